"""A compressor as a user writes it in a file of their own; nothing in the package knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import hvd_compress
from hvd_compress.compressors import NOT_FINITE, Body, add_gradient
from hvd_compress.wire import Sections


@hvd_compress.register
@dataclass(frozen=True)
class SignSum(hvd_compress.Compressor):
    """The signs, and the mean magnitude times a factor."""

    factor: float = 1.0
    error_feedback: bool = True
    id: ClassVar[str] = "signsum"
    codec: ClassVar[int] = 200

    def body_bytes(self, numel: int, group: int) -> int:
        return 8 + (numel + 7) // 8

    def encode_body(self, x: Any, gradient: Any, body: Any, group: int, key: Any) -> Body:
        if not add_gradient(x, gradient):
            return NOT_FINITE
        sections = Sections(body)
        scale = np.float32(self.factor * np.abs(x).mean(dtype=np.float64))
        sections.blank(1, np.float32)[0] = scale
        is_positive = x >= 0
        sections.blank((x.size + 7) // 8, np.uint8)[:] = np.packbits(is_positive)
        if gradient.size:
            x -= np.where(is_positive, scale, -scale)
        return Body(sections.used)

    def decode_body(self, header: Any, body: Any, out: Any, scale: Any, add: bool) -> bool:
        (size,) = body.take(1, np.float32) * scale
        is_positive = np.unpackbits(body.take((out.size + 7) // 8, np.uint8), count=out.size)
        values = np.where(is_positive, size, -size)
        out[:] = out + values if add else values
        return True
