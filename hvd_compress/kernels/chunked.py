"""Send the largest entries of each chunk with values of few bits: index within the chunk, sign and level.

A level l stands for the magnitude base + l * step; each chunk has its own base and step.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table
from hvd_compress.kernels.bits import ends_at, peek
from hvd_compress.kernels.collect import AHEAD, collect
from hvd_compress.kernels.common import correct, kth_largest, least_above_zero, room_for, take_back
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import fetch

MOST_CHUNK = 32768  # so that 16 bits hold how many of a chunk are sent
MOST_BITS = 8
_LARGEST = float(np.finfo(np.float32).max)
_ONE = np.uint64(1)


@kernel
def index_bits(chunk):
    """Return the bits of an index within a chunk."""
    width = 0
    while (1 << width) < chunk:
        width += 1
    return width


@kernel
def kept_of(size, ratio):
    """Return how many of the `size` (1 or more) elements of a chunk are sent at most."""
    return min(size, max(1, np.int64(np.ceil(size * ratio))))


@kernel
def magnitude_of(level, base, step):
    """Return the magnitude that a level stands for, as float32; never beyond it."""
    # in float64 the product is exact, so that no contraction to one rounding can change the result
    v = np.float64(base) + np.float64(level) * np.float64(step)
    return np.float32(min(max(v, -_LARGEST), _LARGEST))


@kernel
def _select(y, k, guess, tiny, found, magnitudes):
    """Move the places of the `k` largest entries of `y` to the start of `found`, ascending: (how many, the least)."""
    count = collect(y, guess, -guess, 0, found, 0)
    if count < k and guess > tiny:
        count = collect(y, tiny, -tiny, 0, found, 0)
    # zeros are never sent
    k = min(k, count)
    if k == 0:
        return 0, tiny
    for j in range(count):
        magnitudes[j] = abs(y[found[j]])
    threshold = kth_largest(magnitudes, count, k)
    ties = k
    for j in range(count):
        ties -= magnitudes[j] > threshold
    kept = 0
    for j in range(count):
        is_tie = magnitudes[j] == threshold
        if magnitudes[j] > threshold or (is_tie and ties > 0):
            ties -= is_tie
            found[kept] = found[j]
            kept += 1
    return kept, threshold


@kernel
def _levels(y, found, count, last, levels):
    """Find the levels of the entries y[found[:count]], from 0 to `last`, and the line that fits them: (base, step)."""
    low = np.inf
    high = 0.0
    for j in range(count):
        v = np.float64(abs(np.float32(y[found[j]])))
        low = min(low, v)
        high = max(high, v)
    per_level = (last + 1) / (high - low) if high > low else 0.0
    numbers = 0
    squares = 0
    total = 0.0
    products = 0.0
    at_zero = 0
    total_at_zero = 0.0
    for j in range(count):
        v = np.float64(abs(np.float32(y[found[j]])))
        level = min(np.int64((v - low) * per_level), last)
        levels[j] = level
        numbers += level
        squares += level * level
        total += v
        products += level * v
        at_zero += level == 0
        total_at_zero += v if level == 0 else 0.0
    # The least squares: what is decoded is a projection, so that it is never farther from the values than zero is.
    if numbers == 0:
        return np.float32(total / count), np.float32(0)
    if last == 1:
        # the same line, but for what is lost where the two means differ much
        base = np.float32(total_at_zero / at_zero)
        return base, np.float32((total - total_at_zero) / numbers - base)
    step = (count * products - numbers * total) / np.float64(count * squares - numbers * numbers)
    return np.float32((total - step * numbers) / count), np.float32(step)


@kernel
def encode(x, gradient, chunk, bits, ratio, counts, scales, entries):
    """Fill counts and scales of the chunks, and entries: (how many entries, and whether all is finite).

    An entry is index << bits | sign << (bits - 1) | level. Among equal magnitudes the lower index wins. See `correct`
    for `x` and `gradient`.
    """
    feedback = gradient.size > 0
    room = room_for(min(chunk, x.size))
    found = np.empty(room + 64, np.int64)
    magnitudes = np.empty(room, x.dtype)
    levels = np.empty(room, np.int64)
    tiny = least_above_zero(x, x.size)
    guess = tiny
    of_chunk = min(bits, 2)
    last = (1 << (bits - 1)) - 1
    total = 0
    is_finite = True
    counts[:] = 0
    scales[:] = 0
    for c in range(counts.size):
        y = x[c * chunk : (c + 1) * chunk]
        if correct(y, gradient[c * chunk : (c + 1) * chunk]) != 0:
            is_finite = False
            if not feedback:
                # there is nothing to take back
                return 0, False
            continue
        count, threshold = _select(y, kept_of(y.size, ratio), guess, tiny, found, magnitudes)
        # chunks of one tensor are alike; a guess that is wrong costs time only
        guess = max(x.dtype.type(threshold * x.dtype.type(0.9)), tiny)
        if count == 0:
            continue
        base, step = _levels(y, found, count, last, levels)
        counts[c] = count
        scales[of_chunk * c] = base
        if of_chunk == 2:
            scales[2 * c + 1] = step
        for j in range(count):
            i = found[j]
            v = y[i]
            q = magnitude_of(levels[j], base, step)
            if feedback:
                y[i] = v - (-q if v < 0 else q)
            entries[total] = np.uint32(i << bits | np.int64(v < 0) << (bits - 1) | levels[j])
            total += 1
    return total, is_finite


@kernel
def decode(counts, scales, entries, chunk, bits, scale, out, add):
    """Write or add `scale` times the values at their places; returns False where something does not fit."""
    of_chunk = min(bits, 2)
    last = (1 << (bits - 1)) - 1
    first = 0
    for c in range(counts.size):
        y = out[c * chunk : (c + 1) * chunk]
        if not add:
            y[:] = 0
        count = np.int64(counts[c])
        base = scales[of_chunk * c]
        step = scales[2 * c + 1] if of_chunk == 2 else np.float32(0)
        if count > entries.size - first or not np.isfinite(base) or not np.isfinite(step):
            return False
        previous = -1
        for e in range(first, first + count):
            ahead = np.int64(entries[min(e + AHEAD, entries.size - 1)]) >> bits
            fetch(out, (c if e + AHEAD < first + count else c + 1) * chunk + ahead)
            entry = np.int64(entries[e])
            index = entry >> bits
            if index <= previous or index >= y.size:
                return False
            v = magnitude_of(entry & last, base, step)
            y[index] += (-v if entry >> (bits - 1) & 1 else v) * scale
            previous = index
        first += count
    return first == entries.size


# -- streams of entries of one length ----------------------------------------------------------------------------------


@kernel
def words_of(count, length):
    """Return how many words so many entries of so many bits take."""
    return (count * length + 63) >> 6


@kernel
def pack(entries, length, words):
    """Write the `length` (below 64) bits of each entry; `words` has as many as they take."""
    pending = np.uint64(0)
    filled = 0
    at = 0
    for e in range(entries.size):
        entry = np.uint64(entries[e])
        pending |= entry << np.uint64(filled)
        filled += length
        if filled >= 64:
            words[at] = pending
            at += 1
            filled -= 64
            # `length` is below 64, so the shift is at least 1
            pending = entry >> np.uint64(length - filled)
    if filled > 0:
        words[at] = pending


@kernel
def unpack(words, length, entries):
    """Reverse `pack`; returns False if there are more bits than those."""
    mask = (_ONE << np.uint64(length)) - _ONE
    at = 0
    for e in range(entries.size):
        entries[e] = np.uint32(peek(words, at) & mask)
        at += length
    return ends_at(words, at)


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_rows(codec, bits, ratio, rows, like):
    """Encode a table of tensors; a body is the counts of chunks, their scales, and the stream of entries."""
    for i in range(rows.shape[0]):
        x, gradient = table.given(rows, i, like)
        chunk = rows[i, table.GROUP]
        body = table.body_of(rows, i)
        chunks = table.count_groups(x.size, chunk)
        counts, at = table.section(body, chunks, np.uint16)
        scales, at = table.section(at, min(bits, 2) * chunks, np.float32)
        entries = np.empty(rows[i, table.LIMIT], np.uint32)
        total, is_finite = encode(x, gradient, chunk, bits, ratio, counts, scales, entries)
        entries = entries[:total]
        if not is_finite and gradient.size > 0:
            decode(counts, scales, entries, chunk, bits, np.float32(1), x, True)
            take_back(x, gradient)
        length = index_bits(chunk) + bits
        words = table.array_at(at, words_of(total, length), np.uint64)
        pack(entries, length, words)
        table.seal(rows, i, like, codec, bits, total, at - body + words.nbytes, is_finite)


@kernel
def sections_of(rows, i):
    """Return of the checked payload of row `i`: counts, scales, where the stream begins; and whether they fit."""
    chunk, bits, _, body, end = table.opened(rows, i)
    chunks = table.count_groups(rows[i, table.NUMEL], chunk)
    scales_at = body + table.padded(2 * chunks)
    at = scales_at + table.padded(4 * min(bits, 2) * chunks)
    fits = 1 <= bits <= MOST_BITS and chunk <= MOST_CHUNK and at <= end
    chunks = chunks if fits else 0
    counts = table.array_at(body, chunks, np.uint16)
    return counts, table.array_at(scales_at, min(bits, 2) * chunks, np.float32), at, fits


@kernel
def entries_of(rows, i, at):
    """Return the entries of the plain payload of row `i`, whose stream begins at `at`, and whether they fit."""
    chunk, bits, number, _, end = table.opened(rows, i)
    length = index_bits(chunk) + bits
    words = table.array_at(at, (end - at) >> 3, np.uint64)
    # before anything is allocated for a number that is forged
    if number > rows[i, table.NUMEL] or words_of(number, length) != words.size:
        return np.empty(0, np.uint32), False
    entries = np.empty(number, np.uint32)
    return entries, unpack(words, length, entries)


@kernel
def decode_row(rows, i, like, scale):
    """Decode the checked payload of row `i`; returns False if its body does not fit."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    counts, scales, at, fits = sections_of(rows, i)
    if not fits:
        return False
    entries, fits = entries_of(rows, i, at)
    chunk, bits, _, _, _ = table.opened(rows, i)
    return fits and decode(counts, scales, entries, chunk, bits, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if table.has_body(rows, i, like) and not decode_row(rows, i, like, scale):
            return i
    return -1
