"""Quantize to one bit (Seide et al. 2014; Dryden et al. 2016, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.compressors.base import Array, Body, Bytes, Compressor, Many, count_groups
from hvd_compress.compressors.groups import group_numel
from hvd_compress.compressors.key import Key
from hvd_compress.compressors.settings import check_flag, check_group, check_int
from hvd_compress.kernels import many
from hvd_compress.kernels import onebit as kernels

__all__ = ["OneBit"]

_LONGEST_ROW = 65536
_NO_KEY = (np.uint32(0), np.uint32(0))


@dataclass(frozen=True)
class OneBit(Compressor):
    """Sends the sign of each element, decoded to the mean of the non-negative or of the negative values of its group.

    Payload: 1 bit per element and 8 bytes per group. Values >= 0 are sent as 1. Source: Dryden et al. 2016, section
    3.1. Difference: rows shorter than 512 elements share a group. The paper's AdaGrad inside the exchange is
    `hvd_compress.AdaGrad`, a setting of optimizers for any compressor.

    Args:
        group: "row" (the paper's columns), "tensor", or elements per group.
        sample: entries drawn per group to estimate the two means; None takes all, as Seide et al. do.
        error_feedback: keep what was not sent and add it to the next gradient.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit
        >>> payload = OneBit().encode(np.ones((1024, 1024), np.float32))
        >>> payload.size  # 131072 bytes of bits, 1024 groups of 8 bytes, a header
        139320
    """

    group: str | int = "row"
    sample: int | None = None
    error_feedback: bool = True

    id: ClassVar[str] = "onebit"
    codec: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_group(self, self.group)
        check_int(self, "sample", self.sample, 2, 2**31 - 1, none=True)
        check_flag(self, "error_feedback", self.error_feedback)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return group_numel(shape, self.group, _LONGEST_ROW)

    def body_bytes(self, numel: int, group: int) -> int:
        return 8 * count_groups(numel, group) + (numel + 7) // 8

    def many(self, group: int) -> Many | None:
        return _many(self) if type(self) is OneBit and self.sample is None else None

    def encode_body(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        sections = wire.Sections(body)
        means = sections.blank(2 * count_groups(x.size, group), np.float32)
        bits = sections.blank((x.size + 7) // 8, np.uint8)
        bits[...] = 0
        words = key.words() if self.sample else _NO_KEY
        finite = kernels.encode(x, gradient, group, self.sample or 0, *words, means, bits)
        return Body(sections.used, x.size, 0, finite)

    def decode_body(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        means = body.take(2 * count_groups(out.size, header.group), np.float32)
        bits = body.take((out.size + 7) // 8, np.uint8)
        kernels.decode(means, bits, header.group, scale, out, add)
        return True


@cache
def _many(compressor: OneBit) -> Many:
    return Many(compressor.codec, partial(many.encode_onebit, wire.VERSION, compressor.codec), many.decode_onebit)
