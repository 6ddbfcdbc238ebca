"""Round at random to powers of two: a byte per element, and the lowest exponent of each block."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table
from hvd_compress.kernels.common import correct, mix
from hvd_compress.kernels.jit import kernel

BLOCK = 4096  # elements that share an exponent; what is encoded at once stays in the first-level cache

_MANTISSA = np.uint32(0x007FFFFF)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST = np.uint32(254)  # exponent, as float32 keeps it, of 2**127
_CODES = 127  # exponents that a byte can tell, beside zero


@kernel
def _round(words, first, key_low, key_high, exponents):
    """Compute the exponents, as float32 keeps them, to which magnitudes are rounded; returns the largest.

    The fraction of a float32 says how far it is on the way from its power of two to the next one. So a number drawn
    below 2**23, added to it, carries into the exponent with the probability with which it is to be rounded up.
    """
    largest = np.uint32(0)
    for i in range(words.size):
        drawn = mix(first + i, key_low, key_high) & _MANTISSA
        exponent = min(np.uint32((words[i] & _MAGNITUDE) + drawn) >> np.uint32(23), _LARGEST)
        exponents[i] = exponent
        largest = max(largest, exponent)
    return largest


@kernel
def encode(x, block, key_low, key_high, bases, codes):
    """Fill bases[blocks] and codes[numel]; returns False if not finite."""
    value = np.empty(block, np.float32)
    words = value.view(np.uint32)
    exponents = np.empty(block, np.uint32)
    for b in range(bases.size):
        start = b * block
        y = x[start : min(start + block, x.size)]
        if correct(y, y[:0]) != 0:
            return False
        for i in range(y.size):
            value[i] = y[i]
        largest = _round(words[: y.size], start, key_low, key_high, exponents)
        base = np.uint32(max(np.int64(largest) - _CODES, 0))
        bases[b] = base
        for i in range(y.size):
            # what is so far below the largest counts as zero
            code = exponents[i] - base if exponents[i] > base else np.uint32(0)
            codes[start + i] = np.uint8(code | ((words[i] >> np.uint32(31)) << np.uint32(7)))
    return True


@kernel
def _emit(value, scale, y, add):
    if add:
        for i in range(y.size):
            y[i] += value[i] * scale
    else:
        for i in range(y.size):
            # never -0, as where it is added to zero
            y[i] = value[i] * scale + np.float32(0)


@kernel
def decode(bases, codes, block, scale, out, add):
    """Write (or add) `scale` times the values; returns False at a base that no encoder makes."""
    value = np.empty(block, np.float32)
    words = value.view(np.uint32)
    for b in range(bases.size):
        start = b * block
        y = out[start : min(start + block, out.size)]
        base = np.uint32(bases[b])
        if base > _CODES:
            return False
        for i in range(y.size):
            code = np.uint32(codes[start + i])
            exponent = code & np.uint32(127)
            exponent = np.uint32(exponent + base) if exponent > 0 else np.uint32(0)
            words[i] = ((code >> np.uint32(7)) << np.uint32(31)) | (exponent << np.uint32(23))
        _emit(value, scale, y, add)
    return True


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_rows(codec, rows, like):
    """Encode a table of tensors; a body is the lowest exponents, and then the codes. See `encode`."""
    for i in range(rows.shape[0]):
        x, _ = table.given(rows, i, like)
        block = rows[i, table.GROUP]
        body = table.body_of(rows, i)
        bases, at = table.section(body, table.count_groups(x.size, block), np.uint8)
        codes, end = table.section(at, x.size, np.uint8)
        low, high = table.key_of(rows, i)
        is_finite = encode(x, block, low, high, bases, codes)
        table.seal(rows, i, like, codec, 0, x.size, end - body, is_finite)


@kernel
def decode_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
        block, _, _, body, end = table.opened(rows, i)
        count = table.count_groups(out.size, block)
        at = body + table.padded(count)
        if block > BLOCK or at + table.padded(out.size) != end:
            return i
        bases = table.array_at(body, count, np.uint8)
        codes = table.array_at(at, out.size, np.uint8)
        if not decode(bases, codes, block, scale, out, rows[i, table.ADD] != 0):
            return i
    return -1
