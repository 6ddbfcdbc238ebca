"""Any tensor as Horovod's collectives can take it, and the way back to its own type, shape and strides.

Horovod reads a tensor's memory from its first element to its last one, and knows few types. What only moves elements
(broadcast, allgather, alltoall) gets the bits of other types; what reduces gets numbers that it can add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.errors import UnsupportedError

__all__ = ["is_reducible", "movable", "moved", "name_of", "reduced", "reducible", "refuse_other_types", "settled"]

_MOVED = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
)
_REDUCED = frozenset((torch.int32, torch.int64, torch.float16, torch.float32, torch.float64))
_GRADIENTS = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a type and order in which Horovod can move them; the same memory where that can be."""
    plain = _plain(tensor)
    if plain.dtype in _MOVED:
        return plain
    bits = _BITS.get(plain.element_size())
    # complex128 is wider than any integer
    return torch.view_as_real(plain) if bits is None else plain.view(bits)


def moved(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What Horovod has made of `movable(like)`, in its type."""
    if result.dtype == like.dtype:
        return result
    return torch.view_as_complex(result) if result.is_floating_point() else result.view(like.dtype)


def is_reducible(tensor: torch.Tensor) -> bool:
    """Whether Horovod can reduce a tensor in its own memory."""
    return tensor.dtype in _REDUCED and tensor.is_contiguous() and not tensor.is_neg()


def reducible(tensor: torch.Tensor, op: Any, function: str) -> torch.Tensor:
    """The elements in a type and order in which Horovod can reduce them; the same memory where that can be.

    Floating types that Horovod does not know become float32, so that results are rounded once; complex numbers become
    two real ones.

    Raises:
        UnsupportedError: complex numbers with an `op` that would not mean the same for their parts.
        TypeError: a type that Horovod does not reduce.
    """
    dtype = tensor.dtype
    if dtype in _REDUCED:
        return _plain(tensor)
    if dtype.is_complex:
        if op not in (None, hvd.Average, hvd.Sum):
            raise UnsupportedError(
                f"{function} of a {_named(dtype)} tensor with op={name_of(op)}: only op=Average and op=Sum mean the "
                "same for the parts of complex numbers. Reduce torch.view_as_real(tensor), or tensor.abs()"
            )
        wide = tensor if dtype in (torch.complex64, torch.complex128) else tensor.to(torch.complex64)
        return torch.view_as_real(_plain(wide))
    if dtype.is_floating_point:
        return tensor.detach().to(torch.float32, memory_format=torch.contiguous_format)
    raise TypeError(
        f"{function} of a {_named(dtype)} tensor: Horovod reduces floating and complex types, int32 and int64. Give "
        "tensor.to(torch.int32)"
    )


def reduced(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What Horovod has made of `reducible(like)`, in its type."""
    if like.is_complex():
        result = torch.view_as_complex(result)
    return result if result.dtype == like.dtype else result.to(like.dtype)


def refuse_other_types(named: Mapping[str, torch.Tensor], by: str) -> None:
    """Raise TypeError if a parameter that takes gradients is of a type whose gradients cannot be combined.

    Args:
        named: parameters by name.
        by: what refuses, for the error.
    """
    for name, p in named.items():
        if p.requires_grad and p.dtype not in _GRADIENTS:
            raise TypeError(
                f"{by}: parameter {name!r} is {_named(p.dtype)}, and gradients of this type cannot be combined; those "
                f"of {', '.join(map(_named, _GRADIENTS))} can. Keep it as one of these, or freeze it: "
                "p.requires_grad_(False)"
            )


def settled(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`target`, with a result of its type and shape written to it, unless Horovod has worked in its memory."""
    if result.data_ptr() != target.data_ptr() or not target.is_contiguous() or target.is_conj() or target.is_neg():
        # a tensor made in inference mode may be written to in that mode only; it is left with gradients enabled
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.detach().copy_(result)
    return target


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, outside of autograd; in the same memory if it is so already."""
    # of conjugated and negated views, the memory holds other values
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_of(op: Any) -> str:
    """What Horovod calls one of its reductions."""
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    return next((name for name in names if op == getattr(hvd, name)), repr(op))
