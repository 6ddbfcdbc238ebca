"""Drop-in for `horovod.tensorflow`: the same names, plus compressed exchanges.

Example, one changed import and one argument::

    import hvd_compress.tensorflow as hvd  # was: import horovod.tensorflow as hvd
    from hvd_compress import Adaptive

    hvd.init()
    tape = hvd.DistributedGradientTape(tape, compression=Adaptive(pi=64))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_compress.missing import missing_horovod

try:
    import horovod.tensorflow
except Exception as error:
    raise missing_horovod("tensorflow", error) from error

# every public name of horovod.tensorflow; those imported below take the place of Horovod's
from horovod.tensorflow import *  # noqa: F403

from hvd_compress.engine import DEFAULT_MIN_NUMEL
from hvd_compress.submodules import offer
from hvd_compress.tensorflow._carried import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from hvd_compress.tensorflow._elastic import TensorFlowKerasState, TensorFlowState
from hvd_compress.tensorflow._functions import allreduce, forget_residuals, grouped_allreduce
from hvd_compress.tensorflow._gossip import EventGraD
from hvd_compress.tensorflow._join import join
from hvd_compress.tensorflow._optimizer import DistributedOptimizer
from hvd_compress.tensorflow._tape import DistributedGradientTape, PartialDistributedGradientTape
from hvd_compress.tensorflow.compression import Compression

__all__ = [
    *(name for name in dir(horovod.tensorflow) if not name.startswith("_")),
    "DEFAULT_MIN_NUMEL",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "EventGraD",
    "PartialDistributedGradientTape",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_variables",
    "forget_residuals",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

offer(__name__, "horovod.tensorflow", TensorFlowKerasState=TensorFlowKerasState, TensorFlowState=TensorFlowState)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
