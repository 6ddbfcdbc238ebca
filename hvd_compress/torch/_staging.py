"""Between a torch gradient and the flat CPU arrays that kernels work on."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_compress.exchange import aligned_empty

__all__ = [
    "Staged",
    "all_finite",
    "flat_of",
    "is_compressible",
    "is_ours_alone",
    "is_seen_elsewhere",
    "memory_of",
    "own_memory",
    "shaped",
    "stage",
    "tensor_of",
]

_uses = torch._C._storage_Use_Count  # torch has no public name for it
_IN_PLACE = (torch.float32, torch.float64)
_WIDENED = (torch.float16, torch.bfloat16)
_KNOWN = _IN_PLACE + _WIDENED
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class Staged(NamedTuple):
    """A gradient beside contiguous CPU memory, float32 or float64, and how to bring a result back.

    `memory` is a flat copy: through host memory for another device, widened to float32 for 16-bit types.
    `keep`: the gradient stays what it is, and results are tensors of their own.
    `source`: where kernels read a gradient that is to be kept and need not be copied; `memory` is only that then.
    """

    memory: torch.Tensor
    gradient: torch.Tensor
    keep: bool = False
    source: torch.Tensor | None = None

    def restore(self, result: torch.Tensor, apart: bool = False) -> torch.Tensor:
        """What `tensor_of` returned, in the gradient, or with `keep` or `apart` as a tensor like it."""
        if self.source is not None:
            return shaped(result, self.gradient.shape)
        # one memory for several elements, as `expand` makes it, cannot hold a result
        is_room = not any(
            n > 1 and stride == 0 for n, stride in zip(self.gradient.shape, self.gradient.stride(), strict=True)
        )
        target = self.gradient if is_room and not (self.keep or apart) else torch.empty_like(self.gradient)
        return target.copy_(result.view(self.gradient.shape))


def is_compressible(tensor: torch.Tensor) -> bool:
    """Whether kernels take elements of its type, as they are or widened."""
    return tensor.dtype in _KNOWN


def own_memory(gradient: torch.Tensor) -> torch.Tensor | None:
    """A dense gradient as a tensor of its own, if kernels can overwrite its memory and nobody else would see it.

    Where that can be: on the CPU, contiguous, float32 or float64, and not a part of a larger buffer.
    """
    if not (gradient.is_cpu and gradient.dtype in _IN_PLACE and gradient.is_contiguous()):
        return None
    memory = gradient.detach()
    # A backward pass may hand out a view of what it still needs, or one memory as the gradients of two parameters:
    # x + b.view(...) does both
    storage = memory.untyped_storage()
    if _uses(storage._cdata) > _REFERENCES_OF_ONE:
        return None
    # the memory will hold the residual; who keeps all gradients in one buffer of theirs would zero it with them
    return memory if storage.nbytes() == memory.nbytes else None


def memory_of(gradient: torch.Tensor) -> Any:
    """What keeps the memory of a float32 gradient on the CPU, if results can be written there at the end of the step.

    Where that can be: contiguous, and nobody would see it but through the same tensor. None where not.
    """
    if not gradient.is_contiguous():
        return None
    # .grad, and the storage's Python object. A backward pass may hand out one memory as the gradients of two parameters
    storage = gradient.untyped_storage()
    return storage if _uses(storage._cdata) <= _REFERENCES_OF_OURS else None


def is_seen_elsewhere(memory: torch.Tensor) -> bool:
    """Whether anything but the parameter's `.grad` and what an exchange holds still refers to what `own_memory` gave.

    The exchange holds that and an array made by `flat_of`.
    """
    # .grad, `memory`, the storage's Python object, and the array that the lane works on
    return _references(memory) > 3 + _REFERENCES_OF_ARRAY


def shaped(result: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """What `tensor_of` returned in another shape, without a copy."""
    # a view would hold its base, one more reference to the memory
    return result if result.shape == shape else result.view(shape).detach()


def flat_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A contiguous CPU tensor as a flat array of the same memory."""
    # views of arrays take a third of what those of tensors do
    return tensor.numpy().reshape(-1)


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A flat array as a tensor: the one that `flat_of` has made it of, where there is one.

    A gradient's memory becomes a residual, which is an array, and later a gradient again: wrapped anew each time, it
    would hold on to the wrappers of all steps before.
    """
    whole: object = array.base
    source = whole.base if isinstance(whole, np.ndarray) else whole
    # a part of a contiguous tensor that has as many elements is all of it
    if isinstance(source, torch.Tensor) and source.numel() == array.size and _is_of_use(source):
        return source
    return torch.from_numpy(array)


def is_ours_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing but `tensor` refers to its memory, in no process."""
    if tensor.is_shared() or _references(tensor) > _REFERENCES_OF_OURS:
        return False
    # torch hands out the same Python object for a storage each time: its own count does not tell who holds that
    return _holders_of_storage(tensor) <= _HOLDERS_OF_STORAGE


