"""Code the gaps between ascending indices after Golomb and Rice.

A gap g >= 0 is g >> k in unary (zeros and a one) and the k low bits of g; an entry's flag bits follow. The parameter k
follows from the number of entries of a group, so that it need not be sent.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.bits import ends_at, low_bits, peek, put
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import trailing_zeros


@kernel
def rice_parameter(count, size):
    """Return the best parameter for `count` (1 or more) entries among `size` places, with geometric gaps."""
    # k + 1 beats k where (1 - p)**(2**k) exceeds the golden section 0.618 = exp(-32 / 66.5), and -1 / log(1 - p) is
    # about 1 / p - 1 / 2
    k = 0
    while (count << k) * 133 < (2 * size - count) * 32:
        k += 1
    return k


@kernel
def encode(counts, entries, group, numel, flag_bits, words):
    """Code `entries`, index << flag_bits | flags, into zeroed `words`; returns bits used, or -1 if they do not fit.

    counts[groups] entries belong to each group of `group` of the `numel` places; the last word is not used.
    """
    room = 64 * (words.size - 1)
    at = 0
    first = 0
    for g in range(counts.size):
        count = np.int64(counts[g])
        if count == 0:
            continue
        k = rice_parameter(count, min(group, numel - g * group))
        length = 1 + k + flag_bits
        expected = 0
        for e in range(first, first + count):
            entry = np.int64(entries[e])
            gap = (entry >> flag_bits) - expected
            expected += gap + 1
            at += gap >> k
            if at + length > room:
                return -1
            code = np.uint64(1) | (low_bits(np.uint64(gap), k) << np.uint64(1))
            code |= low_bits(np.uint64(entry), flag_bits) << np.uint64(k + 1)
            at = put(words, at, code, length)
        first += count
    return at


@kernel
def decode(words, counts, group, numel, flag_bits, entries):
    """Reverse `encode`; returns False at a code that does not fit, or if the stream does not end with the last one."""
    at = 0
    first = 0
    for g in range(counts.size):
        count = np.int64(counts[g])
        if count == 0:
            continue
        if count > entries.size - first:
            return False
        size = min(group, numel - g * group)
        k = rice_parameter(count, size)
        length = 1 + k + flag_bits
        index = -1
        e = first
        first += count
        while e < first:
            window = peek(words, at)
            left = 64
            quotient = trailing_zeros(window)
            if quotient + length > left:
                quotient = _skip_zeros(words, at)
                at += quotient
                window = peek(words, at)
                quotient_of_first = quotient
                quotient = 0
            else:
                quotient_of_first = 0
            # one look at the stream serves all codes that end within it
            while quotient + length <= left and e < first:
                window >>= np.uint64(quotient + 1)
                left -= quotient + length
                at += quotient + length
                quotient += quotient_of_first
                quotient_of_first = 0
                if quotient > size >> k:
                    return False
                index += 1 + ((quotient << k) | np.int64(low_bits(window, k)))
                if index >= size:
                    return False
                window >>= np.uint64(k)
                entries[e] = (index << flag_bits) | np.int64(low_bits(window, flag_bits))
                window >>= np.uint64(flag_bits)
                e += 1
                quotient = trailing_zeros(window)
    return first == entries.size and ends_at(words, at)


@kernel
def _skip_zeros(words, at):
    """Count the zeros from bit `at` up to the next set bit or the end of the stream."""
    start = at
    window = peek(words, at)
    while window == 0 and at < 64 * words.size:
        at += 64
        window = peek(words, at)
    return at - start + trailing_zeros(window)
