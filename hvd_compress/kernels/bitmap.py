"""Send the k entries of largest magnitude as a bit per element, in words of 64, and a float32 value per set bit.

This pays where so many entries are kept that a bit for each element is shorter than their indices. Then two looks at
all elements, one to find the threshold and one to take the entries, cost less than a list of candidates.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table, topk
from hvd_compress.kernels.collect import TILE
from hvd_compress.kernels.common import correct, count_from, kth_largest, least_above_zero, take_back, with_margin
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import count_ones, leading_zeros, outside_64, trailing_zeros
from hvd_compress.kernels.select import exact_threshold, sampled_magnitudes

_ONE = np.uint64(1)
BITS_OF_INDEX = 16
_UNROLLED = 8  # with a chance of 1/10 for each of 64 bits, fewer are set most times


@kernel
def _bounds(x, gradient, k):
    """Guess low and high: very likely fewer than `k` magnitudes are >= high, k or more >= low, at most `room` between.

    Returns both and `room`.
    """
    tiny = least_above_zero(x, x.size)
    low = tiny
    high = x.dtype.type(np.inf)
    room = x.size
    # what drawing costs grows with the sample, what lies between shrinks with its root
    sample = np.int64(np.cbrt(x.size / 5) ** 2)
    if sample > 0:
        down = with_margin(k, x.size, sample)
        expected = k * sample / x.size
        up = np.int64(max(expected - 3.0 * np.sqrt(expected) - 2.0, 0.0))
        values = sampled_magnitudes(x, gradient, sample)
        if up > 0:
            high = max(kth_largest(values, sample, up), tiny)
        if down <= sample:
            low = max(kth_largest(values, sample, down), tiny)
            room = min(2 * (down - up) * x.size // sample + 1024, x.size)
    return low, high, room


@kernel
def _outside(y, i, bound):
    """Return a word whose bit k says |y[i + k]| >= bound; i is below y.size."""
    if i + 64 <= y.size:
        return outside_64(y, i, bound, -bound)
    word = np.uint64(0)
    for k in range(y.size - i):
        word |= np.uint64(abs(y[i + k]) >= bound) << np.uint64(k)
    return word


@kernel
def _scan(x, gradient, low, high, near):
    """Correct `x`; returns how many magnitudes are >= high, how many only >= low, and 0, or NaN if not all are finite.

    Those between are listed in `near`, which is 64 longer than the room it offers; further ones are only counted.
    """
    room = near.size - 64
    sure = 0
    listed = 0
    bad = np.float32(0)
    for tile in range(0, x.size, TILE):
        y = x[tile : tile + TILE]
        bad += correct(y, gradient[tile : tile + TILE])
        for i in range(0, y.size, 64):
            above = _outside(y, i, high)
            between = _outside(y, i, low) & ~above
            sure += count_ones(above)
            at = min(listed, room)
            listed += count_ones(between)
            # two are written without a branch, since most words have at most two
            for _ in range(2):
                near[at] = abs(y[i + (trailing_zeros(between) & 63)])
                at += between != 0
                between &= between - _ONE
            while between != 0:
                near[at] = abs(y[i + trailing_zeros(between)])
                between &= between - _ONE
                at += 1
    return sure, listed, bad


@kernel
def _threshold(x, gradient, k):
    """Correct `x`; returns the k-th largest magnitude (above 0) and how many equal to it are taken (-1 for all).

    The third value says whether all values are finite; without a gradient the others mean nothing if not.
    """
    low, high, room = _bounds(x, gradient, k)
    near = np.empty(room + 64, x.dtype)
    sure, listed, bad = _scan(x, gradient, low, high, near)
    tiny = least_above_zero(x, x.size)
    finite = bad == 0
    if (sure + listed <= k and low == tiny) or (gradient.size == 0 and not finite):
        return tiny, -1, finite
    if sure < k <= sure + listed and listed <= room:
        wanted = k - sure
        magnitudes, threshold, larger = exact_threshold(near[:listed], wanted)
        at_least = count_from(magnitudes, listed, threshold)
    else:
        # the sample guessed badly: many ties, odd shapes
        wanted = k
        magnitudes, threshold, larger = exact_threshold(x, k)
        at_least = count_from(magnitudes, x.size, threshold)
    if threshold == 0:
        return tiny, -1, finite
    return threshold, wanted - larger if at_least > wanted else -1, finite


@kernel
def _first_ties(word, tied, ties):
    """Clear those bits `tied` of the word that follow the first `ties`; returns it and the ties left to take."""
    for _ in range(count_ones(tied) - ties):
        last = _ONE << np.uint64(63 - leading_zeros(tied))
        tied ^= last
        word ^= last
    return word, ties - count_ones(tied)


@kernel
def _take(y, i, word, sent, at, feedback):
    """Note the values of y[i:] at the bits of `word` in `sent` from `at` on; leave what is not sent."""
    if at + _UNROLLED <= sent.size:
        # without a branch: the end of a loop over an unknown number of bits would be mispredicted each
        # time; what is written behind the last one is overwritten
        for _ in range(_UNROLLED):
            place = i + (trailing_zeros(word) & 63)
            v = y[place]
            sent[at] = np.float32(v)
            if feedback:
                y[place] = v - np.float32(v) if word != 0 else v
            word &= word - _ONE
            at += 1
    while word != 0:
        place = i + trailing_zeros(word)
        v = y[place]
        sent[at] = np.float32(v)
        if feedback:
            y[place] = v - np.float32(v)
        word &= word - _ONE
        at += 1


@kernel
def encode(x, gradient, k, words, sent):
    """Fill words[ceil(numel / 64)] and sent[k]; returns the number of entries, and whether all values are finite.

    There are fewer than k entries only where the rest is zeros. Among equal magnitudes the lower index wins. k is 1 or
    more. See `correct` for `x` and `gradient`.
    """
    feedback = gradient.size > 0
    threshold, ties, finite = _threshold(x, gradient, k)
    if not finite and not feedback:
        return 0, False
    above = np.nextafter(threshold, x.dtype.type(np.inf))
    count = 0
    for tile in range(0, x.size, TILE):
        y = x[tile : tile + TILE]
        for i in range(0, y.size, 64):
            word = _outside(y, i, threshold)
            if ties >= 0:
                word, ties = _first_ties(word, word & ~_outside(y, i, above), ties)
            words[(tile + i) >> 6] = word
            _take(y, i, word, sent, count, feedback)
            count += count_ones(word)
    return count, finite


@kernel
def _fits(words, numel, count):
    """Tell whether `count` bits are set, and none behind the last element."""
    found = 0
    for w in range(words.size):
        found += count_ones(words[w])
    beyond = np.uint64(0)
    if numel & 63:
        beyond = words[words.size - 1] >> np.uint64(numel & 63)
    return found == count and beyond == 0


@kernel
def decode(words, values, scale, out, add):
    """Write or add `scale` times the values at the bits; returns False, having written nothing, if they do not fit."""
    if not _fits(words, out.size, values.size):
        return False
    at = 0
    for w in range(words.size):
        start = 64 * w
        y = out[start : start + 64]
        word = words[w]
        if not add:
            y[:] = 0
        while word != 0:
            y[trailing_zeros(word)] += values[at] * scale
            word &= word - _ONE
            at += 1
    return True


@kernel
def indices(words, block, counts, entries):
    """Count the set bits of each `block` (a multiple of 64) of elements, and list their indices within it."""
    counts[:] = 0
    at = 0
    for w in range(words.size):
        b = 64 * w // block
        word = words[w]
        counts[b] += count_ones(word)
        while word != 0:
            entries[at] = 64 * w - b * block + trailing_zeros(word)
            word &= word - _ONE
            at += 1


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_rows(codec, parameter, parameter_of_indices, rows, like):
    """Encode a table of tensors; a body is the bits and the values, or that of `topk` where this takes fewer bytes."""
    for i in range(rows.shape[0]):
        if rows[i, table.LIMIT] * BITS_OF_INDEX <= rows[i, table.NUMEL]:
            topk.encode_row(rows, i, like, codec, parameter_of_indices)
            continue
        x, gradient = table.given(rows, i, like)
        body = table.body_of(rows, i)
        words, at = table.section(body, (x.size + 63) >> 6, np.uint64)
        sent = table.array_at(at, rows[i, table.LIMIT], np.float32)
        found, is_finite = encode(x, gradient, rows[i, table.LIMIT], words, sent)
        if not is_finite and gradient.size > 0:
            decode(words, sent[:found], np.float32(1), x, True)
            take_back(x, gradient)
        table.seal(rows, i, like, codec, parameter, found, at - body + 4 * found, is_finite)


@kernel
def decode_row(parameter, parameter_of_indices, rows, i, like, scale):
    """Decode the checked payload of row `i`; returns False if its body does not fit."""
    _, stated, number, body, end = table.opened(rows, i)
    if stated == parameter_of_indices:
        return topk.decode_row(rows, i, like, scale)
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    words = (out.size + 63) >> 6
    at = body + 8 * words
    if stated != parameter or at + table.padded(4 * number) != end:
        return False
    values = table.array_at(at, number, np.float32)
    return decode(table.array_at(body, words, np.uint64), values, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_rows(parameter, parameter_of_indices, rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        is_there = table.has_body(rows, i, like)
        if is_there and not decode_row(parameter, parameter_of_indices, rows, i, like, scale):
            return i
    return -1
