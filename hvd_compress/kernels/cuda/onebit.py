"""One bit per element, and two means or one magnitude per group, or none; see `hvd_compress.kernels.onebit`.

A payload without any has the magnitude of all its elements as parameter in its header, see `signsgd`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.cast import rounded
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
    packed,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

_LONGEST = 8192  # elements of a group that one program holds in registers
_BLOCK = 1024  # elements that one program decodes


@triton.jit
def means_bytes(groups, per_group: tl.constexpr):
    """Return how many bytes the means of so many groups take."""
    return (4 * per_group * groups + 7) & ~7


@triton.jit
def _means(upper, lower, count, size, per_group: tl.constexpr):
    """Return what the bits of a group stand for: of the sums of its elements above and below 0, and their number."""
    if per_group == 1:
        positive = ((upper - lower) / tl.maximum(size, 1).to(tl.float64)).to(tl.float32)
        negative = -positive
    else:
        positive = (upper / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
        negative = (lower / tl.maximum(size - count, 1).to(tl.float64)).to(tl.float32)
    return positive, negative


@triton.jit
def _put_means(body, g, positive, negative, per_group: tl.constexpr):
    """Write the means of a group."""
    means = pointer(body, tl.float32) + per_group * g
    tl.store(means, positive)
    if per_group == 2:
        tl.store(means + 1, negative)


@triton.jit
def _put_bits(bits, first, last, is_positive, BLOCK: tl.constexpr, aligned: tl.constexpr):
    """Write the bits of the elements from `first` to `last`; words that others write to, too, are joined."""
    words = packed(is_positive, BLOCK)
    number = (first >> 5) + tl.arange(0, BLOCK // 32)
    if aligned:
        tl.store(bits + number, words, mask=32 * number < last)
    else:
        is_whole = (32 * number >= first) & (32 * number + 32 <= last)
        tl.store(bits + number, words, mask=is_whole)
        tl.atomic_or(bits + number, words, mask=(is_whole == 0) & (32 * number < last))


@triton.jit
def _encode_groups(
    rows, work, state, BLOCK: tl.constexpr, per_group: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
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
    positive, negative = _means(upper, lower, count, size, per_group)
    if feedback:
        tl.store(x + o, y - tl.where(is_positive, positive, negative), mask=inside)
    body = column(rows, i, PAYLOAD) + HEADER
    _put_means(body, g, positive, negative, per_group)
    means = means_bytes((numel + group - 1) // group, per_group)
    _put_bits(pointer(body + means, tl.int32), start, start + size, is_positive, BLOCK, aligned)
    if g == 0:
        note_body(state, i, numel, means + ((numel + 7) >> 3))


# groups that are too long for one program: parts are summed, then the means are made, then the residuals


@triton.jit
def place_of_part(rows, i, part, BLOCK: tl.constexpr):
    """Return the group of a part of a row, where it begins, its elements; and which part of the group it is."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    parts = (group + BLOCK - 1) // BLOCK
    g = part // parts
    begin = g * group + (part % parts) * BLOCK
    end = tl.minimum(tl.minimum(begin + BLOCK, (g + 1) * group), numel)
    return g, begin, tl.maximum(end - begin, 0).to(tl.int32), part % parts


