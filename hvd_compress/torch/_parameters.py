"""Parameters and buffers as flat arrays, for those who exchange them; memory is shared where that can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.errors import UnsupportedError
from hvd_compress.tensors import Tensor

__all__ = ["Buffers", "Parameters", "as_arrays", "as_tensors", "by_name", "trained"]

Array = np.ndarray[Any, Any]


class Parameters:
    """The parameters that are exchanged.

    Args:
        parameters: by name.
        optimizer: what the user calls it, for errors.

    Raises:
        TypeError: one is of a type that has no mean.
        ValueError: two share their memory, which would be exchanged twice.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimizer: str) -> None:
        self.tensors = [Tensor(name, tuple(p.shape), _dtype_of(name, p)) for name, p in parameters.items()]
        self._parameters = list(parameters.values())
        self._known = {id(p) for p in self._parameters}
        self._optimizer = optimizer
        self._refuse_shared(parameters)

    @staticmethod
    def _refuse_shared(parameters: Mapping[str, torch.Tensor]) -> None:
        seen: dict[int, str] = {}
        for name, p in parameters.items():
            if p.numel() and seen.setdefault(p.data_ptr(), name) != name:
                raise ValueError(
                    f"parameters {seen[p.data_ptr()]!r} and {name!r} share their memory, which would be exchanged "
                    "twice: use one Parameter in both places"
                )

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if parameters take gradients of which this knows nothing."""
        for group in groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in self._known:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} takes gradients, and did not when {self._optimizer} "
                        "was made, so that ranks would never exchange it. Make all ranks equal, and wrap the inner "
                        "optimizer anew, on all ranks"
                    )

    def arrays(self) -> list[Array]:
        """Flat arrays of all of them."""
        return [_flat(p) for p in self._parameters]

    def trained_arrays(self) -> list[Array | None]:
        """The same, with None for what is frozen by now."""
        return [x if p.requires_grad else None for x, p in zip(self.arrays(), self._parameters, strict=True)]

    def write(self, arrays: Sequence[Array | None]) -> None:
        """Take over arrays that share no memory with their parameters."""
        for p, array in zip(self._parameters, arrays, strict=True):
            if array is not None and not _is_shared(p):
                p.copy_(torch.from_numpy(array).view(p.shape))

    def gradients(self) -> list[Array | None]:
        """Flat arrays of their gradients; None where there is none, or the parameter is frozen by now.

        Raises:
            UnsupportedError: a sparse gradient.
        """
        return [self._gradient(t.name, p) for t, p in zip(self.tensors, self._parameters, strict=True)]

    @staticmethod
    def _gradient(name: str, p: torch.Tensor) -> Array | None:
        if p.grad is None or not p.requires_grad:
            return None
        if p.grad.is_sparse:
            raise UnsupportedError(f"the gradient of {name!r} is sparse, and is sent dense: make it so, sparse=False")
        return _flat(p.grad)

    def set_gradients(self, gradients: Sequence[Array | None]) -> None:
        """Make flat arrays the gradients; they share memory where that can be."""
        for p, array in zip(self._parameters, gradients, strict=True):
            gradient = None if array is None else torch.from_numpy(array).view(p.shape)
            p.grad = gradient if gradient is None or _is_shared(p) else torch.empty_like(p).copy_(gradient)


class Buffers:
    """Other tensors that are averaged with them, now and then.

    Args:
        named: by name.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        # a count of batches has no mean, nor have complex tables
        self._tensors = {name: b for name, b in named.items() if b.is_floating_point()}
        self._copies: dict[str, torch.Tensor] = {}

    def arrays(self) -> dict[str, Array]:
        """Copies of their values."""
        self._copies = {name: _on_host(b, _summable(b)) for name, b in self._tensors.items()}
        return {name: b.numpy() for name, b in self._copies.items()}

    def take(self) -> None:
        """Take over what has become of the last copies."""
        for name, b in self._tensors.items():
            b.copy_(self._copies[name])


def trained(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    """The optimizer's parameters that take gradients, by name.

    Raises:
        ValueError: a parameter without a name, or two of one name.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {f"parameter.{i}": p for i, p in enumerate(params) if p.requires_grad}
    known = {id(p): name for name, p in by_name("named_parameters", named).items()}
    if unnamed := [i for i, p in enumerate(params) if id(p) not in known]:
        raise ValueError(
            f"named_parameters names {len(params) - len(unnamed)} of {len(params)} parameters of the optimizer; "
            f"parameter {unnamed[0]} of shape {tuple(params[unnamed[0]].shape)} is missing"
        )
    return {known[id(p)]: p for p in params if p.requires_grad}


def by_name(argument: str, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Named tensors as a dict.

    Raises:
        ValueError: two have one name.
    """
    pairs = list(named)
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{argument} has several tensors named {repeated[0]!r}; names must differ")
    return dict(pairs)


def as_tensors(state: Any) -> Any:
    """A state with its arrays as tensors, which `torch.load` takes without trust."""
    return _converted(state, np.ndarray, torch.from_numpy)


def as_arrays(state: Any) -> Any:
    """The inverse of `as_tensors`."""
    return _converted(state, torch.Tensor, lambda tensor: tensor.cpu().numpy())


def _dtype_of(name: str, p: torch.Tensor) -> str:
    if p.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"parameter {name!r} is {p.dtype}; what is exchanged is float16, bfloat16, float32 or float64. Keep it as "
            "one of these, complex numbers as torch.view_as_real, or freeze it: p.requires_grad_(False)"
        )
    return "float64" if p.dtype == torch.float64 else "float32"


def _host_type(p: torch.Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _summable(b: torch.Tensor) -> torch.dtype:
    """The type in which a buffer is averaged: its own, unless it holds less than float32."""
    return torch.float32 if b.dtype in (torch.float16, torch.bfloat16) else b.dtype


def _is_shared(p: torch.Tensor) -> bool:
    return bool(p.is_cpu and p.is_contiguous() and p.dtype in (torch.float32, torch.float64))


def _flat(tensor: torch.Tensor) -> Array:
    """The values on the host; shared where that can be."""
    values = tensor.detach()
    array: Array = (values if _is_shared(tensor) else _on_host(values, _host_type(tensor))).view(-1).numpy()
    return array


def _on_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy, contiguous."""
    copy = torch.empty(tensor.shape, dtype=dtype)
    copy.copy_(tensor)
    return copy


def _converted(value: Any, kind: Any, convert: Any) -> Any:
    """A state with all objects of a kind, in dicts and lists, converted."""
    if isinstance(value, dict):
        return {key: _converted(entry, kind, convert) for key, entry in value.items()}
    if isinstance(value, list):
        return [_converted(entry, kind, convert) for entry in value]
    return convert(value) if isinstance(value, kind) else value
