"""A compressor of your own: copy this file, change the marked lines, and let the contract suite look at it.

python examples/guides/own_compressor.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import hvd_compress
from hvd_compress import Key
from hvd_compress.compressors import NOT_FINITE, Body, add_gradient
from hvd_compress.testing import check_compressor
from hvd_compress.wire import Header, Sections

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@hvd_compress.register  # known by its id, in configurations, and in payloads, on every rank that imports this file
@dataclass(frozen=True)
class SignMean(hvd_compress.Compressor):
    """Sends each sign, and one mean of magnitudes for all.

    Args:
        error_feedback: keep what was not sent and add it to the next gradient.
    """

    error_feedback: bool = True  # settings are fields: numbers, strings, booleans

    id: ClassVar[str] = "signmean"  # change: a name that nobody else has
    codec: ClassVar[int] = 200  # change: a number from 192 to 255

    def body_bytes(self, numel: int, group: int) -> int:
        """The most bytes that a body of `numel` elements takes."""
        return 8 + (numel + 7) // 8

    def encode_body(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        """Write the body; with error feedback leave in `x`, the residual, what was not sent."""
        if not add_gradient(x, gradient):  # x += gradient, unless something is not finite
            return NOT_FINITE
        mean = np.float32(np.abs(x).mean(dtype=np.float64))
        sections = Sections(body)
        sections.blank(1, np.float32)[0] = mean
        bits = np.packbits(x >= 0)
        sections.blank(bits.size, np.uint8)[:] = bits
        if gradient.size:
            x -= np.where(x >= 0, mean, -mean)
        return Body(sections.used)

    def decode_body(self, header: Header, body: Sections, out: Array, scale: np.float32, add: bool) -> bool:
        """Write `scale` times what the body stands for to `out`, or add it; False if that is not finite."""
        (mean,) = body.take(1, np.float32)
        packed = np.asarray(body.take((out.size + 7) // 8, np.uint8), np.uint8)
        bits = np.unpackbits(packed, count=out.size)
        values = np.where(bits, np.float32(mean) * scale, -np.float32(mean) * scale)
        out[:] = out + values if add else values
        return bool(np.isfinite(out).all())


if __name__ == "__main__":
    check_compressor(SignMean())
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    print(f"{x.nbytes / SignMean().encode(x).size:.1f} times fewer bytes, and it keeps the contract")
