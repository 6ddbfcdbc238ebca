"""Round at random to three levels: TernGrad (Wen et al. 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor, count_groups
from hvd_compress.compressors.groups import group_numel
from hvd_compress.compressors.settings import check_group, check_int, check_real
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import terngrad as kernels

__all__ = ["TernGrad"]

_LONGEST_ROW = 65536
_RUN, _BYTES = 320, 64


@dataclass(frozen=True)
class TernGrad(TableCompressor):
    """Sends each value as 0 or, with probability magnitude / s, as s with its sign; s is the group's largest magnitude.

    Payload: 1.6 bits per element, five in a byte, and 4 bytes per group. Decoded values equal the encoded ones on
    average, so there is no error feedback. With `clip`, values are first clipped to so many standard deviations. That
    makes s and the noise smaller, but what it clips is lost. Source: Wen et al. 2017, sections 3.1 and 3.3.
    Differences: groups are rows by default ("tensor" is the paper's layer); the deviation is taken from zero, not from
    the mean, so that equal values are not clipped to nothing; ranks do not share a scale, since sums are made of
    decoded values; the owner of a sum rounds it once more. `QSGD(bits=2, norm="max")` rounds in the same way, without
    clipping.

    Args:
        group: "row" (as `OneBit` groups), "tensor", or elements per group.
        clip: standard deviations, from 1 to 1000, beyond which values are clipped; None for no clipping.
        seed: of the random rounding; each tensor, step and rank draws its own numbers.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Key, TernGrad
        >>> x = np.array([0.3, -0.4], np.float32)
        >>> draws = [TernGrad().decode(TernGrad().encode(x, key=Key(step=step))) for step in range(10000)]
        >>> bool(np.allclose(np.mean(draws, axis=0), x, atol=0.01))
        True
    """

    group: str | int = "row"
    clip: float | None = 2.5
    seed: int = 0

    id: ClassVar[str] = "terngrad"
    codec: ClassVar[int] = 13

    def __post_init__(self) -> None:
        check_group(self, self.group)
        if self.clip is not None:
            check_real(self, "clip", self.clip, above=0.0, most=1000.0)
            if self.clip < 1:
                raise ValueError(f"TernGrad(clip={self.clip!r}): clip must be a number from 1 to 1000, or None")
        check_int(self, "seed", self.seed, 0, 2**63 - 1)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether values are not clipped, which makes the result unbiased."""
        return self.clip is None

    def contraction(self, numel: int) -> float:
        """Return 1 / (1 + variance): s times the sum of magnitudes is at most so many times that of the squares."""
        n = (numel if isinstance(self.group, str) else min(numel, self.group)) or 1
        return 1.0 / min(math.sqrt(n), self.clip or math.inf)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return group_numel(shape, self.group, _LONGEST_ROW)

    def body_bytes(self, numel: int, group: int) -> int:
        whole, rest = divmod(numel, group)
        return wire.padded(4 * count_groups(numel, group)) + whole * _bytes_of(group) + _bytes_of(rest)

    @property
    def draws(self) -> bool:
        return True

    def kernels(self, group: int) -> Kernels:
        return _kernels(self)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _device_kernels(self.codec, self.clip)


@cache
def _kernels(compressor: TernGrad) -> Kernels:
    return Kernels(partial(kernels.encode_rows, compressor.codec, compressor.clip or 0.0), kernels.decode_rows)


@cache
def _device_kernels(codec: int, clip: float | None) -> DeviceKernels:
    from hvd_compress.kernels.cuda import terngrad

    encode = partial(terngrad.encode, codec=codec, clip=clip or 0.0)
    return DeviceKernels(encode, terngrad.verify, terngrad.decode)


def _bytes_of(numel: int) -> int:
    return numel // _RUN * _BYTES + -(-(numel % _RUN) // 5)
