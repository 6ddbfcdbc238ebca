"""Stream compaction: list the indices of all elements that satisfy a condition, ascending.

Conditions are evaluated 64 at a time into a word of bits; the few set bits are then walked one by one.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import at_least_64, count_ones, fetch_to_read, outside_64, trailing_zeros

TILE = 4096  # longer arrays are handled in tiles of so many elements, which stay in the first-level cache
AHEAD = 64  # entries whose places are fetched before they are reached: scattered ones wait for memory otherwise

_LINE = 16  # float32 of a cache line
_ONE = np.uint64(1)


@kernel
def _append(word, base, found, count):
    """Append base + position of every set bit to `found` from `count` on; 64 places from there on may be spoiled."""
    # two bits without a branch: a loop that ends after none or one of them would be mispredicted most times
    for _ in range(2):
        found[count] = base + trailing_zeros(word)
        count += word != 0
        word &= word - _ONE
    while word != 0:
        found[count] = base + trailing_zeros(word)
        count += 1
        word &= word - _ONE
    return count


@kernel
def collect(y, above, below, first, found, count, ahead=None, also=None, following=0):
    """Append `first` + the indices with y >= above or y <= below, ascending, to `found` from `count` on.

    Returns the new count, or -1 if there is no room; `found` must be 64 longer than the room it offers, and what it
    holds beyond the count is spoiled. Meanwhile, as many elements of the arrays `ahead` and `also` as `y` has, from
    `following` on, are fetched.
    """
    room = found.size - 64
    whole = y.size & ~63
    for i in range(0, whole, 64):
        if ahead is not None:
            for line in range(0, 64, _LINE):
                fetch_to_read(ahead, following + i + line)
                fetch_to_read(also, following + i + line)
        count = _append(outside_64(y, i, above, below), first + i, found, count)
        if count > room:
            return -1
    for i in range(whole, y.size):
        found[count] = first + i
        count += (y[i] >= above) | (y[i] <= below)
    return count if count <= room else -1


@kernel
def count_at_least(y, bound):
    """Count the elements that are >= bound."""
    whole = y.size & ~63
    count = 0
    for i in range(0, whole, 64):
        count += count_ones(at_least_64(y, i, bound))
    for i in range(whole, y.size):
        count += y[i] >= bound
    return count
