"""Select the k largest magnitudes of each row, exactly, and write the bodies of top-k and percentile.

A magnitude is what a float32 has in its bits beside the sign: an integer, in the order of the numbers. A short row is
done by one program. In a long one a sample says between which magnitudes the k-th very likely lies; each launch counts
those above and in equal bins between them, and the program that ends last chooses the bin with the k-th for the next
launch, until a bin is one magnitude. Then it is known how many entries each tile sends, and where they go. If the
sample has misled, the bins begin anew with what it has ruled out.
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
    entry,
    note_bad,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

TILE = 4096
"""Elements that one program of a long row holds."""

_SHORT = 16384  # the most elements of a row that one program holds
_SAMPLE = 8192  # magnitudes that bound the k-th
_STEP = 2048  # bins or tiles that are summed at once
_FEW_TILES = 64  # likewise, of a short row
_MOST_BITS = 16  # of the number of bins
_BINS = 512  # for each group of TILE * 16 elements

# what is known of a row: int64; of a short one only the first, the k-th magnitude itself, and what is above
_LOW = tl.constexpr(0)  # the least magnitude that the k-th may be
_SPAN = tl.constexpr(1)  # how many magnitudes from there on
_SHIFT = tl.constexpr(2)  # a bin is 2**shift of them
_ABOVE = tl.constexpr(3)  # elements that are larger than all of them
_TICKET = tl.constexpr(4)  # parts that have counted
_ANEW = tl.constexpr(5)  # not zero if all parts must count, also those that had nothing within the span before
_DONE = tl.constexpr(6)  # not zero if the places of all parts are known
_KNOWN = tl.constexpr(8)

_GROUPS_AT = tl.constexpr(GROUPS_AT)
_FEW_BINS = tl.constexpr(4096)  # enough where the next launch can tell the rest, and quicker to sum
_ALL = tl.constexpr(1 << 31)  # more than any magnitude
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_BITS_OF_INDEX = tl.constexpr(BITS_OF_INDEX)
_MARGIN = tl.constexpr(4.0)  # in standard deviations, and as many elements more


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
def _kth(m, k):
    """Return a magnitude that `k` of the magnitudes `m` are not below, and no larger one is, or so many exactly.

    Zeros do not count: if fewer are left, it is the least magnitude above zero.
    """
    low = tl.full((), 1, tl.int64)
    high = tl.max(m, 0).to(tl.int64) + 1
    from_low = tl.sum((m > 0).to(tl.int32), 0)
    from_high = tl.zeros((), tl.int32)
    turn = tl.zeros((), tl.int32)
    # steps alternate between where the counts say it is and the middle, so that none of the two can stall
    while (high - low > 1) & (from_low > k):
        share = (from_low - k).to(tl.float32) / (from_low - from_high).to(tl.float32)
        proposed = low + ((high - low).to(tl.float32) * share).to(tl.int64)
        at = tl.where(turn == 0, proposed, (low + high) >> 1)
        at = tl.maximum(tl.minimum(at, high - 1), low + 1)
        turn = 1 - turn
        count = tl.sum((m >= at.to(tl.int32)).to(tl.int32), 0)
        is_low = count >= k
        low = tl.where(is_low, at, low)
        from_low = tl.where(is_low, count, from_low)
        high = tl.where(is_low, high, at)
        from_high = tl.where(is_low, from_high, count)
    return low


@triton.jit
def _chosen(m, threshold, left):
    """Return which magnitudes are above a threshold, or among the first `left` equal to it; and the rank of each."""
    is_above = m > threshold
    is_tie = m == threshold
    # both ranks in one number
    counted = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
    before = tl.cumsum(counted, 0) - counted
    ties = before >> 16
    rank = (before & 0xFFFF) + tl.minimum(ties, left)
    return is_above | (is_tie & (ties < left)), rank


@triton.jit
def _put_bits(words, chosen, size, TILE: tl.constexpr):
    """Write the bit of each element; the first one is that of a word of 32."""
    bits = tl.reshape(chosen.to(tl.uint32), (TILE // 32, 32))
    word = tl.sum(bits << tl.arange(0, 32).to(tl.uint32)[None, :], 1).to(tl.int32, bitcast=True)
    number = tl.arange(0, TILE // 32)
    tl.store(words + number, word, mask=32 * number < size)


@triton.jit
def _send(
    rows, i, y, chosen, rank, start, before, size, found, TILE: tl.constexpr, bitmaps: tl.constexpr,
    is_even: tl.constexpr,
):  # fmt: skip
    """Write the chosen elements of a tile into the body of row `i`, behind `before` entries of `found`."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    o = tl.arange(0, TILE)
    body = column(rows, i, PAYLOAD) + HEADER
    has_bits = False
    if bitmaps:
        has_bits = wants_bits(rows, i)
    indices_at = body + padded(4 * ((numel + group - 1) // group))
    values_at = indices_at + padded(2 * found)
    if has_bits:
        values_at = body + 8 * ((numel + 63) >> 6)
        words = pointer(body, tl.int32) + (start >> 5)
        if is_even:
            _put_bits(words, chosen, size, TILE)
        else:
            at = o + (start & 31).to(tl.int32)
            tl.atomic_or(words + (at >> 5), tl.full((TILE,), 1, tl.int32) << (at & 31), mask=chosen, sem="relaxed")
    else:
        g = start // group
        index = o + (start - g * group).to(tl.int32)
        tl.store(pointer(indices_at, tl.uint16) + before + rank, index.to(tl.uint16), mask=chosen)
        tl.atomic_add(pointer(body, tl.int32) + g, tl.sum(chosen.to(tl.int32), 0), sem="relaxed")
    tl.store(pointer(values_at, tl.float32) + before + rank, y, mask=chosen)


@triton.jit
def _note_found(rows, state, i, found, bitmaps: tl.constexpr):
    """Note entries, size and form of the body of row `i`."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    nbytes = padded(4 * ((numel + group - 1) // group)) + padded(2 * found)
    if bitmaps:
        has_bits = wants_bits(rows, i)
        nbytes = tl.where(has_bits, 8 * ((numel + 63) >> 6), nbytes)
        tl.store(state_of(state, i, 7), has_bits.to(tl.int64))
    tl.store(state_of(state, i, 1), found)
    tl.store(state_of(state, i, 2), nbytes + 4 * found)


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
def _select_short(
    rows, work, state, known, tiles, starts, BLOCK: tl.constexpr, SHORT: tl.constexpr, STEP: tl.constexpr,
    TILE: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr, is_even: tl.constexpr,
    bitmaps: tl.constexpr,
):  # fmt: skip
    """Select from short rows, each in the program of its first tile, and place their tiles."""
    i, _, part = entry(work)
    numel = column(rows, i, NUMEL)
    if (part == 0) & (numel <= SHORT):
        size = numel.to(tl.int32)
        if aligned:
            size = tl.multiple_of(size, 4)
        o = tl.arange(0, BLOCK)
        x = wide_pointer(column(rows, i, X), tl.float32 if feedback else kind, 4, aligned)
        gradient = wide_pointer(column(rows, i, GRADIENT), kind, 4, aligned)
        y, good = corrected(x, gradient, o, o < size, feedback)
        note_bad(state, i, good)
        if feedback:
            tl.store(x + o, y, mask=o < size)
        m = _magnitude(y)
        k = column(rows, i, LIMIT)
        threshold = _kth(m, k.to(tl.int32)).to(tl.int32)
        is_above, is_tie = m > threshold, m == threshold
        above = tl.sum(is_above.to(tl.int32), 0).to(tl.int64)
        tile = tiles + 2 * tl.program_id(0)
        parts, _start, _size = _place_of_part(rows, i, part, TILE, is_even)
        if is_even and BLOCK > TILE:
            t = tl.arange(0, BLOCK // TILE)
            of_tiles = tl.sum(tl.reshape(is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16), (BLOCK // TILE, TILE)), 1)
            tl.store(tile + 2 * t, of_tiles & 0xFFFF, mask=t < parts)
            tl.store(tile + 2 * t + 1, of_tiles >> 16, mask=t < parts)
        else:
            for p in range(parts):
                _parts, start, of_part = _place_of_part(rows, i, p, TILE, is_even)
                is_here = (o >= start) & (o < start + of_part)
                tl.store(tile + 2 * p, tl.sum((is_here & is_above).to(tl.int32), 0))
                tl.store(tile + 2 * p + 1, tl.sum((is_here & is_tie).to(tl.int32), 0))
        at = known + i * _KNOWN
        tl.store(at + _LOW, threshold.to(tl.int64))
        tl.store(at + _ABOVE, above)
        # all threads have written what they sum now
        tl.debug_barrier()
        _note_found(rows, state, i, _place_tiles(tile, starts + 2 * tl.program_id(0), parts, k - above, STEP), bitmaps)


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
    rows, work, known, bins, BINS: tl.constexpr, SAMPLE: tl.constexpr, SHORT: tl.constexpr, MOST_BITS: tl.constexpr,
    STEP: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Draw from each long row, one element from each of equal strata, and bound the k-th magnitude."""
    i, _, _ = entry(work)
    numel, k = column(rows, i, NUMEL), column(rows, i, LIMIT)
    if numel > SHORT:
        count = tl.minimum(numel >> 3, SAMPLE)
        stride = numel // count
        j = tl.arange(0, SAMPLE)
        # the same places in every step: what is sent does not depend on them
        drawn = mixed(tl.zeros((SAMPLE,), tl.uint32), j)
        o = j * stride + ((drawn * stride) >> 32)
        x = pointer(column(rows, i, X), tl.float32 if feedback else kind)
        y, _good = corrected(x, pointer(column(rows, i, GRADIENT), kind), o, j < count, feedback)
        m = _magnitude(y)
        expected = k.to(tl.float32) * (count.to(tl.float32) / numel.to(tl.float32))
        margin = _MARGIN * tl.sqrt(expected) + _MARGIN
        low = _kth(m, (expected + margin).to(tl.int32))
        high = tl.full((), _ALL - 1, tl.int64)
        up = (expected - margin).to(tl.int32)
        if up > 0:
            high = tl.maximum(_kth(m, up), low)
        at = known + i * _KNOWN
        tl.store(at + _ANEW, 0)
        tl.store(at + _DONE, 0)
        zero = tl.zeros((), tl.int64)
        most = _most_bins(rows, i, BINS, MOST_BITS)
        _begin(at, _row_of_bins(rows, i, bins, BINS), low, high - low + 1, zero, most, STEP)


@triton.jit
def _narrow(
    rows, work, state, known, bins, tiles, starts, BINS: tl.constexpr, SHORT: tl.constexpr, MOST_BITS: tl.constexpr,
    STEP: tl.constexpr, TILE: tl.constexpr, is_first: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
    is_even: tl.constexpr, bitmaps: tl.constexpr,
):  # fmt: skip
    """Count the magnitudes above and within the spans of long rows; the last program of a row draws the conclusion."""
    program = tl.program_id(0)
    if not is_first:
        # backwards: what was written last is still in the cache
        program = tl.num_programs(0) - 1 - program
    i, part = tl.load(work + 4 * program).to(tl.int64), tl.load(work + 4 * program + 2).to(tl.int64)
    at = known + i * _KNOWN
    is_needed = column(rows, i, NUMEL) > SHORT
    if is_needed & (not is_first):
        is_needed = tl.load(at + _DONE) == 0
    if is_needed:
        tile = tiles + 2 * program
        row_bins = _row_of_bins(rows, i, bins, BINS)
        parts, start, size = _place_of_part(rows, i, part, TILE, is_even)
        if is_first:
            is_active = True
        else:
            is_active = (tl.load(at + _ANEW) != 0) | (tl.load(tile + 1) > 0)
        if is_active:
            shift = tl.load(at + _SHIFT).to(tl.int32)
            low, span = tl.load(at + _LOW).to(tl.int32), tl.load(at + _SPAN).to(tl.int32)
            o = tl.arange(0, TILE)
            # no promise of alignment: four at once would have to change threads for what follows, one by one
            x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
            if is_first:
                gradient = pointer(column(rows, i, GRADIENT), kind) + start
                y, good = corrected(x, gradient, o, o < size, feedback)
                note_bad(state, i, good)
                if feedback:
                    tl.store(x + o, y, mask=o < size)
            else:
                y, _good = corrected(x, x, o, o < size, False)
            # low is 1 at least, so that zeros are below, and nothing overflows
            d = _magnitude(y) - low
            is_within = (d >= 0) & (d < span)
            both = tl.sum((d >= span).to(tl.int32) + (is_within.to(tl.int32) << 16), 0)
            above, within = both & 0xFFFF, both >> 16
            tl.store(tile, above)
            tl.store(tile + 1, within)
            if is_first & (above > 0):
                tl.atomic_add(at + _ABOVE, above.to(tl.int64), sem="relaxed")
            if (within > 0) & (is_first | (span > 1)):
                # what many elements may have in common is counted for the tile: the ends of the sample's span, and
                # then, where bins are narrow, the largest of a tile
                if is_first:
                    top = span - 1
                else:
                    top = tl.max(tl.where(is_within, d, -1), 0)
                ends = tl.sum((d == top).to(tl.int32) + ((d == 0).to(tl.int32) << 16), 0)
                of_top, of_low = ends & 0xFFFF, ends >> 16
                if of_top > 0:
                    tl.atomic_add(row_bins + (top >> shift), of_top, sem="relaxed")
                if (of_low > 0) & (top > 0):
                    tl.atomic_add(row_bins, of_low, sem="relaxed")
                tl.atomic_add(row_bins + (d >> shift), 1, mask=is_within & (d != top) & (d > 0), sem="relaxed")
        # all threads have written before one of them takes the ticket
        tl.debug_barrier()
        done = tl.atomic_add(at + _TICKET, 1)
        if done == parts - 1:
            # what the sample says is only a guess
            if (not is_first) and (tl.load(at + _SPAN) == 1):
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
        span = _ALL - low
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
    _begin(known, bins, low, span, above, most, STEP)


# -- all rows --------------------------------------------------------------------------------------------------------


@triton.jit
def _write(
    rows, work, state, known, tiles, starts, TILE: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
    is_even: tl.constexpr, bitmaps: tl.constexpr,
):  # fmt: skip
    """Write what tiles send, and leave zeros in the residuals."""
    i, _, part = entry(work)
    at = known + i * _KNOWN
    program = tl.program_id(0)
    above, ties = tl.load(tiles + 2 * program), tl.load(tiles + 2 * program + 1)
    allowed = column(rows, i, LIMIT) - tl.load(at + _ABOVE)
    ties_before = tl.load(starts + 2 * program + 1)
    before = tl.load(starts + 2 * program) + tl.minimum(ties_before, allowed)
    left = tl.maximum(tl.minimum(allowed - ties_before, ties), 0).to(tl.int32)
    if above + left > 0:
        _parts, start, size = _place_of_part(rows, i, part, TILE, is_even)
        o = tl.arange(0, TILE)
        x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
        y, _good = corrected(x, x, o, o < size, False)
        chosen, rank = _chosen(_magnitude(y), tl.load(at + _LOW).to(tl.int32), left)
        found = tl.load(state_of(state, i, 1))
        _send(rows, i, y, chosen, rank, start, before, size, found, TILE, bitmaps, is_even)
        if feedback:
            tl.store(x + o, tl.zeros((TILE,), tl.float32), mask=chosen)


def is_even(launch: Launch, tile: int = TILE) -> bool:
    """Tell whether no tile of a row reaches into two groups."""
    return not ((launch.groups % tile != 0) & (launch.groups != launch.numels)).any()


def encode(launch: Launch, codec: int, bitmaps: bool) -> None:
    """Encode a table: `kernels.topk.encode_rows`, or `kernels.bitmap.encode_rows` where there may be bitmaps."""
    rows, state, feedback, kind, even = launch.rows, launch.state, launch.feedback, launch.kind, is_even(launch)
    # nothing is added up when encoding, so that each row has its blocks
    work = launch.work_by_blocks(TILE) if even else launch.work_by_parts(TILE)
    count = work.shape[0]
    known = launch.scratch("known", 8 * len(launch.numels), "int64")
    tiles = launch.scratch("tiles", 2 * count, "int32")
    starts = launch.scratch("starts", 2 * count, "int64")
    is_short = launch.numels <= _SHORT
    if is_short.any():
        block = max(64, triton.next_power_of_2(int(launch.numels[is_short].max())))
        # wide loads end at multiples of 4 elements
        aligned = launch.aligned and not (launch.numels[is_short] % 4).any()
        start(_select_short, count,
            rows, work, state, known, tiles, starts, block, _SHORT, _FEW_TILES, TILE, feedback, kind,
            aligned, even, bitmaps,
            num_warps=max(1, min(16, block // 512)), maxnreg=64,
        )  # fmt: skip
    if not is_short.all():
        _select_long(launch, work, known, tiles, starts, bitmaps, ~is_short)
    start(_write, count,
        rows, work, state, known, tiles, starts, TILE, feedback, kind, even, bitmaps,
        num_warps=8, maxnreg=80,
    )  # fmt: skip
    launch.seal(codec, -1 if bitmaps else 0)


def _select_long(
    launch: Launch, work: Any, known: Any, tiles: Any, starts: Any, bitmaps: bool, is_long: npt.NDArray[np.bool_]
) -> None:
    rows, state, feedback, kind, even = launch.rows, launch.state, launch.feedback, launch.kind, is_even(launch)
    # a fixed share of the elements, whatever a group is
    in_group = max(1, _BINS * triton.next_power_of_2(int(launch.groups[is_long].min())) // (16 * TILE))
    most = int(launch.counts[is_long].min()) * in_group
    bits = min(most.bit_length() - 1, _MOST_BITS)
    bins = launch.scratch("bins", int(launch.counts.sum()) * in_group, "int32")
    by_rows = launch.work_by_rows()
    start(_guess, by_rows.shape[0],
        rows, by_rows, known, bins, in_group, _SAMPLE, _SHORT, _MOST_BITS, _STEP, feedback, kind,
        num_warps=16,
    )  # fmt: skip
    # if the sample misleads, all bits of a magnitude are told by those after the first; the last one only counts
    for number in range(2 + -(-31 // bits)):
        start(_narrow, work.shape[0],
            rows, work, state, known, bins, tiles, starts, in_group, _SHORT, _MOST_BITS, _STEP, TILE, number == 0,
            feedback, kind, even, bitmaps,
            num_warps=8, maxnreg=64,
        )  # fmt: skip
