"""Between a torch gradient and the flat CPU arrays that kernels work on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["Staged", "all_finite", "stage"]

_IN_PLACE = (torch.float32, torch.float64)
_WIDENED = (torch.float16, torch.bfloat16)
_KNOWN = _IN_PLACE + _WIDENED


class Staged(NamedTuple):
    """A gradient as a flat, contiguous CPU tensor of float32 or float64, and how to bring a result back.

    `flat` shares the gradient's memory where that can be (CPU, contiguous, float32 or float64, not a part of a larger
    buffer, and seen by nobody else); else it is a copy: through host memory for another device, widened to float32 for
    16-bit types.
    """

    flat: torch.Tensor
    gradient: torch.Tensor
    shared: bool

    def is_seen_elsewhere(self) -> bool:
        """Whether anything but the parameter's `.grad` and what an exchange holds still refers to the shared memory."""
        # .grad, `gradient`, `flat`, the storage's Python object, and the array of `flat` that the lane works on
        return self.shared and _references(self.flat) > 4 + _REFERENCES_OF_ARRAY

    def restore(self, result: torch.Tensor) -> torch.Tensor:
        """`result` (flat) with shape, dtype, device and strides of the gradient; no copy where `shared`."""
        if self.shared:
            return result.view(self.gradient.shape)
        restored = torch.empty_like(self.gradient)
        restored.copy_(result.view(self.gradient.shape))
        return restored


def _references(tensor: torch.Tensor) -> int:
    # torch has no public name for the count; the Python object of the storage, made here, is one more
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _references_of_array() -> int:
    tensor = torch.zeros(1)
    before = _references(tensor)
    array = tensor.numpy()  # held while it is counted
    return _references(tensor) - before if array.size else 0


# .grad, what is detached from it, and the storage's Python object. A backward pass may hand out a view of what it still
# needs, or one memory as the gradients of two parameters: x + b.view(...) does both
_REFERENCES_OF_ONE = 3

# an array shares the tensor's own reference or holds one of its own, as torch's version has it
_REFERENCES_OF_ARRAY = _references_of_array()


def stage(gradient: torch.Tensor, *, name: str) -> Staged:
    """Prepare a dense gradient for the kernels, which will overwrite it.

    Raises:
        TypeError: the gradient is not of a floating type that can be compressed.
    """
    gradient = gradient.detach()
    if gradient.dtype not in _KNOWN:
        raise TypeError(
            f"gradient of {name!r} is {gradient.dtype}; compressors take float16, bfloat16, float32 and float64. "
            "Give such parameters an optimizer of their own without compression."
        )
    in_place = gradient.is_cpu and gradient.is_contiguous() and gradient.dtype in _IN_PLACE
    if in_place and _is_alone(gradient) and _references(gradient) <= _REFERENCES_OF_ONE:
        return Staged(gradient.view(-1), gradient, shared=True)
    dtype = torch.float32 if gradient.dtype in _WIDENED else gradient.dtype
    flat = torch.empty(gradient.shape, dtype=dtype, device="cpu")
    flat.copy_(gradient)
    return Staged(flat.view(-1), gradient, shared=False)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value, stored where the tensor is sparse, is NaN or infinite."""
    values = tensor._values() if tensor.is_sparse else tensor
    # extremes of NaN are NaN; torch.isfinite writes several arrays, and takes ten times as long
    return not values.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(values))


def _is_alone(gradient: torch.Tensor) -> bool:
    # the memory will hold the residual; who keeps all gradients in one buffer of theirs would zero it with them
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
