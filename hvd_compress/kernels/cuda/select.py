"""Select the k largest magnitudes of each row, exactly, and write the bodies of top-k and percentile.

A magnitude is what a float32 has in its bits beside the sign: an integer, in the order of the numbers. A short row is
done by one program. In a long one a sample says between which magnitudes the k-th very likely lies; the first look at
all elements lists those between them for each tile, if they are few, so that the next launches need not read the
others. Each launch counts those above and in equal bins between them, and the program that ends last chooses the bin
with the k-th for the next launch, until a bin is one magnitude. Then it is known how many entries each tile sends, and
where they go. If the sample has misled, the bins begin anew with what it has ruled out.

Where few elements are sent, the first look also marks the sectors of memory that may have one, a bit for each, and the
last launch reads these alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from hvd_compress.kernels.bitmap import BITS_OF_INDEX
from hvd_compress.kernels.cuda.cast import wide_pointer
from hvd_compress.kernels.cuda.envelope import mixed
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    GRADIENT,
    GROUP,
    GROUPS_AT,
    HEADER,
    LIMIT,
    NUMEL,
    PAYLOAD,
    X,
    column,
    corrected,
    corrected_all,
    entry,
    note_bad,
    note_body,
    packed,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

TILE = 4096
"""Elements that one program of a long row holds."""

TILES = 16
"""Tiles in as many elements as 16 bits reach."""

_SHORT = 16384  # the most elements of a row that one program holds
SECTOR = 8
"""Elements of float32 that memory gives at once."""

_SAMPLE = 16384  # magnitudes that bound the k-th
_DRAWN = 1024  # of them by one program
_STEP = 1024  # bins or tiles that are summed at once
_SLOT = 64  # numbers kept of each tile: how many are listed, how many are above, and what is listed
_CHUNK = 1024  # elements that a program reads at once where they are not listed
_SECTORS = 64  # that a program reads at once
_SPARSE = 1 / 32  # the largest share of elements for which sectors are marked
# warps, and the most registers of a thread
_SHORT_WARPS, _SHORT_REGISTERS = 16, 64
_SCAN_WARPS, _SCAN_REGISTERS = 8, 64
_NARROW_WARPS, _NARROW_REGISTERS = 4, 64
_WRITE_WARPS, _WRITE_REGISTERS = 8, 64
_SECTORS_WARPS = 4
_MOST_BITS = 16  # of the number of bins
_BINS = 256  # for each group of TILE * 16 elements

# what is known of a long row: int64
_LOW = tl.constexpr(0)  # the least magnitude that the k-th may be
_SPAN = tl.constexpr(1)  # how many magnitudes from there on
_SHIFT = tl.constexpr(2)  # a bin is 2**shift of them
_ABOVE = tl.constexpr(3)  # elements that are larger than all of them
_TICKET = tl.constexpr(4)  # parts that have counted
_ANEW = tl.constexpr(5)  # not zero if all parts must count, also those that had nothing within the span before
_DONE = tl.constexpr(6)  # not zero if the places of all parts are known
_LISTED = tl.constexpr(7)  # not zero if the span is within that of the lists
_MARKED = tl.constexpr(8)  # the least magnitude that sectors are marked for
_NUMBERS = 9
_KNOWN = tl.constexpr(_NUMBERS)

_GROUPS_AT = tl.constexpr(GROUPS_AT)
_TILES = tl.constexpr(TILES)
_SECTOR = tl.constexpr(SECTOR)
_PER_WORD = tl.constexpr(32 * SECTOR)  # elements that a word of marks stands for
_INFINITY = tl.constexpr(0x7F800000)
_FEW_BINS = tl.constexpr(4096)  # enough where the next launch can tell the rest, and quicker to sum
_ALL = tl.constexpr(1 << 31)  # more than any magnitude
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_BITS_OF_INDEX = tl.constexpr(BITS_OF_INDEX)
_MARGIN = tl.constexpr(2.5)  # in standard deviations, and as many elements more


@triton.jit
def padded(nbytes):
    """Round up to a multiple of 8."""
    return (nbytes + 7) & ~7


@triton.jit
def wants_bits(rows, i):
    """Tell whether the body of row `i` has a bit for each element, and no indices; see `kernels.bitmap`."""
    return column(rows, i, LIMIT) * _BITS_OF_INDEX > column(rows, i, NUMEL)


@triton.jit
def _magnitude(y):
    return y.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def kth(sizes, low, from_low, k, slack):
    """Find a number that `k` to `k + slack` of the absolute values `sizes` are not below, if there is one.

    Else the k-th largest of them is found. It is not below the magnitude `low`, 1 at least, which `from_low` are not
    below: that is found if these are fewer than `k`.

    Returns its magnitude, how many are not below, and how many are above it, or 0 if all that are not below are wanted.
    """
    high = tl.minimum(tl.max(sizes, 0).to(tl.int32, bitcast=True), _INFINITY) + 1
    from_high = tl.zeros((), tl.int32)
    turn = tl.zeros((), tl.int32)
    # steps alternate between where the counts say it is and the middle, so that none of the two can stall
    while (high - low > 1) & (from_low > k + slack):
        share = (from_low - k - slack // 2).to(tl.float32) / (from_low - from_high).to(tl.float32)
        proposed = low + ((high - low).to(tl.float32) * share).to(tl.int32)
        at = tl.where(turn == 0, proposed, low + ((high - low) >> 1))
        at = tl.maximum(tl.minimum(at, high - 1), low + 1)
        turn = 1 - turn
        count = tl.sum((sizes >= at.to(tl.float32, bitcast=True)).to(tl.int32), 0)
        is_low = count >= k
        low = tl.where(is_low, at, low)
        from_low = tl.where(is_low, count, from_low)
        high = tl.where(is_low, high, at)
        from_high = tl.where(is_low, from_high, count)
    return low, from_low, from_high


@triton.jit
def chosen_of(sizes, threshold, left):
    """Return which are above a threshold, or among the first `left` equal to it; the rank of each; what is counted.

    That is 1 for each above, and 65536 for each equal.
    """
    # a magnitude as a number: absolute values are compared without an instruction of their own
    at = threshold.to(tl.float32, bitcast=True)
    is_above = sizes > at
    is_tie = sizes == at
    # both ranks in one number
    counted = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
    before = tl.cumsum(counted, 0) - counted
    ties = before >> 16
    rank = (before & 0xFFFF) + tl.minimum(ties, left)
    return is_above | (is_tie & (ties < left)), rank, counted


@triton.jit
def _put_bits(bits, words, size, TILE: tl.constexpr):
    """Write the bits of a tile's elements, given as words of 32."""
    number = tl.arange(0, TILE // 32)
    tl.store(bits + number, words, mask=32 * number < size)


@triton.jit
def _send_list(rows, i, y, o, chosen, rank, start, before, found):
    """Write the chosen of some elements, `o` behind `start`, into the lists of row `i`, behind `before` of `found`."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    body = column(rows, i, PAYLOAD) + HEADER
    indices_at = body + padded(4 * ((numel + group - 1) // group))
    g = start // group
    index = o + (start - g * group).to(tl.int32)
    tl.store(pointer(indices_at, tl.uint16) + before + rank, index.to(tl.uint16), mask=chosen)
    tl.store(pointer(indices_at + padded(2 * found), tl.float32) + before + rank, y, mask=chosen)
    tl.atomic_add(pointer(body, tl.int32) + g, tl.sum(chosen.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _send(
    rows, i, y, chosen, words, rank, start, before, size, found, TILE: tl.constexpr, bitmaps: tl.constexpr,
    is_even: tl.constexpr,
):  # fmt: skip
    """Write the chosen elements of a tile into the body of row `i`, behind `before` entries of `found`."""
    o = tl.arange(0, TILE)
    has_bits = False
    if bitmaps:
        has_bits = wants_bits(rows, i)
    if has_bits:
        body = column(rows, i, PAYLOAD) + HEADER
        bits = pointer(body, tl.int32) + (start >> 5)
        if is_even:
            _put_bits(bits, words, size, TILE)
        else:
            at = o + (start & 31).to(tl.int32)
            tl.atomic_or(bits + (at >> 5), tl.full((TILE,), 1, tl.int32) << (at & 31), mask=chosen, sem="relaxed")
        values_at = body + 8 * ((column(rows, i, NUMEL) + 63) >> 6)
        tl.store(pointer(values_at, tl.float32) + before + rank, y, mask=chosen)
    else:
        _send_list(rows, i, y, o, chosen, rank, start, before, found)


@triton.jit
def _note_found(rows, state, i, found, bitmaps: tl.constexpr):
    """Note entries, size and form of the body of row `i`."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    nbytes = padded(4 * ((numel + group - 1) // group)) + padded(2 * found)
    if bitmaps:
        has_bits = wants_bits(rows, i)
        nbytes = tl.where(has_bits, 8 * ((numel + 63) >> 6), nbytes)
        tl.store(state_of(state, i, 7), has_bits.to(tl.int64))
    note_body(state, i, found, nbytes + 4 * found)


@triton.jit
def _place_of_part(rows, i, part, TILE: tl.constexpr, is_even: tl.constexpr):
    """Return the parts of row `i`, where a part begins, and its elements, which may be none where groups are odd."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    if is_even:
        parts = (numel + TILE - 1) // TILE
        start = part * TILE
        size = tl.minimum(numel - start, TILE).to(tl.int32)
    else:
        in_group = (group + TILE - 1) // TILE
        g = part // in_group
        parts = in_group * ((numel + group - 1) // group)
        start = g * group + (part % in_group) * TILE
        end = tl.minimum(tl.minimum(start + TILE, (g + 1) * group), numel)
        size = tl.maximum(end - start, 0).to(tl.int32)
    return parts, start, size


@triton.jit
def _place_tiles(tiles, starts, parts, allowed, STEP: tl.constexpr):
    """Sum what is above the threshold before each tile, and the ties; returns the entries, with `allowed` ties."""
    above = tl.zeros((), tl.int64)
    ties = tl.zeros((), tl.int64)
    o = tl.arange(0, STEP)
    for at in range(0, parts, STEP):
        t = at + o
        of_tile = tl.load(tiles + 2 * t, mask=t < parts, other=0, cache_modifier=".cg").to(tl.int64)
        tied = tl.load(tiles + 2 * t + 1, mask=t < parts, other=0, cache_modifier=".cg").to(tl.int64)
        both = of_tile + (tied << 32)
        before = tl.cumsum(both, 0) - both
        tl.store(starts + 2 * t, above + (before & 0xFFFFFFFF), mask=t < parts)
        tl.store(starts + 2 * t + 1, ties + (before >> 32), mask=t < parts)
        sums = tl.sum(both, 0)
        above += sums & 0xFFFFFFFF
        ties += sums >> 32
    return above + tl.minimum(ties, allowed)


# -- short rows ------------------------------------------------------------------------------------------------------


@triton.jit
def _encode_short(
    rows, work, state, tile_starts, BLOCK: tl.constexpr, SHORT: tl.constexpr, TILE: tl.constexpr,
    feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr, bitmaps: tl.constexpr,
):  # fmt: skip
    """Encode the short rows, each in one program; `TILE` is not more than `BLOCK`."""
    i, _, _ = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    if numel <= SHORT:
        x = wide_pointer(column(rows, i, X), tl.float32 if feedback else kind, 4, aligned)
        size = numel.to(tl.int32)
        if aligned:
            size = tl.multiple_of(size, 4)
        o = tl.arange(0, BLOCK)
        gradient = wide_pointer(column(rows, i, GRADIENT), kind, 4, aligned)
        y, good = corrected(x, gradient, o, o < size, feedback)
        if feedback:
            tl.store(x + o, y, mask=o < size)
        sizes = tl.abs(y)
        both = tl.sum((sizes > 0).to(tl.int32) + ((good == 0).to(tl.int32) << 16), 0)
        if (both >> 16) != 0:
            tl.store(state_of(state, i, 0), 1)
        k = column(rows, i, LIMIT).to(tl.int32)
        threshold, from_low, from_high = kth(sizes, tl.full((), 1, tl.int32), both & 0xFFFF, k, 0)
        takes_all = from_low <= k
        found = tl.where(takes_all, from_low, k)
        allowed = tl.where(takes_all, BLOCK, k - from_high)
        body = column(rows, i, PAYLOAD) + HEADER
        has_bits = False
        if bitmaps:
            has_bits = wants_bits(rows, i)
        values_at = body + padded(4 * ((numel + group - 1) // group))
        indices = pointer(values_at, tl.uint16)
        values_at += padded(2 * found.to(tl.int64))
        if has_bits:
            values_at = body + 8 * ((numel + 63) >> 6)
        counts = pointer(body, tl.int32)
        values = pointer(values_at, tl.float32)
        _note_found(rows, state, i, found.to(tl.int64), bitmaps)
        if (has_bits == 0) & (group >= numel):
            tl.store(counts, found)
        # what other threads have stored is read; all of it again, since registers cannot hold what follows
        tl.debug_barrier()
        t = tl.arange(0, TILE)
        x = pointer(column(rows, i, X), tl.float32 if feedback else kind)
        above = tl.zeros((), tl.int32)
        ties = tl.zeros((), tl.int32)
        for start in range(0, size, TILE):
            of_tile = tl.load(x + start + t, mask=start + t < size, other=0.0).to(tl.float32)
            left = tl.maximum(allowed - ties, 0)
            chosen, rank, counted = chosen_of(tl.abs(of_tile), threshold, left)
            rank += above + tl.minimum(ties, allowed)
            if has_bits:
                _put_bits(counts + (start >> 5), packed(chosen, TILE), size - start, TILE)
                first = above + tl.minimum(ties, allowed)
                tl.store(tile_starts + column(rows, i, _GROUPS_AT) * _TILES + start // TILE, first.to(tl.int64))
            elif group >= numel:
                tl.store(indices + rank, (start + t).to(tl.uint16), mask=chosen)
            else:
                of_group = group.to(tl.int32)
                g = (start + t) // of_group
                tl.store(indices + rank, (start + t - g * of_group).to(tl.uint16), mask=chosen)
                tl.atomic_add(counts + g, 1, mask=chosen, sem="relaxed")
            tl.store(values + rank, of_tile, mask=chosen)
            if feedback:
                tl.store(x + start + t, tl.zeros((TILE,), tl.float32), mask=chosen)
            total = tl.sum(counted, 0)
            above += total & 0xFFFF
            ties += total >> 16


# -- long rows -------------------------------------------------------------------------------------------------------


@triton.jit
def _most_bins(rows, i, BINS: tl.constexpr, MOST_BITS: tl.constexpr):
    """Return the most bins that row `i` has memory for, a power of two."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    room = tl.minimum(BINS * ((numel + group - 1) // group), 1 << MOST_BITS)
    most = tl.full((), 1, tl.int64)
    while 2 * most <= room:
        most = 2 * most
    return most


@triton.jit
def _least_shift(span, most):
    """Return the least shift that makes at most so many bins of a span."""
    shift = tl.zeros((), tl.int64)
    while ((span - 1) >> shift) >= most:
        shift += 1
    return shift


@triton.jit
def _begin(known, bins, low, span, above, most, STEP: tl.constexpr):
    """Note a span for the next launch, and clear its bins."""
    shift = _least_shift(span, tl.minimum(most, _FEW_BINS))
    if (span <= most) | ((tl.full((), 1, tl.int64) << shift) > most):
        shift = _least_shift(span, most)
    tl.store(known + _LOW, low)
    tl.store(known + _SPAN, span)
    tl.store(known + _SHIFT, shift)
    tl.store(known + _ABOVE, above)
    tl.store(known + _TICKET, 0)
    b = tl.arange(0, STEP)
    count = ((span - 1) >> shift) + 1
    for at in range(0, count, STEP):
        tl.store(bins + at + b, tl.zeros((STEP,), tl.int32), mask=at + b < count)


@triton.jit
def _row_of_bins(rows, i, bins, BINS: tl.constexpr):
    return bins + column(rows, i, _GROUPS_AT) * BINS


@triton.jit
def _guess(
    rows, work, state, known, bins, BINS: tl.constexpr, SAMPLE: tl.constexpr, DRAWN: tl.constexpr,
    SHORT: tl.constexpr, MOST_BITS: tl.constexpr, STEP: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Draw from each long row, one element from each of equal strata, and bound the k-th magnitude.

    The program of a row that ends last has what all have drawn, in the memory of the bins.
    """
    PARTS: tl.constexpr = SAMPLE // DRAWN
    i = tl.load(work + 4 * (tl.program_id(0) // PARTS)).to(tl.int64)
    numel, k = column(rows, i, NUMEL), column(rows, i, LIMIT)
    if numel > SHORT:
        most = _most_bins(rows, i, BINS, MOST_BITS)
        row_bins = _row_of_bins(rows, i, bins, BINS)
        count = tl.minimum(tl.minimum(numel >> 3, most), SAMPLE)
        stride = numel // count
        j = (tl.program_id(0) % PARTS) * DRAWN + tl.arange(0, DRAWN)
        # the same places in every step: what is sent does not depend on them
        drawn = mixed(tl.zeros((DRAWN,), tl.uint32), j)
        o = j * stride + ((drawn * stride) >> 32)
        x = pointer(column(rows, i, X), tl.float32 if feedback else kind)
        y, _good = corrected(x, pointer(column(rows, i, GRADIENT), kind), o, j < count, feedback)
        tl.store(row_bins + j, _magnitude(y), mask=j < count)
        # all threads have written before one of them takes the ticket
        tl.debug_barrier()
        done = tl.atomic_add(state_of(state, i, 4), 1)
        if done == PARTS - 1:
            tl.store(state_of(state, i, 4), 0)
            n = tl.arange(0, SAMPLE)
            # past the first-level cache, which may hold what was there before
            m = tl.load(row_bins + n, mask=n < count, other=0, cache_modifier=".cg")
            sizes = m.to(tl.float32, bitcast=True)
            above_zero = tl.sum((m > 0).to(tl.int32), 0)
            expected = k.to(tl.float32) * (count.to(tl.float32) / numel.to(tl.float32))
            margin = tl.sqrt(expected) * _MARGIN + _MARGIN
            slack = (margin * 0.125).to(tl.int32)
            one = tl.full((), 1, tl.int32)
            low, from_low, _ = kth(sizes, one, above_zero, (expected + margin).to(tl.int32), slack)
            high = tl.full((), _ALL - 1, tl.int64)
            up = (expected - margin).to(tl.int32) - slack
            if up > 0:
                upper, _, _ = kth(sizes, low, from_low, up, slack)
                high = upper.to(tl.int64)
            at = known + i * _KNOWN
            tl.store(at + _ANEW, 0)
            tl.store(at + _DONE, 0)
            tl.store(at + _LISTED, 1)
            tl.store(at + _MARKED, low.to(tl.int64))
            zero = tl.zeros((), tl.int64)
            # the sample is read before its memory is cleared
            tl.debug_barrier()
            _begin(at, row_bins, low.to(tl.int64), high - low + 1, zero, most, STEP)


@triton.jit
def _mark(marks, y, low, TILE: tl.constexpr):
    """Mark the sectors of a tile that have a magnitude of at least `low`."""
    is_candidate = tl.reshape((_magnitude(y) >= low).to(tl.uint32), (TILE // _SECTOR, _SECTOR))
    words = packed(tl.max(is_candidate, 1), TILE // _SECTOR)
    tl.store(marks + tl.arange(0, TILE // _PER_WORD), words)


@triton.jit
def count_ones(word):
    """Count the bits that are set in words given as uint32; the compiler makes one instruction of it."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _nth_bit(word, n):
    """Return which bit is the one of number `n`, from 0 on, of those set in words given as uint32."""
    at = tl.zeros_like(n)
    for half in tl.static_range(5):
        ones = count_ones((word >> at.to(tl.uint32)) & ((1 << (16 >> half)) - 1))
        is_above = n >= ones
        at += tl.where(is_above, 16 >> half, 0)
        n -= tl.where(is_above, ones, 0)
    return at


@triton.jit
def _count_marks(marks, TILE: tl.constexpr):
    word = tl.load(marks + tl.arange(0, TILE // _PER_WORD))
    return tl.sum(count_ones(word.to(tl.uint32, bitcast=True)), 0)


@triton.jit
def _marked(marks, first, TILE: tl.constexpr, SECTORS: tl.constexpr):
    """Return where in a tile the elements of marked sectors lie, from the `first` one on; then, what is beyond it."""
    WORDS: tl.constexpr = TILE // _PER_WORD
    word = tl.load(marks + tl.arange(0, WORDS)).to(tl.uint32, bitcast=True)
    ends = tl.cumsum(count_ones(word), 0)
    e = first + tl.arange(0, SECTORS)
    is_before = ends[None, :] <= e[:, None]
    number = tl.sum(is_before.to(tl.int32), 1)
    passed = tl.max(tl.where(is_before, ends[None, :], 0), 1)
    of = tl.load(marks + tl.minimum(number, WORDS - 1)).to(tl.uint32, bitcast=True)
    sectors = tl.where(number < WORDS, 32 * number + _nth_bit(of, e - passed), TILE // _SECTOR)
    o = sectors[:, None] * _SECTOR + tl.arange(0, _SECTOR)[None, :]
    return tl.reshape(o, (SECTORS * _SECTOR,))


@triton.jit
def _scan(
    rows, work, state, known, bins, tiles, slots, marks, BINS: tl.constexpr, SHORT: tl.constexpr,
    MOST_BITS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, SLOT: tl.constexpr, feedback: tl.constexpr,
    kind: tl.constexpr, is_even: tl.constexpr, is_sparse: tl.constexpr,
):  # fmt: skip
    """Correct the long rows, count the magnitudes above and within their spans, and list those within."""
    program = tl.program_id(0)
    i, _, part = entry(work)
    if column(rows, i, NUMEL) > SHORT:
        at = known + i * _KNOWN
        row_bins = _row_of_bins(rows, i, bins, BINS)
        parts, start, size = _place_of_part(rows, i, part, TILE, is_even)
        o = tl.arange(0, TILE)
        # no promise of alignment: four at once would have to change threads for what follows, one by one
        x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
        gradient = pointer(column(rows, i, GRADIENT), kind) + start
        if size == TILE:
            y, good = corrected_all(x, gradient, o, feedback)
        else:
            y, good = corrected(x, gradient, o, o < size, feedback)
        shift = tl.load(at + _SHIFT).to(tl.int32)
        low, span = tl.load(at + _LOW).to(tl.int32), tl.load(at + _SPAN).to(tl.int32)
        note_bad(state, i, good)
        if feedback:
            if size == TILE:
                tl.store(x + o, y)
            else:
                tl.store(x + o, y, mask=o < size)
        if is_sparse:
            _mark(marks + program.to(tl.int64) * (TILE // _PER_WORD), y, low, TILE)
        # low is 1 at least, so that zeros are below, and nothing overflows
        d = _magnitude(y) - low
        is_within = (d >= 0) & (d < span)
        # above, and within, in one number
        counted = (d >= span).to(tl.int32) + (is_within.to(tl.int32) << 16)
        both = tl.sum(counted, 0)
        above, within = both & 0xFFFF, both >> 16
        tl.store(tiles + 2 * program, above)
        tl.store(tiles + 2 * program + 1, within)
        if above > 0:
            tl.atomic_add(at + _ABOVE, above.to(tl.int64), sem="relaxed")
        slot = slots + program.to(tl.int64) * SLOT
        is_listed = within <= SLOT - 2
        tl.store(slot, tl.where(is_listed, 0, -1))
        tl.store(slot + 1, above)
        if is_listed:
            if within > 0:
                tl.atomic_add(row_bins + (d >> shift), 1, mask=is_within, sem="relaxed")
                # the list has any order, which takes fewer instructions; it is counted from zero
                tl.debug_barrier()
                place = tl.atomic_add(slot + tl.zeros((TILE,), tl.int32), 1, mask=is_within, sem="relaxed")
                tl.store(slot + 2 + place, d + low, mask=is_within)
        else:
            _count_bins(row_bins, d, is_within, span - 1, shift)
        # all threads have written before one of them takes the ticket
        tl.debug_barrier()
        done = tl.atomic_add(at + _TICKET, 1)
        if done == parts - 1:
            _choose(at, row_bins, column(rows, i, LIMIT), _most_bins(rows, i, BINS, MOST_BITS), STEP)


@triton.jit
def _count_bins(bins, d, is_within, top, shift):
    """Count elements into bins, first those at the ends of a span, which many may have in common."""
    ends = tl.sum((is_within & (d == top)).to(tl.int32) + ((is_within & (d == 0)).to(tl.int32) << 16), 0)
    of_top, of_low = ends & 0xFFFF, ends >> 16
    if of_top > 0:
        tl.atomic_add(bins + (top >> shift), of_top, sem="relaxed")
    if (of_low > 0) & (top > 0):
        tl.atomic_add(bins, of_low, sem="relaxed")
    tl.atomic_add(bins + (d >> shift), 1, mask=is_within & (d != top) & (d > 0), sem="relaxed")


@triton.jit
def _narrow(
    rows, work, state, known, bins, tiles, starts, slots, BINS: tl.constexpr, SHORT: tl.constexpr,
    MOST_BITS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, SLOT: tl.constexpr, CHUNK: tl.constexpr,
    feedback: tl.constexpr, kind: tl.constexpr, is_even: tl.constexpr, bitmaps: tl.constexpr,
):  # fmt: skip
    """Count again within the spans of long rows; the last program of a row draws the conclusion."""
    program = tl.program_id(0)
    i, _, part = entry(work)
    at = known + i * _KNOWN
    is_needed = column(rows, i, NUMEL) > SHORT
    if is_needed:
        is_needed = tl.load(at + _DONE) == 0
    if is_needed:
        tile = tiles + 2 * program
        slot = slots + program.to(tl.int64) * SLOT
        row_bins = _row_of_bins(rows, i, bins, BINS)
        parts, start, size = _place_of_part(rows, i, part, TILE, is_even)
        listed = tl.load(slot)
        is_listed = (tl.load(at + _LISTED) != 0) & (listed >= 0)
        if (tl.load(at + _ANEW) != 0) | (tl.load(tile + 1) > 0):
            shift = tl.load(at + _SHIFT).to(tl.int32)
            low, span = tl.load(at + _LOW).to(tl.int32), tl.load(at + _SPAN).to(tl.int32)
            if is_listed:
                n = tl.arange(0, SLOT)
                d = tl.load(slot + n, mask=(n >= 2) & (n < listed + 2), other=0) - low
                is_within = (d >= 0) & (d < span)
                both = tl.sum((d >= span).to(tl.int32) + (is_within.to(tl.int32) << 16), 0) + tl.load(slot + 1)
                if span > 1:
                    tl.atomic_add(row_bins + (d >> shift), 1, mask=is_within, sem="relaxed")
            else:
                both = tl.zeros((), tl.int32)
                x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
                for chunk in range(0, TILE, CHUNK):
                    o = chunk + tl.arange(0, CHUNK)
                    d = _magnitude(tl.load(x + o, mask=o < size, other=0.0).to(tl.float32)) - low
                    is_within = (d >= 0) & (d < span)
                    of_chunk = tl.sum((d >= span).to(tl.int32) + (is_within.to(tl.int32) << 16), 0)
                    both += of_chunk
                    if ((of_chunk >> 16) > 0) & (span > 1):
                        _count_bins(row_bins, d, is_within, tl.max(tl.where(is_within, d, -1), 0), shift)
            tl.store(tile, both & 0xFFFF)
            tl.store(tile + 1, both >> 16)
        # all threads have written before one of them takes the ticket
        tl.debug_barrier()
        done = tl.atomic_add(at + _TICKET, 1)
        if done == parts - 1:
            # what the sample says is only a guess
            if tl.load(at + _SPAN) == 1:
                first = program - part.to(tl.int32)
                allowed = column(rows, i, LIMIT) - tl.load(at + _ABOVE)
                found = _place_tiles(tiles + 2 * first, starts + 2 * first, parts, allowed, STEP)
                _note_found(rows, state, i, found, bitmaps)
                tl.store(at + _DONE, 1)
            else:
                _choose(at, row_bins, column(rows, i, LIMIT), _most_bins(rows, i, BINS, MOST_BITS), STEP)


@triton.jit
def _choose(known, bins, k, most, STEP: tl.constexpr):
    """Choose the bin that the k-th magnitude lies in."""
    low, span, shift = tl.load(known + _LOW), tl.load(known + _SPAN), tl.load(known + _SHIFT)
    # past the first-level cache, which may hold what was there before
    above = tl.load(known + _ABOVE, cache_modifier=".cg")
    need = k - above
    count = ((span - 1) >> shift) + 1
    total = tl.zeros((), tl.int64)
    passed = tl.zeros((), tl.int64)
    seen = tl.zeros((), tl.int64)
    o = tl.arange(0, STEP)
    for at in range(0, count, STEP):
        b = count - 1 - at - o
        found = tl.load(bins + b, mask=b >= 0, other=0, cache_modifier=".cg").to(tl.int64) & 0xFFFFFFFF
        is_before = (total + tl.cumsum(found, 0) < need) & (b >= 0)
        passed += tl.sum(is_before.to(tl.int64), 0)
        seen += tl.sum(tl.where(is_before, found, 0), 0)
        total += tl.sum(found, 0)
    # bins are read before they are cleared
    tl.debug_barrier()
    anew = tl.zeros((), tl.int64)
    if need <= 0:
        # the sample was too small here
        anew += 1
        low += span
        span = -low + _ALL
        above = tl.zeros((), tl.int64)
    elif passed < count:
        b = count - 1 - passed
        above += seen
        low += b << shift
        span = tl.minimum(span - (b << shift), tl.full((), 1, tl.int64) << shift)
    elif low > 1:
        # or too large
        anew += 1
        above += seen
        span = low - 1
        low = tl.full((), 1, tl.int64)
    else:
        # fewer than k are not zero, and all of them are sent
        span = tl.full((), 1, tl.int64)
        anew += 1
    tl.store(known + _ANEW, anew)
    if anew != 0:
        tl.store(known + _LISTED, 0)
    _begin(known, bins, low, span, above, most, STEP)


# -- all rows --------------------------------------------------------------------------------------------------------


@triton.jit
def _share_of_tile(rows, known, tiles, starts, i, number):
    """Count elements of a tile: above the threshold; equal to it; those of the latter that are sent; sent before it."""
    above, ties = tl.load(tiles + 2 * number), tl.load(tiles + 2 * number + 1)
    allowed = column(rows, i, LIMIT) - tl.load(known + i * _KNOWN + _ABOVE)
    ties_before = tl.load(starts + 2 * number + 1)
    before = tl.load(starts + 2 * number) + tl.minimum(ties_before, allowed)
    return above, ties, tl.maximum(tl.minimum(allowed - ties_before, ties), 0).to(tl.int32), before


@triton.jit
def _write(
    rows, work, state, known, tiles, starts, tile_starts, SHORT: tl.constexpr, TILE: tl.constexpr,
    feedback: tl.constexpr, kind: tl.constexpr, is_even: tl.constexpr, bitmaps: tl.constexpr,
):  # fmt: skip
    """Write what the tiles of long rows send, and leave zeros in the residuals."""
    i, _, part = entry(work)
    if column(rows, i, NUMEL) > SHORT:
        above, ties, left, before = _share_of_tile(rows, known, tiles, starts, i, tl.program_id(0))
        if bitmaps and is_even:
            tl.store(tile_starts + column(rows, i, _GROUPS_AT) * _TILES + part, before)
        if above + left > 0:
            _parts, start, size = _place_of_part(rows, i, part, TILE, is_even)
            o = tl.arange(0, TILE)
            x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
            if size == TILE:
                y = tl.load(x + o).to(tl.float32)
            else:
                y = tl.load(x + o, mask=o < size, other=0.0).to(tl.float32)
            # a magnitude as a number: absolute values are compared without an instruction of their own
            at = tl.load(known + i * _KNOWN + _LOW).to(tl.int32).to(tl.float32, bitcast=True)
            sizes = tl.abs(y)
            chosen = tl.where(left == ties, sizes >= at, sizes > at)
            if (left > 0) & (left < ties):
                is_tie = (sizes == at).to(tl.int32)
                chosen |= (is_tie != 0) & (tl.cumsum(is_tie, 0) <= left)
            words, rank = _ranks(chosen, TILE)
            found = tl.load(state_of(state, i, 1))
            _send(rows, i, y, chosen, words, rank, start, before, size, found, TILE, bitmaps, is_even)
            if feedback:
                tl.store(x + o, tl.zeros((TILE,), tl.float32), mask=chosen)


@triton.jit
def _ranks(chosen, TILE: tl.constexpr):
    """Return the bits of the chosen elements, in words of 32, and how many are before each element."""
    bit = tl.full((32,), 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)
    words = packed(chosen, TILE)
    word = words.to(tl.uint32, bitcast=True)
    ones = count_ones(word)
    # only words are summed one after the other; within a word, bits are counted
    before = tl.cumsum(ones, 0) - ones
    rank = before[:, None] + count_ones(word[:, None] & (bit - 1)[None, :])
    return words, tl.reshape(rank, (TILE,))


@triton.jit
def _write_sectors(
    rows, work, state, known, tiles, starts, marks, SHORT: tl.constexpr, TILE: tl.constexpr, SECTORS: tl.constexpr,
    feedback: tl.constexpr, kind: tl.constexpr, is_even: tl.constexpr,
):  # fmt: skip
    """Do as `_write` for rows that send lists of few elements: only marked sectors are read."""
    i, _, part = entry(work)
    if column(rows, i, NUMEL) > SHORT:
        above, _ties, left, before = _share_of_tile(rows, known, tiles, starts, i, tl.program_id(0))
        if above + left > 0:
            _parts, start, size = _place_of_part(rows, i, part, TILE, is_even)
            x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
            found = tl.load(state_of(state, i, 1))
            at = known + i * _KNOWN
            threshold = tl.load(at + _LOW).to(tl.int32)
            tile_marks = marks + tl.program_id(0).to(tl.int64) * (TILE // _PER_WORD)
            if threshold < tl.load(at + _MARKED):
                # the sample has misled
                n = tl.arange(0, TILE)
                _mark(tile_marks, tl.load(x + n, mask=n < size, other=0.0).to(tl.float32), threshold, TILE)
                # other threads have marked
                tl.debug_barrier()
            # above, and equal, that were passed
            passed = tl.zeros((), tl.int32)
            for first in range(0, _count_marks(tile_marks, TILE), SECTORS):
                o = _marked(tile_marks, first, TILE, SECTORS)
                y = tl.load(x + o, mask=o < size, other=0.0).to(tl.float32)
                of_ties = tl.minimum(passed >> 16, left)
                chosen, rank, counted = chosen_of(tl.abs(y), threshold, left - of_ties)
                _send_list(rows, i, y, o, chosen, rank, start, before + (passed & 0xFFFF) + of_ties, found)
                if feedback:
                    tl.store(x + o, tl.zeros((SECTORS * _SECTOR,), tl.float32), mask=chosen)
                passed += tl.sum(counted, 0)


def is_even(launch: Launch, tile: int = TILE) -> bool:
    """Tell whether no tile of a row reaches into two groups."""
    return not ((launch.groups % tile != 0) & (launch.groups != launch.numels)).any()


def starts_of_tiles(launch: Launch) -> Any:
    """Return memory for the entries before each tile of rows that have bits.

    They are written with the bits, but for long rows that are not even, and when bits are checked.
    """
    return launch.scratch("starts of bits", TILES * int(launch.counts.sum()), "int64")


def encode(launch: Launch, codec: int, bitmaps: bool) -> None:
    """Encode a table: `kernels.topk.encode_rows`, or `kernels.bitmap.encode_rows` where there may be bitmaps."""
    is_short = launch.numels <= _SHORT
    tile_starts = starts_of_tiles(launch) if bitmaps else launch.state
    if is_short.any():
        block = max(64, triton.next_power_of_2(int(launch.numels[is_short].max())))
        by_rows = launch.work_by_rows()
        # wide accesses end at multiples of 4 elements
        aligned = launch.aligned and not (launch.numels[is_short] % 4).any()
        start(_encode_short, by_rows.shape[0],
            launch.rows, by_rows, launch.state, tile_starts, block, _SHORT, min(block, TILE), launch.feedback,
            launch.kind, aligned, bitmaps,
            num_warps=max(1, min(_SHORT_WARPS, block // 512)), maxnreg=_SHORT_REGISTERS, num_stages=1,
        )  # fmt: skip
    if not is_short.all():
        _encode_long(launch, tile_starts, bitmaps, ~is_short)
    launch.seal(codec, -1 if bitmaps else 0)


def _encode_long(launch: Launch, tile_starts: Any, bitmaps: bool, is_long: npt.NDArray[np.bool_]) -> None:
    rows, state, feedback, kind, even = launch.rows, launch.state, launch.feedback, launch.kind, is_even(launch)
    # nothing is added up when encoding, so that each row has its blocks
    work = launch.work_by_blocks(TILE) if even else launch.work_by_parts(TILE)
    count = work.shape[0]
    known = launch.scratch("known", _NUMBERS * len(launch.numels), "int64")
    tiles = launch.scratch("tiles", 2 * count, "int32")
    starts = launch.scratch("starts", 2 * count, "int64")
    is_sparse = not bitmaps and bool((launch.limits[is_long] <= _SPARSE * launch.numels[is_long]).all())
    marks = launch.scratch("marks", count * (TILE // (32 * SECTOR)) if is_sparse else 0, "int32")
    # memory is a fixed share of the elements, whatever a group is
    shortest = triton.next_power_of_2(int(launch.groups[is_long].min()))
    in_group = max(1, _BINS * shortest // (16 * TILE))
    slot = max(2, min(_SLOT, _SLOT * shortest // TILE))
    slots = launch.scratch("slots", slot * count, "int32")
    most = int(launch.counts[is_long].min()) * in_group
    bits = min(most.bit_length() - 1, _MOST_BITS)
    bins = launch.scratch("bins", int(launch.counts.sum()) * in_group, "int32")
    by_rows = launch.work_by_rows()
    sample = min(_SAMPLE, triton.next_power_of_2(int(launch.numels.max()) >> 3))
    drawn = min(_DRAWN, sample)
    start(_guess, by_rows.shape[0] * (sample // drawn),
        rows, by_rows, state, known, bins, in_group, sample, drawn, _SHORT, _MOST_BITS, _STEP, feedback, kind,
        num_warps=max(4, min(32, sample // 1024)), num_stages=1,
    )  # fmt: skip
    start(_scan, count,
        rows, work, state, known, bins, tiles, slots, marks, in_group, _SHORT, _MOST_BITS, _STEP, TILE, slot, feedback,
        kind, even, is_sparse,
        num_warps=_SCAN_WARPS, maxnreg=_SCAN_REGISTERS, num_stages=1,
    )  # fmt: skip
    # if the sample misleads, all bits of a magnitude are told by these; the last one only counts
    for _ in range(1 + -(-31 // bits)):
        start(_narrow, count,
            rows, work, state, known, bins, tiles, starts, slots, in_group, _SHORT, _MOST_BITS, _STEP, TILE,
            slot, _CHUNK, feedback, kind, even, bitmaps,
            num_warps=_NARROW_WARPS, maxnreg=_NARROW_REGISTERS, num_stages=1,
        )  # fmt: skip
    if is_sparse:
        start(_write_sectors, count,
            rows, work, state, known, tiles, starts, marks, _SHORT, TILE, _SECTORS, feedback, kind, even,
            num_warps=_SECTORS_WARPS, maxnreg=_WRITE_REGISTERS, num_stages=1,
        )  # fmt: skip
    else:
        start(_write, count,
            rows, work, state, known, tiles, starts, tile_starts, _SHORT, TILE, feedback, kind, even, bitmaps,
            num_warps=_WRITE_WARPS, maxnreg=_WRITE_REGISTERS, num_stages=1,
        )  # fmt: skip
