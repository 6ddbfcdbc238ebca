"""The largest entries as 16-bit indices and values; see `hvd_compress.kernels.topk`.

What decodes them decodes the bits of `percentile`, too, of which any row of a table may have one or the other.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hvd_compress.kernels.cuda import select
from hvd_compress.kernels.cuda.cast import rounded, wide_pointer
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    ADD,
    GROUP,
    GROUPS_AT,
    HEADER,
    NONFINITE,
    NUMEL,
    PAYLOAD,
    X,
    column,
    entry,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.select import TILE, TILES, count_ones, padded, wants_bits
from hvd_compress.kernels.cuda.start import start

_MOST_SUMMED = 1024  # groups whose counts each program sums by itself
_CHUNK = 1024  # entries that a program looks at together
_WARPS, _REGISTERS = 8, 64
_MORE_REGISTERS = 128  # for several senders, or 16 bits, which take more
_MOST_GROUP = tl.constexpr(65536)
_GROUPS_AT = tl.constexpr(GROUPS_AT)
_TILES = tl.constexpr(TILES)


@triton.jit
def has_body(state, i, force: tl.constexpr):
    """Tell whether there is a body to decode, or, with `force`, one that was made, whatever the header says."""
    found = tl.load(state_of(state, i, 5))
    return force | ((found >= 0) & ((found & (NONFINITE | ABSENT)) == 0))


@triton.jit
def parameter_of(rows, i):
    """Return the parameter in the header of row `i`: of percentile, 1 for bits, and 0 for indices."""
    return tl.load(pointer(column(rows, i, PAYLOAD), tl.int64) + 3) >> 32


@triton.jit
def has_bits(rows, i, bitmaps: tl.constexpr, force: tl.constexpr):
    """Tell whether the body of row `i` has bits; the header of one that is decoded by `force` does not say it."""
    if not bitmaps:
        return tl.full((), 0, tl.int1)
    if force:
        return wants_bits(rows, i)
    return parameter_of(rows, i) == 1


# -- where the lists of groups begin ---------------------------------------------------------------------------------


@triton.jit
def _scan_counts(
    rows, work, state, offsets, STEP: tl.constexpr, bitmaps: tl.constexpr, checks: tl.constexpr, force: tl.constexpr
):
    """Sum the entries before each group of rows that have indices; with `checks`, refuse bodies of wrong sizes."""
    i, _, _ = entry(work)
    if has_body(state, i, force):
        numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
        groups = (numel + group - 1) // group
        entries = tl.load(state_of(state, i, 1))
        is_bits = has_bits(rows, i, bitmaps, force)
        fits = tl.full((), 1, tl.int1)
        if checks:
            of_list = padded(4 * groups) + padded(2 * entries) + padded(4 * entries)
            of_bits = 8 * ((numel + 63) >> 6) + padded(4 * entries)
            fits = tl.load(state_of(state, i, 6)) == tl.where(is_bits, of_bits, of_list) + HEADER
            fits &= is_bits | (group <= _MOST_GROUP)
            if bitmaps:
                fits &= is_bits | (parameter_of(rows, i) == 0)
        if fits & (is_bits == 0):
            counts = pointer(column(rows, i, PAYLOAD) + HEADER, tl.int32)
            total = tl.zeros((), tl.int64)
            o = tl.arange(0, STEP)
            for at in range(0, groups, STEP):
                count = tl.load(counts + at + o, mask=at + o < groups, other=0).to(tl.int64) & 0xFFFFFFFF
                to = offsets + column(rows, i, _GROUPS_AT) + at + o
                tl.store(to, total + tl.cumsum(count, 0) - count, mask=at + o < groups)
                total += tl.sum(count, 0)
            fits = total == entries
        if checks & (fits == 0):
            tl.store(state_of(state, i, 5), -1)


@triton.jit
def _check_lists(rows, work, state, offsets, CHUNK: tl.constexpr, bitmaps: tl.constexpr):
    """Refuse payloads with indices that do not ascend, or lie beyond their group; `_scan_counts` has passed them."""
    i, _, g = entry(work)
    if has_body(state, i, False) & (has_bits(rows, i, bitmaps, False) == 0):
        numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
        body = column(rows, i, PAYLOAD) + HEADER
        count = tl.load(pointer(body, tl.int32) + g).to(tl.int64) & 0xFFFFFFFF
        indices = pointer(body + padded(4 * ((numel + group - 1) // group)), tl.uint16)
        indices += tl.load(offsets + column(rows, i, _GROUPS_AT) + g)
        size = tl.minimum(group, numel - g * group).to(tl.int32)
        wrong = tl.zeros((CHUNK,), tl.int32)
        o = tl.arange(0, CHUNK)
        for at in range(0, count, CHUNK):
            e = at + o
            index = tl.load(indices + e, mask=e < count, other=0).to(tl.int32)
            previous = tl.load(indices + e - 1, mask=(e > 0) & (e < count), other=0).to(tl.int32)
            is_wrong = (index >= size) | (index <= tl.where(e > 0, previous, -1))
            wrong |= (is_wrong & (e < count)).to(tl.int32)
        if tl.max(wrong, 0) != 0:
            tl.store(state_of(state, i, 5), -1)


# -- decoding --------------------------------------------------------------------------------------------------------


@triton.jit
def _first_from(indices, count, bound):
    """Return how many of `count` (at most 65536) ascending indices are below `bound`."""
    step = (count + 255) // 256
    j = tl.arange(0, 256)
    index = tl.load(indices + j * step, mask=j * step < count, other=65535).to(tl.int32)
    n = tl.sum(((index < bound) & (j * step < count)).to(tl.int32), 0)
    # it is behind the last of these that is below
    begin = tl.where(n > 0, (n - 1) * step + 1, 0)
    end = tl.minimum(n * step, count)
    index = tl.load(indices + begin + j, mask=begin + j < end, other=65535).to(tl.int32)
    return begin + tl.sum(((index < bound) & (begin + j < end)).to(tl.int32), 0)


@triton.jit
def _lists(rows, state, i):
    """Return where the counts, the indices and the values of row `i` are, and how many groups it has."""
    groups = (column(rows, i, NUMEL) + column(rows, i, GROUP) - 1) // column(rows, i, GROUP)
    body = column(rows, i, PAYLOAD) + HEADER
    indices_at = body + padded(4 * groups)
    values_at = indices_at + padded(2 * tl.load(state_of(state, i, 1)))
    return pointer(body, tl.int32), pointer(indices_at, tl.uint16), pointer(values_at, tl.float32), groups


@triton.jit
def _list_of(rows, i, offsets, counts, g, GROUPS: tl.constexpr, is_scanned: tl.constexpr):
    """Return how many entries are before those of group `g`, and how many it has."""
    if is_scanned:
        before = tl.load(offsets + column(rows, i, _GROUPS_AT) + g)
    else:
        n = tl.arange(0, GROUPS)
        before = tl.sum(tl.load(counts + n, mask=n < g, other=0), 0).to(tl.int64)
    return before, tl.load(counts + g)


@triton.jit
def _scatter(
    rows, state, i, out, start, offsets, scale, is_fresh, TILE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, kind: tl.constexpr, is_scanned: tl.constexpr,
):  # fmt: skip
    """Add the entries of row `i` that are in a tile to `out`, in memory, where there are zeros if it `is_fresh`."""
    group = column(rows, i, GROUP)
    g = start // group
    counts, indices, values, _ = _lists(rows, state, i)
    before, end = _list_of(rows, i, offsets, counts, g, GROUPS, is_scanned)
    indices += before
    values += before
    first = (start - g * group).to(tl.int32)
    begin = tl.zeros((), tl.int32)
    if end > CHUNK:
        begin = _first_from(indices, end, first)
        end = _first_from(indices, end, first + TILE)
    o = tl.arange(0, CHUNK)
    for at in range(begin, end, CHUNK):
        e = at + o
        index = tl.load(indices + e, mask=e < end, other=0).to(tl.int32) - first
        v = tl.load(values + e, mask=e < end, other=0.0) * scale
        is_here = (e < end) & (index >= 0) & (index < TILE)
        if is_fresh != 0:
            # a negative zero becomes a positive one
            sums = 0.0 + v
        else:
            sums = tl.load(out + index, mask=is_here, other=0.0).to(tl.float32) + v
        tl.store(out + index, rounded(sums, kind), mask=is_here)


@triton.jit
def _found(
    rows, state, i, start, size, offsets, TILE: tl.constexpr, GROUPS: tl.constexpr, is_even: tl.constexpr,
    is_scanned: tl.constexpr,
):  # fmt: skip
    """Search each element of a tile in the lists of row `i`; returns which are there, and their values."""
    group = column(rows, i, GROUP)
    counts, indices, values, groups = _lists(rows, state, i)
    o = tl.arange(0, TILE)
    low = tl.zeros((TILE,), tl.int64)
    high = tl.zeros((TILE,), tl.int64)
    if is_even:
        g = start // group
        before, count = _list_of(rows, i, offsets, counts, g, GROUPS, is_scanned)
        first = (start - g * group).to(tl.int32)
        begin = _first_from(indices + before, count, first)
        end = _first_from(indices + before, count, first + TILE)
        low += before + begin
        high += before + end
        wanted = first + o
        longest = end - begin
    else:
        of_element = tl.minimum((start + o) // group, groups - 1)
        count = tl.load(counts + of_element)
        low += tl.load(offsets + column(rows, i, _GROUPS_AT) + of_element)
        high += low + count
        wanted = (start + o - of_element * group).to(tl.int32)
        longest = tl.max(count, 0)
    last = high
    while longest > 0:
        middle = (low + high) >> 1
        index = tl.load(indices + middle, mask=low < high, other=0).to(tl.int32)
        is_less = (index < wanted) & (low < high)
        high = tl.where(is_less, high, middle)
        low = tl.where(is_less, middle + 1, low)
        longest = longest >> 1
    index = tl.load(indices + low, mask=low < last, other=0).to(tl.int32)
    is_there = (low < last) & (index == wanted) & (o < size)
    return is_there, tl.load(values + low, mask=is_there, other=0.0)


@triton.jit
def _unpacked(rows, i, start, size, starts, TILE: tl.constexpr):
    """Return which elements of a tile have their bit set in row `i`, and their values."""
    body = column(rows, i, PAYLOAD) + HEADER
    number = tl.arange(0, TILE // 32)
    words = pointer(body, tl.int32) + (start >> 5)
    word = tl.load(words + number, mask=32 * number < size, other=0).to(tl.uint32, bitcast=True)
    ones = count_ones(word)
    before = tl.cumsum(ones, 0) - ones
    values = pointer(body + 8 * ((column(rows, i, NUMEL) + 63) >> 6), tl.float32)
    values += tl.load(starts + column(rows, i, _GROUPS_AT) * _TILES + start // TILE)
    # only words are summed one after the other; within a word, bits are counted
    bit = tl.full((32,), 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)
    is_there = (word[:, None] & bit[None, :]) != 0
    rank = before[:, None] + count_ones(word[:, None] & (bit - 1)[None, :])
    v = tl.load(values + rank, mask=is_there, other=0.0)
    return tl.reshape(is_there, (TILE,)), tl.reshape(v, (TILE,))


@triton.jit
def _store(out, v, size, TILE: tl.constexpr, kind: tl.constexpr):
    o = tl.arange(0, TILE)
    # without a mask, stores are wide whatever the size of the row
    if size == TILE:
        tl.store(out + o, rounded(v, kind))
    else:
        tl.store(out + o, rounded(v, kind), mask=o < size)


@triton.jit
def _decode(
    rows, work, state, offsets, starts, scale, TILE: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
    kind: tl.constexpr, bitmaps: tl.constexpr, is_even: tl.constexpr, is_scanned: tl.constexpr,
    aligned: tl.constexpr, single: tl.constexpr, force: tl.constexpr,
):  # fmt: skip
    first_row, count, tile = entry(work)
    if single:
        # one sender, as nearly always: the loops vanish
        count = 1
    start = tile * TILE
    size = tl.minimum(column(rows, first_row, NUMEL) - start, TILE).to(tl.int32)
    out = wide_pointer(column(rows, first_row, X), kind, 4, aligned) + start
    adds = column(rows, first_row, ADD) != 0
    flags = tl.zeros((), tl.int64)
    if not force:
        for number in range(count):
            flags |= tl.load(state_of(state, first_row + number, 5))
    if (flags & NONFINITE) != 0:
        _store(out, tl.full((TILE,), float("nan"), tl.float32), size, TILE, kind)
    else:
        # few entries are added in memory; sums that memory would round, or that take most elements, are made here
        sums = tl.zeros((TILE,), tl.float32)
        in_memory = adds.to(tl.int32)
        is_fresh = 1 - in_memory
        scatters = is_even & ((kind == tl.float32) | ((count == 1) & (adds == 0)))
        for number in range(count):
            i = first_row + number
            if has_body(state, i, force):
                is_bits = has_bits(rows, i, bitmaps, force)
                if scatters & (is_bits == 0):
                    if in_memory == 0:
                        _store(out, sums, size, TILE, kind)
                    # other threads have written there
                    tl.debug_barrier()
                    _scatter(
                        rows, state, i, out, start, offsets, scale, is_fresh, TILE, GROUPS, CHUNK, kind, is_scanned
                    )
                    in_memory = tl.full((), 1, tl.int32)
                elif bitmaps or not is_even or kind != tl.float32:
                    if in_memory != 0:
                        tl.debug_barrier()
                        o = tl.arange(0, TILE)
                        sums = tl.load(out + o, mask=o < size, other=0.0).to(tl.float32)
                    if is_bits:
                        is_there, v = _unpacked(rows, i, start, size, starts, TILE)
                    else:
                        is_there, v = _found(rows, state, i, start, size, offsets, TILE, GROUPS, is_even, is_scanned)
                    sums = tl.where(is_there, sums + v * scale, sums)
                    in_memory = tl.full((), 0, tl.int32)
                is_fresh = tl.full((), 0, tl.int32)
        if in_memory == 0:
            _store(out, sums, size, TILE, kind)


def scan(launch: Launch, bitmaps: bool, checks: bool, force: bool) -> Any:
    """Sum the entries before each group, and return the sums; with `checks` see `_scan_counts`."""
    offsets = launch.scratch("offsets", int(launch.counts.sum()), "int64")
    work = launch.work_by_rows()
    start(
        _scan_counts,
        work.shape[0],
        launch.rows,
        work,
        launch.state,
        offsets,
        _CHUNK,
        bitmaps,
        checks,
        force,
        num_warps=4,
        num_stages=1,
    )
    return offsets


def check_lists(launch: Launch, bitmaps: bool) -> None:
    """Refuse payloads whose sizes, counts or indices are wrong."""
    offsets = scan(launch, bitmaps, True, False)
    work = launch.work_by_groups()
    start(
        _check_lists,
        work.shape[0],
        launch.rows,
        work,
        launch.state,
        offsets,
        _CHUNK,
        bitmaps,
        num_warps=4,
        num_stages=1,
    )


def decode_entries(launch: Launch, scale: float, force: bool, starts: Any = None) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order.

    Args:
        launch: the table.
        scale: what values are multiplied by.
        force: whether also to decode bodies that are not sent.
        starts: the entries before each tile of rows that have bits; None where none has.
    """
    bitmaps = starts is not None
    # where nothing is held in registers, programs are few and long
    is_light = not bitmaps and launch.kind == tl.float32 and select.is_even(launch, 2 * TILE)
    tile = 2 * TILE if is_light else TILE
    is_even = is_light or select.is_even(launch)
    most = int(launch.counts.max())
    is_scanned = most > _MOST_SUMMED or not is_even
    offsets = scan(launch, bitmaps, False, force) if is_scanned else launch.state
    groups = 1 if is_scanned else triton.next_power_of_2(most)
    work = launch.work_by_blocks(tile)
    is_common = launch.is_single and launch.kind == tl.float32
    registers = None if is_light else _REGISTERS if is_common else _MORE_REGISTERS
    start(_decode, work.shape[0],
        launch.rows, work, launch.state, offsets, starts if bitmaps else launch.state, scale, tile, groups, _CHUNK,
        launch.kind, bitmaps, is_even, is_scanned, launch.aligned and not bitmaps, launch.is_single, force,
        num_warps=_WARPS, maxnreg=registers, num_stages=1,
    )  # fmt: skip


def encode(launch: Launch, codec: int) -> None:
    """Encode a table; see `hvd_compress.kernels.topk.encode_rows`."""
    select.encode(launch, codec, False)


def verify(launch: Launch) -> None:
    """Check the bodies of payloads whose headers are good."""
    check_lists(launch, False)


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    decode_entries(launch, scale, force)
