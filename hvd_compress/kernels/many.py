"""Encode, seal, check and decode payloads of many tensors in one call, by the kernels for one, without Python.

Arrays of addresses say where gradients, residuals and payloads lie; who makes them answers for the memory. The layout
is that of `hvd_compress.wire`, for flat float32 tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from hvd_compress.kernels import onebit, signs
from hvd_compress.kernels.checksum import checksum
from hvd_compress.kernels.common import take_back
from hvd_compress.kernels.jit import kernel

HEADER = 40
NONFINITE, ABSENT = 1, 4
_CHECKSUM_WORD = 4
_MAGIC = np.uint64(int.from_bytes(b"hvdc", "little"))
_LOW = np.uint64(0xFFFFFFFF)


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """Turn an address into a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@kernel
def address_of(array):
    """Return the address of an array, in a tenth of the time that `array.ctypes.data` or its like take."""
    return array.ctypes.data


@kernel
def _array(address, count, dtype):
    return carray(_pointer(address), (count,), dtype)


@kernel
def _padded(nbytes):
    return (nbytes + 7) & ~7


@kernel
def _groups(numel, group):
    return (numel + group - 1) // group


@kernel
def _seal(at, version, codec, numel, group, parameter, entries, body, is_finite):
    """Write the header of a payload whose body is complete; returns the bytes of the payload."""
    flags = 0 if is_finite else NONFINITE
    nbytes = HEADER + _padded(body)
    words = _array(at, nbytes >> 3, np.uint64)
    _array(at + HEADER + body, _padded(body) - body, np.uint8)[:] = 0
    kinds = np.uint64(version) | np.uint64(codec) << np.uint64(8) | np.uint64(flags) << np.uint64(16)
    words[0] = _MAGIC | (kinds | np.uint64(1) << np.uint64(24)) << np.uint64(32)
    words[1] = np.uint64(numel)
    words[2] = np.uint64(nbytes)
    words[3] = np.uint64(group) | np.uint64(parameter) << np.uint64(32)
    words[4] = np.uint64(entries)
    words[4] |= np.uint64(checksum(words, _CHECKSUM_WORD)) << np.uint64(32)
    return nbytes


@kernel
def check(at, sizes, version, codec, numels, flags):
    """Check payloads and fill their flags; returns the number of the first that is not as expected, or -1.

    A payload may end before its slot does. `wire` can say what is wrong with one that was not expected.
    """
    for i in range(at.size):
        if sizes[i] < HEADER or at[i] & 7:
            return i
        words = _array(at[i], sizes[i] >> 3, np.uint64)
        kinds = words[0] >> np.uint64(32)
        nbytes = np.int64(words[2])
        flags[i] = (kinds >> np.uint64(16)) & np.uint64(255)
        expected = np.uint64(version) | np.uint64(codec) << np.uint64(8) | np.uint64(1) << np.uint64(24)
        if words[0] & _LOW != _MAGIC or kinds & ~(np.uint64(255) << np.uint64(16)) != expected:
            return i
        if flags[i] not in (0, NONFINITE, ABSENT) or np.int64(words[1]) != numels[i]:
            return i
        if not HEADER <= nbytes <= sizes[i] or nbytes & 7 or words[3] & _LOW == 0:
            return i
        if checksum(words[: nbytes >> 3], _CHECKSUM_WORD) != np.uint32(words[4] >> np.uint64(32)):
            return i
    return -1


@kernel
def clear_rest(slots_at, used, slots):
    """Zero the unused ends of slots, which travel too, and must not show what this memory held before."""
    for i in range(used.size):
        _array(slots_at[i] + used[i], slots[i] - used[i], np.uint8)[:] = 0


@kernel
def _blank(out, flag, add):
    """Write what a payload without a body stands for: nothing, or values that are not finite."""
    if flag == NONFINITE:
        out[:] = np.nan
    elif not add:
        out[:] = 0


@kernel
def take_all_back(x_at, gradients_at, numels):
    """Run `take_back` on many tensors."""
    for i in range(x_at.size):
        take_back(_array(x_at[i], numels[i], np.float32), _array(gradients_at[i], numels[i], np.float32))


# -- one-bit ---------------------------------------------------------------------------------------------------------


