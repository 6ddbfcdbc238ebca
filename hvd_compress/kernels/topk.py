"""Send the k entries of largest magnitude with their values: 16-bit index within a block, float32 value."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.collect import AHEAD, TILE, collect
from hvd_compress.kernels.common import correct, kth_largest, least_above_zero, with_margin
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import fetch
from hvd_compress.kernels.select import exact_threshold, sampled_magnitudes


@kernel
def _guess(x, gradient, k, sample):
    """Guess a magnitude above which slightly more than `k` corrected entries lie; 0 if draws would not pay."""
    sample = min(sample, x.size >> 4)
    down = with_margin(k, x.size, sample) if sample > 0 else 1
    if down > sample:
        return x.dtype.type(0)
    values = sampled_magnitudes(x, gradient, sample)
    return kth_largest(values, sample, down)


@kernel
def _take(y, first, found, values, begin, end, feedback):
    """Note the values of the candidates found[begin:end] of the tile that starts at `first`; leave what is not sent."""
    for c in range(begin, end):
        v = y[found[c] - first]
        values[c] = v
        if feedback:
            y[found[c] - first] = v - np.float32(v)


@kernel
def _give_back(x, found, values, count):
    for c in range(count):
        x[found[c]] = values[c]


@kernel
def _scan(x, gradient, guess, found, values):
    """Correct `x` and take the entries with |x| >= guess: (how many, or -1 for too many and none taken; 0 or NaN)."""
    # All candidates are taken while they are in cache, though a few must be given back: these are fewer misses than
    # visits of all that stay.
    feedback = gradient.size > 0
    count = 0
    bad = np.float32(0)
    for tile in range(0, x.size, TILE):
        y = x[tile : tile + TILE]
        bad += correct(y, gradient[tile : tile + TILE])
        if count < 0:
            continue
        before = count
        count = collect(y, guess, -guess, tile, found, count)
        if count >= 0:
            _take(y, tile, found, values, before, count, feedback)
        elif feedback:
            _give_back(x, found, values, before)
    return count, bad


@kernel
def _take_largest(x, k, feedback, found, values):
    """Take exactly `k` entries, having looked at all of them."""
    magnitudes, threshold, larger = exact_threshold(x, k)
    ties = k - larger
    count = 0
    for i in range(x.size):
        if magnitudes[i] > threshold or (magnitudes[i] == threshold and ties > 0):
            ties -= magnitudes[i] == threshold
            found[count] = i
            count += 1
    _take(x, 0, found, values, 0, count, feedback)


@kernel
def encode(x, gradient, k, sample, block, counts, indices, sent):
    """Fill counts[blocks], indices[k], sent[k]; returns the number of entries (below k only for zeros), and finiteness.

    Among equal magnitudes the lower index wins. k is 1 or more. See `correct` for `x` and `gradient`.
    """
    counts[:] = 0
    feedback = gradient.size > 0
    # zeros are never sent, and must not be candidates where most are
    tiny = least_above_zero(x, x.size)
    guess = max(_guess(x, gradient, k, sample), tiny)
    room = min(max(4 * k + 1024, TILE), x.size)
    found = np.empty(room + 64, np.int64)
    values = np.empty(room, x.dtype)
    candidates, bad = _scan(x, gradient, guess, found, values)
    if bad != 0 and not feedback:
        # there is nothing to take back, and NaN has no order
        return 0, False
    if 0 <= candidates < k and guess == tiny:
        k = candidates
    if k == 0:
        return 0, bad == 0
    if candidates < k:
        # the sample guessed badly: many ties, odd shapes
        if feedback:
            _give_back(x, found, values, candidates)
        _take_largest(x, k, feedback, found, values)
        candidates = k
    magnitudes, threshold, larger = exact_threshold(values[:candidates], k)
    ties = k - larger

    total = 0
    current = 0
    for c in range(candidates):
        i = found[c]
        v = values[c]
        chosen = magnitudes[c] > threshold
        if magnitudes[c] == threshold and v != 0 and ties > 0:
            ties -= 1
            chosen = True
        if chosen:
            while i >= (current + 1) * block:
                current += 1
            counts[current] += 1
            indices[total] = i - current * block
            sent[total] = np.float32(v)
            total += 1
        elif feedback:
            x[i] = v
    return total, bad == 0


@kernel
def decode(counts, indices, values, block, scale, out, add):
    """Write or add `scale` times the values at their places; returns False at an index that does not fit."""
    at = 0
    for b in range(counts.size):
        start = b * block
        size = min(start + block, out.size) - start
        y = out[start : start + size]
        if not add:
            y[:] = 0
        if counts[b] > indices.size - at:
            return False
        previous = -1
        end = at + np.int64(counts[b])
        while at < end:
            ahead = min(at + AHEAD, indices.size - 1)
            fetch(out, (start if ahead < end else start + block) + np.int64(indices[ahead]))
            index = np.int64(indices[at])
            if index <= previous or index >= size:
                return False
            y[index] += values[at] * scale
            previous = index
            at += 1
    return at == indices.size
