"""Round at random to powers of two: natural compression (Horvath et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor, count_groups
from hvd_compress.compressors.settings import check_int
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import natural as kernels

__all__ = ["Natural"]

_BLOCK = 4096


@dataclass(frozen=True)
class Natural(TableCompressor):
    """Rounds each value at random to one of the two powers of two around it, which keeps its expected value.

    Payload: 1 byte per element, a sign and an exponent of 7 bits, and 1 byte per block of 4096. The variance is at most
    an eighth of the square of the value, so it loses little and needs no error feedback. Source: Horvath et al. 2019,
    definition 1 and theorem 1. Differences: they send 9 bits, all exponents of float32. Here a block sends the 127
    exponents below its largest, and what is 2**126 times smaller than the largest value becomes zero. Magnitudes above
    2**127 are rounded down, since float32 has no larger power of two; float64 is rounded to float32 first.

    Args:
        seed: of the random rounding; each tensor, step and rank draws its own numbers.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Key, Natural
        >>> x = np.array([2.5, -8.0, 0.0], np.float32)
        >>> draws = [Natural().decode(Natural().encode(x, key=Key(step=step))) for step in range(1000)]
        >>> np.unique(draws).tolist()
        [-8.0, 0.0, 2.0, 4.0]
        >>> bool(np.allclose(np.mean(draws, axis=0), x, atol=0.1))
        True
    """

    seed: int = 0

    id: ClassVar[str] = "natural"
    codec: ClassVar[int] = 14
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int(self, "seed", self.seed, 0, 2**63 - 1)

    def contraction(self, numel: int) -> float:
        """Return 1 / (1 + variance), with the variance of 1/8 of theorem 1."""
        return 8 / 9

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return _BLOCK

    def body_bytes(self, numel: int, group: int) -> int:
        return wire.padded(count_groups(numel, group)) + numel

    def misfit(self, header: wire.Header) -> str | None:
        if header.group > _BLOCK:
            return f"payload of natural with blocks of {header.group} elements; they have at most {_BLOCK}"
        return None

    @property
    def draws(self) -> bool:
        return True

    def kernels(self, group: int) -> Kernels:
        return _kernels(self.codec)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _device_kernels(self.codec) if group == _BLOCK else None


@cache
def _kernels(codec: int) -> Kernels:
    return Kernels(partial(kernels.encode_rows, codec), kernels.decode_rows)


@cache
def _device_kernels(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import natural

    return DeviceKernels(partial(natural.encode, codec=codec), natural.verify, natural.decode)
