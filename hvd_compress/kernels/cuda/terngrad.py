"""Three levels, five elements in a byte, and a scale per group; see `hvd_compress.kernels.terngrad`.

A program has a part of a group: so many bytes, whose elements lie in up to five runs of as many. It goes through these
one after the other.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from hvd_compress.kernels import terngrad
from hvd_compress.kernels.cuda.cast import rounded
from hvd_compress.kernels.cuda.draws import key_words, uniform
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.onebit import place_of_part
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    ADD,
    GROUP,
    HEADER,
    NONFINITE,
    NUMEL,
    PAYLOAD,
    X,
    column,
    entry,
    expect_body,
    note_bad,
    note_body,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

_MOST_BYTES = 1024  # of a part
_SUMMED = 1024  # parts whose sums are added up at once
_DIGITS = 5
_RUN = tl.constexpr(terngrad.RUN)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_MOST = tl.constexpr(3e38)  # a scale that is cut stays below infinity
_LARGEST_BYTE = tl.constexpr(242)  # five digits of 2


@triton.jit
def _bytes_of(numel):
    """Return how many bytes so many elements of a group take."""
    return numel // _RUN * 64 + (numel % _RUN + 4) // 5


@triton.jit
def _sizes(rows, i):
    """Return of a row: the bytes of a whole group, and the bytes of a body with and without scales."""
    numel, group = column(rows, i, NUMEL), column(rows, i, GROUP)
    groups = (numel + group - 1) // group
    whole = _bytes_of(group)
    packed = (groups - 1) * whole + _bytes_of(numel - (groups - 1) * group)
    return whole, ((4 * groups + 7) & ~7) + packed, packed


@triton.jit
def _places(size, BYTES: tl.constexpr):
    """Return for each byte of a part of so many elements: the first element, how far the next is, and what is left.

    Nothing is left where there is no byte.
    """
    b = tl.arange(0, BYTES)
    j = b & 63
    run = (b >> 6) * _RUN
    of_run = tl.maximum(tl.minimum(size - run, _RUN), 0)
    stride = (of_run + 4) // 5
    return run + j, stride, tl.where(j < stride, of_run - j, 0)


@triton.jit
def _sums(x, state, i, size, BYTES: tl.constexpr, DIGITS: tl.constexpr):
    """Return the sum of squares of a part, and the bits of its largest magnitude; notes values that are not finite."""
    first, stride, left = _places(size, BYTES)
    squares = tl.zeros((BYTES,), tl.float64)
    top = tl.zeros((BYTES,), tl.int32)
    for d in tl.static_range(DIGITS):
        y = tl.load(x + first + d * stride, mask=d * stride < left, other=0.0).to(tl.float32)
        wide = y.to(tl.float64)
        squares += wide * wide
        top = tl.maximum(top, y.to(tl.int32, bitcast=True) & _MAGNITUDE)
    note_bad(state, i, top < _INFINITE)
    return tl.sum(squares, 0), tl.max(top, 0)


@triton.jit
def _scale_of(squares, top, size, CLIP: tl.constexpr):
    """Return the largest magnitude of a group, cut as `CLIP` says: the bits of a float64, or 0 for not at all."""
    largest = top.to(tl.float32, bitcast=True)
    if CLIP != 0:
        clip = tl.full((), CLIP, tl.int64).to(tl.float64, bitcast=True)
        cut = clip * tl.sqrt(squares / size.to(tl.float64))
        cut = tl.minimum(cut, tl.full((), _MOST, tl.float64)).to(tl.float32)
        # what is not zero must not vanish
        largest = tl.where(cut > 0, tl.minimum(largest, cut), largest)
    return largest


@triton.jit
def _sum_parts(
    rows, work, state, squares, tops, BYTES: tl.constexpr, DIGITS: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """Sum up each part of groups that are too long for one program."""
    i, _, part = entry(work)
    _, begin, size, _ = place_of_part(rows, i, part, DIGITS * BYTES)
    square, top = _sums(pointer(column(rows, i, X), kind) + begin, state, i, size, BYTES, DIGITS)
    tl.store(squares + tl.program_id(0), square)
    tl.store(tops + tl.program_id(0), top)


@triton.jit
def _sums_of_parts(squares, tops, first, parts, SIZE: tl.constexpr):
    """Add up what `_sum_parts` has written; every part does so in the same order, and gets the same."""
    square = tl.zeros((SIZE,), tl.float64)
    top = tl.zeros((SIZE,), tl.int32)
    for at in range(0, parts, SIZE):
        o = at + tl.arange(0, SIZE)
        square += tl.load(squares + first + o, mask=o < parts, other=0.0)
        top = tl.maximum(top, tl.load(tops + first + o, mask=o < parts, other=0))
    return tl.sum(square, 0), tl.max(top, 0)


@triton.jit
def _encode(
    rows, work, state, squares, tops, CLIP: tl.constexpr, BYTES: tl.constexpr, DIGITS: tl.constexpr,
    SIZE: tl.constexpr, is_short: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Write the bytes of a part, and the scale of its group; a short group has one part, which is summed here."""
    i, _, part = entry(work)
    g, begin, size, number = place_of_part(rows, i, part, DIGITS * BYTES)
    x = pointer(column(rows, i, X), kind) + begin
    whole, body_bytes, packed = _sizes(rows, i)
    of_group = tl.minimum(column(rows, i, GROUP), column(rows, i, NUMEL) - g * column(rows, i, GROUP))
    if is_short:
        square, top = _sums(x, state, i, size, BYTES, DIGITS)
    else:
        parts = ((of_group + DIGITS * BYTES - 1) // (DIGITS * BYTES)).to(tl.int32)
        square, top = _sums_of_parts(squares, tops, tl.program_id(0) - number, parts, SIZE)
    scale = _scale_of(square, top, of_group, CLIP)
    body = column(rows, i, PAYLOAD) + HEADER
    if (number == 0) & (size > 0):
        tl.store(pointer(body, tl.float32) + g, scale)
    low, high = key_words(rows, i)
    first, stride, left = _places(size, BYTES)
    byte = tl.zeros((BYTES,), tl.int32)
    for d in tl.static_range(DIGITS):
        o = first + d * stride
        inside = d * stride < left
        v = tl.load(x + o, mask=inside, other=0.0).to(tl.float32)
        is_sent = uniform(begin.to(tl.uint32) + o.to(tl.uint32), low, high) * scale < tl.abs(v)
        digit = 1 + tl.where(is_sent & inside, tl.where(v > 0, 1, -1), 0)
        byte += digit * (3**d)
    at = pointer(body + body_bytes - packed + g * whole + number * BYTES, tl.uint8)
    tl.store(at + tl.arange(0, BYTES), byte.to(tl.uint8), mask=left > 0)
    if part == 0:
        note_body(state, i, column(rows, i, NUMEL), body_bytes)


@triton.jit
def _decode(
    rows, work, state, scale, BYTES: tl.constexpr, DIGITS: tl.constexpr, kind: tl.constexpr, force: tl.constexpr
):
    first_row, senders, part = entry(work)
    g, begin, size, number = place_of_part(rows, first_row, part, DIGITS * BYTES)
    whole, body_bytes, packed = _sizes(rows, first_row)
    out = pointer(column(rows, first_row, X), kind) + begin
    first, stride, left = _places(size, BYTES)
    for d in tl.static_range(DIGITS):
        inside = d * stride < left
        sums = tl.zeros((BYTES,), tl.float32)
        if column(rows, first_row, ADD) != 0:
            sums = tl.load(out + first + d * stride, mask=inside, other=0.0).to(tl.float32)
        for i in range(first_row, first_row + senders):
            flags = tl.load(state_of(state, i, 5))
            if force or (flags & (NONFINITE | ABSENT)) == 0:
                body = column(rows, i, PAYLOAD) + HEADER
                step = tl.load(pointer(body, tl.float32) + g, mask=size > 0, other=0.0) * scale
                at = pointer(body + body_bytes - packed + g * whole + number * BYTES, tl.uint8)
                byte = tl.load(at + tl.arange(0, BYTES), mask=inside, other=0).to(tl.int32)
                sums += (byte // (3**d) % 3 - 1).to(tl.float32) * step
            elif (flags & NONFINITE) != 0:
                sums = tl.full((BYTES,), float("nan"), tl.float32)
        tl.store(out + first + d * stride, rounded(sums, kind), mask=inside)


@triton.jit
def _verify(rows, work, state, BYTES: tl.constexpr, DIGITS: tl.constexpr):
    i, _, part = entry(work)
    whole, body_bytes, packed = _sizes(rows, i)
    g, _, size, number = place_of_part(rows, i, part, DIGITS * BYTES)
    is_there = tl.arange(0, BYTES) < _bytes_of(size)
    if expect_body(state, i, (body_bytes + 7) & ~7):
        at = column(rows, i, PAYLOAD) + HEADER + body_bytes - packed + g * whole + number * BYTES
        byte = tl.load(pointer(at, tl.uint8) + tl.arange(0, BYTES), mask=is_there, other=0).to(tl.int32)
        if tl.max(byte, 0) > _LARGEST_BYTE:
            tl.store(state_of(state, i, 5), -1)


def _part_bytes(launch: Launch) -> int:
    """Return how many bytes a part has: whole runs, unless one part has all of a group."""
    return min(_MOST_BYTES, max(16, triton.next_power_of_2(-(-launch.longest // _DIGITS))))


def encode(launch: Launch, codec: int, clip: float) -> None:
    """Encode a table; a `clip` of 0 is none. See `hvd_compress.kernels.terngrad.encode_rows`."""
    nbytes = _part_bytes(launch)
    work = launch.work_by_parts(_DIGITS * nbytes)
    count = work.shape[0]
    is_short = launch.longest <= _DIGITS * nbytes
    squares = launch.scratch("squares", 1 if is_short else count, "float64")
    tops = launch.scratch("tops", 1 if is_short else count, "int32")
    warps = max(1, min(8, nbytes // 128))
    if not is_short:
        start(
            _sum_parts, count, launch.rows, work, launch.state, squares, tops, nbytes, _DIGITS, launch.kind,
            num_warps=warps,
        )  # fmt: skip
    start(
        _encode, count, launch.rows, work, launch.state, squares, tops, int(np.float64(clip).view(np.int64)), nbytes,
        _DIGITS, _SUMMED, is_short, launch.kind, num_warps=warps, num_stages=1,
    )  # fmt: skip
    launch.seal(codec, 0)


def verify(launch: Launch) -> None:
    """Check the sizes of bodies whose headers are good, and that all bytes are five digits."""
    nbytes = _part_bytes(launch)
    work = launch.work_by_parts(_DIGITS * nbytes)
    start(_verify, work.shape[0], launch.rows, work, launch.state, nbytes, _DIGITS, num_warps=max(1, nbytes // 256))


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    nbytes = _part_bytes(launch)
    work = launch.work_by_parts(_DIGITS * nbytes)
    start(
        _decode, work.shape[0], launch.rows, work, launch.state, scale, nbytes, _DIGITS, launch.kind, force,
        num_warps=max(1, min(8, nbytes // 128)), num_stages=1,
    )  # fmt: skip
