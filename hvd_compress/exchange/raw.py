"""Send values uncompressed within an exchange, with more checks and sizes than `NoCompression` and `FP16` have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from hvd_compress.compressors import FP16, Compressor, NoCompression
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import cast

__all__ = ["CheckedRaw", "Raw", "checked", "fitted", "is_uncompressed", "unchecked"]


class Raw(NoCompression):
    """Sends float32 values as they are."""

    # a slot for any type would hold 8 bytes per element, and all of them would travel
    def body_bytes(self, numel: int, group: int) -> int:
        return 4 * numel


@dataclass(frozen=True, repr=False)
class CheckedRaw(Raw):
    """Sends values as they are; the payload says if one is not finite.

    Args:
        itemsize: bytes per element; values are rounded to float32 for 4, which is all that other compressors send, and
            float64 for 8.
    """

    itemsize: int = 4
    reducible: ClassVar[bool] = False

    def __repr__(self) -> str:
        return repr(NoCompression())

    def body_bytes(self, numel: int, group: int) -> int:
        return self.itemsize * numel

    def kernels(self, group: int) -> Kernels:
        return _CHECKED_RAW[self.itemsize]

    def device_kernels(self, group: int) -> DeviceKernels | None:
        # gradients in device memory are float32 or narrower
        return _checked_raw_on_device() if self.itemsize == 4 else None


class CheckedHalves(FP16):
    """Sends IEEE halves; the payload says if one is not finite, as values too large for a half are not."""

    reducible: ClassVar[bool] = False

    def __repr__(self) -> str:
        return repr(FP16())

    def kernels(self, group: int) -> Kernels:
        return _CHECKED_HALVES

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _checked_halves_on_device()


_CHECKED_RAW = {
    size: Kernels(partial(cast.encode_raw_rows, CheckedRaw.codec, size, True), partial(cast.decode_raw_rows, size))
    for size in (4, 8)
}
_CHECKED_HALVES = Kernels(partial(cast.encode_fp16_rows, FP16.codec, True), cast.decode_fp16_rows)


@cache
def _checked_raw_on_device() -> DeviceKernels:
    from hvd_compress.kernels.cuda import cast

    encode = partial(cast.encode_raw, codec=CheckedRaw.codec, is_checked=True)
    return DeviceKernels(encode, partial(cast.verify_raw, may_be_wide=False), cast.decode_raw)


@cache
def _checked_halves_on_device() -> DeviceKernels:
    from hvd_compress.kernels.cuda import cast

    encode = partial(cast.encode_float16, codec=FP16.codec, is_checked=True)
    return DeviceKernels(encode, cast.verify_halves, cast.decode_float16)


def fitted(compressor: Compressor, dtype: str) -> Compressor:
    """Return the compressor that suits a dtype, given by name: float64 is not rounded where nothing else is lost."""
    return CheckedRaw(8) if isinstance(compressor, CheckedRaw) and dtype == "float64" else compressor


def is_uncompressed(compressor: Compressor) -> bool:
    """Whether `checked` has made this compressor."""
    return isinstance(compressor, CheckedRaw | CheckedHalves)


def unchecked(compressor: Compressor) -> Compressor:
    """Return the compressor that `checked` was given."""
    if isinstance(compressor, CheckedRaw):
        return NoCompression()
    return FP16() if isinstance(compressor, CheckedHalves) else compressor


def checked(compressor: Compressor) -> Compressor:
    """Replace a compressor that lets the allreduce carry values that are not finite by one that reports them itself."""
    if isinstance(compressor, NoCompression):
        return CheckedRaw()
    return CheckedHalves() if isinstance(compressor, FP16) else compressor
