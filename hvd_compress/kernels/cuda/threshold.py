"""Sparse signs of what a given threshold leaves; see `hvd_compress.kernels.signs`.

One launch marks entries, two bits for each element of a tensor, and counts them for each group. Another one writes
them to their places. Marks of a row lie at the end of the room for its entries, which needs eight times as much.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda import signs
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    GRADIENT,
    GROUP,
    HEADER,
    NUMEL,
    PAYLOAD,
    X,
    column,
    entry,
    note_body,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.signs import (
    ROW_GROUPS_AT,
    WORD,
    entries_of,
    given,
    groups_of,
    leave,
    list_marked,
    marks_of,
)
from hvd_compress.kernels.cuda.start import start

TILE = 4096
"""Elements of a program that compares; groups are whole tiles."""
_WARPS = 8
_REGISTERS = 64  # of a thread: enough programs run at a time for memory to be busy
_WORDS = 256  # of marks, for each warp of a program that lists
_COUNTS = 1024  # of groups that are added up at once


@triton.jit
def _marks_of(numel, entries):
    """Return where the marks of a row are whose entries begin there, and how many words."""
    words = (numel + WORD - 1) // WORD
    return pointer(entries + ((2 * numel + 7) & ~7) - 4 * words, tl.int32), words


@triton.jit
def _mark_tile(
    x, gradient, start, size, marks, word, words, tau, TILE: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    """Mark a tile and leave its residual; returns how many entries it has, and above 65535 if a value is not finite."""
    y, good = given(x, gradient, start, size, TILE, feedback, kind, wide)
    is_up, is_down = y > tau, y < -tau
    if feedback:
        leave(x, start, size, y - tl.where(is_up, tau, tl.where(is_down, -tau, 0.0)), TILE, wide)
    word += tl.arange(0, TILE // WORD)
    tl.store(marks + word, marks_of(is_up, is_down, TILE), mask=word < words)
    return tl.sum(tl.where(is_up | is_down, 1, 0) + tl.where(good, 0, 65536), 0)


@triton.jit
def _mark(
    rows, work, state, tau, TILE: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr
):
    """Mark the entries of a tile, count them for its group, and leave the residual."""
    i, _, t = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    x, gradient = column(rows, i, X), column(rows, i, GRADIENT)
    body = column(rows, i, PAYLOAD) + HEADER
    start = t * TILE
    size = tl.minimum(numel - start, TILE).to(tl.int32)
    # divisions of 64 bits take long
    tiles = (group // TILE).to(tl.int32)
    groups = (((numel + TILE - 1) // TILE).to(tl.int32) + tiles - 1) // tiles
    marks, words = _marks_of(numel, entries_of(body, groups.to(tl.int64), False))
    word = t * (TILE // WORD)
    if aligned:
        if size == TILE:
            found = _mark_tile(x, gradient, start, TILE, marks, word, words, tau, TILE, feedback, kind, True)
        else:
            found = _mark_tile(x, gradient, start, size, marks, word, words, tau, TILE, feedback, kind, False)
    else:
        found = _mark_tile(x, gradient, start, size, marks, word, words, tau, TILE, feedback, kind, False)
    if found != 0:
        tl.atomic_add(pointer(body, tl.int32) + t.to(tl.int32) // tiles, found & 65535, sem="relaxed")
    if found > 65535:
        tl.atomic_or(state_of(state, i, 0), 1)


@triton.jit
def _list(rows, work, state, offsets, WORDS: tl.constexpr, COUNTS: tl.constexpr):
    """Write the entries of a group that are marked, and how many those before it have."""
    i, _, g = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    groups = groups_of(rows, i)
    body = column(rows, i, PAYLOAD) + HEADER
    counts = pointer(body, tl.int32)
    before, total = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for begin in range(0, groups, COUNTS):
        number = begin + tl.arange(0, COUNTS)
        count = tl.load(counts + number, mask=number < groups, other=0)
        before += tl.sum(tl.where(number < g, count, 0), 0)
        total += tl.sum(count, 0)
    tl.store(offsets + column(rows, i, ROW_GROUPS_AT) + g, before)
    entries = entries_of(body, groups, False)
    marks, words = _marks_of(numel, entries)
    if g == 0:
        note_body(state, i, total, entries - body + 2 * total)
    first, last = g, g + 1
    if entries + 2 * total > marks.to(tl.int64):
        # almost all is sent, so that entries come where marks are: groups are listed in turn, and none reaches the next
        first, last = g * 0, tl.where(g == 0, groups, 0)
    for turn in range(first, last):
        word = tl.arange(0, WORDS)
        at = turn * (group // WORD) + word
        inside = (word < group // WORD) & (at < words)
        marked = tl.load(marks + at, mask=inside, other=0)
        # what is not sent of a slot stays zero; no thread stores before all have loaded
        tl.debug_barrier()
        tl.store(marks + at, tl.zeros((WORDS,), tl.int32), mask=inside)
        tl.debug_barrier()
        list_marked(marked, pointer(entries, tl.uint16) + before, WORDS)
        before += tl.load(counts + turn)


def encode(launch: Launch, codec: int, tau: float, parameter: int) -> None:
    """Encode a table whose groups are whole tiles; see `hvd_compress.kernels.signs.encode_threshold_rows`."""
    # nothing is added up when encoding, so that each row has its blocks
    work = launch.work_by_blocks(TILE)
    start(
        _mark, work.shape[0], launch.rows, work, launch.state, tau, TILE, launch.feedback, launch.kind, launch.aligned,
        num_warps=_WARPS, maxnreg=_REGISTERS,
    )  # fmt: skip
    work = launch.work_by_groups()
    words = max(_WORDS, triton.next_power_of_2(launch.longest) // 16)
    start(
        _list, work.shape[0], launch.rows, work, launch.state, signs.offsets_of(launch), words, _COUNTS,
        num_warps=words // _WORDS, num_stages=1, maxnreg=_REGISTERS,
    )  # fmt: skip
    launch.seal(codec, parameter)


def verify(launch: Launch) -> None:
    """Check bodies of thresholds whose headers are good."""
    signs.verify(launch, False)


def decode(launch: Launch, scale: float, force: bool = False, *, tau: float) -> None:
    """Decode a table of checked payloads, or with `force` of one's own, made with this `tau`; see `signs.decode`."""
    signs.decode(launch, scale, tau, force, False)
