"""Encode the sign of each element, and nothing else; a zero gets a sign at random."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import onebit, table
from hvd_compress.kernels.common import correct, least_above_zero, mix, take_back
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import at_least_64, float32_of, put_word

_BLOCK = 256  # elements that are encoded while memory brings the next ones; a multiple of 64
_NOTHING = np.float32(0)


@kernel
def _random_word(number, key_low, key_high):
    high = np.uint64(mix(2 * number + 1, key_low, key_high)) << np.uint64(32)
    return np.uint64(mix(2 * number, key_low, key_high)) | high


@kernel
def _pack(y, number, least, key_low, key_high, bits):
    """Write the signs of `y`, whose first element is at bit 0 of `bits` and of the random word `number`."""
    zero = y.dtype.type(0)
    words = y.size >> 6
    for w in range(words):
        word = at_least_64(y, 64 * w, zero)
        above = at_least_64(y, 64 * w, least)
        if word != above:
            word &= above | _random_word(number + w, key_low, key_high)
        put_word(bits, 8 * w, word)
    rest = y[64 * words :]
    if rest.size == 0:
        return
    drawn = _random_word(number + words, key_low, key_high)
    word = np.uint64(0)
    for i in range(rest.size):
        bit = np.uint64(1) << np.uint64(i)
        word |= bit if rest[i] >= least else ((drawn & bit) if rest[i] >= zero else np.uint64(0))
    for byte in range((rest.size + 7) >> 3):
        bits[8 * words + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))


@kernel
def encode(x, gradient, scale, key_low, key_high, bits):
    """Fill bits[ceil(numel / 8)]; returns False if a value is not finite. See `correct` for `x` and `gradient`."""
    bad = _NOTHING
    least = least_above_zero(x, x.size)
    for begin in range(0, x.size, _BLOCK):
        y = x[begin : min(begin + _BLOCK, x.size)]
        bad += correct(y, gradient[begin : begin + y.size])
        _pack(y, begin >> 6, least, key_low, key_high, bits[begin >> 3 :])
    # last, since a small residual would not survive that a large scale is taken from it and put back
    if bad == 0 and gradient.size > 0:
        onebit.unpack(bits, 0, x.dtype.type(-scale), x.dtype.type(scale), x, True)
    return bad == 0


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_rows(codec, scale, parameter, rows, like):
    """Encode a table of tensors; a body is the signs. `parameter` has the bits of the float32 `scale`."""
    for i in range(rows.shape[0]):
        x, gradient = table.given(rows, i, like)
        body = table.body_of(rows, i)
        bits, end = table.section(body, (x.size + 7) >> 3, np.uint8)
        low, high = table.key_of(rows, i)
        is_finite = encode(x, gradient, scale, low, high, bits)
        if not is_finite and gradient.size > 0:
            take_back(x, gradient)
        table.seal(rows, i, like, codec, parameter, x.size, end - body, is_finite)


@kernel
def decode_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
        _, parameter, _, body, end = table.opened(rows, i)
        size = (out.size + 7) >> 3
        value = float32_of(np.uint32(parameter))
        if body + table.padded(size) != end or not 0 < value < np.inf:
            return i
        one = out.dtype.type(np.float32(value * scale))
        onebit.unpack(table.array_at(body, size, np.uint8), 0, one, -one, out, rows[i, table.ADD] != 0)
    return -1
