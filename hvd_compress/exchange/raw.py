"""What travels uncompressed within an exchange: `NoCompression` and `FP16` for those who need to know more of it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.compressors import FP16, Compressor, Key, NoCompression
from hvd_compress.compressors.base import Array, Bytes
from hvd_compress.kernels import cast, common

__all__ = ["CheckedRaw", "Raw", "checked"]


class Raw(NoCompression):
    """Float32 values as they are."""

    # where any type may come, a slot holds 8 bytes per element, which would travel
    def body_bytes(self, numel: int, group: int) -> int:
        return 4 * numel


class CheckedRaw(Raw):
    """Float32 values, whatever the type of their source; the payload says if one is not finite."""

    reducible: ClassVar[bool] = False

    def __repr__(self) -> str:
        return repr(NoCompression())

    def _encode(self, x: Array, r: Array, body: Bytes, group: int, key: Key) -> tuple[int, int, int] | None:
        if np.isnan(common.correct(x, r)):
            return None
        sections = wire.Sections(body)
        values = sections.blank(x.size, np.float32)
        values[...] = x
        if r.size:
            x -= values
        return sections.used, x.size, 0

    def _decode(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        cast.scaled(body.take(out.size, np.float32), out.dtype.type(scale), out, add)
        return True


class CheckedHalves(FP16):
    """IEEE halves; the payload says if one is not finite, as too large values are not."""

    reducible: ClassVar[bool] = False

    def __repr__(self) -> str:
        return repr(FP16())

    def _encode(self, x: Array, r: Array, body: Bytes, group: int, key: Key) -> tuple[int, int, int] | None:
        done = super()._encode(x, r, body, group, key)
        halves = wire.Sections(body).take(x.size, np.float16)
        return done if np.isfinite(halves).all() else None


def checked(compressor: Compressor) -> Compressor:
    """In place of a compressor that leaves it to an allreduce to tell what is not finite, one that tells it itself."""
    if isinstance(compressor, NoCompression):
        return CheckedRaw()
    return CheckedHalves() if isinstance(compressor, FP16) else compressor
