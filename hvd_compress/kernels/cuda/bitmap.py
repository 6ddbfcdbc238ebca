"""The largest entries as a bit for each element, and values; see `hvd_compress.kernels.bitmap`.

A table has rows of this form, and rows with indices as those of `topk`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hvd_compress.kernels.cuda import select, topk
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import GROUP, GROUPS_AT, HEADER, NUMEL, PAYLOAD, column, entry, pointer, state_of
from hvd_compress.kernels.cuda.select import TILE, TILES, count_ones
from hvd_compress.kernels.cuda.start import start
from hvd_compress.kernels.cuda.topk import has_bits, has_body

_STEP = 1024  # tiles that are summed at once
_GROUPS_AT = tl.constexpr(GROUPS_AT)


@triton.jit
def _count_bits(
    rows, work, state, starts, TILE: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr, checks: tl.constexpr,
    force: tl.constexpr,
):  # fmt: skip
    """Sum the bits before each tile; with `checks`, refuse bodies with more or fewer bits than values.

    A group has TILE * TILES elements at most, so that there are enough programs, each for so many elements of a row.
    """
    i, _, part = entry(work)
    if has_body(state, i, force) & has_bits(rows, i, True, force):
        numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
        WORDS: tl.constexpr = TILE * TILES // 32
        number = part * WORDS + tl.arange(0, WORDS)
        words = pointer(column(rows, i, PAYLOAD) + HEADER, tl.int32)
        word = tl.load(words + number, mask=number < 2 * ((numel + 63) >> 6), other=0).to(tl.uint32, bitcast=True)
        ones = tl.sum(tl.reshape(count_ones(word), (TILES, TILE // 32)), 1)
        row_starts = starts + TILES * column(rows, i, _GROUPS_AT)
        tiles = (numel + TILE - 1) // TILE
        t = part * TILES + tl.arange(0, TILES)
        tl.store(row_starts + t, ones.to(tl.int64), mask=t < tiles)
        ticket = tl.full((), 1, tl.int64)
        if checks:
            inside = tl.maximum(tl.minimum(numel - 32 * number, 32), 0).to(tl.uint32)
            beyond = tl.where(inside < 32, word >> tl.minimum(inside, 31), 0)
            ticket += tl.max((beyond != 0).to(tl.int64), 0) << 32
        # all threads have written before one of them takes the ticket
        tl.debug_barrier()
        taken = tl.atomic_add(state_of(state, i, 4), ticket) + ticket
        if (taken & 0xFFFFFFFF) == (numel + group - 1) // group:
            total = tl.zeros((), tl.int64)
            o = tl.arange(0, STEP)
            for at in range(0, tiles, STEP):
                # past the first-level cache, which may hold what was there before
                count = tl.load(row_starts + at + o, mask=at + o < tiles, other=0, cache_modifier=".cg")
                tl.store(row_starts + at + o, total + tl.cumsum(count, 0) - count, mask=at + o < tiles)
                total += tl.sum(count, 0)
            tl.store(state_of(state, i, 4), 0)
            if checks & (((taken >> 32) != 0) | (total != tl.load(state_of(state, i, 1)))):
                tl.store(state_of(state, i, 5), -1)


def _bits(launch: Launch, checks: bool, force: bool) -> Any:
    starts = select.starts_of_tiles(launch)
    work = launch.work_by_groups()
    start(
        _count_bits,
        work.shape[0],
        launch.rows,
        work,
        launch.state,
        starts,
        TILE,
        TILES,
        _STEP,
        checks,
        force,
        num_warps=4,
        num_stages=1,
    )
    return starts


def encode(launch: Launch, codec: int) -> None:
    """Encode a table; see `hvd_compress.kernels.bitmap.encode_rows`."""
    select.encode(launch, codec, True)


def verify(launch: Launch) -> None:
    """Check the bodies of payloads whose headers are good."""
    topk.check_lists(launch, True)
    _bits(launch, True, False)


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    # where bits were written or checked, it is known where tiles begin
    starts = select.starts_of_tiles(launch) if select.is_even(launch) else _bits(launch, False, force)
    topk.decode_entries(launch, scale, force, starts)
