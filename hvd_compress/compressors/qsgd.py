"""Quantize at random, without bias: QSGD (Alistarh et al. 2017; Sievert 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.compressors.base import Array, TableCompressor, count_groups
from hvd_compress.compressors.settings import check_choice, check_int
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import coded, elias, signs
from hvd_compress.kernels import qsgd as kernels

__all__ = ["QSGD"]

_MOST_BUCKET = 32768  # what 15 bits of index reach
_MOST_BUCKET_OF_ONE_BIT = 2**30  # coded gaps reach any distance; a bucket for all of any tensor


@dataclass(frozen=True)
class QSGD(TableCompressor):
    """Rounds each value at random to one of the levels norm * l / s, l = -s … s, which keeps its expected value.

    The norm is that of a bucket, a run of `bucket_numel` elements. With b bits a code holds the sign and a level up to
    s = 2**(b-1) - 1; a bucket's norm costs 4 bytes. With 1 bit, s = 1 and only the non-zero levels are sent, each as 16
    bits of index and sign: less than 1 bit per element is expected for the Euclidean norm and buckets of 512. With
    coding="elias", the gaps between non-zero levels, their signs and levels are sent as Elias codes, or all levels
    where few are zero. The result is unbiased, so there is no error feedback: the variance can exceed the square of the
    norm, and a residual would grow without bound. Source: Alistarh et al. 2017, section 3; Sievert 2017, section 3.1,
    is the case of 1 bit, coded, with one bucket for all. Differences: codes are sent as they are unless a coding is
    asked for; gaps continue across the bounds of buckets, and take the paper's omega (recursive) code only where they
    are so wide that it is shorter, else the gamma code.

    Args:
        bits: 1 to 8.
        bucket_numel: elements that share a norm, a multiple of 8 up to 32768, with 1 bit and a coding up to 2**30.
        norm: "l2" (Alistarh) or "max" (less variance for the same bits, but few zeros).
        coding: None, or "elias" for losslessly coded levels: fewer bytes, but messages whose size varies from step to
            step.
        seed: of the random rounding; each tensor, step and rank draws its own numbers.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Key, QSGD
        >>> x = np.array([0.3, -0.4], np.float32)
        >>> compressor = QSGD(bits=4, bucket_numel=8)
        >>> draws = [compressor.decode(compressor.encode(x, key=Key(step=step))) for step in range(10000)]
        >>> bool(np.allclose(np.mean(draws, axis=0), x, atol=0.005))
        True
    """

    bits: int = 4
    bucket_numel: int = 512
    norm: str = "l2"
    coding: str | None = None
    seed: int = 0

    id: ClassVar[str] = "qsgd"
    codec: ClassVar[int] = 5
    coded_codec: ClassVar[int | None] = 133
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int(self, "bits", self.bits, 1, 8)
        check_int(self, "bucket_numel", self.bucket_numel, 8, _most_bucket(self.bits == 1 and self.coding is not None))
        if self.bucket_numel % 8:
            raise ValueError(f"QSGD(bucket_numel={self.bucket_numel!r}): bucket_numel must be a multiple of 8")
        check_choice(self, "norm", self.norm, ("l2", "max"))
        check_choice(self, "coding", self.coding, (None, "elias"))
        check_int(self, "seed", self.seed, 0, 2**63 - 1)

    @property
    def fixed_size(self) -> bool:
        """Whether the size follows from the shape: not with one bit or a coding, where it depends on the levels."""
        return self.bits > 1 and self.coding is None

    def contraction(self, numel: int) -> float:
        """Return 1 / (1 + variance), with the bound of Alistarh et al. 2017, lemma 3.1, on the variance."""
        levels = max(1, 2 ** (self.bits - 1) - 1)
        n = min(numel, self.bucket_numel) or 1
        # rounding between two levels has a variance of a quarter of their distance squared, at most
        variance = n / (4 * levels**2) if self.norm == "max" else min(n / levels**2, math.sqrt(n) / levels)
        return 1.0 / (1.0 + variance)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return self.bucket_numel

    def body_bytes(self, numel: int, group: int) -> int:
        buckets = count_groups(numel, group)
        if self.bits == 1:
            if self.coding is not None:
                return wire.padded(4 * buckets) + 8 * _ternary_words(numel)
            return wire.padded(2 * buckets) + 8 * buckets + 2 * numel
        return wire.padded(4 * buckets) + (numel + 7) // 8 * self.bits

    def misfit(self, header: wire.Header) -> str | None:
        is_coded = header.codec == self.coded_codec
        bits, form = (header.parameter & 255, header.parameter >> 8) if is_coded else (header.parameter, elias.DENSE)
        if not 1 <= bits <= 8 or header.group % 8 or header.group > _most_bucket(is_coded and bits == 1):
            return f"payload of qsgd with {bits} bits and buckets of {header.group} elements"
        if not elias.SPARSE_GAMMA <= form <= elias.DENSE:
            return f"payload of an Elias code of form {form}; known are {elias.SPARSE_GAMMA} to {elias.DENSE}"
        return None

    @property
    def draws(self) -> bool:
        return True

    def limit_of(self, numel: int, group: int) -> int:
        return _ternary_words(numel)

    def kernels(self, group: int) -> Kernels:
        return _kernels(self)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        # sizes that depend on the levels are for hosts
        return _device_kernels(self, group) if self.fixed_size else None


@cache
def _kernels(compressor: QSGD) -> Kernels:
    is_max = compressor.norm == "max"
    if compressor.bits > 1:
        encode = partial(kernels.encode_rows, compressor.codec, compressor.bits, is_max)
    elif compressor.coding is None:
        encode = partial(signs.encode_ternary_rows, compressor.codec, is_max)
    else:
        encode = partial(elias.encode_ternary_rows, compressor.codec, compressor.coded_codec, is_max)
    # levels of one bit are coded as they are made
    shorten = partial(coded.shorten_levels_rows, compressor.coded_codec) if compressor.bits > 1 else None
    return Kernels(encode, kernels.decode_rows, shorten, _decode_coded)


def _decode_coded(rows: Array, like: Array, scale: np.float32) -> int:
    return int(coded.decode_levels_rows(_symbols(), rows, like, scale))


@cache
def _symbols() -> Array:
    """Return tables of the symbols of all streams."""
    symbols = np.zeros((8, 3, 2**elias.TABLE_BITS), np.int32)
    elias.tabulate(symbols)
    return symbols


@cache
def _device_kernels(compressor: QSGD, bucket: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import qsgd

    bits, is_max = compressor.bits, compressor.norm == "max"
    encode = partial(qsgd.encode, codec=compressor.codec, bits=bits, is_max=is_max, bucket=bucket)
    verify = partial(qsgd.verify, bits=bits, bucket=bucket)
    return DeviceKernels(encode, verify, partial(qsgd.decode, bits=bits, bucket=bucket))


def _ternary_words(numel: int) -> int:
    """Return the most words that a stream of `numel` levels -1, 0 and 1 takes, with the two that it does not fill."""
    return -(-2 * numel // 64) + 2


def _most_bucket(one_bit_coded: bool) -> int:
    return _MOST_BUCKET_OF_ONE_BIT if one_bit_coded else _MOST_BUCKET
