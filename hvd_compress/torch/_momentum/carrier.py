"""Averages arrays of an optimizer over ranks, through the exchanges of `DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_compress.compressors import Compressor
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._gradients.optimizer import DistributedOptimizer
from hvd_compress.torch._gradients.staging import all_finite

__all__ = ["Carrier", "stand_in", "wide"]


def wide(p: torch.Tensor) -> torch.dtype:
    """The type in which moments of a parameter are kept and averaged."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def stand_in(like: torch.Tensor, shape: torch.Size | tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor without memory of its own that takes a gradient; it stands for an array to average.

    Args:
        like: a parameter, on the device of the array.
        shape: of the array, if not that of the parameter.
    """
    made = _without_memory(like.shape if shape is None else shape, wide(like), like.device)
    return made.requires_grad_(like.requires_grad)


def _without_memory(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class Carrier:
    """Averages named arrays over ranks in place, as an optimizer averages gradients; creating it is a collective call.

    An exchange knows gradients of parameters. So each array has a stand-in, and is its gradient during an exchange.

    Args:
        stand_ins: by name, made by `stand_in`; they belong to this object alone.
        values: by name, what is to be equal on all ranks before the first exchange; a difference is a warning.
        settings: of `DistributedOptimizer`.
    """

    def __init__(
        self, stand_ins: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor] | None = None, **settings: Any
    ) -> None:
        self._stand_ins = dict(stand_ins)
        optimizer = torch.optim.SGD(list(stand_ins.values()), lr=0.0)
        self.optimizer: Any = DistributedOptimizer(optimizer, list(stand_ins.items()), **settings)
        self._combiner = self.optimizer._combiner
        self._combiner.sender.values = dict(values or {})

    @property
    def engine(self) -> Engine | None:
        """None where nothing is exchanged."""
        engine: Engine | None = self._combiner.sender.engine
        return engine

    def add(self, name: str, stand_in: torch.Tensor, value: torch.Tensor | None = None) -> None:
        """Take another array; ranks compare in the next step."""
        self._stand_ins[name] = stand_in
        if value is not None:
            self._combiner.sender.values[name] = value
        self._combiner.members.names[stand_in] = name
        self.optimizer.add_param_group({"params": [stand_in]})

    def follow(self, compression: Compressor) -> None:
        """Compress in another way from the next exchange on; what is owed stays owed. All ranks do so at once."""
        self._combiner.go_on_with(compression)

    def owed(self, name: str) -> torch.Tensor | None:
        """What this rank owes of an array, flat, to be read; None where nothing is kept of it."""
        account = None if self.engine is None else self.engine.accounts.get(name)
        if account is None or account.residual is None:
            return None
        return account.residual if isinstance(account.residual, torch.Tensor) else torch.from_numpy(account.residual)

    def agree(self, told: dict[str, Any]) -> None:
        """Make sure that all ranks go the same way from here on; see `Wrapping.agree_on_way`."""
        if self.engine is not None:
            self._combiner.wrapping.agree_on_way(self.engine, told)

    def average(self, arrays: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
        """Average arrays, the same ones on all ranks; a collective call.

        Args:
            arrays: by name; overwritten. Those that are not there rest.

        Returns:
            The averages, and whether all of them are finite: the same on all ranks. If not, what compression owes is
            what it was before.
        """
        for name, stand_in in self._stand_ins.items():
            array = arrays.get(name)
            if array is not None and (array.dtype, array.device) != (stand_in.dtype, stand_in.device):
                # its parameter was converted
                stand_in.data = _without_memory(stand_in.shape, array.dtype, array.device)
            stand_in.requires_grad_(array is not None)
            stand_in.grad = array
        try:
            self._combiner.combine()
            self._combiner.close()
            averages = {name: _gradient_of(self._stand_ins[name]) for name in arrays}
        finally:
            for stand_in in self._stand_ins.values():
                stand_in.grad = None
        return averages, all(all_finite(average) for average in averages.values())


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        raise RuntimeError("an array to average has got lost in the exchange")
    return tensor.grad.detach()
