"""Round to 16-bit floats, to nearest even, and convert back, on bit patterns."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table
from hvd_compress.kernels.common import all_finite, correct, take_back
from hvd_compress.kernels.jit import kernel

_TILE = 4096  # values converted at once: they stay in the first-level cache between the steps


@kernel
def to_bf16(bits32, out):
    """Round float32 bit patterns to bfloat16 ones; NaN stays a quiet NaN."""
    for i in range(bits32.size):
        b = bits32[i]
        rounded = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
        is_nan = np.uint32(b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16((np.uint32(b | np.uint32(0x400000)) if is_nan else rounded) >> np.uint32(16))


@kernel
def to_fp16(bits32, out):
    """Round float32 bit patterns to IEEE half ones; values beyond 65504 (rounded) become infinite."""
    # denormal halves: adding 0.5 as a float shifts the mantissa to its place and rounds it on the way
    word = np.empty(_TILE, np.uint32)
    value = word.view(np.float32)
    for start in range(0, bits32.size, _TILE):
        source = bits32[start : start + _TILE]
        target = out[start : start + _TILE]
        for i in range(source.size):
            word[i] = source[i] & np.uint32(0x7FFFFFFF)
        for i in range(source.size):
            value[i] += np.float32(0.5)
        for i in range(source.size):
            b = source[i] & np.uint32(0x7FFFFFFF)
            normal = np.uint32(b - np.uint32(112 << 23) + np.uint32(0xFFF) + ((b >> np.uint32(13)) & np.uint32(1)))
            half = np.uint32(normal >> np.uint32(13))
            half = np.uint32(word[i] - np.uint32(126 << 23)) if b < np.uint32(113 << 23) else half
            half = np.uint32(0x7C00) if b >= np.uint32(143 << 23) else half
            half = np.uint32(0x7E00) if b > np.uint32(0x7F800000) else half
            target[i] = np.uint16(half | ((source[i] >> np.uint32(16)) & np.uint32(0x8000)))


@kernel
def _emit(value, scale, target, add):
    if add:
        for i in range(target.size):
            target[i] += value[i] * scale
    else:
        for i in range(target.size):
            target[i] = value[i] * scale


@kernel
def from_bf16(bits16, scale, out, add):
    """Write (or add) `scale` times the values of bfloat16 bit patterns, into float32 or float64 `out`."""
    word = np.empty(_TILE, np.uint32)
    for start in range(0, bits16.size, _TILE):
        source = bits16[start : start + _TILE]
        for i in range(source.size):
            word[i] = np.uint32(source[i]) << np.uint32(16)
        _emit(word.view(np.float32), scale, out[start : start + _TILE], add)


@kernel
def from_fp16(bits16, scale, out, add):
    """Write (or add) `scale` times the values of IEEE half bit patterns, into float32 or float64 `out`."""
    word = np.empty(_TILE, np.uint32)
    value = word.view(np.float32)
    smallest = np.float32(2.0**-14)
    for start in range(0, bits16.size, _TILE):
        source = bits16[start : start + _TILE]
        for i in range(source.size):
            magnitude = (np.uint32(source[i]) & np.uint32(0x7FFF)) << np.uint32(13)
            exponent = magnitude & np.uint32(0x7C00 << 13)
            magnitude = np.uint32(magnitude + np.uint32(112 << 23))
            if exponent == np.uint32(0x7C00 << 13):
                magnitude = np.uint32(magnitude + np.uint32(112 << 23))
            word[i] = np.uint32(magnitude + np.uint32(1 << 23)) if exponent == 0 else magnitude
        for i in range(source.size):
            # denormal halves have no implicit one, but were given it
            small = (source[i] & np.uint16(0x7C00)) == 0
            v = value[i] - smallest if small else value[i]
            value[i] = -v if source[i] & np.uint16(0x8000) else v
        _emit(value, scale, out[start : start + _TILE], add)


@kernel
def _leave_bf16_residual(x, bits16):
    """Subtract bfloat16 values from x, in place; returns False if one is not finite, and sets that one to 0."""
    bad = np.float32(0)
    word = np.empty(bits16.size, np.uint32)
    value = word.view(np.float32)
    for i in range(bits16.size):
        word[i] = np.uint32(bits16[i]) << np.uint32(16)
    for i in range(bits16.size):
        none = value[i] * np.float32(0)
        # the largest numbers are rounded to infinity
        x[i] -= value[i] if none == 0 else np.float32(0)
        bits16[i] = bits16[i] if none == 0 else np.uint16(0)
        bad += none
    return bad == 0


@kernel
def encode_bf16(x, gradient, out):
    """Correct `x`, round it, and leave what was rounded off; returns False if a value is not finite. See `correct`."""
    feedback = gradient.size > 0
    finite = True
    word = np.empty(_TILE, np.uint32)
    value = word.view(np.float32)
    for start in range(0, x.size, _TILE):
        y = x[start : start + _TILE]
        target = out[start : start + _TILE]
        finite &= correct(y, gradient[start : start + _TILE]) == 0
        for i in range(y.size):
            value[i] = y[i]
        to_bf16(word[: y.size], target)
        if feedback:
            finite &= _leave_bf16_residual(y, target)
    return finite


@kernel
def scaled(values, scale, out, add):
    """Write (or add) `scale` times the values."""
    _emit(values, scale, out, add)


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_bf16_rows(codec, rows, like):
    """Encode a table of tensors; a body is the halves. See `encode_bf16`."""
    for i in range(rows.shape[0]):
        x, gradient = table.given(rows, i, like)
        body = table.body_of(rows, i)
        halves = table.array_at(body, x.size, np.uint16)
        is_finite = encode_bf16(x, gradient, halves)
        if not is_finite and gradient.size > 0:
            from_bf16(halves, np.float32(1), x, True)
            take_back(x, gradient)
        table.seal(rows, i, like, codec, 0, x.size, 2 * x.size, is_finite)


@kernel
def encode_fp16_rows(codec, is_checked, rows, like):
    """Encode a table of tensors; a body is the halves. `is_checked`: payloads report what is not finite."""
    for i in range(rows.shape[0]):
        x, _ = table.given(rows, i, like)
        halves = table.array_at(table.body_of(rows, i), x.size, np.uint16)
        value = np.empty(_TILE, np.float32)
        exponents = np.uint16(0)
        for start in range(0, x.size, _TILE):
            y = x[start : start + _TILE]
            target = halves[start : start + _TILE]
            if like.itemsize == 4:
                to_fp16(y.view(np.uint32), target)
            else:
                for j in range(y.size):
                    value[j] = y[j]
                to_fp16(value[: y.size].view(np.uint32), target)
            if is_checked:
                for j in range(y.size):
                    exponents = max(exponents, target[j] & np.uint16(0x7C00))
        table.seal(rows, i, like, codec, 0, x.size, 2 * x.size, not is_checked or exponents != np.uint16(0x7C00))


@kernel
def _half_row(rows, i, like):
    """Return where row `i` is to be decoded to, and its halves, which are empty if its body does not fit."""
    numel = rows[i, table.NUMEL]
    _, _, _, body, end = table.opened(rows, i)
    fits = body + table.padded(2 * numel) == end
    return table.array_at(rows[i, table.X], numel, like.dtype), table.array_at(body, numel if fits else 0, np.uint16)


@kernel
def decode_bf16_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if table.has_body(rows, i, like):
            out, halves = _half_row(rows, i, like)
            if halves.size != out.size:
                return i
            from_bf16(halves, scale, out, rows[i, table.ADD] != 0)
    return -1


@kernel
def decode_fp16_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if table.has_body(rows, i, like):
            out, halves = _half_row(rows, i, like)
            if halves.size != out.size:
                return i
            from_fp16(halves, scale, out, rows[i, table.ADD] != 0)
    return -1


@kernel
def _copy(x, values):
    for j in range(x.size):
        values[j] = x[j]


@kernel
def encode_raw_rows(codec, itemsize, is_checked, rows, like):
    """Encode a table of tensors; a body is the values.

    Args:
        codec: number of the compressor.
        itemsize: bytes of a sent value; 0 for those that it has.
        is_checked: whether a tensor with a value that is not finite is told of, and not sent.
        rows: see `table`.
        like: see `table`.
    """
    for i in range(rows.shape[0]):
        x, _ = table.given(rows, i, like)
        size = itemsize if itemsize else like.itemsize
        body = table.body_of(rows, i)
        if size == 8:
            _copy(x, table.array_at(body, x.size, np.float64))
        else:
            _copy(x, table.array_at(body, x.size, np.float32))
        is_finite = not is_checked or all_finite(x)
        table.seal(rows, i, like, codec, 0, x.size, size * x.size, is_finite)


@kernel
def decode_raw_rows(itemsize, rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1.

    Args:
        itemsize: bytes of a sent value; 0 where the header's flag for float64 tells.
        rows: see `table`.
        like: see `table`.
        scale: factor on the values.
    """
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
        _, _, _, body, end = table.opened(rows, i)
        is_wide = itemsize == 8 or (itemsize == 0 and rows[i, table.FLAGS] & table.FLOAT64 != 0)
        if body + table.padded(out.size * (8 if is_wide else 4)) != end:
            return i
        add = rows[i, table.ADD] != 0
        if is_wide:
            scaled(table.array_at(body, out.size, np.float64), out.dtype.type(scale), out, add)
        else:
            scaled(table.array_at(body, out.size, np.float32), out.dtype.type(scale), out, add)
    return -1
