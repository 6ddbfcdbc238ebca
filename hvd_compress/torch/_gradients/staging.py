"""Between a torch gradient and the flat arrays that kernels read and write."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_compress._torch.device import DeviceMemory, as_tensor
from hvd_compress.memory import HOST, Memory

__all__ = [
    "Held",
    "all_finite",
    "device_of",
    "has_room",
    "hold",
    "is_compressible",
    "overlapping",
    "sample_of",
    "version_of",
]

_IN_PLACE = (torch.float32, torch.float64)
_WIDENED = (torch.float16, torch.bfloat16)
_KNOWN = _IN_PLACE + _WIDENED
_VALUES_PER_SAMPLE = 16
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Held:
    """A dense gradient while it is exchanged.

    Args:
        gradient: as it was handed over.
        flat: its elements as kernels read them, an array of a `Memory`: its own memory, or a copy where that is on
            another device, not contiguous, or of a 16-bit type that is to be widened to float32.
        is_copy: whether `flat` is a copy.
        keep: the gradient is not to be overwritten; results are tensors of their own.
        place: where the gradient begins.
        version: of the gradient, which counts the writes to it.
    """

    gradient: torch.Tensor
    flat: Any
    is_copy: bool
    keep: bool
    place: int
    version: int

    @property
    def has_changed(self) -> bool:
        """Whether the gradient is not what it was, or not where it was, when it was handed over."""
        return self.has_moved or version_of(self.gradient) != self.version

    @property
    def has_moved(self) -> bool:
        """Whether the gradient has got other memory since, or has another size."""
        return self.gradient.data_ptr() != self.place or self.gradient.numel() != len(self.flat)

    def restored(self, apart: bool) -> torch.Tensor:
        """Copy the result from `flat` into the gradient, or with `apart` into a new tensor like it; returns that."""
        # through `data`: what is written there does not count as a write of the user's
        target = torch.empty_like(self.gradient) if apart else self.gradient.data
        target.copy_(as_tensor(self.flat).view(target.shape))
        return target if apart else self.gradient


def is_compressible(tensor: torch.Tensor) -> bool:
    """Whether kernels take elements of its type, as they are or widened."""
    return tensor.dtype in _KNOWN


def version_of(tensor: torch.Tensor) -> int:
    """Counts the writes to a tensor; 0 for one that was made in inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def has_room(gradient: torch.Tensor) -> bool:
    """Whether each element has memory of its own; not where `expand` has made one memory stand for several."""
    return not any(n > 1 and stride == 0 for n, stride in zip(gradient.shape, gradient.stride(), strict=True))


def device_of(memory: Memory) -> torch.device:
    """Return the device whose memory it is."""
    return memory.device if isinstance(memory, DeviceMemory) else _CPU


def hold(
    gradient: torch.Tensor,
    name: str,
    keep: bool = False,
    spare: Any = None,
    memory: Memory = HOST,
    device: torch.device = _CPU,
    in_place: Collection[torch.dtype] = _IN_PLACE,
) -> Held:
    """Make a dense gradient ready for kernels.

    Args:
        gradient: of any device and strides.
        name: for errors.
        keep: see `Held`.
        spare: for a copy, if one is needed and it fits.
        memory: that kernels read.
        device: whose memory it is.
        in_place: the types that kernels read there; others are widened to float32.

    Raises:
        TypeError: the gradient is not of a floating type that can be compressed.
    """
    if gradient.dtype not in _KNOWN:
        raise TypeError(
            f"gradient of {name!r} is {gradient.dtype}; compressors take float16, bfloat16, float32 and float64. "
            "Give such parameters an optimizer of their own without compression."
        )
    data = gradient.data
    told = (keep, gradient.data_ptr(), version_of(gradient))
    if data.device == device and data.dtype in in_place and data.is_contiguous():
        return Held(gradient, data.numpy().reshape(-1) if memory.is_host else data.view(-1), False, *told)
    kind = "float64" if data.dtype == torch.float64 else "float32"
    if spare is None or memory.kind_of(spare) != kind or len(spare) != data.numel():
        spare = memory.empty(data.numel(), kind)
    copy = as_tensor(spare).view(data.shape)
    if memory.is_host:
        copy.copy_(data)
    else:
        memory.copy_all([copy], [data])
    return Held(gradient, spare, True, *told)


def sample_of(gradient: torch.Tensor) -> torch.Tensor:
    """Copy the bits of some values."""
    row = gradient.detach()
    while row.dim() > 1 and row.numel():
        row = row[0]
    return row.reshape(-1)[:_VALUES_PER_SAMPLE].clone().view(torch.uint8)


def overlapping(spans: Sequence[tuple[int, int]]) -> set[int]:
    """Return the starts of those spans of memory, (start, end), that share a part with another one.

    A backward pass may hand out one memory as the gradients of two parameters, whose results differ.

    Example:
        >>> sorted(overlapping([(0, 8), (8, 16), (32, 40), (36, 44)]))
        [32, 36]
    """
    shared: set[int] = set()
    first = last = 0
    for start, end in sorted(spans):
        if start < last:
            shared |= {first, start}
        if end > last:
            first, last = start, end
    return shared


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value, stored where the tensor is sparse, is NaN or infinite."""
    values = tensor._values() if tensor.is_sparse else tensor
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    # extremes of NaN are NaN; torch.isfinite writes several arrays, and takes ten times as long
    return not values.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(values))
