"""One bit per element and two means per group; see `hvd_compress.kernels.onebit`."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels import table
from hvd_compress.kernels.cuda.envelope import complete, mixed
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    GRADIENT,
    GROUP,
    HEADER,
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
from hvd_compress.kernels.cuda.start import start

_LONGEST = 8192  # elements of a group that one program holds in registers
_BLOCK = 1024  # elements that one program decodes
_FIRST = tl.constexpr(table.HEADER // 4)  # the first word of a body


@triton.jit
def _pack(is_positive, BLOCK: tl.constexpr):
    """Return the words of 32 bits that say which elements are positive."""
    bits = tl.reshape(is_positive.to(tl.uint32), (BLOCK // 32, 32))
    return tl.sum(bits << tl.arange(0, 32).to(tl.uint32)[None, :], 1).to(tl.int32, bitcast=True)


@triton.jit
def _put_bits(bits, first, last, is_positive, BLOCK: tl.constexpr, aligned: tl.constexpr):
    """Write the bits of the elements from `first` to `last`; words that others write to, too, are joined."""
    words = _pack(is_positive, BLOCK)
    number = (first >> 5) + tl.arange(0, BLOCK // 32)
    if aligned:
        tl.store(bits + number, words, mask=32 * number < last)
    else:
        is_whole = (32 * number >= first) & (32 * number + 32 <= last)
        tl.store(bits + number, words, mask=is_whole)
        tl.atomic_or(bits + number, words, mask=(is_whole == 0) & (32 * number < last))
    return words


@triton.jit
def _counted(words, positive, negative, g, groups, start, end, numel, BLOCK: tl.constexpr):
    """Return what the words of a group count for in the checksum: bits, both means, and behind the last group zeros."""
    number = tl.arange(0, BLOCK // 32)
    bits_at = 2 * groups + (start >> 5) + _FIRST
    of_bits = mixed(words.to(tl.uint32, bitcast=True), bits_at + number)
    total = tl.sum(tl.where(start + 32 * number < end, of_bits, 0), 0)
    total += mixed(positive.to(tl.uint32, bitcast=True), 2 * g + _FIRST)
    total += mixed(negative.to(tl.uint32, bitcast=True), 2 * g + (_FIRST + 1))
    written = (numel + 31) >> 5
    if (g == groups - 1) & ((written & 1) != 0):
        total += mixed(tl.zeros((), tl.uint32), 2 * groups + written + _FIRST)
    return total


@triton.jit
def _encode_groups(
    rows, work, state, BLOCK: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr,
    codec: tl.constexpr,
):  # fmt: skip
    """Encode a group; where words are not shared by groups, the last one of a row to end completes the payload."""
    i, _, g = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    start = g * group
    size = tl.minimum(group, numel - start).to(tl.int32)
    if aligned:
        # a hint for the compiler sticks to what is computed here, not to what a function returns
        start = tl.multiple_of(start, 32)
        size = tl.multiple_of(size, 4)
        o = tl.arange(0, BLOCK)
        inside = o < size
    else:
        o = tl.arange(0, BLOCK) - (start & 31).to(tl.int32)
        inside = (o >= 0) & (o < size)
    x = pointer(column(rows, i, X), tl.float32 if feedback else kind, aligned) + start
    gradient = pointer(column(rows, i, GRADIENT), kind, aligned) + start
    y, good = corrected(x, gradient, o, inside, feedback)
    note_bad(state, i, good | (inside == 0))
    is_positive = (y >= 0) & inside
    wide = y.to(tl.float64)
    count = tl.sum(is_positive.to(tl.int32), 0)
    upper = tl.sum(tl.where(is_positive, wide, 0.0), 0)
    lower = tl.sum(tl.where(is_positive, 0.0, wide), 0)
    positive = (upper / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    negative = (lower / tl.maximum(size - count, 1).to(tl.float64)).to(tl.float32)
    if feedback:
        tl.store(x + o, y - tl.where(is_positive, positive, negative), mask=inside)
    body = column(rows, i, PAYLOAD) + HEADER
    means = pointer(body, tl.float32) + 2 * g
    tl.store(means, positive)
    tl.store(means + 1, negative)
    groups = (numel + group - 1) // group
    words = _put_bits(pointer(body + 8 * groups, tl.int32), start, start + size, is_positive, BLOCK, aligned)
    nbytes = 8 * groups + ((numel + 7) >> 3)
    if aligned:
        counted = _counted(words, positive, negative, g, groups, start, start + size, numel, BLOCK)
        complete(rows, state, i, codec, tl.zeros((), tl.int64), counted, groups, numel, nbytes)
    elif g == 0:
        note_body(state, i, numel, nbytes)


# groups that are too long for one program: parts are summed, then the means are made, then the residuals


@triton.jit
def _place_of_part(rows, i, part, BLOCK: tl.constexpr):
    """Return the group of a part of a row, where it begins, its elements; and which part of the group it is."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    parts = (group + BLOCK - 1) // BLOCK
    g = part // parts
    begin = g * group + (part % parts) * BLOCK
    end = tl.minimum(tl.minimum(begin + BLOCK, (g + 1) * group), numel)
    return g, begin, tl.maximum(end - begin, 0).to(tl.int32), part % parts


