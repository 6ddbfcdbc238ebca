"""Random numbers from a counter and a key; see `mix` and `uniform` of `hvd_compress.kernels.common`."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.rows import KEY, column

_DRAW = tl.constexpr(2.0**-24)


@triton.jit
def key_words(rows, i):
    """Return the two words of uint32 that random choices of row `i` depend on."""
    key = column(rows, i, KEY)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def mix(counter, low, high):
    """Hash each counter, given as uint32, under a key to 32 bits."""
    h = counter * 0x9E3779B1 + low
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h ^= high
    h *= 0x846CA68B
    h ^= h >> 16
    h *= 0x9E3779B1
    h ^= h >> 15
    return h


@triton.jit
def uniform(counter, low, high):
    """Draw a float32 in [0, 1) for each counter, which is given as uint32."""
    return (mix(counter, low, high) >> 8).to(tl.int32).to(tl.float32) * _DRAW
