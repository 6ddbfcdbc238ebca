"""Quantize adaptively (Dryden et al. 2016, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor, count_groups
from hvd_compress.compressors.groups import group_numel
from hvd_compress.compressors.settings import check_choice, check_feedback, check_group, check_int
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import coded
from hvd_compress.kernels import signs as kernels

__all__ = ["Adaptive"]

_LONGEST_ROW = 32768  # what 15 bits of index reach
_LONGEST_GROUP = 2**31 - 1  # what 31 bits do
_EVERY = 2**40  # elements, more than any tensor has
_SHORT, _LONG = np.dtype(np.uint16), np.dtype(np.uint32)


@dataclass(frozen=True)
class Adaptive(TableCompressor):
    """Sends the largest 1/pi of each group's non-negative values, and of its negative values, each as their mean.

    Payload: 2 bytes per sent value (4 in groups beyond 32768 elements) and 10 bytes per group, 1/60 of float32 or less
    at pi=64; with coding="golomb" about 1.1 bytes per sent value. Source: Dryden et al. 2016, section 3.3. Differences:
    counts are rounded up, so that each sign that occurs in a group sends at least one value; the sample only says where
    the selection starts, while the selection itself is exact and the means are those of the values sent, so the message
    is never longer than the proportion allows; counts per group replace the paper's separators; rows shorter than 512
    elements share a group.

    Args:
        pi: one in `pi` values is sent, 2 or more.
        group: "row" (the paper's columns), "tensor", or elements per group.
        sample: at most so many entries per group are drawn to estimate the thresholds; None looks at every entry.
        error_feedback: keep what was not sent and add it to the next gradient; "float8" keeps it in 8 bits.
        coding: None, or "golomb" for losslessly coded gaps instead of indices: fewer bytes, but messages whose size
            varies from step to step.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Adaptive
        >>> x = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
        >>> x.nbytes / Adaptive(pi=64).encode(x).size > 60
        True
    """

    pi: int = 64
    group: str | int = "row"
    sample: int | None = 1024
    error_feedback: bool | str = True
    coding: str | None = None

    id: ClassVar[str] = "adaptive"
    codec: ClassVar[int] = 3
    coded_codec: ClassVar[int | None] = 131

    def __post_init__(self) -> None:
        check_int(self, "pi", self.pi, 2, 2**20)
        check_group(self, self.group)
        check_int(self, "sample", self.sample, 16, 2**31 - 1, none=True)
        check_feedback(self, self.error_feedback)
        check_choice(self, "coding", self.coding, (None, "golomb"))

    def group_numel(self, shape: tuple[int, ...]) -> int:
        group = group_numel(shape, self.group, _LONGEST_ROW)
        if group > _LONGEST_GROUP:
            raise ValueError(
                f"{self!r} of a tensor of shape {shape}: a group of {group} elements; groups have at most "
                f'{_LONGEST_GROUP}. Use group="row"'
            )
        return group

    def _most_entries(self, numel: int, group: int) -> int:
        def of_group(size: int) -> int:
            # ceil(a / pi) + ceil(b / pi) with a + b = size
            return min(size, (size + 2 * self.pi - 2) // self.pi)

        whole, rest = divmod(numel, max(group, 1))
        return whole * of_group(group) + of_group(rest) * (rest > 0)

    def keeping(self, share: float) -> Adaptive:
        return replace(self, pi=min(self.pi, max(2, int(1 / share))))

    def kept_share(self, numel: int) -> float:
        return 2 / self.pi

    def body_bytes(self, numel: int, group: int) -> int:
        groups = count_groups(numel, group)
        count_type, entry_type = _types(group)
        tables = wire.padded(groups * count_type.itemsize) + 8 * groups
        return tables + entry_type.itemsize * self._most_entries(numel, group)

    def limit_of(self, numel: int, group: int) -> int:
        return self._most_entries(numel, group)

    def kernels(self, group: int) -> Kernels:
        return _kernels(self, group <= _LONGEST_ROW)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        # a coding is for hosts, and so are groups that no program on a device can hold
        return _device_kernels(self) if self.coding is None and group <= _LONGEST_ROW else None


def _types(group: int) -> tuple[np.dtype[np.generic], np.dtype[np.generic]]:
    """Return the types of a group's count and of an entry `index << 1 | sign`."""
    short = group <= _LONGEST_ROW
    return (_SHORT, _SHORT) if short else (_LONG, _LONG)


@cache
def _kernels(compressor: Adaptive, is_short: bool) -> Kernels:
    index = np.empty(0, _SHORT if is_short else _LONG)
    sample = compressor.sample or _EVERY
    encode = partial(kernels.encode_adaptive_rows, index, compressor.codec, compressor.pi, sample)
    shorten = partial(coded.shorten_adaptive_rows, compressor.coded_codec)
    return Kernels(encode, kernels.decode_adaptive_rows, shorten, coded.decode_adaptive_rows)


@cache
def _device_kernels(compressor: Adaptive) -> DeviceKernels:
    from hvd_compress.kernels.cuda import adaptive

    encode = partial(adaptive.encode, codec=compressor.codec, pi=compressor.pi)
    return DeviceKernels(encode, adaptive.verify, adaptive.decode)
