"""Round at random to -scale, 0 and scale of a group, five elements in a byte.

The elements of a byte lie apart: a run of 320 has 64 bytes, and byte j holds the elements j, j + 64, j + 128, ... as
digits of a number to the base of 3. So packing and unpacking read and write what follows one another, and vectorize.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table
from hvd_compress.kernels.common import largest_magnitude, uniform
from hvd_compress.kernels.jit import kernel, kernel_in_order

RUN = 320  # elements whose digits are packed together
_BYTES = 64  # of a run
_MOST = np.uint8(242)  # five digits of 2


@kernel
def bytes_of(numel):
    """Return how many bytes so many elements of a group take."""
    return numel // RUN * _BYTES + (numel % RUN + 4) // 5


@kernel
def scale_of(y, clip):
    """Return the largest magnitude, or `clip` times the root mean square if that is less; not finite if a value is."""
    squares = 0.0
    for i in range(y.size):
        v = np.float64(np.float32(y[i]))
        squares += v * v
    if not np.isfinite(squares):
        return np.float32(np.nan)
    largest = largest_magnitude(y)
    if clip > 0:
        # at least the smallest float32: what is not zero must not vanish
        most = np.float32(min(clip * np.sqrt(squares / y.size), 3e38))
        largest = min(largest, most) if most > 0 else largest
    return largest


@kernel_in_order
def _draw_digits(y, first, scale, key_low, key_high, draws, digits):
    """Compute 1 plus the sign with probability magnitude / scale, else 1."""
    # two loops: the factors of a draw and a scale next to the denormals must not be multiplied first
    for i in range(y.size):
        draws[i] = uniform(first + i, key_low, key_high)
    for i in range(y.size):
        v = np.float32(y[i])
        is_sent = draws[i] * scale < abs(v)
        sign = np.int32(1) if v > 0 else np.int32(-1)
        digits[i] = np.uint8(np.int32(1) + (sign if is_sent else np.int32(0)))


@kernel
def _pack(digits, packed):
    """Pack digits, five in each byte; those that are not there are 1."""
    n = packed.size
    for j in range(n):
        packed[j] = (
            digits[j]
            + np.uint8(3) * digits[n + j]
            + np.uint8(9) * digits[2 * n + j]
            + np.uint8(27) * digits[3 * n + j]
            + np.uint8(81) * digits[4 * n + j]
        )


@kernel
def encode(x, group, clip, key_low, key_high, scales, packed):
    """Fill scales[groups] and the bytes of all groups; returns False if not finite. A `clip` of 0 is none."""
    digits = np.empty(RUN, np.uint8)
    draws = np.empty(RUN, np.float32)
    at = 0
    for g in range(scales.size):
        start = g * group
        stop = min(start + group, x.size)
        scale = scale_of(x[start:stop], clip)
        if not np.isfinite(scale):
            return False
        scales[g] = scale
        for begin in range(start, stop, RUN):
            y = x[begin : min(begin + RUN, stop)]
            _draw_digits(y, begin, scale, key_low, key_high, draws, digits)
            digits[y.size :] = 1
            end = at + bytes_of(y.size)
            _pack(digits, packed[at:end])
            at = end
    return True


@kernel
def _unpack(packed, digits):
    """Reverse `_pack`; returns the largest byte."""
    n = packed.size
    largest = np.uint8(0)
    for j in range(n):
        # x * 171 >> 9 is x // 3, up to 255
        first = np.uint16(packed[j])
        second = np.uint16((first * np.uint16(171)) >> np.uint16(9))
        third = np.uint16((second * np.uint16(171)) >> np.uint16(9))
        fourth = np.uint16((third * np.uint16(171)) >> np.uint16(9))
        fifth = np.uint16((fourth * np.uint16(171)) >> np.uint16(9))
        digits[j] = np.uint8(first - np.uint16(3) * second)
        digits[n + j] = np.uint8(second - np.uint16(3) * third)
        digits[2 * n + j] = np.uint8(third - np.uint16(3) * fourth)
        digits[3 * n + j] = np.uint8(fourth - np.uint16(3) * fifth)
        digits[4 * n + j] = np.uint8(fifth)
        largest = max(largest, packed[j])
    return largest


@kernel
def _emit(digits, step, y, add):
    if add:
        for i in range(y.size):
            y[i] += np.float32(np.int32(digits[i]) - 1) * step
    else:
        for i in range(y.size):
            # never -0, as where it is added to zero
            y[i] = np.float32(np.int32(digits[i]) - 1) * step + np.float32(0)


@kernel
def decode(scales, packed, group, scale, out, add):
    """Write (or add) `scale` times the values; returns False at a byte that is no five digits."""
    digits = np.empty(RUN, np.uint8)
    at = 0
    for g in range(scales.size):
        start = g * group
        stop = min(start + group, out.size)
        step = np.float32(scales[g] * scale)
        for begin in range(start, stop, RUN):
            y = out[begin : min(begin + RUN, stop)]
            end = at + bytes_of(y.size)
            if _unpack(packed[at:end], digits) > _MOST:
                return False
            _emit(digits, step, y, add)
            at = end
    return True


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def _packed_bytes(numel, group):
    count = table.count_groups(numel, group)
    return (count - 1) * bytes_of(group) + bytes_of(numel - (count - 1) * group) if count else 0


@kernel
def encode_rows(codec, clip, rows, like):
    """Encode a table of tensors; a body is the scales, and then the bytes. See `encode`."""
    for i in range(rows.shape[0]):
        x, _ = table.given(rows, i, like)
        group = rows[i, table.GROUP]
        body = table.body_of(rows, i)
        scales, at = table.section(body, table.count_groups(x.size, group), np.float32)
        packed, end = table.section(at, _packed_bytes(x.size, group), np.uint8)
        low, high = table.key_of(rows, i)
        is_finite = encode(x, group, clip, low, high, scales, packed)
        table.seal(rows, i, like, codec, 0, x.size, end - body, is_finite)


@kernel
def decode_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
        group, _, _, body, end = table.opened(rows, i)
        count = table.count_groups(out.size, group)
        at = body + table.padded(4 * count)
        size = _packed_bytes(out.size, group)
        if at + table.padded(size) != end:
            return i
        scales = table.array_at(body, count, np.float32)
        packed = table.array_at(at, size, np.uint8)
        if not decode(scales, packed, group, scale, out, rows[i, table.ADD] != 0):
            return i
    return -1
