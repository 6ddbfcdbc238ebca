"""Compressors as hooks of PyTorch's DistributedDataParallel and of FSDP2 with replicas, and DiLoCo; without Horovod.

Example, one line after the model is wrapped::

    from hvd_compress import Adaptive, ddp

    model = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(model, compression=Adaptive(pi=64))
"""

from __future__ import annotations

from hvd_compress.missing import missing_torch

try:
    import torch  # noqa: F401 - whether it is there
except Exception as error:
    raise missing_torch(error) from error

from hvd_compress.ddp._books import load_state_dict, state_dict, stats
from hvd_compress.ddp._diloco import DiLoCo
from hvd_compress.ddp._fsdp import fsdp_all_reduce_hook
from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.ddp._register import register_comm_hook

__all__ = [
    "DiLoCo",
    "GlooRanks",
    "fsdp_all_reduce_hook",
    "load_state_dict",
    "register_comm_hook",
    "state_dict",
    "stats",
]
