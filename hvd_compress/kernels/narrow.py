"""Keep residuals in 8 bits: a whole number of steps for each element, and a power of two, their size, for each block.

Numbers that were kept once are kept again exactly: a step is a power of two, so that nothing is rounded twice.
"""

from __future__ import annotations

import math

import numpy as np

from hvd_compress.kernels.common import mix
from hvd_compress.kernels.jit import kernel

BLOCK = 256  # elements that share a step
_MOST = 127
# exponents of the smallest steps: the least float32, and for float64 one whose inverse is a float64
_LEAST = {4: -149, 8: -1000}


@kernel
def _exponent(y, least):
    """Return the exponent of the step with which the largest of these values takes 7 bits."""
    largest = 0.0
    for i in range(y.size):
        largest = max(largest, abs(np.float64(y[i])))
    if largest == 0:
        return 0
    fraction, exponent = math.frexp(largest / _MOST)
    return max(exponent - 1 if fraction == 0.5 else exponent, least)


@kernel
def pack(x, least, key_low, key_high, exponents, codes):
    """Round finite values at random to whole steps, up as often as they are nearer to the upper one.

    Args:
        x: float32 or float64.
        least: exponent of the smallest step.
        key_low: of the random choices.
        key_high: likewise.
        exponents: int16, of each block; written.
        codes: int8, of each element; written.
    """
    for b in range(exponents.size):
        start = b * BLOCK
        y = x[start : min(start + BLOCK, x.size)]
        exponent = _exponent(y, least)
        exponents[b] = exponent
        factor = math.ldexp(1.0, -exponent)
        for i in range(y.size):
            # 16 random bits: a whole number of steps and they are a float32 exactly, and it stays what it is
            drawn = np.float32(mix(start + i, key_low, key_high) >> np.uint32(16)) * np.float32(2.0**-16)
            up = np.floor(np.float32(np.float64(y[i]) * factor) + drawn)
            codes[start + i] = np.int8(min(max(up, np.float32(-_MOST)), np.float32(_MOST)))


@kernel
def unpack(exponents, codes, out):
    """Write the values that codes stand for to float32 or float64."""
    for b in range(exponents.size):
        start = b * BLOCK
        y = out[start : min(start + BLOCK, out.size)]
        step = math.ldexp(1.0, exponents[b])
        for i in range(y.size):
            y[i] = np.float64(codes[start + i]) * step


def least_exponent(dtype: np.dtype) -> int:
    """Return the exponent of the smallest step for values of a type."""
    return _LEAST[dtype.itemsize]
