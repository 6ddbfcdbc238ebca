"""Sparse signs: entries `index << 1 | positive`, and one value per sign; see `hvd_compress.kernels.signs`.

Where entries begin depends on how many the groups before have. So kernels that choose leave what is chosen elsewhere,
and others write the entries to their places. Offsets of groups stay in scratch memory, for who decodes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.cast import rounded, wide_pointer
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
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
    note_body,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

WORD: tl.constexpr = tl.constexpr(16)
"""Marks of two bits in a word."""
ROW_GROUPS_AT: tl.constexpr = tl.constexpr(GROUPS_AT)
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)

_SCANNED = 4096  # counts that are added up at once
_STORED = 16  # elements that a thread which decodes stores at once
_MOST_WARPS = 8  # of a program that decodes


@triton.jit
def float_of(key):
    """Return the float32 whose bits are given; as integers, those above 0 are in the same order."""
    return key.to(tl.float32, bitcast=True)


@triton.jit
def key_of(v):
    """Return the bits of a float32."""
    return v.to(tl.int32, bitcast=True)


# -- places ----------------------------------------------------------------------------------------------------------


@triton.jit
def groups_of(rows, i):
    """Return how many groups a row has."""
    return (column(rows, i, NUMEL) + column(rows, i, GROUP) - 1) // column(rows, i, GROUP)


@triton.jit
def means_of(body, groups, pairs: tl.constexpr):
    """Return the address behind the counts of a body, where the means are if it has `pairs` of them."""
    return body + ((groups * (2 if pairs else 4) + 7) & ~7)


@triton.jit
def entries_of(body, groups, pairs: tl.constexpr):
    """Return the address of the entries of a body."""
    return means_of(body, groups, pairs) + (8 * groups if pairs else 0)


@triton.jit
def _offsets(start, size, BLOCK: tl.constexpr, wide: tl.constexpr):
    """Return the elements of a block, from `start` on, and which are among `size`."""
    o = tl.arange(0, BLOCK)
    if wide:
        # the compiler sees that these are multiples of 4
        return (start >> 2) * 4 + o, o < (size >> 2) * 4
    return start + o, o < size


@triton.jit
def given(
    x, gradient, start, size, BLOCK: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, wide: tl.constexpr
):
    """Load the elements from `start` on that are to be encoded; see `corrected`. Those beyond `size` are 0.

    Arrays are given by their addresses. In `wide` launches these are 16-byte boundaries, and `start` and `size` are
    multiples of 4.
    """
    x = wide_pointer(x, tl.float32 if feedback else kind, 4, wide)
    gradient = wide_pointer(gradient, kind, 4, wide)
    o, inside = _offsets(start, size, BLOCK, wide)
    y, good = corrected(x, gradient, o, inside, feedback)
    if not feedback:
        # NaN has no order
        y = tl.where(good, y, 0.0)
    return y, good


@triton.jit
def leave(x, start, size, y, BLOCK: tl.constexpr, wide: tl.constexpr):
    """Store so many elements of a residual from `start` on."""
    o, inside = _offsets(start, size, BLOCK, wide)
    tl.store(wide_pointer(x, tl.float32, 4, wide) + o, y, mask=inside)


# -- marks -----------------------------------------------------------------------------------------------------------


@triton.jit
def marks_of(is_up, is_down, BLOCK: tl.constexpr):
    """Return words of marks of two bits: 1 for an entry below zero, 3 for one above."""
    marks = tl.where(is_up, 3, tl.where(is_down, 1, 0)).to(tl.uint32)
    marks = tl.reshape(marks, (BLOCK // WORD, WORD)) << (2 * tl.arange(0, WORD).to(tl.uint32))[None, :]
    return tl.sum(marks, 1).to(tl.int32, bitcast=True)


@triton.jit
def list_marked(words, targets, COUNT: tl.constexpr):
    """Write the entries that are marked in so many words of a group."""
    ones = words & 0x55555555
    count = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
    count = (count & 0x0F0F0F0F) + ((count >> 4) & 0x0F0F0F0F)
    count = (count & 0x00FF00FF) + ((count >> 8) & 0x00FF00FF)
    count = (count & 0xFF) + (count >> 16)
    targets += tl.cumsum(count, 0) - count
    value = tl.arange(0, COUNT) * (2 * WORD)
    for place in range(tl.max(count, 0)):
        # the exponent of the lowest bit says where it is
        bit = ((key_of((ones & -ones).to(tl.float32)) >> 23) - 127) & 31
        entries = value + bit + ((words >> bit) >> 1 & 1)
        tl.store(targets + place, entries.to(tl.uint16), mask=ones != 0)
        ones &= ones - 1


# -- offsets ---------------------------------------------------------------------------------------------------------


@triton.jit
def refuse(state, i, is_wrong):
    """Note that the payload of row `i` is damaged."""
    if is_wrong:
        tl.store(state_of(state, i, 5), -1)


@triton.jit
def _fits(rows, i, state, body, ahead, entries, pairs: tl.constexpr):
    """Tell whether sizes and parameter of a payload with a good header are as they must be."""
    is_good = tl.load(state_of(state, i, 6)) == ((2 * entries + 7) & ~7) + ahead + HEADER
    if not pairs:
        tau = (tl.load(pointer(body - HEADER, tl.int64) + 3) >> 32).to(tl.int32)
        is_good &= (tau > 0) & (tau < INFINITE)
    return is_good


@triton.jit
def sum_counts(counts, groups, targets, SIZE: tl.constexpr):
    """Write how many entries the groups before each one have, as `counts` says; returns how many all have."""
    total = tl.zeros((), tl.int64)
    for begin in range(0, groups, SIZE):
        g = begin + tl.arange(0, SIZE)
        count = tl.load(counts + g, mask=g < groups, other=0).to(tl.int64)
        tl.store(targets + g, total + tl.cumsum(count, 0) - count, mask=g < groups)
        total += tl.sum(count, 0)
    return total


@triton.jit
def _scan(rows, work, state, offsets, SIZE: tl.constexpr, pairs: tl.constexpr, verifying: tl.constexpr):
    """Write how many entries the groups before each group of a row have.

    Encoding, note the sizes of the body; verifying, refuse a payload whose sizes do not fit.
    """
    i, _, _ = entry(work)
    groups = groups_of(rows, i)
    body = column(rows, i, PAYLOAD) + HEADER
    ahead = entries_of(body, groups, pairs) - body
    has_body = groups > 0
    if verifying:
        flags = tl.load(state_of(state, i, 5))
        entries = tl.load(state_of(state, i, 1))
        has_body = (flags >= 0) & ((flags & (NONFINITE | ABSENT)) == 0)
        is_good = _fits(rows, i, state, body, ahead, entries, pairs)
        refuse(state, i, has_body & (is_good == 0))
        has_body &= is_good
    if has_body:
        counts = pointer(body, tl.uint16 if pairs else tl.uint32)
        total = sum_counts(counts, groups, offsets + column(rows, i, ROW_GROUPS_AT), SIZE)
        if verifying:
            refuse(state, i, total != entries)
        else:
            note_body(state, i, total, ahead + 2 * total)


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
        count = tl.load(pointer(body, tl.uint16 if pairs else tl.uint32) + g).to(tl.int64)
        entries = pointer(entries_of(body, groups_of(rows, i), pairs), tl.uint16)
        entries += tl.load(offsets + column(rows, i, ROW_GROUPS_AT) + g)
        for begin in range(0, count, SIZE):
            j = begin + tl.arange(0, SIZE)
            index = tl.load(entries + j, mask=j < count, other=0).to(tl.int32) >> 1
            previous = tl.load(entries + j - 1, mask=(j > 0) & (j < count), other=0).to(tl.int32) >> 1
            is_wrong = (j < count) & ((index >= size) | ((j > 0) & (index <= previous)))
            refuse(state, i, tl.max(is_wrong.to(tl.int32), 0) != 0)


# -- decoding --------------------------------------------------------------------------------------------------------


@triton.jit
def fill(out, start, size, value, BLOCK: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
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
def _sent(rows, i, g, groups, has_body, offsets, scale, own_tau, pairs: tl.constexpr, force: tl.constexpr):
    """Return of a group of a payload: its entries, how many, and what they stand for. Without a body none are read."""
    body = column(rows, i, PAYLOAD) + HEADER
    count = tl.load(pointer(body, tl.uint16 if pairs else tl.int32) + g, mask=has_body, other=0).to(tl.int32)
    entries = pointer(entries_of(body, groups, pairs), tl.uint16)
    entries += tl.load(offsets + column(rows, i, ROW_GROUPS_AT) + g, mask=has_body, other=0)
    if pairs:
        means = pointer(means_of(body, groups, True), tl.float32) + 2 * g
        positive = tl.load(means, mask=has_body, other=0.0) * scale
        negative = tl.load(means + 1, mask=has_body, other=0.0) * scale
    else:
        tau = own_tau
        if not force:
            # the upper half of the fourth word
            tau = tl.load(pointer(body - HEADER, tl.float32) + 7)
        positive, negative = tau * scale, -tau * scale
    return entries, count, positive, negative


@triton.jit
def _put(out, entries, count, positive, negative, adds, SIZE: tl.constexpr, kind: tl.constexpr):
    """Store what the entries of a group stand for, or add it."""
    for begin in range(0, count, SIZE):
        j = begin + tl.arange(0, SIZE)
        sent = tl.load(entries + j, mask=j < count, other=0).to(tl.int32)
        v = tl.where((sent & 1) != 0, positive, negative)
        targets = out + (sent >> 1)
        sums = tl.load(targets, mask=(j < count) & adds, other=0.0).to(tl.float32)
        tl.store(targets, rounded(sums + v, kind), mask=j < count)


@triton.jit
def _decode(
    rows, work, state, offsets, scale, own_tau, BLOCK: tl.constexpr, SIZE: tl.constexpr, pairs: tl.constexpr,
    kind: tl.constexpr, aligned: tl.constexpr, single: tl.constexpr, adds: tl.constexpr, force: tl.constexpr,
):  # fmt: skip
    """Fill a group with zeros, and then add the entries of one sender after the other where they belong."""
    first_row, senders, g = entry(work)
    numel, group = column(rows, first_row, NUMEL), column(rows, first_row, GROUP)
    groups = groups_of(rows, first_row)
    start = g * group
    size = tl.minimum(group, numel - start).to(tl.int32)
    out = wide_pointer(column(rows, first_row, X), kind, 4, aligned)
    flags = tl.zeros((), tl.int64)
    if not force:
        flags = tl.load(state_of(state, first_row, 5))
        if not single:
            for i in range(first_row + 1, first_row + senders):
                flags |= tl.load(state_of(state, i, 5))
    is_nan = (flags & NONFINITE) != 0
    if single:
        # as nearly always: what is loaded comes while zeros are stored
        has_body = (flags & (NONFINITE | ABSENT)) == 0
        entries, count, positive, negative = _sent(
            rows, first_row, g, groups, has_body, offsets, scale, own_tau, pairs, force
        )
    if (not adds) | is_nan:
        fill(out, start, size, tl.where(is_nan, float("nan"), 0.0), BLOCK, kind, aligned)
        # elements that other threads have stored are there now
        tl.debug_barrier()
    if single:
        _put(out + start, entries, count, positive, negative, adds, SIZE, kind)
    else:
        for i in range(first_row, first_row + senders):
            has_body = (is_nan == 0) & (force | ((tl.load(state_of(state, i, 5)) & ABSENT) == 0))
            entries, count, positive, negative = _sent(
                rows, i, g, groups, has_body, offsets, scale, own_tau, pairs, force
            )
            _put(out + start, entries, count, positive, negative, adds | (i != first_row), SIZE, kind)
            tl.debug_barrier()


# -- tables ----------------------------------------------------------------------------------------------------------


def offsets_of(launch: Launch) -> Any:
    """Return memory for the entries before each group of all rows: made when encoding or verifying."""
    return launch.scratch("offsets", launch.work_by_groups().shape[0], "int64")


def scanned_at_once(launch: Launch) -> int:
    """Return how many counts a program adds up at once."""
    groups, rows = launch.work_by_groups().shape[0], launch.work_by_rows().shape[0]
    return min(_SCANNED, max(128, triton.next_power_of_2(groups // rows)))


def scan(launch: Launch, pairs: bool, verifying: bool) -> None:
    """Fill what `offsets_of` returns; encoding, sizes of bodies are noted, and verifying they are checked."""
    work, size = launch.work_by_rows(), scanned_at_once(launch)
    start(
        _scan, work.shape[0], launch.rows, work, launch.state, offsets_of(launch), size, pairs, verifying,
        num_warps=max(1, size // 512), num_stages=1,
    )  # fmt: skip


def verify(launch: Launch, pairs: bool) -> None:
    """Check bodies whose headers are good, with two means per group or none."""
    scan(launch, pairs, True)
    work = launch.work_by_groups()
    size = min(1024, max(128, triton.next_power_of_2(launch.longest) // 32))
    start(
        _verify, work.shape[0], launch.rows, work, launch.state, offsets_of(launch), size, pairs,
        num_warps=max(1, size // 256), num_stages=1,
    )  # fmt: skip


def decode(launch: Launch, scale: float, tau: float, force: bool, pairs: bool) -> None:
    """Decode a table of payloads that were verified, or with `force` encoded with this `tau`, in this launch.

    Rows of one tensor are added up in their order.
    """
    if launch.kind != tl.float32 and not launch.is_single:
        raise NotImplementedError("sums of several payloads of sparse signs are made in float32")
    work = launch.work_by_groups_of_tensors()
    warps = max(1, min(_MOST_WARPS, triton.next_power_of_2(launch.longest) // 1024))
    start(
        _decode, work.shape[0], launch.rows, work, launch.state, offsets_of(launch), scale, tau, 32 * _STORED * warps,
        64 * warps, pairs, launch.kind, launch.aligned, launch.is_single, launch.adds, force,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