@triton.jit
def _sum_parts(
    rows, work, state, sums, counts, BLOCK: tl.constexpr, per_group: tl.constexpr, feedback: tl.constexpr,
    kind: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    i, _, part = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    _, start, size, _ = place_of_part(rows, i, part, BLOCK)
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
    means = means_bytes((numel + group - 1) // group, per_group)
    bits = pointer(column(rows, i, PAYLOAD) + HEADER + means, tl.int32)
    _put_bits(bits, start, start + size, is_positive, BLOCK if aligned else 2 * BLOCK, aligned)
    if part == 0:
        note_body(state, i, numel, means + ((numel + 7) >> 3))


@triton.jit
def _leave_parts(rows, work, sums, counts, BLOCK: tl.constexpr, per_group: tl.constexpr, feedback: tl.constexpr):
    i, _, part = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    g, start, size, number = place_of_part(rows, i, part, BLOCK)
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
    of_group = tl.minimum(group, numel - g * group)
    positive, negative = _means(tl.sum(upper, 0), tl.sum(lower, 0), ones, of_group, per_group)
    if number == 0 and size > 0:
        _put_means(column(rows, i, PAYLOAD) + HEADER, g, positive, negative, per_group)
    if feedback:
        o = tl.arange(0, BLOCK)
        x = pointer(column(rows, i, X), tl.float32) + start
        y = tl.load(x + o, mask=o < size, other=0.0)
        tl.store(x + o, y - tl.where(y >= 0, positive, negative), mask=o < size)


@triton.jit
def _mean_of(means, first, second, means_of, inside, has_body, per_group: tl.constexpr, long_groups: tl.constexpr):
    """Return a mean of the group of each element; `means` has that of the first group of the row."""
    if long_groups:
        mean = tl.load(means + per_group * first, has_body, 0.0)
        return tl.where(means_of, tl.load(means + per_group * second, has_body, 0.0), mean)
    return tl.load(means + per_group * means_of, mask=inside, other=0.0)


@triton.jit
def _values(
    rows, i, has_body, means_of, groups, start, o, inside, scale, per_group: tl.constexpr, long_groups: tl.constexpr
):
    """Return what the payload of row `i` stands for, from the element `start` on; `means_of` says which means.

    Without a body nothing is read, and it means nothing.
    """
    inside = inside & has_body
    body = column(rows, i, PAYLOAD) + HEADER
    means = pointer(body, tl.float32)
    bits = pointer(body + means_bytes(groups, per_group), tl.int32) + (start >> 5)
    word = tl.load(bits + (o >> 5), mask=inside, other=0)
    if per_group == 0:
        # the parameter, which is the upper half of the fourth word of the header
        positive = tl.load(pointer(body - HEADER, tl.float32) + 7, has_body, 0.0) * scale
    else:
        # a block of long groups reaches into one group more at most
        first = start // column(rows, i, GROUP)
        second = tl.minimum(first + 1, groups - 1)
        positive = _mean_of(means, first, second, means_of, inside, has_body, per_group, long_groups) * scale
    if per_group == 2:
        negative = _mean_of(means + 1, first, second, means_of, inside, has_body, 2, long_groups) * scale
    else:
        negative = -positive
    return tl.where(((word >> (o & 31)) & 1) != 0, positive, negative)


@triton.jit
def _decode(
    rows, work, state, scale, BLOCK: tl.constexpr, per_group: tl.constexpr, kind: tl.constexpr,
    long_groups: tl.constexpr, aligned: tl.constexpr, single: tl.constexpr, adds: tl.constexpr, force: tl.constexpr,
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
    # of signs alone, what is not sent was not taken out of the residual, and has no magnitude in its header
    takes_all: tl.constexpr = force and per_group != 0
    if single:
        # one sender, as nearly always: without a loop the loads of all columns come at once
        flags = tl.load(state_of(state, first_row, 5))
        has_body = takes_all | ((flags & 5) == 0)
        v = _values(rows, first_row, has_body, means_of, groups, start, o, inside, scale, per_group, long_groups)
        v = sums + v if adds else v
        nothing = sums if force else tl.where((flags & 1) != 0, float("nan"), sums)
        sums = tl.where(has_body, v, nothing)
    else:
        for i in range(first_row, first_row + count):
            flags = tl.load(state_of(state, i, 5))
            if takes_all or (flags & 5) == 0:
                v = _values(rows, i, True, means_of, groups, start, o, inside, scale, per_group, long_groups)
                sums = tl.where((i == first_row) & (adds == 0), v, sums + v)
            elif (flags & 1) != 0 and not force:
                sums = tl.full((BLOCK,), float("nan"), tl.float32)
    tl.store(out + start + o, rounded(sums, kind), mask=inside)


def encode(launch: Launch, codec: int, per_group: int = 2) -> None:
    """Encode a table, with two means or one magnitude per group; see `hvd_compress.kernels.onebit.encode_rows`."""
    longest = launch.longest
    aligned = launch.aligned and launch.has_even_groups
    if longest <= _LONGEST:
        block = max(32, triton.next_power_of_2(longest if aligned else longest + 31))
        work = launch.work_by_groups()
        # with 64 registers enough programs run at a time for memory to be busy: a fifth faster on an H200
        start(
            _encode_groups, work.shape[0], launch.rows, work, launch.state, block, per_group, launch.feedback,
            launch.kind, aligned, num_warps=max(1, min(16, block // 512)), maxnreg=64,
        )  # fmt: skip
    else:
        work = launch.work_by_parts(_LONGEST)
        count = work.shape[0]
        sums = launch.scratch("sums", 2 * count, "float64")
        counts = launch.scratch("counts", count, "int64")
        start(
            _sum_parts, count,
            launch.rows, work, launch.state, sums, counts, _LONGEST, per_group, launch.feedback, launch.kind, aligned,
            num_warps=16,
        )  # fmt: skip
        start(
            _leave_parts, count, launch.rows, work, sums, counts, _LONGEST, per_group, launch.feedback,
            num_warps=16,
        )  # fmt: skip
    launch.seal(codec, 0)


def decode(launch: Launch, scale: float, force: bool = False, *, per_group: int = 2) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    aligned = launch.aligned and launch.has_even_rows
    work = launch.work_by_blocks(_BLOCK)
    start(
        _decode, work.shape[0], launch.rows, work, launch.state, scale, _BLOCK, per_group, launch.kind,
        launch.shortest >= _BLOCK, aligned, launch.is_single, launch.adds, force, num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit
def _verify(rows, work, state, per_group: tl.constexpr):
    i, _, _ = entry(work)
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    means = means_bytes((numel + group - 1) // group, per_group)
    expect_body(state, i, means + ((((numel + 7) >> 3) + 7) & ~7))


def verify(launch: Launch, per_group: int = 2) -> None:
    """Check the sizes of the bodies of payloads whose headers are good."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, per_group, num_warps=1)
