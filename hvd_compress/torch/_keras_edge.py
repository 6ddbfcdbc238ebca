"""The torch edge as the Keras code sees it: `hvd_compress._keras.edge.Edge`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvd_compress._keras.edge import Edge
from hvd_compress.engine import CarriedExchanges, is_carried
from hvd_compress.mpi import start_one_sided
from hvd_compress.torch import _differentiable
from hvd_compress.torch._collectives import broadcast_async, synchronize
from hvd_compress.torch._functions import allreduce
from hvd_compress.torch._keras_arithmetic import TorchArithmetic
from hvd_compress.torch._keras_exchange import CarriedTorchExchange, TorchExchange
from hvd_compress.torch._ranks import NODES, TorchRanks
from hvd_compress.torch.compression import horovod_compressor

__all__ = ["EDGE"]


BOOK = CarriedExchanges(TorchRanks)


class TorchEdge(Edge):
    """See `Edge`."""

    def exchange(
        self, variables: Sequence[Any], groups: Any, settings: dict[str, Any], compares: bool
    ) -> TorchExchange | CarriedTorchExchange:
        if is_carried(settings["compression"], settings["adagrad"]):
            return CarriedTorchExchange(variables, settings, compares, BOOK)
        return TorchExchange(variables, settings, compares)

    def divided(self, gradient: torch.Tensor | None, divisor: float) -> torch.Tensor | None:
        return None if gradient is None else gradient / divisor

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        handles = []
        for i, variable in enumerate(variables):
            handles.append((variable, broadcast_async(variable.value, root_rank, f"hvd_compress.variable.{i}")))
        for variable, handle in handles:
            variable.assign(synchronize(handle))

    def keep_uncompiled(self, optimizer: Any, method: str) -> None:
        # torch.compile looks methods up in the class that an object says it is of, which is not that of the overrides;
        # attributes of the object come first there too
        object.__setattr__(optimizer, method, torch.compiler.disable(getattr(optimizer, method)))

    def tensor(self, value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value).detach()
        # Horovod rejects scalars in most collectives
        return tensor.reshape(1) if tensor.dim() == 0 else tensor

    def values(self, variable: Any) -> Any:
        value = variable.value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

    def accumulators(self, passes: int) -> Any:
        raise NotImplementedError("Keras 2 has no torch backend")


EDGE = TorchEdge(
    hvd, allreduce, horovod_compressor, TorchRanks, partial(start_one_sided, hvd), NODES, ObjectState, _differentiable,
    BOOK, HostsUpdatedInterrupt, TorchArithmetic(),
)  # fmt: skip
