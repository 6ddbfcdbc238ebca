"""Stream compaction: from a condition per element to the ascending list of indices that satisfy it.

Conditions are evaluated eight at a time into a bit mask, which vectorizes; the few set bits are then walked one by one.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel

TILE = 4096  # elements per mask: 512 bytes, and the tile of values stays in the first-level cache

_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_POSITIONS = np.zeros(64, np.int64)
for _bit in range(64):
    _POSITIONS[((int(_DE_BRUIJN) << _bit) & 0xFFFFFFFFFFFFFFFF) >> 58] = _bit


@kernel
def mask_outside(y, above, below, mask):
    """Bits of y >= above or y <= below into `mask` (uint8, TILE / 8 of them; all are written)."""
    whole = y.size >> 3
    for j in range(whole):
        byte = np.uint8(0)
        for k in range(8):
            v = y[8 * j + k]
            byte |= np.uint8((v >= above) | (v <= below)) << np.uint8(k)
        mask[j] = byte
    mask[whole:] = 0
    for i in range(8 * whole, y.size):
        mask[whole] |= np.uint8((y[i] >= above) | (y[i] <= below)) << np.uint8(i & 7)


@kernel
def count_bits(mask):
    """How many bits are set."""
    total = 0
    words = mask.view(np.uint64)
    for i in range(words.size):
        w = words[i]
        w -= (w >> np.uint64(1)) & np.uint64(0x5555555555555555)
        w = (w & np.uint64(0x3333333333333333)) + ((w >> np.uint64(2)) & np.uint64(0x3333333333333333))
        w = (w + (w >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        total += np.int64((w * np.uint64(0x0101010101010101)) >> np.uint64(56))
    return total


@kernel
def append_bits(mask, first, found, count):
    """Append first + position of every set bit to `found`, which has room for them, from `count` on; the new count."""
    words = mask.view(np.uint64)
    for i in range(words.size):
        w = words[i]
        base = first + 64 * i
        while w != 0:
            lowest = w & (~w + np.uint64(1))
            found[count] = base + _POSITIONS[(lowest * _DE_BRUIJN) >> np.uint64(58)]
            count += 1
            w ^= lowest
    return count


@kernel
def collect(y, above, below, found):
    """Indices with y >= above or y <= below, ascending, into `found`; their number, or -1 if there is no room."""
    mask = np.empty(TILE // 8, np.uint8)
    count = 0
    for tile in range(0, y.size, TILE):
        mask_outside(y[tile : tile + TILE], above, below, mask)
        if count + count_bits(mask) > found.size:
            return -1
        count = append_bits(mask, tile, found, count)
    return count
