"""Sparse signs: the largest share of each sign of each group; see `hvd_compress.kernels.signs`.

Entries of a group wait in scratch memory until those of all groups are counted; then they are moved to their places.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import triton
import triton.language as tl

from hvd_compress.kernels.cuda import signs
from hvd_compress.kernels.cuda.largest import marks_of_last, thresholds
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import GRADIENT, GROUP, HEADER, NUMEL, PAYLOAD, X, column, entry, note_bad, pointer
from hvd_compress.kernels.cuda.signs import (
    WORD,
    entries_of,
    float_of,
    given,
    groups_of,
    leave,
    list_marked,
    marks_of,
    means_of,
)
from hvd_compress.kernels.cuda.start import start

_ELEMENTS_OF_LANE = 32  # elements of a group that one thread holds in registers
_REGISTERS = 96  # of a thread, so that there is room for enough warps to hide what they wait for
_SHORT = 1024  # groups up to here are selected from by the same launch
_MOVED = 8  # groups whose entries one program moves
_LOW = tl.constexpr(0xFFFF)


@triton.jit
def _place_of_found(rows, i, number, g, places, pi, mixed: tl.constexpr):
    """Return where entries of a group are until they are moved; its room is that for the most that it may have.

    Its number is among the groups of all rows. Rows are in `places` if they have `mixed` sizes.
    """
    longest = tl.minimum(column(rows, i, GROUP), column(rows, i, NUMEL)).to(tl.int32)
    most = tl.minimum(longest, (longest + 2 * pi - 2) // pi)
    if mixed:
        return tl.load(places + i) + g * most
    return number * most


@triton.jit(do_not_specialize=["count", "pi"])
def _place_rows(rows, count, places, pi, SIZE: tl.constexpr):
    """Write where the entries of the groups of each row begin, see `_place_of_found`."""
    total = tl.zeros((), tl.int64)
    for begin in range(0, count, SIZE):
        number = begin + tl.arange(0, SIZE)
        i = tl.minimum(number, count - 1).to(tl.int64)
        groups = groups_of(rows, i)
        room = tl.where(number < count, _place_of_found(rows, i, groups, groups, places, pi, False), 0)
        tl.store(places + i, total + tl.cumsum(room, 0) - room, mask=number < count)
        total += tl.sum(room, 0)


@triton.jit
def _select(
    x, gradient, start, size, body, groups, g, state, i, entries, pi, BLOCK: tl.constexpr, SUBSETS: tl.constexpr,
    SIZE: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Write counts, means and residual of a group, and its entries."""
    y, good = given(x, gradient, start, size, BLOCK, feedback, kind, wide)
    note_bad(state, i, good)
    if feedback:
        leave(x, start, size, y, BLOCK, wide)
    counts = tl.sum(tl.where(y > 0, 1, tl.where(y < 0, 65536, 0)), 0)
    n_up, n_down = counts & _LOW, (counts >> 16) & _LOW
    # zeros count as positive, but are not sent
    k_up = tl.minimum((size - n_down + pi - 1) // pi, n_up)
    k_down = (n_down + pi - 1) // pi
    up, n_up, down, n_down = thresholds(y, k_up, n_up, k_down, n_down, BLOCK, SUBSETS, wide)
    words = marks_of(y >= float_of(up), y <= -float_of(down), BLOCK)
    if (n_up > k_up) | (n_down > k_down):
        # of the elements that are equal to a threshold the first ones are sent
        equal = tl.sum(tl.where(y == float_of(up), 1, tl.where(y == -float_of(down), 65536, 0)), 0)
        n_up, n_down = (equal & _LOW) - (n_up - k_up), ((equal >> 16) & _LOW) - (n_down - k_down)
        words ^= marks_of_last(y, size, float_of(up), n_up, -float_of(down), n_down, BLOCK)
    # each thread gets its own words: elsewise every value that is stored would have to change threads
    words = tl.gather(words, tl.arange(0, BLOCK // WORD), 0)
    list_marked(words, entries, BLOCK // WORD)
    # entries and residuals that other threads have stored are there now
    tl.debug_barrier()
    x = pointer(x, tl.float32 if feedback else kind) + start
    upper, lower = tl.zeros((SIZE,), tl.float64), tl.zeros((SIZE,), tl.float64)
    for begin in range(0, k_up + k_down, SIZE):
        j = begin + tl.arange(0, SIZE)
        index = tl.load(entries + j, mask=j < k_up + k_down, other=0).to(tl.int32) >> 1
        v = tl.load(x + index, mask=j < k_up + k_down, other=0.0).to(tl.float32)
        upper += tl.maximum(v, 0.0).to(tl.float64)
        lower += tl.minimum(v, 0.0).to(tl.float64)
    positive = (tl.sum(upper, 0) / tl.maximum(k_up, 1).to(tl.float64)).to(tl.float32)
    negative = (tl.sum(lower, 0) / tl.maximum(k_down, 1).to(tl.float64)).to(tl.float32)
    if feedback:
        # no thread stores before all have loaded
        tl.debug_barrier()
        for begin in range(0, k_up + k_down, SIZE):
            j = begin + tl.arange(0, SIZE)
            sent = tl.load(entries + j, mask=j < k_up + k_down, other=0).to(tl.int32)
            v = tl.load(x + (sent >> 1), mask=j < k_up + k_down, other=0.0)
            v -= tl.where((sent & 1) != 0, positive, negative)
            tl.store(x + (sent >> 1), v, mask=j < k_up + k_down)
    means = pointer(means_of(body, groups, True), tl.float32) + 2 * g
    tl.store(means, positive)
    tl.store(means + 1, negative)
    tl.store(pointer(body, tl.uint16) + g, (k_up + k_down).to(tl.uint16))


@triton.jit(do_not_specialize=["pi", "shorter"])
def _select_groups(
    rows, work, state, found, places, pi, shorter, BLOCK: tl.constexpr, SUBSETS: tl.constexpr, SIZE: tl.constexpr,
    mixed: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Select from a group of more than `shorter` elements; its entries come into `found`."""
    i, _, g = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    x, gradient = column(rows, i, X), column(rows, i, GRADIENT)
    body, groups = column(rows, i, PAYLOAD) + HEADER, groups_of(rows, i)
    longest = tl.minimum(group, numel)
    start = g * group
    size = tl.minimum(group, numel - start).to(tl.int32)
    # other groups are for other launches
    if (longest > shorter) & (longest <= BLOCK):
        entries = found + _place_of_found(rows, i, tl.program_id(0).to(tl.int64), g, places, pi, mixed)
        if even or not aligned:
            _select(
                x, gradient, start, size, body, groups, g, state, i, entries, pi, BLOCK, SUBSETS, SIZE, feedback, kind,
                aligned,
            )  # fmt: skip
        elif ((start | size) & 3) == 0:
            _select(
                x, gradient, start, size, body, groups, g, state, i, entries, pi, BLOCK, SUBSETS, SIZE, feedback, kind,
                True,
            )  # fmt: skip
        else:
            _select(
                x, gradient, start, size, body, groups, g, state, i, entries, pi, BLOCK, SUBSETS, SIZE, feedback, kind,
                False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "most", "pi"])
def _move(
    rows, work, offsets, found, places, count, most, pi, GROUPS: tl.constexpr, SIZE: tl.constexpr, mixed: tl.constexpr
):
    """Write the entries of some groups, `most` of each, where they belong."""
    number = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    is_there = number < count
    i = tl.load(work + 4 * number, mask=is_there, other=0).to(tl.int64)
    g = tl.load(work + 4 * number + 2, mask=is_there, other=0).to(tl.int64)
    body = column(rows, i, PAYLOAD) + HEADER
    of_group = tl.load(body.to(tl.pointer_type(tl.uint16)) + g, mask=is_there, other=0).to(tl.int32)
    at = tl.load(offsets + number, mask=is_there, other=0)
    targets = entries_of(body, groups_of(rows, i), True).to(tl.pointer_type(tl.uint16)) + at
    sources = found + _place_of_found(rows, i, number.to(tl.int64), g, places, pi, mixed)
    for begin in range(0, most, SIZE):
        j = begin + tl.arange(0, SIZE)[None, :]
        inside = j < of_group[:, None]
        tl.store(targets[:, None] + j, tl.load(sources[:, None] + j, mask=inside, other=0), mask=inside)


class _Sizes(NamedTuple):
    """What follows from the sizes of the rows of a table."""

    longest: int  # entries that a group may have
    found: int  # entries that all groups may have
    mixed: bool  # whether groups of rows may have different numbers of entries
    even: bool  # whether groups begin and end at multiples of 4 elements
    blocks: tuple[int, ...]  # sizes of programs that the groups need, ascending


_sizes: WeakKeyDictionary[Launch, dict[int, _Sizes]] = WeakKeyDictionary()


def _sizes_of(launch: Launch, pi: int) -> _Sizes:
    kept = _sizes.setdefault(launch, {})
    if pi not in kept:
        most = np.minimum(launch.groups, (launch.groups + 2 * pi - 2) // pi)
        least = max(16, min(_SHORT, triton.next_power_of_2(launch.longest)))
        blocks = sorted({max(least, triton.next_power_of_2(int(size))) for size in set(launch.groups.tolist())})
        mixed, even = bool((most != most[0]).any()), not ((launch.numels | launch.groups) & 3).any()
        kept[pi] = _Sizes(int(most.max()), int((launch.counts * most).sum()), mixed, even, tuple(blocks))
    return kept[pi]


def encode(launch: Launch, codec: int, pi: int) -> None:
    """Encode a table with groups of 32768 elements or less; see `hvd_compress.kernels.signs.encode_adaptive_rows`."""
    sizes = _sizes_of(launch, pi)
    work = launch.work_by_groups()
    count, rows = work.shape[0], launch.state.shape[0]
    found = launch.scratch("found", sizes.found, "uint16")
    places = launch.scratch("places", rows, "int64")
    if sizes.mixed:
        start(_place_rows, 1, launch.rows, rows, places, pi, 1024, num_warps=4, num_stages=1)
    shorter = 0
    for block in sizes.blocks:
        warps = max(1, block // (32 * _ELEMENTS_OF_LANE))
        # all pairs of subsets are compared
        subsets = min(block, 64 if warps >= 4 else 32)
        start(
            _select_groups, count, launch.rows, work, launch.state, found, places, pi, shorter, block, subsets,
            64 * warps, sizes.mixed, launch.feedback, launch.kind, launch.aligned, sizes.even,
            # more threads than 512 have no more registers than these anyway
            num_warps=warps, num_stages=1, maxnreg=_REGISTERS if warps <= 16 else None,
        )  # fmt: skip
        shorter = block
    signs.scan(launch, True, False)
    size = min(128, triton.next_power_of_2(sizes.longest))
    start(
        _move, triton.cdiv(count, _MOVED), launch.rows, work, signs.offsets_of(launch), found, places, count,
        sizes.longest, pi, _MOVED, size, sizes.mixed, num_warps=4, num_stages=1,
    )  # fmt: skip
    launch.seal(codec, 2)


def verify(launch: Launch) -> None:
    """Check bodies with two means per group whose headers are good."""
    signs.verify(launch, True)


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, or with `force` of one's own; see `signs.decode`."""
    signs.decode(launch, scale, 0.0, force, True)
