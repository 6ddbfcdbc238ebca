"""The arithmetic of `hvd_compress._keras.arithmetic` on the torch backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_compress._keras.arithmetic import Arithmetic
from hvd_compress.torch._gradients.staging import all_finite
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["TorchArithmetic"]


class TorchArithmetic(Arithmetic):
    """See `Arithmetic`."""

    def read(self, variable: Any) -> torch.Tensor:
        tensor: torch.Tensor = variable if isinstance(variable, torch.Tensor) else variable.value.detach()
        return tensor

    def write(self, variable: Any, value: Any) -> None:
        self.read(variable).copy_(torch.as_tensor(value))

    def zeros(self, variable: Any) -> torch.Tensor:
        return torch.zeros_like(self.read(variable))

    def counter(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64)

    def array(self, variable: Any) -> Any:
        return self.read(variable).cpu().numpy().copy()

    def number(self, value: Any) -> Any:
        return value

    def dense(self, gradient: Any, variable: Any) -> torch.Tensor:
        value = self.read(variable)
        if gradient is None:
            return torch.zeros_like(value)
        given: torch.Tensor = gradient.detach()
        return (given.to_dense() if given.is_sparse else given).to(value.dtype)

    def root(self, value: torch.Tensor) -> torch.Tensor:
        return value.sqrt()

    def clipped(self, value: torch.Tensor, bound: float) -> torch.Tensor:
        return value.clamp(-bound, bound)

    def where(self, flag: Any, one: Any, other: Any) -> Any:
        return torch.where(flag, one, other)

    def nothing(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(like)

    def spoiled(self, value: torch.Tensor) -> Any:
        # 0 · inf is NaN
        return value.abs().amax() * 0.0 if value.numel() else 0.0

    def correction(self, beta: float, steps: Any, like: torch.Tensor) -> float:
        return 1.0 - beta ** int(steps)

    def rate(self, learning_rate: Any, like: torch.Tensor) -> float:
        return float(learning_rate)

    def all_finite(self, values: Sequence[torch.Tensor]) -> bool:
        return all(all_finite(value) for value in values)

    def any_nonzero(self, values: Sequence[torch.Tensor]) -> bool:
        return any(bool(value.any()) for value in values)

    def choose(self, flag: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
        return one() if bool(flag) else other()

    def decided(self, decision: Callable[[int], bool], number: Any) -> bool:
        return decision(int(number))

    def any_rank(self, flag: Any, name: str, process_set: Any) -> bool:
        return bool(TorchRanks(process_set).maximum([float(flag)])[0] > 0)

    def claimed(self, name: str, process_set: Any) -> str:
        # steps that are run one after the other name their collectives themselves
        return name

    def warned(self, text: str) -> bool:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False

    def one_piece(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.no_grad()(function)
