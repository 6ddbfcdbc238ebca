"""What kernels are called with: a table of payloads, one row for each, whose columns say where its memory lies.

A table is a two-dimensional array of int64; the constants below number its columns. Addresses stand for flat arrays of
one type, float32 or float64, which an empty array `like` tells; who makes them answers for the memory. So one call
handles as many tensors as there are rows. `encode_rows` and `decode_rows` of each algorithm are in its own file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from hvd_compress.kernels.checksum import checksum, checksum_of_parts
from hvd_compress.kernels.common import take_back
from hvd_compress.kernels.jit import kernel

# when encoding, a residual that is renewed in place, or without error feedback the values; when decoding, where values
# go
X = 0
GRADIENT = 1  # what is added to the residual; 0 where there is none
NUMEL = 2  # elements of both
GROUP = 3  # elements per group
LIMIT = 4  # what a compressor has computed for so many elements, such as how many entries to send
KEY = 5  # 64 bits that random choices depend on
PAYLOAD = 6  # on an 8-byte boundary
ROOM = 7  # bytes that the payload can take, or that have come
DIMENSIONS = 8  # of the shape that the payload states, behind the header, and written already unless it is flat
ADD = 9  # whether decoded values are added to what is there
USED = 10  # filled when encoding: bytes of the payload
FLAGS = 11  # filled when checking: what its header says
COLUMNS = 12

VERSION = 1
HEADER = 40
NONFINITE, FLOAT64, ABSENT = 1, 2, 4
SUMMED = 8
"""The checksum is the one whose parts can be made at once, as devices make it."""
CODED = 256
"""Beside the flags of a header: the body is in the losslessly coded form."""
LENGTH_WORD, CHECKSUM_WORD = 2, 4

_MAGIC = np.uint64(int.from_bytes(b"hvdc", "little"))
_LOW = np.uint64(0xFFFFFFFF)
_BYTE = np.uint64(255)


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


# -- parts of the kernels of algorithms -------------------------------------------------------------------------------


@kernel
def array_at(address, count, dtype):
    """Return the array of so many elements that begins at an address."""
    return carray(_pointer(address), (count,), dtype)


@kernel
def padded(nbytes):
    """Round up to a multiple of 8."""
    return (nbytes + 7) & ~7


@kernel
def count_groups(numel, group):
    """Count the groups of so many elements."""
    return (numel + group - 1) // group


@kernel
def given(rows, i, like):
    """Return what row `i` encodes: the values, or the residual, and the gradient, which is empty for the former."""
    numel = rows[i, NUMEL]
    address = rows[i, GRADIENT]
    return array_at(rows[i, X], numel, like.dtype), array_at(address, numel if address else 0, like.dtype)


@kernel
def section(address, count, dtype):
    """Return the next section of a body, for writing, with its padding zeroed; and where the one after it begins."""
    values = array_at(address, count, dtype)
    nbytes = values.nbytes
    array_at(address + nbytes, padded(nbytes) - nbytes, np.uint8)[:] = 0
    return values, address + padded(nbytes)


@kernel
def body_of(rows, i):
    """Return where the body of the payload of row `i` begins."""
    dimensions = rows[i, DIMENSIONS]
    return rows[i, PAYLOAD] + HEADER + (0 if dimensions == 1 else 8 * dimensions)


@kernel
def key_of(rows, i):
    """Return the two words that random choices of row `i` depend on."""
    key = np.uint64(rows[i, KEY])
    return np.uint32(key & _LOW), np.uint32(key >> np.uint64(32))


@kernel
def seal(rows, i, like, codec, parameter, entries, body_bytes, is_finite):
    """Complete the payload of row `i` with padding and header; its body is written, and is dropped if not finite."""
    at = rows[i, PAYLOAD]
    body = body_of(rows, i)
    if not is_finite:
        parameter, entries, body_bytes = 0, 0, 0
    array_at(body + body_bytes, padded(body_bytes) - body_bytes, np.uint8)[:] = 0
    flags = np.uint64((0 if is_finite else NONFINITE) | (FLOAT64 if like.itemsize == 8 else 0))
    nbytes = body - at + padded(body_bytes)
    words = array_at(at, nbytes >> 3, np.uint64)
    stated = np.uint64(rows[i, DIMENSIONS])
    kinds = np.uint64(VERSION) | np.uint64(codec) << np.uint64(8) | flags << np.uint64(16) | stated << np.uint64(24)
    words[0] = _MAGIC | kinds << np.uint64(32)
    words[1] = np.uint64(rows[i, NUMEL])
    words[2] = np.uint64(nbytes)
    words[3] = np.uint64(rows[i, GROUP]) | np.uint64(parameter) << np.uint64(32)
    # readers of what has more elements do not ask for their number
    words[4] = np.uint64(entries) & _LOW
    words[4] |= np.uint64(checksum(words, CHECKSUM_WORD)) << np.uint64(32)
    rows[i, USED] = nbytes


@kernel
def opened(rows, i):
    """Return of the payload of row `i`, which is checked: group, parameter, entries, where its body begins and ends."""
    at = rows[i, PAYLOAD]
    words = array_at(at, HEADER >> 3, np.uint64)
    dimensions = np.int64(words[0] >> np.uint64(56))
    body = at + HEADER + (0 if dimensions == 1 else 8 * dimensions)
    high = np.uint64(32)
    return (
        np.int64(words[3] & _LOW),
        np.int64(words[3] >> high),
        np.int64(words[4] & _LOW),
        body,
        at + np.int64(words[2]),
    )


@kernel
def reseal(rows, i, codec, parameter, entries, body_bytes):
    """State that the payload of row `i`, which is sealed, has another codec, and so many bytes of body."""
    at = rows[i, PAYLOAD]
    nbytes = body_of(rows, i) - at + padded(body_bytes)
    words = array_at(at, nbytes >> 3, np.uint64)
    words[0] = words[0] & ~(_BYTE << np.uint64(40)) | np.uint64(codec) << np.uint64(40)
    words[2] = np.uint64(nbytes)
    words[3] = words[3] & _LOW | np.uint64(parameter) << np.uint64(32)
    # readers of what has more elements do not ask for their number
    words[4] = np.uint64(entries) & _LOW
    words[4] |= np.uint64(checksum(words, CHECKSUM_WORD)) << np.uint64(32)
    rows[i, USED] = nbytes


@kernel
def is_empty(rows, i):
    """Tell whether the payload of row `i`, which is sealed, has no body."""
    _, _, _, body, end = opened(rows, i)
    return body == end


@kernel
def has_body(rows, i, like):
    """Tell whether row `i` has a body that is to be decoded now; writes what a payload without one stands for."""
    flags = rows[i, FLAGS]
    out = array_at(rows[i, X], rows[i, NUMEL], like.dtype)
    if flags & NONFINITE:
        out[:] = np.nan
        return False
    if flags & ABSENT or out.size == 0:
        if not rows[i, ADD]:
            out[:] = 0
        return False
    return True


# -- whole tables -----------------------------------------------------------------------------------------------------


@kernel
def check(rows, codec, coded):
    """Check payloads and fill their flags; returns the number of the first that is not as expected, or -1.

    A payload may end before its room does. `wire` can say what is wrong with one that was not expected.
    """
    for i in range(rows.shape[0]):
        at = rows[i, PAYLOAD]
        room = rows[i, ROOM]
        if room < HEADER or at & 7:
            return i
        words = array_at(at, room >> 3, np.uint64)
        kinds = words[0] >> np.uint64(32)
        nbytes = np.int64(words[2])
        found = np.int64((kinds >> np.uint64(8)) & _BYTE)
        flags = np.int64((kinds >> np.uint64(16)) & _BYTE)
        expected = np.uint64(VERSION) | np.uint64(1) << np.uint64(24)
        if words[0] & _LOW != _MAGIC or kinds & ~np.uint64(0xFFFF00) != expected or (found != codec and found != coded):
            return i
        if flags & ~(NONFINITE | FLOAT64 | ABSENT | SUMMED) or np.int64(words[1]) != rows[i, NUMEL]:
            return i
        if not HEADER <= nbytes <= room or nbytes & 7 or (words[3] & _LOW == 0 and rows[i, NUMEL]):
            return i
        if flags & (NONFINITE | ABSENT) and nbytes != HEADER:
            return i
        stated = np.uint32(words[CHECKSUM_WORD] >> np.uint64(32))
        if flags & SUMMED:
            matches = checksum_of_parts(array_at(at, nbytes >> 2, np.uint32), 2 * CHECKSUM_WORD + 1) == stated
        else:
            matches = checksum(words[: nbytes >> 3], CHECKSUM_WORD) == stated
        if not matches:
            return i
        rows[i, FLAGS] = flags | (CODED if found == coded else 0)
    return -1


@kernel
def sum_in_parts(places, rooms):
    """Give sound payloads the checksum that devices check, where they have the other one."""
    for i in range(places.size):
        if rooms[i] < HEADER:
            continue
        words = array_at(places[i], HEADER >> 3, np.uint64)
        flags = (words[0] >> np.uint64(48)) & _BYTE
        nbytes = np.int64(words[2])
        if words[0] & _LOW != _MAGIC or flags & np.uint64(SUMMED) or not HEADER <= nbytes <= rooms[i] or nbytes & 7:
            continue
        words = array_at(places[i], nbytes >> 3, np.uint64)
        if checksum(words, CHECKSUM_WORD) != np.uint32(words[CHECKSUM_WORD] >> np.uint64(32)):
            continue
        words[0] |= np.uint64(SUMMED) << np.uint64(48)
        total = checksum_of_parts(array_at(places[i], nbytes >> 2, np.uint32), 2 * CHECKSUM_WORD + 1)
        words[CHECKSUM_WORD] = (words[CHECKSUM_WORD] & _LOW) | np.uint64(total) << np.uint64(32)


@kernel
def cut(at, nbytes, places, sizes):
    """Find payloads that follow one another from `at` on; fills places and sizes, returns the bytes that they take.

    Returns -1 - i if payload `i` is none, or is cut off.
    """
    begin = at
    for i in range(places.size):
        if at + HEADER > begin + nbytes:
            return -1 - i
        words = array_at(at, HEADER >> 3, np.uint64)
        size = np.int64(words[2])
        if words[0] & _LOW != _MAGIC or size < HEADER or size & 7 or size > begin + nbytes - at:
            return -1 - i
        places[i] = at
        sizes[i] = size
        at += size
    return at - begin


@kernel
def close_gaps(places, used, to):
    """Move payloads, which lie in ascending order, together from `to` on; renews their places."""
    for i in range(places.size):
        if places[i] != to:
            source = array_at(places[i], used[i] >> 3, np.uint64)
            target = array_at(to, used[i] >> 3, np.uint64)
            for word in range(source.size):
                target[word] = source[word]
            places[i] = to
        to += used[i]


@kernel
def clear_rest(places, used, slots):
    """Zero the unused ends of slots, which travel too, and must not show what this memory held before."""
    for i in range(used.size):
        array_at(places[i] + used[i], slots[i] - used[i], np.uint8)[:] = 0


@kernel
def take_all_back(rows, like):
    """Subtract the gradients from residuals to which their decoded payloads were added, see `take_back`."""
    for i in range(rows.shape[0]):
        if rows[i, GRADIENT]:
            x, gradient = given(rows, i, like)
            take_back(x, gradient)