@triton.jit
def _sum_parts(
    rows, work, state, sums, counts, BLOCK: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    i, _, part = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    _, start, size, _ = _place_of_part(rows, i, part, BLOCK)
    shift = (start & 31).to(tl.int32)
    o = tl.arange(0, 2 * BLOCK) - shift if not aligned else tl.arange(0, BLOCK)
    inside = (o >= 0) & (o < size)
    x = pointer(column(rows, i, X), tl.float32 if feedback else kind) + start
    gradient = pointer(column(rows, i, GRADIENT), kind) + start
    y, good = corrected(x, gradient, o, inside, feedback)
    note_bad(state, i, good | (inside == 0))
    if feedback:
        tl.store(x + o, y, mask=inside)
    is_positive = (y >= 0) & inside
    wide = y.to(tl.float64)
    program = tl.program_id(0)
    tl.store(sums + 2 * program, tl.sum(tl.where(is_positive, wide, 0.0), 0))
    tl.store(sums + 2 * program + 1, tl.sum(tl.where(is_positive, 0.0, wide), 0))
    tl.store(counts + program, tl.sum(is_positive.to(tl.int32), 0))
    groups = (numel + group - 1) // group
    bits = pointer(column(rows, i, PAYLOAD) + HEADER + 8 * groups, tl.int32)
    _put_bits(bits, start, start + size, is_positive, BLOCK if aligned else 2 * BLOCK, aligned)
    if part == 0:
        note_body(state, i, numel, 8 * groups + ((numel + 7) >> 3))


@triton.jit
def _leave_parts(rows, work, sums, counts, BLOCK: tl.constexpr, feedback: tl.constexpr):
    i, _, part = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    g, start, size, number = _place_of_part(rows, i, part, BLOCK)
    parts = ((tl.minimum(group, numel - g * group) + BLOCK - 1) // BLOCK).to(tl.int32)
    first = tl.program_id(0) - number
    # every part sums in the same order, and so gets the same means
    upper = tl.zeros((1024,), tl.float64)
    lower = tl.zeros((1024,), tl.float64)
    count = tl.zeros((1024,), tl.int64)
    for at in range(0, parts, 1024):
        o = at + tl.arange(0, 1024)
        upper += tl.load(sums + 2 * (first + o), mask=o < parts, other=0.0)
        lower += tl.load(sums + 2 * (first + o) + 1, mask=o < parts, other=0.0)
        count += tl.load(counts + first + o, mask=o < parts, other=0)
    ones = tl.sum(count, 0)
    zeros = tl.minimum(group, numel - g * group) - ones
    positive = (tl.sum(upper, 0) / tl.maximum(ones, 1).to(tl.float64)).to(tl.float32)
    negative = (tl.sum(lower, 0) / tl.maximum(zeros, 1).to(tl.float64)).to(tl.float32)
    if number == 0 and size > 0:
        means = pointer(column(rows, i, PAYLOAD) + HEADER, tl.float32) + 2 * g
        tl.store(means, positive)
        tl.store(means + 1, negative)
    if feedback:
        o = tl.arange(0, BLOCK)
        x = pointer(column(rows, i, X), tl.float32) + start
        y = tl.load(x + o, mask=o < size, other=0.0)
        tl.store(x + o, y - tl.where(y >= 0, positive, negative), mask=o < size)


@triton.jit
def _values(rows, i, has_body, means_of, groups, start, o, inside, scale, long_groups: tl.constexpr):
    """Return what the payload of row `i` stands for, from the element `start` on; `means_of` says which means.

    Without a body nothing is read, and it means nothing.
    """
    inside = inside & has_body
    body = column(rows, i, PAYLOAD) + HEADER
    means = pointer(body, tl.float32)
    bits = pointer(body + 8 * groups, tl.int32) + (start >> 5)
    word = tl.load(bits + (o >> 5), mask=inside, other=0)
    if long_groups:
        # a block reaches into one group more at most
        first = start // column(rows, i, GROUP)
        second = tl.minimum(first + 1, groups - 1)
        p0, n0 = tl.load(means + 2 * first, has_body, 0.0), tl.load(means + 2 * first + 1, has_body, 0.0)
        p1, n1 = tl.load(means + 2 * second, has_body, 0.0), tl.load(means + 2 * second + 1, has_body, 0.0)
        positive = tl.where(means_of, p1, p0) * scale
        negative = tl.where(means_of, n1, n0) * scale
    else:
        positive = tl.load(means + 2 * means_of, mask=inside, other=0.0) * scale
        negative = tl.load(means + 2 * means_of + 1, mask=inside, other=0.0) * scale
    return tl.where(((word >> (o & 31)) & 1) != 0, positive, negative)


@triton.jit
def _decode(
    rows, work, state, scale, BLOCK: tl.constexpr, kind: tl.constexpr, long_groups: tl.constexpr,
    aligned: tl.constexpr, single: tl.constexpr, adds: tl.constexpr, force: tl.constexpr,
):  # fmt: skip
    first_row, count, block = entry(work)
    numel, group = column(rows, first_row, NUMEL), column(rows, first_row, GROUP)
    out = pointer(column(rows, first_row, X), kind, aligned)
    start = block * BLOCK
    size = tl.minimum(numel - start, BLOCK).to(tl.int32)
    if aligned:
        size = tl.multiple_of(size, 4)
    o = tl.arange(0, BLOCK)
    inside = o < size
    groups = (numel + group - 1) // group
    first = start // group
    if long_groups:
        means_of = o >= ((first + 1) * group - start).to(tl.int32)
    else:
        means_of = first + ((start - first * group).to(tl.int32) + o) // group.to(tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)
    if adds:
        sums = tl.load(out + start + o, mask=inside, other=0.0).to(tl.float32)
    if single:
        # one sender, as nearly always: without a loop the loads of all columns come at once
        flags = tl.load(state_of(state, first_row, 5))
        has_body = force | ((flags & 5) == 0)
        v = _values(rows, first_row, has_body, means_of, groups, start, o, inside, scale, long_groups)
        v = sums + v if adds else v
        nothing = tl.where((flags & 1) != 0, float("nan"), sums)
        sums = tl.where(has_body, v, nothing)
    else:
        for i in range(first_row, first_row + count):
            flags = tl.load(state_of(state, i, 5))
            if force or (flags & 5) == 0:
                v = _values(rows, i, True, means_of, groups, start, o, inside, scale, long_groups)
                sums = tl.where((i == first_row) & (adds == 0), v, sums + v)
            elif (flags & 1) != 0:
                sums = tl.full((BLOCK,), float("nan"), tl.float32)
    tl.store(out + start + o, sums.to(kind), mask=inside)


def encode(launch: Launch, codec: int) -> None:
    """Encode a table; see `hvd_compress.kernels.onebit.encode_rows`."""
    longest = launch.longest
    aligned = launch.aligned and launch.has_even_groups
    if longest <= _LONGEST:
        block = max(32, triton.next_power_of_2(longest if aligned else longest + 31))
        work = launch.work_by_groups()
        # with 64 registers enough programs run at a time for memory to be busy: a fifth faster on an H200
        start(
            _encode_groups, work.shape[0], launch.rows, work, launch.state, block, launch.feedback, launch.kind,
            aligned, codec, num_warps=max(1, min(16, block // 512)), maxnreg=64,
        )  # fmt: skip
        if aligned:
            return
    else:
        work = launch.work_by_parts(_LONGEST)
        count = work.shape[0]
        sums = launch.scratch("sums", 2 * count, "float64")
        counts = launch.scratch("counts", count, "int64")
        start(
            _sum_parts, count,
            launch.rows, work, launch.state, sums, counts, _LONGEST, launch.feedback, launch.kind, aligned,
            num_warps=16,
        )  # fmt: skip
        start(
            _leave_parts, count, launch.rows, work, sums, counts, _LONGEST, launch.feedback,
            num_warps=16,
        )  # fmt: skip
    launch.seal(codec, 0)


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    aligned = launch.aligned and launch.has_even_rows
    work = launch.work_by_blocks(_BLOCK)
    start(
        _decode, work.shape[0], launch.rows, work, launch.state, scale, _BLOCK, launch.kind, launch.shortest >= _BLOCK,
        aligned, launch.is_single, launch.adds, force, num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit
def _verify(rows, work, state):
    i, _, _ = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    body = 8 * ((numel + group - 1) // group) + ((((numel + 7) >> 3) + 7) & ~7)
    expect_body(state, i, body)


def verify(launch: Launch) -> None:
    """Check the sizes of the bodies of payloads whose headers are good."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, num_warps=1)
