"""Round blocks to integers of 8 or 4 bits, as they are or rotated by a Hadamard matrix.

A body is that of QSGD, a scale per block and then sign and level of each element, so that its loops pack and decode
it. A negative scale says that the block is rotated.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import qsgd, table
from hvd_compress.kernels.common import correct, largest_magnitude, take_back
from hvd_compress.kernels.jit import kernel, kernel_in_order

_UNIT = np.float32(1)
# a rotated block has no sum beyond float32, and no share of an element among the denormals
_MOST_ROTATED = np.float32(2.0**100)
_LEAST_ROTATED = np.float32(2.0**-80)


@kernel
def _round(y, norm, bits, codes):
    """Compute sign and nearest level of each entry of a block; codes beyond it are 0."""
    levels = np.int32((1 << (bits - 1)) - 1)
    sign_bit = np.int32(1 << (bits - 1))
    factor = np.float64(levels) / np.float64(norm) if norm > 0 else 0.0
    if factor > 3e38:
        # a norm next to the denormals, whose inverse no float32 holds
        for i in range(y.size):
            v = np.float32(y[i])
            level = min(np.int32(np.float32(np.float64(abs(v)) * factor) + np.float32(0.5)), levels)
            codes[i] = np.uint8(level | (sign_bit if v < 0 else np.int32(0)))
    else:
        factor32 = np.float32(factor)
        for i in range(y.size):
            v = np.float32(y[i])
            level = min(np.int32(abs(v) * factor32 + np.float32(0.5)), levels)
            codes[i] = np.uint8(level | (sign_bit if v < 0 else np.int32(0)))
    codes[y.size :] = 0


@kernel_in_order
def _pass(source, target):
    """Add and subtract two halves, and interleave the results."""
    half = source.size >> 1
    a, b = source[:half], source[half:]
    for i in range(half):
        target[2 * i] = a[i] + b[i]
        target[2 * i + 1] = a[i] - b[i]


@kernel_in_order
def _two_passes(source, target):
    quarter = source.size >> 2
    a, b = source[:quarter], source[quarter : 2 * quarter]
    c, d = source[2 * quarter : 3 * quarter], source[3 * quarter :]
    for i in range(quarter):
        s, t, u, v = a[i] + c[i], a[i] - c[i], b[i] + d[i], b[i] - d[i]
        target[4 * i] = s + u
        target[4 * i + 1] = s - u
        target[4 * i + 2] = t + v
        target[4 * i + 3] = t - v


@kernel
def rotate(y, spare):
    """Multiply a block, of as many elements as a power of 2, by the Hadamard matrix, unscaled; `spare` is like it.

    All passes are the same, so that each of them vectorizes; after the last one the order is that of Sylvester's matrix
    again. Sums are made in this order only: bits depend on it.
    """
    left = 0
    while 1 << left < y.size:
        left += 1
    is_in_spare = False
    while left > 0:
        if left == 1 and is_in_spare:
            _pass(spare, y)
        elif left == 1:
            _pass(y, spare)
        elif is_in_spare:
            _two_passes(spare, y)
        else:
            _two_passes(y, spare)
        is_in_spare = not is_in_spare
        left -= 2
    if is_in_spare:
        for i in range(y.size):
            y[i] = spare[i]


@kernel
def _divide(y, divisor, values):
    share = np.float32(1) / divisor
    for i in range(values.size):
        values[i] = np.float32(y[i]) * share


@kernel
def _rotated(y, block, largest, values, spare):
    """Tell whether a block is to be rotated; if so, `values` are the block rotated, divided by its size."""
    if y.size < block or block & (block - 1) or not _LEAST_ROTATED < largest < _MOST_ROTATED:
        return False
    _divide(y, np.float32(block), values)
    rotate(values, spare)
    return True


@kernel
def _put_back(values, spare, y, add):
    rotate(values, spare)
    if add:
        for i in range(y.size):
            y[i] += values[i]
    else:
        for i in range(y.size):
            y[i] = values[i] + np.float32(0)


@kernel
def _decode_block(packed, norm, bits, factor, codes, values, spare, y, add):
    """Write or add `factor` times what the codes of one block stand for."""
    levels = np.int32((1 << (bits - 1)) - 1)
    if bits < 8:
        qsgd.unpack(packed, bits, codes)
    source = codes if bits < 8 else packed
    step = qsgd.step_of(abs(norm), levels) * factor
    if norm < 0 and y.size == values.size:
        qsgd.emit(source, levels, step, values, False)
        _put_back(values, spare, y, add)
    else:
        qsgd.emit(source, levels, step, y, add)


@kernel
def encode(x, gradient, block, bits, hadamard, norms, packed):
    """Fill norms[blocks] and packed[ceil(numel / 8) * bits]; returns False if not finite. See `correct`."""
    codes = np.empty((block + 7) & ~7, np.uint8)
    values = np.empty(block, np.float32)
    spare = np.empty(block, np.float32)
    bad = np.float32(0)
    for b in range(norms.size):
        start = b * block
        y = x[start : min(start + block, x.size)]
        bad += correct(y, gradient[start : start + y.size])
        octets = (y.size + 7) >> 3
        first = (start >> 3) * bits
        target = packed[first : first + octets * bits]
        # after a value that is not finite nothing is taken out of the residual any more
        largest = largest_magnitude(y) if bad == 0 else np.float32(0)
        of_block = codes[: 8 * octets] if bits < 8 else target
        if hadamard and _rotated(y, block, largest, values, spare):
            largest = largest_magnitude(values)
            _round(values, largest, bits, of_block)
            largest = -largest
        else:
            _round(y, largest, bits, of_block)
        if bits < 8:
            qsgd.pack(of_block, bits, target)
        norms[b] = largest
        if gradient.size > 0:
            _decode_block(target, largest, bits, -_UNIT, codes[: 8 * octets], values, spare, y, True)
    return bad == 0


@kernel
def decode(norms, packed, block, bits, scale, out, add):
    """Write (or add) `scale` times the values."""
    codes = np.empty((block + 7) & ~7, np.uint8)
    # what is hostile may claim blocks that cannot be rotated
    size = block if block & (block - 1) == 0 else 0
    values = np.empty(size, np.float32)
    spare = np.empty(size, np.float32)
    for b in range(norms.size):
        start = b * block
        y = out[start : min(start + block, out.size)]
        octets = (y.size + 7) >> 3
        first = (start >> 3) * bits
        source = packed[first : first + octets * bits]
        _decode_block(source, norms[b], bits, scale, codes[: 8 * octets], values, spare, y, add)


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_rows(codec, bits, hadamard, rows, like):
    """Encode a table of tensors; a body is the scales, and then the codes. See `encode`."""
    for i in range(rows.shape[0]):
        x, gradient = table.given(rows, i, like)
        block = rows[i, table.GROUP]
        body = table.body_of(rows, i)
        norms, at = table.section(body, table.count_groups(x.size, block), np.float32)
        packed, end = table.section(at, ((x.size + 7) >> 3) * bits, np.uint8)
        is_finite = encode(x, gradient, block, bits, hadamard, norms, packed)
        if not is_finite and gradient.size > 0:
            decode(norms, packed, block, bits, _UNIT, x, True)
            take_back(x, gradient)
        table.seal(rows, i, like, codec, bits, x.size, end - body, is_finite)


@kernel
def decode_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
        block, bits, _, body, end = table.opened(rows, i)
        if (bits != 4 and bits != 8) or block & 7 or block > qsgd.MOST_BUCKET:
            return i
        count = table.count_groups(out.size, block)
        at = body + table.padded(4 * count)
        size = ((out.size + 7) >> 3) * bits
        if at + table.padded(size) != end:
            return i
        norms = table.array_at(body, count, np.float32)
        decode(norms, table.array_at(at, size, np.uint8), block, bits, scale, out, rows[i, table.ADD] != 0)
    return -1
