"""Read and write streams of bits: codes of any length in an array of uint64, the lowest bit first."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel

_ONE = np.uint64(1)
_LAST = np.uint64(63)


@kernel
def put(words, at, code, length):
    """Write the `length` (64 or fewer) bits of `code` at bit `at` of a zeroed stream; returns the position behind them.

    The stream must have a word more than it needs.
    """
    i = np.uint64(at) >> np.uint64(6)
    shift = np.uint64(at) & _LAST
    words[i] |= code << shift
    # in two steps: a shift by 64 is undefined
    words[i + _ONE] |= (code >> _ONE) >> (_LAST - shift)
    return at + length


@kernel
def peek(words, at):
    """Return the 64 bits from bit `at` on, with zeros behind the end of the stream."""
    i = np.uint64(at) >> np.uint64(6)
    shift = np.uint64(at) & _LAST
    size = np.uint64(words.size)
    window = words[i] >> shift if i < size else np.uint64(0)
    if i + _ONE < size:
        window |= (words[i + _ONE] << _ONE) << (_LAST - shift)
    return window


@kernel
def ends_at(words, at):
    """Tell whether the stream ends before bit `at`: no word is left over, and the padding is zero."""
    return (at + 63) >> 6 == words.size and peek(words, at) == 0


@kernel
def low_bits(word, count):
    """Return the lowest `count` (below 64) bits."""
    return word & ((_ONE << np.uint64(count)) - _ONE)