@kernel
def encode_onebit(version, codec, x_at, gradients_at, numels, groups, slots_at, used):
    """Encode tensors into their slots and fill `used` with bytes; gradients_at is 0 where x itself is encoded."""
    zero = np.uint32(0)
    for i in range(x_at.size):
        x = _array(x_at[i], numels[i], np.float32)
        gradient = _array(gradients_at[i], numels[i] if gradients_at[i] else 0, np.float32)
        count = _groups(numels[i], groups[i])
        means = _array(slots_at[i] + HEADER, 2 * count, np.float32)
        size = (numels[i] + 7) >> 3
        bits = _array(slots_at[i] + HEADER + 8 * count, size, np.uint8)
        bits[:] = 0
        is_finite = onebit.encode(x, gradient, groups[i], 0, zero, zero, means, bits)
        if not is_finite and gradient.size > 0:
            onebit.decode(means, bits, groups[i], np.float32(1), x, True)
            take_back(x, gradient)
        body, entries = (8 * count + size, numels[i]) if is_finite else (0, 0)
        used[i] = _seal(slots_at[i], version, codec, numels[i], groups[i], 0, entries, body, is_finite)


@kernel
def decode_onebit(at, flags, outs_at, numels, scale, adds):
    """Decode payloads that `check` has passed; returns the number of the first whose body does not fit, or -1."""
    for i in range(at.size):
        out = _array(outs_at[i], numels[i], np.float32)
        if flags[i]:
            _blank(out, flags[i], adds[i])
            continue
        words = _array(at[i], HEADER >> 3, np.uint64)
        group = np.int64(words[3] & _LOW)
        count = _groups(numels[i], group)
        size = (numels[i] + 7) >> 3
        if HEADER + 8 * count + _padded(size) != np.int64(words[2]):
            return i
        means = _array(at[i] + HEADER, 2 * count, np.float32)
        onebit.decode(means, _array(at[i] + HEADER + 8 * count, size, np.uint8), group, scale, out, adds[i])
    return -1


# -- adaptive --------------------------------------------------------------------------------------------------------


@kernel
def encode_adaptive(version, codec, pi, sample, x_at, gradients_at, numels, groups, slots_at, used):
    """Do as `encode_onebit`, for groups whose entries fit into 16 bits."""
    for i in range(x_at.size):
        x = _array(x_at[i], numels[i], np.float32)
        gradient = _array(gradients_at[i], numels[i] if gradients_at[i] else 0, np.float32)
        count = _groups(numels[i], groups[i])
        table = _padded(2 * count)
        counts = _array(slots_at[i] + HEADER, count, np.uint16)
        _array(slots_at[i] + HEADER + 2 * count, table - 2 * count, np.uint8)[:] = 0
        recon = _array(slots_at[i] + HEADER + table, 2 * count, np.float32)
        entries = _array(slots_at[i] + HEADER + table + 8 * count, numels[i], np.uint16)
        drawn = min(sample, groups[i])
        found, is_finite = signs.encode_adaptive(x, gradient, groups[i], pi, drawn, counts, recon, entries)
        if not is_finite and gradient.size > 0:
            signs.decode(counts, recon, 2, entries[:found], groups[i], np.float32(1), x, True)
            take_back(x, gradient)
        body, number, width = (table + 8 * count + 2 * found, found, 2) if is_finite else (0, 0, 0)
        used[i] = _seal(slots_at[i], version, codec, numels[i], groups[i], width, number, body, is_finite)


@kernel
def decode_adaptive(at, flags, outs_at, numels, scale, adds):
    """Do as `decode_onebit`."""
    for i in range(at.size):
        out = _array(outs_at[i], numels[i], np.float32)
        if flags[i]:
            _blank(out, flags[i], adds[i])
            continue
        words = _array(at[i], HEADER >> 3, np.uint64)
        group = np.int64(words[3] & _LOW)
        number = np.int64(words[4] & _LOW)
        count = _groups(numels[i], group)
        table = _padded(2 * count)
        if HEADER + _padded(table + 8 * count + 2 * number) != np.int64(words[2]):
            return i
        counts = _array(at[i] + HEADER, count, np.uint16)
        recon = _array(at[i] + HEADER + table, 2 * count, np.float32)
        entries = _array(at[i] + HEADER + table + 8 * count, number, np.uint16)
        if not signs.decode(counts, recon, 2, entries, group, scale, out, adds[i]):
            return i
    return -1
