"""Keep residuals in 8 bits: a sign, 4 bits of exponent and 3 of mantissa, and for each block the largest exponent.

Numbers that were kept once are kept again exactly: they are floats of few bits, and need no rounding then.
"""

from __future__ import annotations

import math

import numpy as np

from hvd_compress.kernels.common import largest_magnitude, mix
from hvd_compress.kernels.jit import kernel

BLOCK = 256  # elements that share the largest exponent
# a block's largest value is at most 1.875 * 2**exponent, its smallest step is 2**(exponent - 17): the least float32,
# and for float64 a number whose inverse is a float64
_LEAST = {4: -149 + 17, 8: -980}
# the largest float is a little larger, and becomes that
_LARGEST = {4: 127, 8: 1023}

_NORMAL = np.float32(2.0**-14)  # the least value with a leading bit, where the exponent is 0
_STEPS = np.float32(2.0**17)
_BIAS = np.uint32(112 << 3)  # between the exponents of float32 and of these
_RANDOM = np.uint32(0xFFFFF)
_UNIT = np.float32(2.0**-20)
_MOST = np.uint32(127)


@kernel
def _exponent(y, least, most):
    if y.itemsize == 4:
        largest = np.float64(largest_magnitude(y))
    else:
        largest = 0.0
        for i in range(y.size):
            largest = max(largest, abs(np.float64(y[i])))
    if largest == 0:
        return least
    fraction, exponent = math.frexp(largest)
    return min(max(exponent - 1 if fraction <= 0.9375 else exponent, least), most)


@kernel
def pack(x, least, most, key_low, key_high, exponents, codes):
    """Round finite values at random to such floats, up as often as they are nearer to the upper one.

    Args:
        x: float32 or float64.
        least: exponent of the smallest block.
        most: of the largest block.
        key_low: of the random choices.
        key_high: likewise.
        exponents: int16, of each block; written.
        codes: uint8, of each element; written.
    """
    magnitudes = np.empty(BLOCK, np.float32)
    words = magnitudes.view(np.uint32)
    for b in range(exponents.size):
        start = b * BLOCK
        y = x[start : min(start + BLOCK, x.size)]
        exponent = _exponent(y, least, most)
        exponents[b] = exponent
        factor = math.ldexp(1.0, -exponent)
        for i in range(y.size):
            magnitudes[i] = np.float32(abs(np.float64(y[i])) * factor)
        for i in range(y.size):
            drawn = mix(start + i, key_low, key_high) & _RANDOM
            # what is cut off of the mantissa is how near it is to the next one, in units of 2**-20
            normal = ((words[i] + drawn) >> np.uint32(20)) - _BIAS
            small = np.uint32(min(magnitudes[i], _NORMAL) * _STEPS + np.float32(drawn) * _UNIT)
            code = min(normal if magnitudes[i] >= _NORMAL else small, _MOST)
            is_negative = y[i] < 0 and code > np.uint32(0)
            codes[start + i] = np.uint8(code | (np.uint32(128) if is_negative else np.uint32(0)))


@kernel
def unpack(exponents, codes, out):
    """Write the values that codes stand for to float32 or float64."""
    magnitudes = np.empty(BLOCK, np.float32)
    words = magnitudes.view(np.uint32)
    for b in range(exponents.size):
        start = b * BLOCK
        y = out[start : min(start + BLOCK, out.size)]
        size = math.ldexp(1.0, exponents[b])
        for i in range(y.size):
            words[i] = ((np.uint32(codes[start + i]) & _MOST) + _BIAS) << np.uint32(20)
        for i in range(y.size):
            code = np.uint32(codes[start + i])
            level = code & _MOST
            magnitude = magnitudes[i] if level >= np.uint32(8) else np.float32(level) / _STEPS
            y[i] = np.float64(-magnitude if code > _MOST else magnitude) * size


def exponents_of(dtype: np.dtype) -> tuple[int, int]:
    """Return the exponents of the smallest and the largest block for values of a type."""
    return _LEAST[dtype.itemsize], _LARGEST[dtype.itemsize]
