"""Random entries, the same on all ranks; see `hvd_compress.compressors.randomk`.

What is drawn is marked, a bit for each element, and counted for each tile of elements. Then it is known where the
values of a tile lie. Marks and counts of incoming payloads are made when these are checked.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.cast import load_block, rounded, store_block, wide_pointer
from hvd_compress.kernels.cuda.draws import key_words
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    ADD,
    GRADIENT,
    GROUPS_AT,
    HEADER,
    LIMIT,
    NONFINITE,
    NUMEL,
    PAYLOAD,
    X,
    column,
    corrected,
    entry,
    expect_body,
    note_bad,
    note_body,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.signs import sum_counts
from hvd_compress.kernels.cuda.start import start

_TILE = 1024
_DRAWN = 1024  # entries that a program draws
_SUMMED = 1024  # tiles that are added up at once
_ROUNDS = 6
_ELEMENTS_AT = tl.constexpr(GROUPS_AT)  # a group is one element
_ODD = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _tiles_before(rows, i, TILE: tl.constexpr):
    """Return where the tiles of row `i` begin among those of all rows."""
    return column(rows, i, _ELEMENTS_AT) // TILE + i


@triton.jit
def _sizes(numel, entries):
    """Mix both numbers, as the parameter of a header has them."""
    return (numel * 0x9E3779B1 + entries) & 0xFFFFFFFF


@triton.jit
def _permuted(numbers, low, high, half, ROUNDS: tl.constexpr):
    """Permute numbers of 2 * `half` bits, all given as uint64."""
    mask = (tl.full((), 1, tl.uint64) << half) - 1
    odd = tl.full((), _ODD, tl.uint64)
    left, right = numbers >> half, numbers & mask
    for number in tl.static_range(ROUNDS):
        word = low if number % 2 == 0 else high
        mixed = (right + word + tl.full((), number << 32, tl.uint64)) * odd
        mixed = (mixed ^ (mixed >> 29)) * odd
        following = left ^ ((mixed >> 32) & mask)
        left, right = right, following
    return (left << half) | right


@triton.jit
def _half_of(numel):
    """Return half of the bits, rounded up, that numbers below `numel` take: at least 1."""
    half = tl.full((), 1, tl.int64)
    while ((numel - 1) >> (2 * half)) > 0:
        half += 1
    return half


@triton.jit
def _clear(marks, counts, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    tl.store(marks + tile * (TILE // 32) + tl.arange(0, TILE // 32), tl.zeros((TILE // 32,), tl.int32))
    tl.store(counts + tile, 0)


@triton.jit
def _mark(
    rows, work, state, marks, counts, DRAWN: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr,
    verifying: tl.constexpr,
):  # fmt: skip
    """Mark what is drawn, and count it for each tile; encoding, the words of the key are written, too."""
    i, _, part = entry(work)
    numel = column(rows, i, NUMEL)
    body = column(rows, i, PAYLOAD) + HEADER
    if verifying:
        count = tl.load(state_of(state, i, 1))
        flags = tl.load(state_of(state, i, 5))
        # what was found not to fit has no values
        count = tl.where((flags >= 0) & ((flags & (NONFINITE | ABSENT)) == 0), count, 0)
        low = tl.load(pointer(body, tl.uint32), mask=count > 0, other=0)
        high = tl.load(pointer(body, tl.uint32) + 1, mask=count > 0, other=0)
    else:
        count = column(rows, i, LIMIT)
        low, high = key_words(rows, i)
        if part == 0:
            tl.store(pointer(body, tl.uint32), low)
            tl.store(pointer(body, tl.uint32) + 1, high)
            note_body(state, i, count, 8 + 4 * count)
            tl.store(state_of(state, i, 7), _sizes(numel, count))
    j = part * DRAWN + tl.arange(0, DRAWN)
    if part * DRAWN < count:
        place = j
        if count < numel:
            half = _half_of(numel).to(tl.uint64)
            one, other = low.to(tl.uint64), high.to(tl.uint64)
            place = _permuted(j.to(tl.uint64), one, other, half, ROUNDS).to(tl.int64)
            outside = (place >= numel) & (j < count)
            while tl.max(outside.to(tl.int32), 0) != 0:
                again = _permuted(place.to(tl.uint64), one, other, half, ROUNDS).to(tl.int64)
                place = tl.where(outside, again, place)
                outside = (place >= numel) & (j < count)
        first = _tiles_before(rows, i, TILE)
        bit = tl.full((DRAWN,), 1, tl.int32) << (place & 31).to(tl.int32)
        tl.atomic_or(marks + first * (TILE // 32) + (place >> 5), bit, mask=j < count, sem="relaxed")
        tl.atomic_add(counts + first + place // TILE, 1, mask=j < count, sem="relaxed")


@triton.jit
def _scan(rows, work, counts, starts, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Write how many entries the tiles before each tile of a row have."""
    i, _, _ = entry(work)
    first = _tiles_before(rows, i, TILE)
    sum_counts(counts + first, (column(rows, i, NUMEL) + TILE - 1) // TILE, starts + first, SIZE)


@triton.jit
def _drawn_in(rows, i, tile, marks, starts, TILE: tl.constexpr):
    """Return which elements of a tile are drawn, and the places of their values."""
    at = _tiles_before(rows, i, TILE) + tile
    o = tl.arange(0, TILE)
    word = tl.load(marks + at * (TILE // 32) + (o >> 5))
    is_drawn = ((word >> (o & 31)) & 1) != 0
    ones = is_drawn.to(tl.int32)
    return is_drawn, tl.load(starts + at) + tl.cumsum(ones, 0) - ones


@triton.jit
def _encode(
    rows, work, state, marks, starts, TILE: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    i, _, tile = entry(work)
    begin = tile * TILE
    left = tl.minimum(column(rows, i, NUMEL) - begin, TILE).to(tl.int32)
    o = tl.arange(0, TILE)
    x = wide_pointer(column(rows, i, X), tl.float32 if feedback else kind, 4, aligned) + begin
    gradient = wide_pointer(column(rows, i, GRADIENT), kind, 4, aligned) + begin
    y, good = corrected(x, gradient, o, o < left, feedback)
    note_bad(state, i, good | (o >= left))
    is_drawn, rank = _drawn_in(rows, i, tile, marks, starts, TILE)
    tl.store(pointer(column(rows, i, PAYLOAD) + HEADER + 8, tl.float32) + rank, y, mask=is_drawn)
    if feedback:
        store_block(x, o, tl.where(is_drawn, 0.0, y), left, TILE)


@triton.jit
def _decode(
    rows, work, state, marks, starts, scale, TILE: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr,
    force: tl.constexpr,
):  # fmt: skip
    first_row, senders, tile = entry(work)
    begin = tile * TILE
    left = tl.minimum(column(rows, first_row, NUMEL) - begin, TILE).to(tl.int32)
    o = tl.arange(0, TILE)
    out = wide_pointer(column(rows, first_row, X), kind, 4, aligned) + begin
    sums = tl.zeros((TILE,), tl.float32)
    if column(rows, first_row, ADD) != 0:
        sums = load_block(out, o, left, TILE).to(tl.float32)
    for i in range(first_row, first_row + senders):
        flags = tl.load(state_of(state, i, 5))
        if force or (flags & (NONFINITE | ABSENT)) == 0:
            is_drawn, rank = _drawn_in(rows, i, tile, marks, starts, TILE)
            values = pointer(column(rows, i, PAYLOAD) + HEADER + 8, tl.float32)
            v = tl.load(values + rank, mask=is_drawn, other=0.0)
            sums = tl.where(is_drawn, sums + v * scale, sums)
        elif (flags & NONFINITE) != 0:
            sums = tl.full((TILE,), float("nan"), tl.float32)
    store_block(out, o, rounded(sums, kind), left, TILE)


@triton.jit
def _verify(rows, work, state):
    i, _, _ = entry(work)
    entries = tl.load(state_of(state, i, 1))
    numel = column(rows, i, NUMEL)
    has_body = expect_body(state, i, (8 + 4 * entries + 7) & ~7)
    parameter = (tl.load(pointer(column(rows, i, PAYLOAD), tl.int64) + 3) >> 32) & 0xFFFFFFFF
    if has_body & ((entries < 1) | (entries > numel) | (parameter != _sizes(numel, entries))):
        tl.store(state_of(state, i, 5), -1)


def _tiles_of(launch: Launch) -> int:
    """Return for how many tiles there is memory; see `_tiles_before`."""
    return int(launch.numels.sum()) // _TILE + len(launch.numels) + 1


def _memory(launch: Launch) -> tuple[Any, Any, Any]:
    """Return memory for marks, for counts of tiles, and for what lies before each."""
    tiles = _tiles_of(launch)
    marks = launch.scratch("marks", tiles * (_TILE // 32), "int32")
    return marks, launch.scratch("counts", tiles, "int32"), launch.scratch("starts", tiles, "int64")


def _draw(launch: Launch, verifying: bool) -> tuple[Any, Any]:
    """Draw the entries of all rows; returns their marks, and where the values of tiles begin."""
    marks, counts, starts = _memory(launch)
    start(_clear, _tiles_of(launch), marks, counts, _TILE, num_warps=1)
    work = launch.work_by_words(_DRAWN)
    start(
        _mark, work.shape[0], launch.rows, work, launch.state, marks, counts, _DRAWN, _ROUNDS, _TILE, verifying,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    work = launch.work_by_rows()
    start(_scan, work.shape[0], launch.rows, work, counts, starts, _SUMMED, _TILE, num_warps=4, num_stages=1)
    return marks, starts


def encode(launch: Launch, codec: int) -> None:
    """Encode a table with groups of one element, so many entries as its limits say; see `RandomK.encode_body`."""
    marks, starts = _draw(launch, False)
    work = launch.work_by_blocks(_TILE)
    start(
        _encode, work.shape[0], launch.rows, work, launch.state, marks, starts, _TILE, launch.feedback, launch.kind,
        launch.aligned, num_warps=4, num_stages=1,
    )  # fmt: skip
    launch.seal(codec, -1)


def verify(launch: Launch) -> None:
    """Check how many values payloads have whose headers are good, and draw the places of these."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, num_warps=1)
    _draw(launch, True)


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of payloads that were verified, or with `force` encoded, in this launch; sums up rows in order."""
    marks, _, starts = _memory(launch)
    work = launch.work_by_blocks(_TILE)
    start(
        _decode, work.shape[0], launch.rows, work, launch.state, marks, starts, scale, _TILE, launch.kind,
        launch.aligned, force, num_warps=4, num_stages=1,
    )  # fmt: skip
