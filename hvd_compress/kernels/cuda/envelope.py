"""Headers on the device: complete payloads whose bodies are written, and check payloads that have come.

Both sum the words of a body in parts, one program for each part; the last one of a row to end has all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels import table
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    GROUP,
    HEADER,
    NONFINITE,
    NUMEL,
    PAYLOAD,
    ROOM,
    column,
    entry,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

PART = 4096
"""Words of 32 bits that one program sums."""

_MAGIC = tl.constexpr(int.from_bytes(b"hvdc", "little"))
_VERSION = tl.constexpr(table.VERSION)
_SUMMED = tl.constexpr(table.SUMMED)
_FLAGS = tl.constexpr(table.NONFINITE | table.FLOAT64 | table.ABSENT | table.SUMMED)
_FIRST = tl.constexpr(table.HEADER // 4)  # the first word of a body
_PART = tl.constexpr(PART)
_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def mixed(word, i):
    """Return what word `i` of a payload, given as uint32, counts for in its checksum; see `kernels.checksum`."""
    h = word ^ (i.to(tl.uint32) * 0x9E3779B1)
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return h.to(tl.int64)


@triton.jit
def _parts_of(nbytes):
    """Return into how many parts a payload is cut, at least one; programs for others end at once."""
    return (nbytes + 4 * _PART - 1) // (4 * _PART)


@triton.jit
def _sum_of_part(words, part, count):
    """Sum what the words of a part count for; those of the header, and those from `count` on, are left out."""
    i = part * _PART + tl.arange(0, _PART)
    word = tl.load(words + i, mask=(i >= _FIRST) & (i < count), other=0)
    counted = mixed(word.to(tl.uint32, bitcast=True), i)
    return tl.sum(tl.where((i >= _FIRST) & (i < count), counted, 0), 0)


@triton.jit
def _sum_of_header(w0, w1, w2, w3, entries):
    """Sum what the first nine words count for, given as four words of 64 bits and a half; the tenth is the sum."""
    total = tl.zeros((), tl.int64)
    i = tl.zeros((), tl.int64)
    for word in tl.static_range(4):
        w = w0 if word == 0 else (w1 if word == 1 else (w2 if word == 2 else w3))
        total += mixed((w & _LOW).to(tl.uint32), i + 2 * word) + mixed(
            ((w >> 32) & _LOW).to(tl.uint32), i + 2 * word + 1
        )
    return total + mixed(entries.to(tl.uint32), i + 8) + mixed(tl.zeros((), tl.uint32), i + 9)


# a codec of 1 must not become a constant, which has no type to widen
@triton.jit(do_not_specialize=["codec", "parameter"])
def _seal(rows, work, state, codec, parameter):
    i, _, part = entry(work)
    body = tl.load(state_of(state, i, 2))
    # what is bad is reset by the last program, and must not tell the others how many there are
    parts = _parts_of(((body + 7) & ~7) + HEADER)
    if part < parts:
        is_bad = tl.load(state_of(state, i, 0)) != 0
        nbytes = tl.where(is_bad, 0, (body + 7) & ~7) + HEADER
        at = pointer(column(rows, i, PAYLOAD), tl.int32)
        tl.atomic_add(state_of(state, i, 3), _sum_of_part(at, part, nbytes // 4))
        # no thread may read what the last program has made ready for the next step
        tl.debug_barrier()
        if tl.atomic_add(state_of(state, i, 4), 1) == parts - 1:
            # what differs from row to row is noted by the compressor
            stated = tl.where(parameter < 0, tl.load(state_of(state, i, 7)), parameter.to(tl.int64))
            entries = tl.where(is_bad, 0, tl.load(state_of(state, i, 1)))
            flags = tl.where(is_bad, NONFINITE, 0) + _SUMMED
            kinds = (codec * 256 + flags * 65536 + (_VERSION + (1 << 24))).to(tl.int64)
            w0 = (kinds << 32) | _MAGIC
            w1 = column(rows, i, NUMEL)
            w3 = column(rows, i, GROUP) | (tl.where(is_bad, 0, stated) << 32)
            total = tl.atomic_add(state_of(state, i, 3), 0) + _sum_of_header(w0, w1, nbytes, w3, entries)
            words = at.to(tl.pointer_type(tl.int64), bitcast=True)
            tl.store(words, w0)
            tl.store(words + 1, w1)
            tl.store(words + 2, nbytes)
            tl.store(words + 3, w3)
            tl.store(words + 4, entries | ((total & _LOW) << 32))
            tl.store(state_of(state, i, 5), flags)
            tl.store(state_of(state, i, 6), nbytes)
            # ready for the next step; what has come of it stays for who takes it back
            tl.store(state_of(state, i, 0), 0)
            tl.store(state_of(state, i, 3), 0)
            tl.store(state_of(state, i, 4), 0)


@triton.jit(do_not_specialize=["codec"])
def _check(rows, work, state, codec):
    i, _, part = entry(work)
    room = column(rows, i, ROOM)
    at = pointer(column(rows, i, PAYLOAD), tl.int32)
    words = at.to(tl.pointer_type(tl.int64), bitcast=True)
    has_header = room >= HEADER
    w0 = tl.load(words, mask=has_header, other=0)
    w1 = tl.load(words + 1, mask=has_header, other=0)
    w2 = tl.load(words + 2, mask=has_header, other=0)
    w3 = tl.load(words + 3, mask=has_header, other=0)
    w4 = tl.load(words + 4, mask=has_header, other=0)
    flags = (w0 >> 48) & 255
    expected = (codec * 256 + (_VERSION + (1 << 24))).to(tl.int64)
    is_good = ((w0 & _LOW) == _MAGIC) & (((w0 >> 32) & 0xFF00FFFF) == expected) & ((flags & ~_FLAGS) == 0)
    is_good &= (w1 == column(rows, i, NUMEL)) & ((w3 & _LOW) == column(rows, i, GROUP))
    is_good &= (w2 >= HEADER) & (w2 <= room) & ((w2 & 7) == 0)
    is_good &= ((flags & (NONFINITE | ABSENT)) == 0) | (w2 == HEADER)
    # too long is not read
    nbytes = tl.where(is_good, w2, HEADER)
    parts = _parts_of(nbytes)
    if part < parts:
        tl.atomic_add(state_of(state, i, 3), _sum_of_part(at, part, nbytes // 4))
        # no thread may read what the last program has made ready for the next step
        tl.debug_barrier()
        if tl.atomic_add(state_of(state, i, 4), 1) == parts - 1:
            total = tl.atomic_add(state_of(state, i, 3), 0) + _sum_of_header(w0, w1, w2, w3, w4 & _LOW)
            matches = ((total ^ (w4 >> 32)) & _LOW) == 0
            found = tl.where(matches, flags, -1)
            found = tl.where((flags & _SUMMED) == 0, -2, found)
            tl.store(state_of(state, i, 1), w4 & _LOW)
            tl.store(state_of(state, i, 6), w2)
            tl.store(state_of(state, i, 5), tl.where(is_good, found, -1))
            tl.store(state_of(state, i, 3), 0)
            tl.store(state_of(state, i, 4), 0)


def seal(rows, work, state, codec, parameter):
    """Complete the payloads of a table: the bodies are written, and `state` has BAD, ENTRIES and BODY of each row.

    Args:
        rows: the table, int64 in device memory.
        work: (row, 1, part) for each PART words of the room of each row.
        state: of the rows; FOUND and NBYTES are filled, BAD is 0 afterwards.
        codec: for the headers.
        parameter: likewise; -1 where the last column of `state` has that of each row.
    """
    start(_seal, work.shape[0], rows, work, state, codec, parameter, num_warps=4)


def check(rows, work, state, codec):
    """Check headers and checksums of payloads that have come; fills FOUND, NBYTES and ENTRIES of `state`.

    Args:
        rows: the table; ROOM of each row can be read.
        work: as for `seal`.
        state: of the rows.
        codec: that is expected.
    """
    start(_check, work.shape[0], rows, work, state, codec, num_warps=4)
