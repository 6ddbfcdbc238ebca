"""Code the levels of QSGD after Elias: gaps between those that are not zero, signs, and the levels themselves.

With n = floor(log2 v), gamma of v >= 1 is n zeros, a one, and the n low bits of v. Omega of 1 is a zero; of v > 1 it is
omega of n without its last zero, a one, the n low bits of v, and a zero.

Sparse streams hold, per level that is not zero, its distance (1 or more) from the one before, over all buckets, in one
of the two codes; a bit that says that it is negative; and, if there are more levels than one, its gamma code. Dense
streams hold gamma of level + 1 for each element, and the sign bit if the level is not zero.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table as tables
from hvd_compress.kernels.bits import ends_at, low_bits, peek, put
from hvd_compress.kernels.collect import TILE, collect
from hvd_compress.kernels.common import bucket_norm, least_above_zero
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import common_bits_64, count_ones, leading_zeros, trailing_zeros
from hvd_compress.kernels.qsgd import unpack
from hvd_compress.kernels.signs import CHOSEN_BELOW, excess_over_draws

SPARSE_GAMMA = 1
SPARSE_OMEGA = 2
DENSE = 3

TABLE_BITS = 12  # 16 KiB of int32: half of a first-level cache

_ONE = np.uint64(1)
_TABLE_MASK = np.uint64((1 << TABLE_BITS) - 1)
# geometric gaps of this mean take as many bits in omega as in gamma code, those of a larger mean take fewer
GAP_OF_OMEGA = 135
# normal and Laplacian values take equally many bits in both forms at 0.8, and dense is faster: from here on it takes at
# most some per cent more bits
_DENSE_SHARE = 0.7
_MOST_ZEROS = 40  # no array has more elements than 2**40


@kernel
def gamma(v):
    """Return the gamma code of v, 1 to 2**31, and its length."""
    n = 63 - leading_zeros(np.uint64(v))
    code = (_ONE | (low_bits(np.uint64(v), n) << _ONE)) << np.uint64(n)
    return code, 2 * n + 1


@kernel
def omega(v):
    """Return the omega code of v, 1 to 2**40, and its length."""
    code = np.uint64(0)
    length = 1
    while v > 1:
        n = 63 - leading_zeros(np.uint64(v))
        code = _ONE | (low_bits(np.uint64(v), n) << _ONE) | (code << np.uint64(n + 1))
        length += n + 1
        v = n
    return code, length


@kernel
def read_gamma(words, at):
    """Return the number at bit `at`, 0 if none up to 2**40 is there, and the bit behind it."""
    window = peek(words, at)
    n = trailing_zeros(window)
    if n > 31:
        if n > _MOST_ZEROS:
            return 0, at
        window = peek(words, at + n)
    else:
        window >>= np.uint64(n)
    return np.int64(low_bits(window >> _ONE, n)) | (1 << n), at + 2 * n + 1


@kernel
def read_omega(words, at):
    """Return the number at bit `at`, 0 if none up to 2**40 is there, and the bit behind it."""
    window = peek(words, at)
    v = 1
    length = 1
    while window & _ONE:
        n = v
        length += n + 1
        if n > _MOST_ZEROS or length > 64:
            return 0, at
        v = np.int64(low_bits(window >> _ONE, n)) | (1 << n)
        window >>= np.uint64(n + 1)
    return v, at + length


@kernel
def _put_gap(words, at, gap, use_omega, rest, rest_length):
    """Write a gap and the `rest` (17 bits or fewer) that follows it."""
    if use_omega:
        code, length = omega(gap)
        at = put(words, at, code, length)
        return put(words, at, rest, rest_length)
    # the zeros are there already, so that the other bits and the rest fit into a word
    n = 63 - leading_zeros(np.uint64(gap))
    code = _ONE | (low_bits(np.uint64(gap), n) << _ONE) | (rest << np.uint64(n + 1))
    return put(words, at + n, code, n + 1 + rest_length)


@kernel
def encode_ternary(x, bucket, norm_is_max, key_low, key_high, use_omega, norms, words):
    """Write a sparse stream of x sent as sign(x) * norm with probability |x| / norm, and fill norms[buckets].

    `words` must be zeroed and hold two bits an element and two words. Returns the bits used, -1 if a value is not
    finite, and the number of levels that are not zero.
    """
    excess = np.empty(TILE, np.float32)
    found = np.empty(TILE + 64, np.int32)
    at = 0
    count = 0
    previous = -1
    least = least_above_zero(excess, x.size)
    for b in range(norms.size):
        start = b * bucket
        stop = min(start + bucket, x.size)
        norm = bucket_norm(x[start:stop], norm_is_max)
        if not np.isfinite(norm):
            return -1, 0
        norms[b] = norm
        for tile in range(start, stop, TILE):
            y = x[tile : min(tile + TILE, stop)]
            excess_over_draws(y, tile, norm, key_low, key_high, excess)
            chosen = collect(excess[: y.size], least, CHOSEN_BELOW, 0, found, 0)
            for c in range(chosen):
                i = found[c]
                negative = np.uint64(not y[i] > 0)
                # with its sign, a gap of g takes no more than 2 * g bits in either code
                at = _put_gap(words, at, tile + i - previous, use_omega, negative, 1)
                previous = tile + i
            count += chosen
    return at, count


@kernel
def _suffixes(bits, codes, lengths):
    """Tabulate what follows a gap, for each code of `bits` bits whose level is not 0."""
    sign_bit = 1 << (bits - 1)
    for level in range(1, sign_bit):
        code, length = gamma(level)
        if bits == 2:
            code, length = np.uint64(0), 0
        for negative in range(2):
            codes[level | negative * sign_bit] = np.uint64(negative) | (code << _ONE)
            lengths[level | negative * sign_bit] = length + 1


@kernel
def _unpack_tile(packed, bits, first, last, codes):
    """Unpack the octets from `first` up to `last` into `codes`, zeros up to a multiple of 64; returns their number."""
    size = 8 * (last - first)
    unpack(packed[first * bits : last * bits], bits, codes[:size])
    codes[size : (size + 63) & ~63] = 0
    return size


@kernel
def count_levels(packed, bits):
    """Count the packed codes whose level is not 0."""
    codes = np.empty(TILE, np.uint8)
    levels = np.uint8((1 << (bits - 1)) - 1)
    octets = packed.size // bits
    total = 0
    for first in range(0, octets, TILE // 8):
        size = _unpack_tile(packed, bits, first, min(first + TILE // 8, octets), codes)
        for i in range(0, size, 64):
            total += count_ones(common_bits_64(codes, i, levels))
    return total


@kernel
def encode_sparse(packed, bits, use_omega, words):
    """Write a sparse stream of packed codes (octets of `bits` bytes); returns the bits used, or -1 if they do not fit.

    `words` must be zeroed; the last two are not used.
    """
    room = 64 * (words.size - 2)
    codes = np.empty(TILE, np.uint8)
    levels = np.uint8((1 << (bits - 1)) - 1)
    suffix = np.zeros(256, np.uint64)
    suffix_length = np.zeros(256, np.int64)
    _suffixes(bits, suffix, suffix_length)
    octets = packed.size // bits
    at = 0
    previous = -1
    for first in range(0, octets, TILE // 8):
        size = _unpack_tile(packed, bits, first, min(first + TILE // 8, octets), codes)
        for base in range(0, size, 64):
            w = common_bits_64(codes, base, levels)
            while w != 0:
                i = base + trailing_zeros(w)
                w &= w - _ONE
                code = codes[i]
                place = 8 * first + i
                if at > room - 64:
                    return -1
                at = _put_gap(words, at, place - previous, use_omega, suffix[code], suffix_length[code])
                previous = place
    return at


@kernel
def encode_dense(packed, numel, bits, words):
    """Write a dense stream of the first `numel` packed codes; returns the bits used, or -1 if they do not fit.

    `words` must be zeroed; the last two are not used.
    """
    room = 64 * (words.size - 2)
    codes = np.empty(TILE, np.uint8)
    sign_bit = 1 << (bits - 1)
    whole = np.zeros(256, np.uint64)
    whole_length = np.zeros(256, np.int64)
    for level in range(sign_bit):
        code, length = gamma(level + 1)
        for negative in range(2):
            whole[level | negative * sign_bit] = code | (np.uint64(negative * (level > 0)) << np.uint64(length))
            whole_length[level | negative * sign_bit] = length + (level > 0)
    octets = packed.size // bits
    at = 0
    for first in range(0, octets, TILE // 8):
        size = _unpack_tile(packed, bits, first, min(first + TILE // 8, octets), codes)
        size = min(size, numel - 8 * first)
        fours = size & ~3
        # four symbols of 16 bits at most are one word, and one access to the stream
        for i in range(0, fours, 4):
            if at > room - 64:
                return -1
            length = whole_length[codes[i]]
            low = whole[codes[i]] | (whole[codes[i + 1]] << np.uint64(length))
            length += whole_length[codes[i + 1]]
            length_of_high = whole_length[codes[i + 2]]
            high = whole[codes[i + 2]] | (whole[codes[i + 3]] << np.uint64(length_of_high))
            length_of_high += whole_length[codes[i + 3]]
            at = put(words, at, low | (high << np.uint64(length)), length + length_of_high)
        for i in range(fours, size):
            if at > room - 64:
                return -1
            at = put(words, at, whole[codes[i]], whole_length[codes[i]])
    return at


@kernel
def encode_levels(packed, bits, numel, most):
    """Code packed codes in the form that suits them; returns words, bits used (-1 for too many), form and nonzeros.

    Where most levels are zero, gap, sign and level are sent for each that is not, else all levels. Difference from the
    paper: there the bound of the variance decides between the two, here the share of zeros.
    """
    words = np.zeros(most + 2, np.uint64)
    nonzeros = count_levels(packed, bits)
    if nonzeros > _DENSE_SHARE * numel:
        return words, encode_dense(packed, numel, bits, words), DENSE, nonzeros
    use_omega = numel > GAP_OF_OMEGA * nonzeros
    used = encode_sparse(packed, bits, use_omega, words)
    return words, used, SPARSE_OMEGA if use_omega else SPARSE_GAMMA, nonzeros


@kernel
def _step(norm, levels, scale):
    """Return the value that one level stands for."""
    step = np.float32(np.float64(norm) / levels)
    if np.isinf(step * np.float32(levels)):
        # the quotient was rounded up and the norm is next to the largest float32
        step -= step * np.float32(2.0**-23)
    return step * scale


@kernel
def _read_symbol(words, at, levels, use_omega):
    """Read the symbol of a sparse stream at bit `at`: its gap (0 if none is there), signed level and end."""
    gap, at = read_omega(words, at) if use_omega else read_gamma(words, at)
    negative = peek(words, at) & _ONE
    at += 1
    level = 1
    if levels > 1:
        level, at = read_gamma(words, at)
        if level == 0 or level > levels:
            return 0, 0, at
    return gap, -level if negative else level, at


@kernel
def _read_level(words, at, levels):
    """Read the symbol of a dense stream at bit `at`: its signed level and its end, 0 if none is there."""
    code, at = read_gamma(words, at)
    level = code - 1
    if level < 0 or level > levels:
        return 0, 0
    if level == 0:
        return 0, at
    negative = peek(words, at) & _ONE
    return -level if negative else level, at + 1


@kernel
def sparse_table(levels, use_omega, table):
    """Tabulate the symbol of a sparse stream for all next bits: level << 16 | gap << 4 | length, 0 if longer."""
    word = np.zeros(1, np.uint64)
    for pattern in range(table.size):
        word[0] = pattern
        gap, level, length = _read_symbol(word, 0, levels, use_omega)
        table[pattern] = 0 if gap == 0 or length > TABLE_BITS else level << 16 | gap << 4 | length


@kernel
def dense_table(levels, table):
    """Tabulate the symbol of a dense stream for all next bits: level << 16 | length, 0 if longer."""
    word = np.zeros(1, np.uint64)
    for pattern in range(table.size):
        word[0] = pattern
        level, length = _read_level(word, 0, levels)
        table[pattern] = 0 if length > TABLE_BITS else level << 16 | length


@kernel
def tabulate(symbols):
    """Fill symbols[bits - 1, form - 1] for 1 to 8 bits and all forms."""
    for bits in range(1, 9):
        levels = max(1, (1 << (bits - 1)) - 1)
        sparse_table(levels, False, symbols[bits - 1, SPARSE_GAMMA - 1])
        sparse_table(levels, True, symbols[bits - 1, SPARSE_OMEGA - 1])
        dense_table(levels, symbols[bits - 1, DENSE - 1])


@kernel
def decode_sparse(words, nonzeros, norms, bucket, levels, use_omega, table, scale, out):
    """Add `scale * norm * level / levels` with the sign; False at the first code that does not fit."""
    at = 0
    place = np.int64(-1)
    stop = 0
    step = np.float32(0)
    done = 0
    while done < nonzeros:
        window = peek(words, at)
        # one look at the stream serves as many short symbols as surely fit into it, or one long one
        for symbol in range(min(64 // TABLE_BITS, nonzeros - done)):
            entry = table[window & _TABLE_MASK]
            length = entry & 15
            if length == 0:
                if symbol > 0:
                    break
                gap, level, at = _read_symbol(words, at, levels, use_omega)
                if gap == 0:
                    return False
            else:
                gap, level = np.int64((entry >> 4) & 4095), np.int64(entry >> 16)
            place += gap
            if place >= out.size:
                return False
            if place >= stop:
                b = place // bucket
                stop = (b + 1) * bucket
                step = _step(norms[b], levels, scale)
            out[place] += np.float32(level) * step
            done += 1
            if length == 0:
                break
            at += length
            window >>= np.uint64(length)
    return ends_at(words, at)


@kernel
def decode_dense(words, nonzeros, norms, bucket, levels, table, scale, out):
    """Add `scale * norm * level / levels` with the sign; False at the first code that does not fit."""
    at = 0
    found = 0
    for b in range(norms.size):
        y = out[b * bucket : min((b + 1) * bucket, out.size)]
        step = _step(norms[b], levels, scale)
        i = 0
        while i < y.size:
            window = peek(words, at)
            for symbol in range(min(64 // TABLE_BITS, y.size - i)):
                entry = table[window & _TABLE_MASK]
                length = entry & 15
                level = np.int64(entry >> 16)
                if length == 0:
                    if symbol > 0:
                        break
                    level, at = _read_level(words, at, levels)
                    if at == 0:
                        return False
                found += level != 0
                y[i] += np.float32(level) * step
                i += 1
                if length == 0:
                    break
                at += length
                window >>= np.uint64(length)
    return found == nonzeros and ends_at(words, at)


@kernel
def encode_ternary_rows(codec, coded_codec, norm_is_max, rows, like):
    """Encode a table of tensors; a body is the norms, and then the stream. See `encode_ternary`.

    Gaps are expected to be wide where one of the norms is Euclidean.
    """
    for i in range(rows.shape[0]):
        x, _ = tables.given(rows, i, like)
        bucket = rows[i, tables.GROUP]
        body = tables.body_of(rows, i)
        norms, at = tables.section(body, tables.count_groups(x.size, bucket), np.float32)
        words = tables.array_at(at, rows[i, tables.LIMIT], np.uint64)
        words[:] = 0
        # of n normal values sqrt(2 n / pi) are expected
        use_omega = not norm_is_max and np.sqrt(np.pi / 2 * min(bucket, x.size)) > GAP_OF_OMEGA
        low, high = tables.key_of(rows, i)
        used, nonzeros = encode_ternary(x, bucket, norm_is_max, low, high, use_omega, norms, words)
        parameter = 1 | (SPARSE_OMEGA if use_omega else SPARSE_GAMMA) << 8
        size = at - body + 8 * ((used + 63) >> 6)
        stated = coded_codec if used >= 0 else codec
        tables.seal(rows, i, like, stated, parameter, nonzeros, size, used >= 0)
