"""Drop the smallest magnitudes of a gradient: SparsifyGradients (Lam, Look and Whittell 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import ClassVar

from hvd_compress import wire
from hvd_compress.compressors import entries
from hvd_compress.compressors.base import TableCompressor
from hvd_compress.compressors.settings import check_choice, check_feedback, check_real
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import bitmap as kernels
from hvd_compress.kernels import coded

__all__ = ["Percentile"]

# the parameter of a header
_INDICES = 0
_BITMAP = 1

# from here on a bit for each of 32-bit values is paid by those that are dropped
_LEAST_PERCENTILE = 100 / 32


@dataclass(frozen=True)
class Percentile(TableCompressor):
    """Sends the values whose magnitude is not below a percentile of the magnitudes of their tensor, and drops the rest.

    Of n values, n - floor(n * percentile / 100) are sent, at least one; the percentile is taken as the decimal number
    that Python prints, so that 99.9 is 999/1000. Payload: float32 values and their positions. Positions take a bit per
    element where more than 1 in 16 is sent, else 2 bytes per value and 4 per 65536 elements. At a percentile of 90 that
    makes 4.2 bits per element, 7.6 times fewer than dense float32 (the paper: "around 2-3"), with coding="golomb" about
    3.7. Where a tensor is exchanged in parts, each part has its own percentile. An exchange in two phases sparsifies
    the sums again; exchange="allgather" does not.

    Source: Lam, Look and Whittell 2017, section 3. As there, what is dropped is gone unless `error_feedback` is on.
    Differences: the paper's listing compares the gradient itself, not its magnitude, with the threshold, which would
    drop all negative values and a value equal to the threshold; the paper's text and this class send both. Among equal
    magnitudes at the threshold the lower indices are sent, so that the size follows from the shape; zeros are not sent.
    The threshold comes from counting magnitudes, not from interpolation: NumPy's default percentile can drop one value
    more.

    Args:
        percentile: values whose magnitude is below this percentile are dropped; from 3.125, where as many bytes are
            sent as without compression, to 100.
        error_feedback: keep what was not sent and add it to the next gradient; "float8" keeps it in 8 bits.
        coding: None, or "golomb" for losslessly coded gaps instead of a bit for each element: fewer bytes, but messages
            whose size varies from step to step.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Percentile
        >>> compressor = Percentile(50)
        >>> compressor.decode(compressor.encode(np.array([0.2, 0.7, -3.0, 0.5], np.float32)))
        array([ 0. ,  0.7, -3. ,  0. ], dtype=float32)
    """

    percentile: float = 90.0
    error_feedback: bool | str = False
    coding: str | None = None

    id: ClassVar[str] = "percentile"
    sends_entries: ClassVar[bool] = True
    codec: ClassVar[int] = 10
    coded_codec: ClassVar[int | None] = 138

    def __post_init__(self) -> None:
        check_real(self, "percentile", self.percentile, above=0.0, most=100.0)
        if self.percentile < _LEAST_PERCENTILE:
            hint = f" Did you mean Percentile({round(100 * self.percentile, 9):g})?" if self.percentile < 1 else ""
            raise ValueError(
                f"Percentile(percentile={self.percentile!r}): it is a number of hundredths, so this keeps the largest "
                f"{100 - self.percentile:.4g} % of the values, which with a bit for each element takes more bytes than "
                f"dense float32; give {_LEAST_PERCENTILE} to 100.{hint}"
            )
        check_feedback(self, self.error_feedback)
        check_choice(self, "coding", self.coding, (None, "golomb"))

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return entries.BLOCK

    def keeping(self, share: float) -> Percentile:
        return replace(self, percentile=min(self.percentile, max(_LEAST_PERCENTILE, 100 * (1 - share))))

    def kept_share(self, numel: int) -> float:
        return 1 - self.percentile / 100

    def _kept(self, numel: int) -> int:
        return min(numel, max(1, numel - int(numel * _share_below(self.percentile))))

    def body_bytes(self, numel: int, group: int) -> int:
        kept = self._kept(numel)
        if _wants_bitmap(kept, numel):
            return 8 * _words(numel) + 4 * kept
        return entries.body_bytes(numel, group, kept)

    def misfit(self, header: wire.Header) -> str | None:
        known = {_INDICES} if header.codec == self.coded_codec else {_INDICES, _BITMAP}
        if header.parameter not in known:
            return f"payload of percentile of form {header.parameter}; known are {sorted(known)}"
        if header.parameter == _INDICES and header.group > entries.BLOCK:
            return f"payload of 16-bit indices in blocks of {header.group} elements; {entries.BLOCK} is the most"
        return None

    def limit_of(self, numel: int, group: int) -> int:
        return self._kept(numel)

    def kernels(self, group: int) -> Kernels:
        return _kernels(self.codec, self.coded_codec)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        # coded gaps are for hosts
        return None if self.coding is not None or group > entries.BLOCK else _device_kernels(self.codec)


@cache
def _kernels(codec: int, coded_codec: int | None) -> Kernels:
    return Kernels(
        partial(kernels.encode_rows, codec, _BITMAP, _INDICES),
        partial(kernels.decode_rows, _BITMAP, _INDICES),
        partial(coded.shorten_bitmap_rows, coded_codec, _INDICES),
        partial(coded.decode_bitmap_rows, _BITMAP, _INDICES),
    )


@cache
def _device_kernels(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import bitmap

    return DeviceKernels(partial(bitmap.encode, codec=codec), bitmap.verify, bitmap.decode)


@cache
def _share_below(percentile: float) -> Fraction:
    """Return the share that is dropped, of the decimal number: the float nearest to 99.3 is a little less than it."""
    return Fraction(repr(percentile)) / 100


def _wants_bitmap(kept: int, numel: int) -> bool:
    return kept * kernels.BITS_OF_INDEX > numel


def _words(numel: int) -> int:
    return -(-numel // 64)
