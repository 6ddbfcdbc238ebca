"""Send the k entries of largest magnitude with their values: 16-bit index within a block, float32 value."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table
from hvd_compress.kernels.collect import AHEAD, TILE, collect
from hvd_compress.kernels.common import correct, kth_largest, least_above_zero, take_back, with_margin
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import fetch
from hvd_compress.kernels.select import exact_threshold, sampled_magnitudes

_SAMPLE = 8192  # magnitudes that the first guess is made of
MOST_BLOCK = 65536  # what 16 bits of index reach


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


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_row(rows, i, like, codec, parameter):
    """Encode row `i` of a table; a body is the counts of blocks, the indices, and the values. See `encode`."""
    x, gradient = table.given(rows, i, like)
    block, k = rows[i, table.GROUP], rows[i, table.LIMIT]
    body = table.body_of(rows, i)
    counts, indices_at = table.section(body, table.count_groups(x.size, block), np.uint32)
    indices, at = table.section(indices_at, k, np.uint16)
    sent = table.array_at(at, k, np.float32)
    found, is_finite = encode(x, gradient, k, _SAMPLE, block, counts, indices, sent)
    if not is_finite and gradient.size > 0:
        decode(counts, indices[:found], sent[:found], block, np.float32(1), x, True)
        take_back(x, gradient)
    if found < k:
        # zeros are not sent: what there is moves together
        _, at = table.section(indices_at, found, np.uint16)
        moved = table.array_at(at, found, np.float32)
        for j in range(found):
            moved[j] = sent[j]
    table.seal(rows, i, like, codec, parameter, found, at - body + 4 * found, is_finite)


@kernel
def encode_rows(codec, rows, like):
    """Encode a table of tensors, see `encode_row`."""
    for i in range(rows.shape[0]):
        encode_row(rows, i, like, codec, 0)


@kernel
def decode_row(rows, i, like, scale):
    """Decode the checked payload of row `i`; returns False if its body does not fit."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    block, _, number, body, end = table.opened(rows, i)
    count = table.count_groups(out.size, block)
    indices_at = body + table.padded(4 * count)
    at = indices_at + table.padded(2 * number)
    if block > MOST_BLOCK or at + table.padded(4 * number) != end:
        return False
    counts = table.array_at(body, count, np.uint32)
    indices = table.array_at(indices_at, number, np.uint16)
    values = table.array_at(at, number, np.float32)
    return decode(counts, indices, values, block, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if table.has_body(rows, i, like) and not decode_row(rows, i, like, scale):
            return i
    return -1
