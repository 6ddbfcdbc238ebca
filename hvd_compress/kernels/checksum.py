"""Compute a fast checksum of a payload; a change goes unnoticed with odds of 1 : 2**32."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel

_PRIME = np.uint64(0x9FB21C651E98DF25)


@kernel
def _step(chain, word):
    # a product carries upwards only: without the shift, two flipped top bits of a chain would cancel
    mixed = chain ^ word
    return (mixed ^ (mixed >> np.uint64(32))) * _PRIME


@kernel
def checksum(words, stored):
    """Return the 32-bit checksum of an array of uint64; the upper half of words[stored], its place, counts as 0."""
    start = np.uint64(0)
    for i in range(stored):
        start = _step(start, words[i])
    start = _step(start, words[stored] & np.uint64(0xFFFFFFFF))
    # four independent chains hide the latency of the multiplication; each step is a bijection of the chain
    a, b, c, d = start, np.uint64(2), np.uint64(3), np.uint64(4)
    words = words[stored + 1 :]
    whole = words.size & ~3
    for i in range(0, whole, 4):
        a = _step(a, words[i])
        b = _step(b, words[i + 1])
        c = _step(c, words[i + 2])
        d = _step(d, words[i + 3])
    for i in range(whole, words.size):
        a = _step(a, words[i])
    h = np.uint64(words.size)
    for lane in (a, b, c, d):
        h = (h ^ lane ^ (lane >> np.uint64(32))) * _PRIME
        h ^= h >> np.uint64(29)
    return np.uint32(h >> np.uint64(32))


@kernel
def checksum_of_parts(words, stored):
    """Return the 32-bit checksum of an array of uint32 that devices make; words[stored], its place, counts as 0.

    Each word is mixed with its number, and all are added up, in any order. Each step of mixing is a bijection, so that
    a change of one word never goes unnoticed.
    """
    total = np.uint32(0)
    for i in range(words.size):
        h = np.uint32(words[i] ^ np.uint32(np.uint32(i) * np.uint32(0x9E3779B1)))
        if i == stored:
            h = np.uint32(np.uint32(i) * np.uint32(0x9E3779B1))
        h ^= np.uint32(h >> np.uint32(16))
        h = np.uint32(h * np.uint32(0x7FEB352D))
        h ^= np.uint32(h >> np.uint32(15))
        h = np.uint32(h * np.uint32(0x846CA68B))
        h ^= np.uint32(h >> np.uint32(16))
        total = np.uint32(total + h)
    return total
