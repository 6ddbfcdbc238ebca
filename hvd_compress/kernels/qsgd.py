"""Encode the stochastic levels of QSGD: a norm per bucket and `bits` bits per element, sign on top."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import signs, table
from hvd_compress.kernels.common import bucket_norm, uniform
from hvd_compress.kernels.jit import kernel

MOST_BUCKET = 32768  # what 15 bits of index reach
_SHORT = np.empty(0, np.uint16)


@kernel
def _quantize(y, first, norm, bits, key_low, key_high, codes):
    """Compute sign and randomly rounded level of each entry of a bucket; codes beyond it are 0."""
    levels = np.int32((1 << (bits - 1)) - 1)
    sign_bit = np.int32(1 << (bits - 1))
    factor = np.float64(levels) / np.float64(norm) if norm > 0 else 0.0
    if factor > 3e38:
        # a norm next to the denormals, whose inverse no float32 holds; two factors would be multiplied first
        for i in range(y.size):
            v = np.float32(y[i])
            scaled = np.float32(np.float64(abs(v)) * factor) + uniform(first + i, key_low, key_high)
            level = min(np.int32(scaled), levels)
            codes[i] = np.uint8(level | (sign_bit if v < 0 else np.int32(0)))
    else:
        factor32 = np.float32(factor)
        for i in range(y.size):
            v = np.float32(y[i])
            scaled = abs(v) * factor32 + uniform(first + i, key_low, key_high)
            level = min(np.int32(scaled), levels)
            codes[i] = np.uint8(level | (sign_bit if v < 0 else np.int32(0)))
    codes[y.size :] = 0


@kernel
def pack(codes, bits, packed):
    """Pack eight codes at a time into `bits` bytes, 2 to 7."""
    if bits == 4:
        for j in range(packed.size):
            packed[j] = codes[2 * j] | (codes[2 * j + 1] << np.uint8(4))
    elif bits == 2:
        for j in range(packed.size):
            packed[j] = (
                codes[4 * j]
                | (codes[4 * j + 1] << np.uint8(2))
                | (codes[4 * j + 2] << np.uint8(4))
                | (codes[4 * j + 3] << np.uint8(6))
            )
    else:
        for octet in range(codes.size >> 3):
            word = np.uint64(0)
            for k in range(8):
                word |= np.uint64(codes[8 * octet + k]) << np.uint64(bits * k)
            for byte in range(bits):
                packed[octet * bits + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))


@kernel
def unpack(packed, bits, codes):
    """Reverse `pack`."""
    mask = np.uint8((1 << bits) - 1)
    if bits == 4:
        for j in range(packed.size):
            codes[2 * j] = packed[j] & mask
            codes[2 * j + 1] = packed[j] >> np.uint8(4)
    elif bits == 2:
        for j in range(packed.size):
            codes[4 * j] = packed[j] & mask
            codes[4 * j + 1] = (packed[j] >> np.uint8(2)) & mask
            codes[4 * j + 2] = (packed[j] >> np.uint8(4)) & mask
            codes[4 * j + 3] = packed[j] >> np.uint8(6)
    else:
        for octet in range(codes.size >> 3):
            word = np.uint64(0)
            for byte in range(bits):
                word |= np.uint64(packed[octet * bits + byte]) << np.uint64(8 * byte)
            for k in range(8):
                codes[8 * octet + k] = np.uint8(word >> np.uint64(bits * k)) & mask


@kernel
def encode(x, bucket, bits, norm_is_max, key_low, key_high, norms, packed):
    """Fill norms[buckets] and packed[ceil(numel / 8) * bits], 8 codes in `bits` bytes; returns False if not finite."""
    codes = np.empty(bucket, np.uint8)
    for b in range(norms.size):
        start = b * bucket
        y = x[start : min(start + bucket, x.size)]
        norm = bucket_norm(y, norm_is_max)
        if not np.isfinite(norm):
            return False
        norms[b] = norm
        octets = (y.size + 7) >> 3
        first = (start >> 3) * bits
        target = packed[first : first + octets * bits]
        if bits == 8:
            _quantize(y, start, norm, bits, key_low, key_high, target)
        else:
            _quantize(y, start, norm, bits, key_low, key_high, codes[: 8 * octets])
            pack(codes[: 8 * octets], bits, target)
    return True


@kernel
def emit(codes, levels, step, y, add):
    """Write (or add) what the codes of one bucket stand for."""
    sign_bit = levels + np.int32(1)
    if add:
        for i in range(y.size):
            code = np.int32(codes[i])
            level = code & levels
            y[i] += np.float32(-level if code & sign_bit else level) * step
    else:
        for i in range(y.size):
            code = np.int32(codes[i])
            level = code & levels
            # a product that underflows is +0, as where it is added to zero
            y[i] = np.float32(-level if code & sign_bit else level) * step + np.float32(0)


@kernel
def step_of(norm, levels):
    """Return the distance of two levels."""
    step = np.float32(np.float64(norm) / levels)
    # where the norm is next to the largest float32, the quotient may have been rounded up
    return step - step * np.float32(2.0**-23) if np.isinf(step * np.float32(levels)) else step


@kernel
def decode(norms, packed, bucket, bits, scale, out, add):
    """Write (or add) `scale * norm * level / levels` with the sign."""
    codes = np.empty(bucket, np.uint8)
    levels = np.int32((1 << (bits - 1)) - 1)
    for b in range(norms.size):
        start = b * bucket
        y = out[start : min(start + bucket, out.size)]
        octets = (y.size + 7) >> 3
        first = (start >> 3) * bits
        source = packed[first : first + octets * bits]
        if bits < 8:
            unpack(source, bits, codes[: 8 * octets])
        step = step_of(norms[b], levels) * scale
        if bits < 8:
            emit(codes, levels, step, y, add)
        else:
            emit(source, levels, step, y, add)


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_rows(codec, bits, norm_is_max, rows, like):
    """Encode a table of tensors; a body is the norms, and then the codes. See `encode`."""
    for i in range(rows.shape[0]):
        x, _ = table.given(rows, i, like)
        bucket = rows[i, table.GROUP]
        body = table.body_of(rows, i)
        norms, at = table.section(body, table.count_groups(x.size, bucket), np.float32)
        packed, end = table.section(at, ((x.size + 7) >> 3) * bits, np.uint8)
        low, high = table.key_of(rows, i)
        is_finite = encode(x, bucket, bits, norm_is_max, low, high, norms, packed)
        table.seal(rows, i, like, codec, bits, x.size, end - body, is_finite)


@kernel
def decode_row(rows, i, like, scale):
    """Decode the checked payload of row `i`; returns False if its body does not fit."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    bucket, bits, _, body, end = table.opened(rows, i)
    if not 1 <= bits <= 8 or bucket & 7 or bucket > MOST_BUCKET:
        return False
    if bits == 1:
        return signs.decode_pairs_row(rows, i, like, _SHORT, scale)
    count = table.count_groups(out.size, bucket)
    at = body + table.padded(4 * count)
    size = ((out.size + 7) >> 3) * bits
    if at + table.padded(size) != end:
        return False
    norms = table.array_at(body, count, np.float32)
    decode(norms, table.array_at(at, size, np.uint8), bucket, bits, scale, out, rows[i, table.ADD] != 0)
    return True


@kernel
def decode_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if table.has_body(rows, i, like) and not decode_row(rows, i, like, scale):
            return i
    return -1
