"""Sparse signs: entries `index << 1 | positive`, and one value per sign; see `hvd_compress.kernels.signs`.

Where entries begin depends on how many the groups before have. So kernels that choose leave what is chosen in scratch
memory, one program per row adds the counts up, and then the entries are written to their places.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from hvd_compress.kernels.cuda.cast import rounded, wide_pointer
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    ADD,
    GRADIENT,
    GROUP,
    GROUPS_AT,
    HEADER,
    NONFINITE,
    NUMEL,
    PAYLOAD,
    X,
    column,
    corrected,
    entry,
    note_bad,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

TILE = 4096
"""Elements of a program that compares with a given threshold; groups are whole tiles."""

_ELEMENTS_OF_LANE = 32  # elements of a group that one thread of `_select_groups` holds in registers
_SHORT = 1024  # groups up to here are selected from by the same kernel
_MOVED = 8  # groups whose entries one program moves
_SCANNED = 4096  # counts that are added up at once

_ROW_GROUPS_AT = tl.constexpr(GROUPS_AT)
_TILE = tl.constexpr(TILE)
_WORD = tl.constexpr(16)  # marks of two bits
_INFINITE = tl.constexpr(0x7F800000)
_LOW = tl.constexpr(0xFFFF)

# what `_scan` is to do
_ENCODING = tl.constexpr(0)
_TAKING_BACK = tl.constexpr(1)
_VERIFYING = tl.constexpr(2)
_DECODING = tl.constexpr(3)

# how a launch accesses elements: in wide words, and only those that allow it; all others one by one; or all of them
_WIDE = tl.constexpr(0)
_NARROW = tl.constexpr(1)
_ANY = tl.constexpr(2)
_REGISTERS = (96, 128, 128)  # of a thread, so that there is room for enough warps to hide what they wait for


@triton.jit
def _float(key):
    """Return the float32 whose bits are given; as integers, those above 0 are in the same order."""
    return key.to(tl.float32, bitcast=True)


@triton.jit
def _key(v):
    return v.to(tl.int32, bitcast=True)


# -- places ----------------------------------------------------------------------------------------------------------


@triton.jit
def _groups_of(rows, i):
    return (column(rows, i, NUMEL) + column(rows, i, GROUP) - 1) // column(rows, i, GROUP)


@triton.jit
def _means_of(body, groups, pairs: tl.constexpr):
    """Return the address behind the counts of a body, where the means are if it has `pairs` of them."""
    return body + ((groups * (2 if pairs else 4) + 7) & ~7)


@triton.jit
def _entries_of(body, groups, pairs: tl.constexpr):
    """Return the address of the entries of a body."""
    return _means_of(body, groups, pairs) + (8 * groups if pairs else 0)


@triton.jit
def _count_of(body, g, pairs: tl.constexpr):
    """Load how many entries a group has."""
    return tl.load(pointer(body, tl.uint16 if pairs else tl.uint32) + g).to(tl.int64)


@triton.jit
def _is_mine(start, size, access: tl.constexpr):
    """Tell whether a launch with this kind of access handles the elements; see `_accesses`."""
    if access == _ANY:
        return size > 0
    is_wide = ((start | size) & 3) == 0
    return (size > 0) & (is_wide if access == _WIDE else is_wide == 0)


@triton.jit
def _offsets(start, size, BLOCK: tl.constexpr, access: tl.constexpr):
    """Return the elements of a block, from `start` on, and which are among `size`."""
    o = tl.arange(0, BLOCK)
    if access == _WIDE:
        # the compiler sees that these are multiples of 4
        return (start >> 2) * 4 + o, o < (size >> 2) * 4
    return start + o, o < size


@triton.jit
def _given(rows, i, start, size, BLOCK: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, access: tl.constexpr):
    """Load the elements from `start` on that are to be encoded; see `corrected`. Those beyond `size` are 0."""
    x = wide_pointer(column(rows, i, X), tl.float32 if feedback else kind, 4, access == _WIDE)
    gradient = wide_pointer(column(rows, i, GRADIENT), kind, 4, access == _WIDE)
    o, inside = _offsets(start, size, BLOCK, access)
    y, good = corrected(x, gradient, o, inside, feedback)
    if not feedback:
        # NaN has no order
        y = tl.where(good, y, 0.0)
    return y, good


@triton.jit
def _leave(rows, i, start, size, y, BLOCK: tl.constexpr, access: tl.constexpr):
    """Store so many elements of a residual from `start` on."""
    x = wide_pointer(column(rows, i, X), tl.float32, 4, access == _WIDE)
    o, inside = _offsets(start, size, BLOCK, access)
    tl.store(x + o, y, mask=inside)


@triton.jit
def _marks(is_up, is_down, BLOCK: tl.constexpr):
    """Return words of 16 marks of two bits: 1 for an entry below zero, 3 for one above."""
    marks = tl.where(is_up, 3, tl.where(is_down, 1, 0)).to(tl.uint32)
    marks = tl.reshape(marks, (BLOCK // _WORD, _WORD)) << (2 * tl.arange(0, _WORD).to(tl.uint32))[None, :]
    return tl.sum(marks, 1).to(tl.int32, bitcast=True)


@triton.jit
def _list(words, targets, first, BLOCK: tl.constexpr):
    """Write the entries that are marked; `first` is the index of the first mark."""
    ones = words & 0x55555555
    count = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
    count = (count & 0x0F0F0F0F) + ((count >> 4) & 0x0F0F0F0F)
    count = (count & 0x00FF00FF) + ((count >> 8) & 0x00FF00FF)
    count = (count & 0xFF) + (count >> 16)
    targets += tl.cumsum(count, 0) - count
    value = 2 * (first + tl.arange(0, BLOCK // _WORD) * _WORD)
    for place in range(tl.max(count, 0)):
        # the exponent of the lowest bit says where it is
        bit = ((_key((ones & -ones).to(tl.float32)) >> 23) - 127) & 31
        entries = value + bit + ((words >> bit) >> 1 & 1)
        tl.store(targets + place, entries.to(tl.uint16), mask=ones != 0)
        ones &= ones - 1


# -- a given threshold -----------------------------------------------------------------------------------------------


@triton.jit
def _place_of_tile(rows, i, t):
    """Return of a tile of a row: its group, the first one of the group, where it begins, and how many elements."""
    numel = column(rows, i, NUMEL)
    tiles = (column(rows, i, GROUP) // _TILE).to(tl.int64)
    start = t * _TILE
    return t // tiles, t // tiles * tiles, start, tl.minimum(numel - start, _TILE).to(tl.int32)


@triton.jit
def _marks_of(rows, i, entries, t, last_marks):
    """Return where the marks of a tile are until its entries are written; and whether it is one of the last.

    Entries need eight times the room of marks. So marks of a row's first tiles lie at the end of the room for entries,
    where no entries of these tiles come; those of the last ninth of the tiles lie in scratch memory, and their entries
    are written after those of the others.
    """
    nbytes = (2 * column(rows, i, NUMEL) + 7) & ~7
    firsts = nbytes // (2 * _TILE + _TILE // 4)
    is_last = t >= firsts
    # a row has no more last tiles than groups and one
    number = column(rows, i, _ROW_GROUPS_AT) + i + t - firsts
    inside = pointer(entries + nbytes - (firsts - t) * (_TILE // 4), tl.int32)
    return tl.where(is_last, last_marks + number * (_TILE // _WORD), inside), is_last


@triton.jit
def _mark_tiles(
    rows, work, state, counts, last_marks, tau, feedback: tl.constexpr, kind: tl.constexpr, access: tl.constexpr
):
    """Mark the entries of a tile, count them for the tile and for its group, and leave the residual."""
    i, _, t = entry(work)
    g, _, start, size = _place_of_tile(rows, i, t)
    if _is_mine(start, size, access):
        y, good = _given(rows, i, start, size, _TILE, feedback, kind, access)
        note_bad(state, i, good)
        is_up, is_down = y > tau, y < -tau
        if feedback:
            _leave(rows, i, start, size, tl.where(is_up, y - tau, tl.where(is_down, y + tau, y)), _TILE, access)
        count = tl.sum((is_up | is_down).to(tl.int32), 0)
        tl.store(counts + tl.program_id(0), count)
        body = column(rows, i, PAYLOAD) + HEADER
        if count > 0:
            tl.atomic_add(pointer(body, tl.int32) + g, count, sem="relaxed")
        marks, _last = _marks_of(rows, i, _entries_of(body, _groups_of(rows, i), False), t, last_marks)
        tl.store(marks + tl.arange(0, _TILE // _WORD), _marks(is_up, is_down, _TILE))


@triton.jit
def _list_tiles(rows, work, counts, last_marks, offsets, last: tl.constexpr):
    """Write the entries of a tile that are marked: of one of the first tiles of a row, or of the `last` ones."""
    i, _, t = entry(work)
    g, first, _, size = _place_of_tile(rows, i, t)
    if size > 0:
        body = column(rows, i, PAYLOAD) + HEADER
        entries = _entries_of(body, _groups_of(rows, i), False)
        marks, is_last = _marks_of(rows, i, entries, t, last_marks)
        if is_last == last:
            number = tl.arange(0, _TILE // _WORD)
            words = tl.load(marks + number)
            if not last:
                # what is not sent of a slot stays zero; no thread stores before all have loaded
                tl.debug_barrier()
                tl.store(marks + number, tl.zeros((_TILE // _WORD,), tl.int32))
            of_group = (t - first).to(tl.int32)
            before = tl.arange(0, 8)
            before = tl.sum(tl.load(counts + tl.program_id(0) - of_group + before, mask=before < of_group, other=0), 0)
            at = tl.load(offsets + column(rows, i, _ROW_GROUPS_AT) + g) + before
            _list(words, pointer(entries, tl.uint16) + at, of_group * _TILE, _TILE)


# -- offsets ---------------------------------------------------------------------------------------------------------


@triton.jit
def _refuse(state, i, is_wrong):
    """Note that the payload of row `i` is damaged."""
    if is_wrong:
        tl.store(state_of(state, i, 5), -1)


@triton.jit
def _scan(rows, work, state, offsets, SIZE: tl.constexpr, pairs: tl.constexpr, purpose: tl.constexpr):
    """Write how many entries the groups before each group of a row have.

    Encoding, note the sizes of the body; verifying, refuse a payload whose sizes do not fit.
    """
    i, _, _ = entry(work)
    groups = _groups_of(rows, i)
    body = column(rows, i, PAYLOAD) + HEADER
    ahead = _entries_of(body, groups, pairs) - body
    flags = tl.load(state_of(state, i, 5))
    entries = tl.load(state_of(state, i, 1))
    has_body = groups > 0
    if purpose >= _VERIFYING:
        has_body = (flags >= 0) & ((flags & (NONFINITE | ABSENT)) == 0)
    if purpose == _VERIFYING:
        is_good = tl.load(state_of(state, i, 6)) == HEADER + ahead + ((2 * entries + 7) & ~7)
        if not pairs:
            tau = (tl.load(pointer(body - HEADER, tl.int64) + 3) >> 32).to(tl.int32)
            is_good &= (tau > 0) & (tau < _INFINITE)
        _refuse(state, i, has_body & (is_good == 0))
        has_body &= is_good
    if has_body:
        counts = pointer(body, tl.uint16 if pairs else tl.uint32)
        targets = offsets + column(rows, i, _ROW_GROUPS_AT)
        total = tl.zeros((), tl.int64)
        for begin in range(0, groups, SIZE):
            g = begin + tl.arange(0, SIZE)
            count = tl.load(counts + g, mask=g < groups, other=0).to(tl.int64)
            tl.store(targets + g, total + tl.cumsum(count, 0) - count, mask=g < groups)
            total += tl.sum(count, 0)
        if purpose == _ENCODING:
            tl.store(state_of(state, i, 1), total)
            tl.store(state_of(state, i, 2), ahead + 2 * total)
        if purpose == _VERIFYING:
            _refuse(state, i, total != entries)


@triton.jit
def _verify(rows, work, state, offsets, SIZE: tl.constexpr, pairs: tl.constexpr):
    """Refuse a payload with a group whose entries do not ascend, or reach beyond it."""
    i, _, g = entry(work)
    flags = tl.load(state_of(state, i, 5))
    # sizes fit, so that all entries are there
    if (flags >= 0) & ((flags & (NONFINITE | ABSENT)) == 0):
        group = column(rows, i, GROUP)
        size = tl.minimum(group, column(rows, i, NUMEL) - g * group)
        body = column(rows, i, PAYLOAD) + HEADER
        count = _count_of(body, g, pairs)
        entries = pointer(_entries_of(body, _groups_of(rows, i), pairs), tl.uint16)
        entries += tl.load(offsets + column(rows, i, _ROW_GROUPS_AT) + g)
        for begin in range(0, count, SIZE):
            j = begin + tl.arange(0, SIZE)
            index = tl.load(entries + j, mask=j < count, other=0).to(tl.int32) >> 1
            previous = tl.load(entries + j - 1, mask=(j > 0) & (j < count), other=0).to(tl.int32) >> 1
            is_wrong = (j < count) & ((index >= size) | ((j > 0) & (index <= previous)))
            _refuse(state, i, tl.max(is_wrong.to(tl.int32), 0) != 0)


# -- the largest of each sign ----------------------------------------------------------------------------------------


@triton.jit
def _rank(count, SUBSETS: tl.constexpr):
    """Estimate how many subsets have one of the `count` largest elements."""
    return tl.floor(SUBSETS * (1.0 - tl.exp(-count.to(tl.float32) / SUBSETS)) + 0.5).to(tl.int32)


@triton.jit
def _next_rank(count, k, SUBSETS: tl.constexpr):
    """Return the rank, among the largest of the subsets, to try after the one where `count` and not k were found."""
    before = _rank(k, SUBSETS)
    more = tl.maximum(_rank(tl.maximum(2 * k - count + 1, 1), SUBSETS), before + 1)
    less = tl.minimum(_rank(tl.maximum(2 * k - count - 1, 1), SUBSETS), before - 1)
    return tl.where(count < k, more, less)


@triton.jit
def _at_rank(keys, ranks, rank, SUBSETS: tl.constexpr):
    """Return the key that has this rank, from 1 on; `ranks` says how many are larger than each."""
    rank = tl.minimum(tl.maximum(rank, 1), SUBSETS)
    return tl.min(tl.where(ranks < rank, keys, _INFINITE), 0)


@triton.jit
def _between(low, n_low, high, n_high, k):
    """Return a key from which on about k elements lie, if their number falls exponentially from n_low to n_high."""
    count, target = n_low.to(tl.float32), tl.maximum(k, 1).to(tl.float32)
    least = tl.maximum(n_high.to(tl.float32), 0.5)
    # log(r) is about (r - 1) / sqrt(r)
    share = (count - target) / tl.maximum(count - least, 0.5) * tl.sqrt(least / target)
    return _key(_float(low) + (_float(high) - _float(low)) * share)


@triton.jit
def _inside(t, low, high):
    """Return the key between two others that is next to `t`."""
    return tl.minimum(tl.maximum(t, low + 1), high - 1)


@triton.jit
def _is_open(low, n_low, high, k):
    """Tell whether the threshold is still unknown: the bounds have others between them, and too many lie above."""
    return (n_low > k) & (high - low > 1)


@triton.jit
def _narrowed(low, n_low, high, n_high, k, t, n):
    """Replace one of two bounds by `t`, from which on n elements lie."""
    is_low = _is_open(low, n_low, high, k) & (n >= k)
    is_high = _is_open(low, n_low, high, k) & (n < k)
    return (
        tl.where(is_low, t, low),
        tl.where(is_low, n, n_low),
        tl.where(is_high, t, high),
        tl.where(is_high, n, n_high),
    )


@triton.jit
def _count(y, up, down):
    """Count the elements whose magnitudes are at least that of their sign; both numbers in one."""
    return tl.sum(tl.where(y >= _float(up), 1, tl.where(y <= -_float(down), 65536, 0)), 0)


@triton.jit
def _tightened(y, up, up_to, down, down_to):
    """Return the first and the last element between two keys of each sign; between them there is one at least."""
    least_up = tl.min(tl.where(y >= _float(up), y, float("inf")), 0)
    largest_up = tl.max(tl.where(y < _float(up_to), y, 0.0), 0)
    least_down = tl.max(tl.where(y <= -_float(down), y, float("-inf")), 0)
    largest_down = tl.min(tl.where(y > -_float(down_to), y, 0.0), 0)
    return _key(least_up), _key(largest_up), _key(-least_down), _key(-largest_down)


@triton.jit
def _after_tightening(t, low, n_low, high, n_high, k):
    """Return what to try where the bounds are elements: without the first one, or with the last one, it may be k."""
    t = tl.where(n_high + 1 == k, high - 1, t)
    return tl.where(n_low == k + 1, low + 1, t)


@triton.jit
def _thresholds(y, k_up, n_up, k_down, n_down, BLOCK: tl.constexpr, SUBSETS: tl.constexpr, access: tl.constexpr):
    """Find the k-th largest of n elements above 0, and likewise below, or what lies between it and the next one.

    Returns two keys and how many elements are at least as large; more than k only if some are equal to the k-th.
    """
    # the largest of each subset, whose elements few threads have: a sample of the largest ones
    wide: tl.constexpr = 4 if access == _WIDE and BLOCK >= 4 * SUBSETS else 1
    subsets = tl.reshape(y, (BLOCK // (wide * SUBSETS), SUBSETS, wide))
    tops_up = _key(tl.maximum(tl.max(tl.max(subsets, 2), 0), 0.0))
    tops_down = _key(tl.maximum(-tl.min(tl.min(subsets, 2), 0), 0.0))
    larger = (tops_up[:, None] > tops_up[None, :]).to(tl.int32)
    larger += (tops_down[:, None] > tops_down[None, :]).to(tl.int32) << 16
    ranks = tl.sum(larger, 0)
    ranks_up, ranks_down = ranks & _LOW, ranks >> 16

    low_up, low_down = tl.full((), 1, tl.int32), tl.full((), 1, tl.int32)
    high_up, high_down = tl.max(tops_up, 0) + 1, tl.max(tops_down, 0) + 1
    above_up, above_down = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if _is_open(low_up, n_up, high_up, k_up) | _is_open(low_down, n_down, high_down, k_down):
        up = _inside(_at_rank(tops_up, ranks_up, _rank(k_up, SUBSETS), SUBSETS), low_up, high_up)
        down = _inside(_at_rank(tops_down, ranks_down, _rank(k_down, SUBSETS), SUBSETS), low_down, high_down)
        n = _count(y, up, down)
        rank_up = _next_rank(n & _LOW, k_up, SUBSETS)
        rank_down = _next_rank((n >> 16) & _LOW, k_down, SUBSETS)
        low_up, n_up, high_up, above_up = _narrowed(low_up, n_up, high_up, above_up, k_up, up, n & _LOW)
        low_down, n_down, high_down, above_down = _narrowed(
            low_down, n_down, high_down, above_down, k_down, down, (n >> 16) & _LOW
        )
        attempt = 1
        while _is_open(low_up, n_up, high_up, k_up) | _is_open(low_down, n_down, high_down, k_down):
            up = _between(low_up, n_up, high_up, above_up, k_up)
            down = _between(low_down, n_down, high_down, above_down, k_down)
            if attempt == 1:
                other = _at_rank(tops_up, ranks_up, rank_up, SUBSETS)
                up = tl.where((low_up < other) & (other < high_up), other, up)
                other = _at_rank(tops_down, ranks_down, rank_down, SUBSETS)
                down = tl.where((low_down < other) & (other < high_down), other, down)
            if (attempt > 5) & (attempt % 2 == 1):
                # ends for any distribution
                up, down = low_up + (high_up - low_up) // 2, low_down + (high_down - low_down) // 2
            if (attempt > 4) & (attempt % 4 == 1):
                # ends soon where few values are left, each of many elements
                first_up, last_up, first_down, last_down = _tightened(y, low_up, high_up, low_down, high_down)
                is_wide = high_up - low_up > 1
                low_up, high_up = tl.where(is_wide, first_up, low_up), tl.where(is_wide, last_up + 1, high_up)
                is_wide = high_down - low_down > 1
                low_down = tl.where(is_wide, first_down, low_down)
                high_down = tl.where(is_wide, last_down + 1, high_down)
                up = _after_tightening(up, low_up, n_up, high_up, above_up, k_up)
                down = _after_tightening(down, low_down, n_down, high_down, above_down, k_down)
            up, down = _inside(up, low_up, high_up), _inside(down, low_down, high_down)
            n = _count(y, up, down)
            low_up, n_up, high_up, above_up = _narrowed(low_up, n_up, high_up, above_up, k_up, up, n & _LOW)
            low_down, n_down, high_down, above_down = _narrowed(
                low_down, n_down, high_down, above_down, k_down, down, (n >> 16) & _LOW
            )
            attempt += 1
    low_up, low_down = tl.where(k_up > 0, low_up, _INFINITE), tl.where(k_down > 0, low_down, _INFINITE)
    return low_up, n_up, low_down, n_down


@triton.jit
def _marks_of_last(y, size, up, n_up, down, n_down, BLOCK: tl.constexpr):
    """Mark the elements that are equal to the thresholds, but for the first ones, so many of each."""
    o = tl.arange(0, BLOCK)
    # the first ones end between these and as many elements behind them; what no element is stands for all others
    up_at, down_at = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    up_range, down_range = size, size
    while (up_range > 0) | (down_range > 0):
        up_step, down_step = (up_range + 1) // 2, (down_range + 1) // 2
        is_up = y == tl.where(o < up_at + up_step, up, float("inf"))
        is_down = y == tl.where(o < down_at + down_step, down, float("inf"))
        n = tl.sum(tl.where(is_up, 1, tl.where(is_down, 65536, 0)), 0)
        is_more = (n & _LOW) <= n_up
        up_at += tl.where(is_more, up_step, 0)
        up_range = tl.where(is_more, up_range - up_step, up_step - 1)
        is_more = ((n >> 16) & _LOW) <= n_down
        down_at += tl.where(is_more, down_step, 0)
        down_range = tl.where(is_more, down_range - down_step, down_step - 1)
    is_up = y == tl.where(o >= up_at, up, float("inf"))
    return _marks(is_up, y == tl.where(o >= down_at, down, float("inf")), BLOCK)


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
        groups = _groups_of(rows, i)
        room = tl.where(number < count, _place_of_found(rows, i, groups, groups, places, pi, False), 0)
        tl.store(places + i, total + tl.cumsum(room, 0) - room, mask=number < count)
        total += tl.sum(room, 0)


@triton.jit(do_not_specialize=["pi", "shorter"])
def _select_groups(
    rows, work, state, found, places, pi, shorter, BLOCK: tl.constexpr, SUBSETS: tl.constexpr, SIZE: tl.constexpr,
    mixed: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, access: tl.constexpr,
):  # fmt: skip
    """Write counts, means and residual of a group of more than `shorter` elements, and its entries into `found`."""
    i, _, g = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    longest = tl.minimum(group, numel)
    start = g * group
    size = tl.minimum(group, numel - start).to(tl.int32)
    # other groups are for other launches
    if (longest > shorter) & (longest <= BLOCK) & _is_mine(start, size, access):
        y, good = _given(rows, i, start, size, BLOCK, feedback, kind, access)
        note_bad(state, i, good)
        if feedback:
            _leave(rows, i, start, size, y, BLOCK, access)
        counts = tl.sum(tl.where(y > 0, 1, tl.where(y < 0, 65536, 0)), 0)
        n_up, n_down = counts & _LOW, (counts >> 16) & _LOW
        # zeros count as positive, but are not sent
        k_up = tl.minimum((size - n_down + pi - 1) // pi, n_up)
        k_down = (n_down + pi - 1) // pi
        up, n_up, down, n_down = _thresholds(y, k_up, n_up, k_down, n_down, BLOCK, SUBSETS, access)
        words = _marks(y >= _float(up), y <= -_float(down), BLOCK)
        if (n_up > k_up) | (n_down > k_down):
            # of the elements that are equal to a threshold the first ones are sent
            equal = tl.sum(tl.where(y == _float(up), 1, tl.where(y == -_float(down), 65536, 0)), 0)
            n_up, n_down = (equal & _LOW) - (n_up - k_up), ((equal >> 16) & _LOW) - (n_down - k_down)
            words ^= _marks_of_last(y, size, _float(up), n_up, -_float(down), n_down, BLOCK)
        # each thread gets its own words: elsewise every value that is stored would have to change threads
        words = tl.gather(words, tl.arange(0, BLOCK // _WORD), 0)
        entries = found + _place_of_found(rows, i, tl.program_id(0).to(tl.int64), g, places, pi, mixed)
        _list(words, entries, 0, BLOCK)
        # entries and residuals that other threads have stored are there now
        tl.debug_barrier()
        x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
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
        body = column(rows, i, PAYLOAD) + HEADER
        means = pointer(_means_of(body, _groups_of(rows, i), True), tl.float32) + 2 * g
        tl.store(means, positive)
        tl.store(means + 1, negative)
        tl.store(pointer(body, tl.uint16) + g, (k_up + k_down).to(tl.uint16))


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
    targets = _entries_of(body, _groups_of(rows, i), True).to(tl.pointer_type(tl.uint16)) + at
    sources = found + _place_of_found(rows, i, number.to(tl.int64), g, places, pi, mixed)
    for begin in range(0, most, SIZE):
        j = begin + tl.arange(0, SIZE)[None, :]
        inside = j < of_group[:, None]
        tl.store(targets[:, None] + j, tl.load(sources[:, None] + j, mask=inside, other=0), mask=inside)


# -- decoding --------------------------------------------------------------------------------------------------------


@triton.jit
def _fill(out, start, size, value, BLOCK: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    """Store the same value in so many elements from `start` on."""
    v = tl.full((BLOCK,), value, tl.float32).to(kind)
    for begin in range(0, size, BLOCK):
        o = begin + tl.arange(0, BLOCK)
        if aligned:
            if ((start | size) & 3) == 0:
                tl.store(out + (start >> 2) * 4 + o, v, mask=o < (size >> 2) * 4)
            else:
                tl.store(out + start + o, v, mask=o < size)
        else:
            tl.store(out + start + o, v, mask=o < size)


@triton.jit
def _decode(
    rows, work, state, offsets, scale, own_tau, BLOCK: tl.constexpr, SIZE: tl.constexpr, pairs: tl.constexpr,
    kind: tl.constexpr, aligned: tl.constexpr, force: tl.constexpr,
):  # fmt: skip
    """Fill a group with zeros, and then add the entries of one sender after the other where they belong."""
    first_row, senders, g = entry(work)
    numel, group = column(rows, first_row, NUMEL), column(rows, first_row, GROUP)
    groups = _groups_of(rows, first_row)
    start = g * group
    size = tl.minimum(group, numel - start).to(tl.int32)
    out = wide_pointer(column(rows, first_row, X), kind, 4, aligned)
    adds = column(rows, first_row, ADD) != 0
    all_flags = tl.zeros((), tl.int64)
    if not force:
        for i in range(first_row, first_row + senders):
            all_flags |= tl.load(state_of(state, i, 5))
    if (all_flags & NONFINITE) != 0:
        _fill(out, start, size, float("nan"), BLOCK, kind, aligned)
    else:
        if adds == 0:
            _fill(out, start, size, 0.0, BLOCK, kind, aligned)
        for i in range(first_row, first_row + senders):
            flags = tl.load(state_of(state, i, 5))
            if force or (flags & ABSENT) == 0:
                at = column(rows, i, PAYLOAD)
                body = at + HEADER
                count = _count_of(body, g, pairs).to(tl.int32)
                if pairs:
                    means = pointer(_means_of(body, groups, True), tl.float32) + 2 * g
                    positive, negative = tl.load(means) * scale, tl.load(means + 1) * scale
                else:
                    tau = own_tau
                    if not force:
                        tau = _float((tl.load(pointer(at, tl.int64) + 3) >> 32).to(tl.int32))
                    positive, negative = tau * scale, -tau * scale
                entries = pointer(_entries_of(body, groups, pairs), tl.uint16)
                entries += tl.load(offsets + column(rows, i, _ROW_GROUPS_AT) + g)
                # what other threads have stored in these elements is there now
                tl.debug_barrier()
                for begin in range(0, count, SIZE):
                    j = begin + tl.arange(0, SIZE)
                    sent = tl.load(entries + j, mask=j < count, other=0).to(tl.int32)
                    v = tl.where((sent & 1) != 0, positive, negative)
                    targets = out + start + (sent >> 1)
                    sums = tl.zeros((SIZE,), tl.float32)
                    if adds | (i != first_row):
                        sums = tl.load(targets, mask=j < count, other=0.0).to(tl.float32)
                    tl.store(targets, rounded(sums + v, kind), mask=j < count)


# -- tables ----------------------------------------------------------------------------------------------------------


def _scan_rows(launch: Launch, pairs: bool, purpose: int) -> None:
    """Fill `offsets`, see `_scan`."""
    groups = int(launch.counts.max())
    size = min(_SCANNED, max(128, triton.next_power_of_2(groups)))
    work = launch.work_by_rows()
    offsets = launch.scratch("offsets", int(launch.counts.sum()), "int64")
    start(
        _scan,
        work.shape[0],
        launch.rows,
        work,
        launch.state,
        offsets,
        size,
        pairs,
        purpose,
        num_warps=max(1, size // 512),
    )


def encode_threshold(launch: Launch, codec: int, tau: float, parameter: int) -> None:
    """Encode a table whose groups are whole tiles; see `hvd_compress.kernels.signs.encode_threshold_rows`."""
    work = launch.work_by_parts(TILE)
    count = work.shape[0]
    groups = int(launch.counts.sum())
    counts = launch.scratch("counts", count, "int32")
    last_marks = launch.scratch("marks", (groups + len(launch.counts)) * (TILE // 16), "int32")
    offsets = launch.scratch("offsets", groups, "int64")
    for access in _accesses(launch):
        start(_mark_tiles, count,
            launch.rows, work, launch.state, counts, last_marks, tau, launch.feedback, launch.kind, access,
            num_warps=8,
        )  # fmt: skip
    _scan_rows(launch, False, _ENCODING.value)
    for last in (False, True):
        start(_list_tiles, count, launch.rows, work, counts, last_marks, offsets, last, num_warps=2)
    launch.seal(codec, parameter)


def encode_adaptive(launch: Launch, codec: int, pi: int) -> None:
    """Encode a table with groups of 32768 elements or less; see `hvd_compress.kernels.signs.encode_adaptive_rows`."""
    work = launch.work_by_groups()
    count = work.shape[0]
    most = np.minimum(launch.groups, (launch.groups + 2 * pi - 2) // pi)
    mixed = bool((most != most[0]).any())
    found = launch.scratch("found", int((launch.counts * most).sum()), "uint16")
    places = launch.scratch("places", len(most), "int64")
    offsets = launch.scratch("offsets", count, "int64")
    if mixed:
        start(_place_rows, 1, launch.rows, len(most), places, pi, 1024, num_warps=4)
    shorter = 0
    for block in _blocks(launch):
        warps = max(1, block // (32 * _ELEMENTS_OF_LANE))
        # all pairs of subsets are compared
        subsets = min(block, 64 if warps >= 4 else 32)
        for access in _accesses(launch):
            # more threads than 512 have no more registers than these anyway
            registers = _REGISTERS[access] if warps <= 16 else None
            start(_select_groups, count,
                launch.rows, work, launch.state, found, places, pi, shorter, block, subsets, 64 * warps, mixed,
                launch.feedback, launch.kind, access, num_warps=warps, maxnreg=registers,
            )  # fmt: skip
        shorter = block
    _scan_rows(launch, True, _ENCODING.value)
    longest = int(most.max())
    size = min(128, triton.next_power_of_2(longest))
    start(
        _move,
        triton.cdiv(count, _MOVED),
        launch.rows,
        work,
        offsets,
        found,
        places,
        count,
        longest,
        pi,
        _MOVED,
        size,
        mixed,
        num_warps=4,
    )
    launch.seal(codec, 2)


def _accesses(launch: Launch) -> list[int]:
    """Return the launches that it takes to access all elements of a table in words as wide as can be."""
    if not launch.aligned:
        return [_ANY.value]
    is_whole = not ((launch.numels | launch.groups) & 3).any()
    return [_WIDE.value] if is_whole else [_WIDE.value, _NARROW.value]


def _blocks(launch: Launch) -> list[int]:
    """Return the sizes of programs that the groups of a table need, ascending."""
    longest = int(launch.groups.max())
    least = max(16, min(_SHORT, triton.next_power_of_2(longest)))
    return sorted({max(least, triton.next_power_of_2(int(size))) for size in set(launch.groups.tolist())})


def verify_threshold(launch: Launch) -> None:
    """Check bodies of thresholds whose headers are good."""
    _verify_groups(launch, False)


def verify_adaptive(launch: Launch) -> None:
    """Check bodies with two means per group whose headers are good."""
    _verify_groups(launch, True)


def _verify_groups(launch: Launch, pairs: bool) -> None:
    _scan_rows(launch, pairs, _VERIFYING.value)
    work = launch.work_by_groups()
    offsets = launch.scratch("offsets", work.shape[0], "int64")
    size = min(1024, max(128, triton.next_power_of_2(int(launch.groups.max())) // 32))
    start(_verify, work.shape[0], launch.rows, work, launch.state, offsets, size, pairs, num_warps=max(1, size // 256))


def decode_threshold(launch: Launch, scale: float, force: bool = False, *, tau: float) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order.

    With `force` they are one's own, made with this `tau`.
    """
    _decode_groups(launch, scale, tau, force, False)


def decode_adaptive(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode like `decode_threshold`, payloads with two means per group."""
    _decode_groups(launch, scale, 0.0, force, True)


def _decode_groups(launch: Launch, scale: float, tau: float, force: bool, pairs: bool) -> None:
    work = launch.work_by_groups_of_tensors()
    groups = int(launch.counts.sum())
    if launch.kind != tl.float32 and work.shape[0] != groups:
        raise NotImplementedError("sums of several payloads of sparse signs are made in float32")
    _scan_rows(launch, pairs, _TAKING_BACK.value if force else _DECODING.value)
    longest = int(launch.groups.max())
    warps = max(1, min(8, triton.next_power_of_2(longest) // 1024))
    start(_decode, work.shape[0],
        launch.rows, work, launch.state, launch.scratch("offsets", groups, "int64"), scale, tau, 512 * warps,
        64 * warps, pairs, launch.kind, launch.aligned, force, num_warps=warps,
    )  # fmt: skip
