"""Parameters and buffers as flat arrays, for those who exchange them; memory is shared where that can be."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.errors import UnsupportedError
from hvd_compress.tensors import ParameterSpec

__all__ = [
    "Buffers",
    "Copies",
    "NamedBuffers",
    "Parameters",
    "as_tensors",
    "by_name",
    "named_or_numbered",
    "trained",
]

Array = np.ndarray[Any, Any]


class Parameters:
    """The parameters that are exchanged; complex ones as pairs of real numbers.

    Args:
        parameters: by name.
        optimizer: what the user calls it, for errors.

    Raises:
        TypeError: one is of a type that has no mean.
        ValueError: two share their memory, which would be exchanged twice.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimizer: str) -> None:
        self.tensors = [ParameterSpec(name, _shape_of(p), _dtype_of(name, p)) for name, p in parameters.items()]
        self._parameters = list(parameters.values())
        self._known = {id(p) for p in self._parameters}
        self._layout = self._layout_now()
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

    def problem(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """What keeps these from being exchanged: parameters that take gradients now, or have become others."""
        for group in groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in self._known:
                    return (
                        f"a parameter of shape {tuple(p.shape)} takes gradients, and did not when {self._optimizer} "
                        f"was made, so that ranks would never exchange it. {_ANEW}"
                    )
        if self._layout_now() == self._layout:
            return None
        for tensor, p in zip(self.tensors, self._parameters, strict=True):
            if _shape_of(p) != tensor.shape or _dtype_name(p) != tensor.dtype:
                return (
                    f"parameter {tensor.name!r} is {_dtype_name(p)} of shape {_shape_of(p)} now, and was "
                    f"{tensor.dtype} of shape {tensor.shape} when {self._optimizer} was made. {_ANEW}"
                )
        return None

    def _layout_now(self) -> list[tuple[Any, ...]]:
        return [(p.shape, p.dtype) for p in self._parameters]

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if there is a `problem`."""
        if problem := self.problem(groups):
            raise ValueError(problem)

    def arrays(self) -> list[Array]:
        """Flat arrays of all of them."""
        return [_flat(p) for p in self._parameters]

    def arrays_of(self, numbers: Sequence[int]) -> list[Array]:
        """Flat arrays of some of them, by number."""
        return [_flat(self._parameters[n]) for n in numbers]

    def ids(self) -> set[int]:
        """Return the ids of the parameters."""
        return set(self._known)

    def frozen(self) -> list[str]:
        """Names of those that take no gradients any more."""
        return [t.name for t, p in zip(self.tensors, self._parameters, strict=True) if not p.requires_grad]

    def trained_arrays(self) -> list[Array | None]:
        """Return the parameters as flat arrays, with None for those that are frozen by now."""
        return [x if p.requires_grad else None for x, p in zip(self.arrays(), self._parameters, strict=True)]

    def write(self, arrays: Sequence[Array | None]) -> None:
        """Take over arrays that share no memory with their parameters."""
        for p, array in zip(self._parameters, arrays, strict=True):
            if array is not None and not _is_shared(p):
                p.copy_(_shaped(array, p))

    def write_at(self, arrays: Mapping[int, Array]) -> None:
        """Take over arrays by number, as `write` does."""
        self.write([arrays.get(n) for n in range(len(self._parameters))])

    def at(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Return the parameters with these numbers."""
        return [self._parameters[n] for n in numbers]

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
            gradient = None if array is None else _shaped(array, p)
            p.grad = gradient if gradient is None or _is_shared(p) else torch.empty_like(p).copy_(gradient)


NamedBuffers = torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | None
"""What users give: a module, whose buffers are looked up when they are averaged, or some tensors with their names."""


class Buffers:
    """Tensors beside the parameters that are averaged with them, now and then.

    Args:
        named: see `NamedBuffers`.

    Raises:
        ValueError: two have one name.
    """

    def __init__(self, named: NamedBuffers) -> None:
        self._module = named if isinstance(named, torch.nn.Module) else None
        given = {} if isinstance(named, torch.nn.Module) else by_name("named_buffers", named or ())
        # a module that replaces one lets it go
        self._given = {name: weakref.ref(b) for name, b in given.items()}
        self._copies = Copies({})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that have a mean, as they are now.

        Raises:
            ValueError: one of them is not there any more.
        """
        found = {name: reference() for name, reference in self._given.items()}
        if gone := [name for name, b in found.items() if b is None]:
            raise ValueError(
                f"buffer {gone[0]!r} is gone: it was replaced since the optimizer was made, as model.cuda() does it, "
                "and a module that assigns a new tensor; or it was another tensor of the same memory, such as those "
                "of state_dict(). Give the optimizer named_buffers=model, so that buffers are looked up each time"
            )
        if self._module is not None:
            found = dict(self._module.named_buffers())
        # a count of batches has no mean, nor have complex tables
        return {f"buffer {name}": b for name, b in found.items() if b is not None and b.is_floating_point()}

    def arrays(self) -> dict[str, Array]:
        """Copies of their values."""
        self._copies = Copies(self.tensors())
        return self._copies.arrays

    def take(self) -> None:
        """Take over what has become of the last copies."""
        self._copies.take()


class Copies:
    """Copies of the values of tensors, which may become others.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: _distinct(b) for name, b in tensors.items()}
        self._copies = {name: _on_host(b, _summable(b)) for name, b in self._tensors.items()}

    @property
    def arrays(self) -> dict[str, Array]:
        """The copies, whose memory they share."""
        return {name: b.numpy() for name, b in self._copies.items()}

    def take(self) -> None:
        """Write the copies to the tensors."""
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


