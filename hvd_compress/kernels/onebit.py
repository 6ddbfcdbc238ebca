"""One bit per element and two means per group."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.common import correct, draw
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import at_least_64, count_ones

_TILE = 1024  # values unpacked at once before they are added: they stay in the first-level cache


@kernel
def _means(y, count):
    """Means of the `count` non-negative entries and of the others."""
    positive = 0.0
    negative = 0.0
    for i in range(y.size):
        v = np.float64(y[i])
        positive += max(v, 0.0)
        negative += min(v, 0.0)
    return np.float32(positive / max(count, 1)), np.float32(negative / max(y.size - count, 1))


@kernel
def _sampled_means(y, sample, key_low, key_high):
    positive = 0.0
    negative = 0.0
    count = 0
    for j in range(sample):
        v = np.float64(y[draw(j, sample, y.size, key_low, key_high)])
        is_positive = v >= 0
        positive += v if is_positive else 0.0
        negative += 0.0 if is_positive else v
        count += is_positive
    return np.float32(positive / max(count, 1)), np.float32(negative / max(sample - count, 1))


@kernel
def _pack(y, first_bit, bits):
    """OR the signs of `y` into the bit stream from `first_bit` on; the number of ones."""
    zero = y.dtype.type(0)
    head = min((8 - first_bit) & 7, y.size)
    count = 0
    for i in range(head):
        one = y[i] >= zero
        bits[first_bit >> 3] |= np.uint8(one) << np.uint8((first_bit + i) & 7)
        count += one
    out = bits[(first_bit + head) >> 3 :]
    words = (y.size - head) >> 6
    for w in range(words):
        word = at_least_64(y, head + 64 * w, zero)
        count += count_ones(word)
        for byte in range(8):
            out[8 * w + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))
    for i in range(head + 64 * words, y.size):
        one = y[i] >= zero
        bits[(first_bit + i) >> 3] |= np.uint8(one) << np.uint8((first_bit + i) & 7)
        count += one
    return count


@kernel
def _leave_residual(y, positive, negative):
    for i in range(y.size):
        v = y[i]
        y[i] = v - (positive if v >= 0 else negative)


@kernel
def encode(x, r, group, sample, key_low, key_high, means, bits):
    """Fill means[2 * groups] (non-negative, negative) and the zeroed bits[ceil(numel / 8)]; False if not finite.

    `sample` entries per group estimate the means; 0 takes all.
    """
    feedback = r.size > 0
    bad = np.float32(0)
    for g in range(means.size // 2):
        start = g * group
        stop = min(start + group, x.size)
        y = x[start:stop]
        bad += correct(y, r[start:stop] if feedback else r)
        count = _pack(y, start, bits)
        if 0 < sample < y.size:
            positive, negative = _sampled_means(y, sample, np.uint32(key_low + np.uint32(g)), key_high)
        else:
            positive, negative = _means(y, count)
        means[2 * g] = positive
        means[2 * g + 1] = negative
        if feedback:
            _leave_residual(y, positive, negative)
    return bad == 0


@kernel
def _unpack(bits, first_bit, positive, negative, tile):
    """Fill `tile` with the values of the bits from `first_bit` (a multiple of 8 unless the tile is short) on."""
    source = bits[first_bit >> 3 :]
    if first_bit & 7:
        for i in range(tile.size):
            bit = (first_bit & 7) + i
            tile[i] = positive if (source[bit >> 3] >> np.uint8(bit & 7)) & 1 else negative
        return
    whole = tile.size >> 3
    for j in range(whole):
        byte = source[j]
        for k in range(8):
            tile[8 * j + k] = positive if byte & np.uint8(1 << k) else negative
    for i in range(8 * whole, tile.size):
        tile[i] = positive if (source[whole] >> np.uint8(i & 7)) & 1 else negative


@kernel
def decode(means, bits, group, scale, out, add):
    """Write (or add) `scale` times the means that the bits stand for."""
    tile = np.empty(_TILE, out.dtype)
    for g in range(means.size // 2):
        start = g * group
        stop = min(start + group, out.size)
        positive = out.dtype.type(means[2 * g] * scale)
        negative = out.dtype.type(means[2 * g + 1] * scale)
        at = start
        while at < stop:
            # a short first tile up to the next whole byte, then long ones
            size = min(8 - (at & 7) if at & 7 else _TILE, stop - at)
            target = out[at : at + size]
            if add:
                _unpack(bits, at, positive, negative, tile[:size])
                for i in range(size):
                    target[i] += tile[i]
            else:
                _unpack(bits, at, positive, negative, target)
            at += size
