"""Encode one bit per element, and for each group two means (one-bit) or one magnitude (EF-SignSGD)."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table
from hvd_compress.kernels.common import correct, draw, take_back
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import (
    add_chosen_64,
    at_least_64,
    count_ones,
    put_chosen_64,
    put_word,
)

_BLOCK = 256  # elements whose signs and sums are taken while memory brings the next ones; 128 and 512 take a tenth more


@kernel
def _sums(y):
    """Sum the non-negative entries, and the others."""
    positive = 0.0
    negative = 0.0
    for i in range(y.size):
        v = np.float64(y[i])
        positive += max(v, 0.0)
        negative += min(v, 0.0)
    return positive, negative


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
    """OR the signs of `y` into the bit stream from `first_bit` on; returns the number of ones."""
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
        put_word(out, 8 * w, word)
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
def encode(x, gradient, group, sample, key_low, key_high, per_group, means, bits):
    """Fill means[per_group * groups] and zeroed bits[ceil(numel / 8)]; returns False if not finite.

    With two means per group, these are of the non-negative and of the negative values. With one, it is the mean of all
    magnitudes, which the bits give a sign. `sample` entries per group estimate two means; 0 takes all. See `correct`
    for `x` and `gradient`.
    """
    feedback = gradient.size > 0
    bad = np.float32(0)
    for g in range(means.size // per_group):
        start = g * group
        stop = min(start + group, x.size)
        is_sampled = 0 < sample < stop - start
        upper = 0.0
        lower = 0.0
        count = 0
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            y = x[begin:end]
            bad += correct(y, gradient[begin:end])
            count += _pack(y, begin, bits)
            if not is_sampled:
                of_positive, of_negative = _sums(y)
                upper += of_positive
                lower += of_negative
        y = x[start:stop]
        if is_sampled:
            positive, negative = _sampled_means(y, sample, np.uint32(key_low + np.uint32(g)), key_high)
        elif per_group == 1:
            positive = np.float32((upper - lower) / y.size)
            negative = -positive
        else:
            positive = np.float32(upper / max(count, 1))
            negative = np.float32(lower / max(y.size - count, 1))
        means[per_group * g] = positive
        if per_group == 2:
            means[2 * g + 1] = negative
        if feedback:
            _leave_residual(y, positive, negative)
    return bad == 0


@kernel
def _unpack_one(bits, bit, positive, negative, y, i, add):
    v = positive if (bits[bit >> 3] >> np.uint8(bit & 7)) & 1 else negative
    y[i] = y[i] + v if add else v


@kernel
def unpack(bits, first_bit, positive, negative, y, add):
    """Write (or add) the values of the bits from `first_bit` on."""
    head = min((8 - first_bit) & 7, y.size)
    source = bits[(first_bit + head) >> 3 :]
    words = (y.size - head) >> 6
    for i in range(head):
        _unpack_one(bits, first_bit + i, positive, negative, y, i, add)
    for w in range(words):
        word = np.uint64(0)
        for byte in range(8):
            word |= np.uint64(source[8 * w + byte]) << np.uint64(8 * byte)
        if add:
            add_chosen_64(y, head + 64 * w, word, positive, negative)
        else:
            put_chosen_64(y, head + 64 * w, word, positive, negative)
    for i in range(64 * words, y.size - head):
        _unpack_one(source, i, positive, negative, y, head + i, add)


@kernel
def decode(means, bits, group, per_group, scale, out, add):
    """Write (or add) `scale` times the means that the bits stand for; see `encode` for how many there are."""
    for g in range(means.size // per_group):
        start = g * group
        positive = out.dtype.type(means[per_group * g] * scale)
        negative = out.dtype.type(means[2 * g + 1] * scale) if per_group == 2 else -positive
        unpack(bits, start, positive, negative, out[start : min(start + group, out.size)], add)


@kernel
def encode_rows(codec, sample, per_group, rows, like):
    """Encode a table of tensors; a body is the means, and then the bits. See `encode`."""
    for i in range(rows.shape[0]):
        x, gradient = table.given(rows, i, like)
        group = rows[i, table.GROUP]
        body = table.body_of(rows, i)
        means, at = table.section(body, per_group * table.count_groups(x.size, group), np.float32)
        bits, end = table.section(at, (x.size + 7) >> 3, np.uint8)
        bits[:] = 0
        low, high = table.key_of(rows, i)
        is_finite = encode(x, gradient, group, sample, low, high, per_group, means, bits)
        if not is_finite and gradient.size > 0:
            decode(means, bits, group, per_group, np.float32(1), x, True)
            take_back(x, gradient)
        table.seal(rows, i, like, codec, 0, x.size, end - body, is_finite)


@kernel
def decode_rows(per_group, rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
        group, _, _, body, end = table.opened(rows, i)
        count = table.count_groups(out.size, group)
        at = body + table.padded(4 * per_group * count)
        size = (out.size + 7) >> 3
        if at + table.padded(size) != end:
            return i
        means = table.array_at(body, per_group * count, np.float32)
        decode(means, table.array_at(at, size, np.uint8), group, per_group, scale, out, rows[i, table.ADD] != 0)
    return -1
