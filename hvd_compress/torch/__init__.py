"""Drop-in for `horovod.torch`: the same names, plus compressed exchanges.

Example, one changed import and one argument::

    import hvd_compress.torch as hvd  # was: import horovod.torch as hvd
    from hvd_compress import Adaptive

    hvd.init()
    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(), compression=Adaptive(pi=64))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_compress.missing import missing_horovod

try:
    import horovod.torch.mpi_ops  # horovod.torch alone can be imported where it was built without torch
except Exception as error:
    raise missing_horovod("torch", error) from error

# every public name of horovod.torch; those imported below take the place of Horovod's
from horovod.torch import *  # noqa: F403

from hvd_compress.engine import DEFAULT_MIN_NUMEL
from hvd_compress.submodules import offer
from hvd_compress.torch._averaging.async_server import AsyncParameterServerOptimizer
from hvd_compress.torch._averaging.daso import DASO, daso_process_sets
from hvd_compress.torch._averaging.diloco import DiLoCo
from hvd_compress.torch._averaging.eventgrad import DPSGDOptimizer, EventGraDOptimizer
from hvd_compress.torch._collectives import *  # noqa: F403
from hvd_compress.torch._differentiable import *  # noqa: F403
from hvd_compress.torch._elastic import TorchState
from hvd_compress.torch._functions import allreduce, forget_residuals, grouped_allreduce
from hvd_compress.torch._gradients.join import join
from hvd_compress.torch._gradients.optimizer import DistributedOptimizer
from hvd_compress.torch._momentum.adam import CompressedAdam
from hvd_compress.torch._momentum.demo import DeMo
from hvd_compress.torch._momentum.dgc import DGC
from hvd_compress.torch._momentum.signum import Signum
from hvd_compress.torch._state import broadcast_optimizer_state, broadcast_parameters
from hvd_compress.torch.compression import Compression

__all__ = [
    *(name for name in dir(horovod.torch) if not name.startswith("_")),
    "AsyncParameterServerOptimizer",
    "DASO",
    "DGC",
    "DEFAULT_MIN_NUMEL",
    "CompressedAdam",
    "Compression",
    "DPSGDOptimizer",
    "DeMo",
    "DiLoCo",
    "DistributedOptimizer",
    "EventGraDOptimizer",
    "Signum",
    "allreduce",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "daso_process_sets",
    "forget_residuals",
    "grouped_allreduce",
    "join",
]

offer(__name__, "horovod.torch", TorchState=TorchState)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
