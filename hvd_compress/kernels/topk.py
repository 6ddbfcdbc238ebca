"""The k entries of largest magnitude with their values: 16-bit index within a block, float32 value."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.collect import TILE, append_bits, count_bits, mask_outside
from hvd_compress.kernels.common import correct, draw, kth_largest, with_margin
from hvd_compress.kernels.jit import kernel


@kernel
def _guess(x, r, k, sample, key_low, key_high):
    """A magnitude above which slightly more than `k` corrected entries are expected."""
    values = np.empty(sample, x.dtype)
    for j in range(sample):
        i = draw(j, sample, x.size, key_low, key_high)
        v = abs(x[i] + r[i]) if r.size > 0 else abs(x[i])
        # NaN would break the selection; it is found, and reported, by the scan
        values[j] = v if v == v else x.dtype.type(0)
    down = with_margin(k, x.size, sample)
    if down > sample:
        return x.dtype.type(0)
    return kth_largest(values, down)


@kernel
def _scan(x, r, guess, found):
    """Correct `x` and collect the indices with |x| >= guess: (how many, or -1 for too many; 0 or NaN)."""
    count = 0
    bad = np.float32(0)
    mask = np.empty(TILE // 8, np.uint8)
    for tile in range(0, x.size, TILE):
        y = x[tile : tile + TILE]
        bad += correct(y, r[tile : tile + TILE] if r.size > 0 else r)
        if count < 0:
            continue
        mask_outside(y, guess, -guess, mask)
        if count + count_bits(mask) > found.size:
            count = -1
        else:
            count = append_bits(mask, tile, found, count)
    return count, bad


@kernel
def encode(x, r, k, sample, block, key_low, key_high, counts, indices, values):
    """counts[blocks], indices[k], values[k]; the number of entries (fewer only for zeros), or -1 if not finite.

    Among equal magnitudes the lower index wins.
    """
    counts[:] = 0
    if k == 0:
        return 0
    guess = _guess(x, r, k, min(sample, x.size), key_low, key_high)
    found = np.empty(min(4 * k + 1024, x.size), np.int64)
    candidates, bad = _scan(x, r, guess, found)
    if np.isnan(bad):
        return -1

    # exact selection among the candidates; all entries if the sample guessed badly (many ties, odd shapes)
    if candidates < k:
        magnitudes = np.abs(x)
        threshold = kth_largest(magnitudes, k)
        larger = 0
        for i in range(x.size):
            larger += abs(x[i]) > threshold
        found = np.empty(k, np.int64)
        ties = k - larger
        candidates = 0
        for i in range(x.size):
            v = abs(x[i])
            if v > threshold or (v == threshold and ties > 0):
                ties -= v == threshold
                found[candidates] = i
                candidates += 1
    magnitudes = np.empty(candidates, x.dtype)
    for c in range(candidates):
        magnitudes[c] = abs(x[found[c]])
    threshold = kth_largest(magnitudes, k)
    larger = 0
    for c in range(candidates):
        larger += magnitudes[c] > threshold
    ties = k - larger

    total = 0
    current = 0
    for c in range(candidates):
        i = found[c]
        v = x[i]
        if v == 0 or abs(v) < threshold:
            continue
        if abs(v) == threshold:
            if ties == 0:
                continue
            ties -= 1
        while i >= (current + 1) * block:
            current += 1
        sent = np.float32(v)
        counts[current] += 1
        indices[total] = i - current * block
        values[total] = sent
        total += 1
        if r.size > 0:
            x[i] = v - sent
    return total


@kernel
def decode(counts, indices, values, block, scale, out):
    """Add `scale` times the values at their places; False at the first index that does not fit."""
    at = 0
    for b in range(counts.size):
        start = b * block
        size = min(start + block, out.size) - start
        previous = -1
        for _ in range(counts[b]):
            if at >= indices.size:
                return False
            index = np.int64(indices[at])
            if index <= previous or index >= size:
                return False
            out[start + index] += values[at] * scale
            previous = index
            at += 1
    return at == indices.size