def _is_of_use(tensor: torch.Tensor) -> bool:
    """Whether it may be written to: not if it was made in inference mode, which has ended."""
    return not tensor.is_inference() or torch.is_inference_mode_enabled()


def _references(tensor: torch.Tensor) -> int:
    # the Python object of the storage, made here, is one more
    return int(_uses(tensor.untyped_storage()._cdata))


def _holders_of_storage(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


def _references_of_array() -> int:
    tensor = torch.zeros(1)
    before = _references(tensor)
    array = tensor.numpy()  # held while it is counted
    return _references(tensor) - before if array.size else 0


# .grad, what is detached from it, and the storage's Python object
_REFERENCES_OF_ONE = 3

# the tensor itself, and the storage's Python object
_REFERENCES_OF_OURS = 2

# where nobody holds it, as Python's and torch's version have it
_HOLDERS_OF_STORAGE = _holders_of_storage(torch.zeros(1))

# an array shares the tensor's own reference or holds one of its own, as torch's version has it
_REFERENCES_OF_ARRAY = _references_of_array()


def stage(gradient: torch.Tensor, *, name: str, keep: bool = False, memory: torch.Tensor | None = None) -> Staged:
    """Prepare a dense gradient for the kernels, which work on other memory.

    Args:
        gradient: of any device and strides.
        name: for errors.
        keep: nobody will write to the gradient until kernels have read it.
        memory: flat, on the CPU, to be used if it is needed, it fits and nothing else refers to it.

    Raises:
        TypeError: the gradient is not of a floating type that can be compressed.
    """
    # a result that is written there does not count as a write of the user's
    gradient = gradient.data
    if gradient.dtype not in _KNOWN:
        raise TypeError(
            f"gradient of {name!r} is {gradient.dtype}; compressors take float16, bfloat16, float32 and float64. "
            "Give such parameters an optimizer of their own without compression."
        )
    dtype = torch.float32 if gradient.dtype in _WIDENED else gradient.dtype
    flat = _room(gradient.numel(), dtype, memory)
    if keep and gradient.is_cpu and gradient.dtype in _IN_PLACE and gradient.is_contiguous():
        return Staged(flat, gradient, keep, source=gradient)
    flat.view(gradient.shape).copy_(gradient)
    return Staged(flat, gradient, keep)


def _room(numel: int, dtype: torch.dtype, memory: torch.Tensor | None) -> torch.Tensor:
    """`memory`, if so many elements may be written there, or else some of its own."""
    fits = memory is not None and memory.dtype == dtype and memory.numel() == numel
    if memory is not None and fits and _is_of_use(memory) and is_ours_alone(memory):
        return memory
    return torch.from_numpy(aligned_empty(numel, _NUMPY[dtype]))


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value, stored where the tensor is sparse, is NaN or infinite."""
    values = tensor._values() if tensor.is_sparse else tensor
    # extremes of NaN are NaN; torch.isfinite writes several arrays, and takes ten times as long
    return not values.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(values))