def named_or_numbered(optimizer: torch.optim.Optimizer, named: Any) -> list[tuple[str, torch.Tensor]]:
    """Named parameters as a list; by their numbers if no names are given."""
    if named is not None:
        return list(named)
    return [(f"parameter.{i}", p) for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])]


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
    """A state with its arrays as tensors, which `torch.load` takes without trust; loading takes both."""
    if isinstance(state, dict):
        return {key: as_tensors(entry) for key, entry in state.items()}
    if isinstance(state, list):
        return [as_tensors(entry) for entry in state]
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


_ANEW = (
    "On all ranks: make the parameters equal (average_parameters() or epoch_end() before the change, or "
    "hvd.broadcast_parameters), make a torch optimizer anew, and wrap that"
)
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_DOUBLE = (torch.float64, torch.complex128)


def _dtype_of(name: str, p: torch.Tensor) -> str:
    if p.dtype not in (*_REAL, *_COMPLEX):
        raise TypeError(
            f"parameter {name!r} is {p.dtype}; what is exchanged is float16, bfloat16, float32 or float64, and complex "
            "numbers of these. Convert it before its optimizer is made, or freeze it: p.requires_grad_(False)"
        )
    return _dtype_name(p)


def _dtype_name(p: torch.Tensor) -> str:
    return "float64" if p.dtype in _DOUBLE else "float32"


def _shape_of(p: torch.Tensor) -> tuple[int, ...]:
    return (*p.shape, 2) if p.is_complex() else tuple(p.shape)


def _host_type(p: torch.Tensor) -> torch.dtype:
    return torch.float64 if p.dtype in _DOUBLE else torch.float32


def _summable(b: torch.Tensor) -> torch.dtype:
    """The type in which a buffer is averaged: its own, unless it holds less than float32."""
    return torch.float32 if b.element_size() < 4 else b.dtype


def _distinct(b: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that lie in memory of their own: of an expanded one, what it was expanded from."""
    return b[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in b.stride())] if 0 in b.stride() else b


def _is_shared(p: torch.Tensor) -> bool:
    exact = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return bool(p.is_cpu and p.is_contiguous() and p.dtype in exact and not p.is_conj() and not p.is_neg())


def _flat(tensor: torch.Tensor) -> Array:
    """The values on the host; shared where that can be."""
    values = tensor.detach()
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    array: Array = (real if _is_shared(tensor) else _on_host(real, _host_type(tensor))).reshape(-1).numpy()
    return array


def _shaped(array: Array, p: torch.Tensor) -> torch.Tensor:
    """Flat values in the shape of their parameter, and complex if that is."""
    values = torch.from_numpy(array).view(_shape_of(p))
    return torch.view_as_complex(values) if p.is_complex() else values


def _on_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy, contiguous."""
    copy = torch.empty(tensor.shape, dtype=dtype)
    copy.copy_(tensor)
    return copy
