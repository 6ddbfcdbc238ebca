"""Values as they are, or rounded to 16 bits; see `hvd_compress.kernels.cast`."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels import table
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    ADD,
    GRADIENT,
    HEADER,
    NONFINITE,
    NUMEL,
    PAYLOAD,
    X,
    column,
    corrected,
    entry,
    expect_body,
    note_bad,
    note_body,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

_BLOCK = 2048
_WARPS = 4
_FLOAT64 = tl.constexpr(table.FLOAT64)


@triton.jit
def _bits_of_bfloat16(v):
    """Round float32 values to bfloat16 ones, to nearest even; NaN stays a quiet NaN. Returns bits, as uint16."""
    b = v.to(tl.uint32, bitcast=True)
    nearest = b + 0x7FFF + ((b >> 16) & 1)
    is_nan = (b & 0x7FFFFFFF) > 0x7F800000
    return (tl.where(is_nan, b | 0x400000, nearest) >> 16).to(tl.uint16)


@triton.jit
def _bits_of_float16(v):
    """Round float32 values to halves, to nearest even; those beyond 65504 become infinite. Returns bits, as uint16."""
    # not by a conversion: that of a processor gives NaN other bits than that of another
    bits = v.to(tl.uint32, bitcast=True)
    b = bits & 0x7FFFFFFF
    # denormal halves: adding 0.5 shifts the mantissa to its place and rounds it on the way
    small = (b.to(tl.float32, bitcast=True) + 0.5).to(tl.uint32, bitcast=True) - (126 << 23)
    half = (b - (112 << 23) + 0xFFF + ((b >> 13) & 1)) >> 13
    half = tl.where(b < (113 << 23), small, half)
    half = tl.where(b >= (143 << 23), 0x7C00, half)
    half = tl.where(b > 0x7F800000, 0x7E00, half)
    return (half | ((bits >> 16) & 0x8000)).to(tl.uint16)


@triton.jit
def rounded(v, kind: tl.constexpr):
    """Round float32 values to `kind`, to nearest even."""
    if kind == tl.bfloat16:
        # the conversion of Triton's interpreter cuts
        return _bits_of_bfloat16(v).to(tl.bfloat16, bitcast=True)
    return v.to(kind)


@triton.jit
def wide_pointer(address, kind: tl.constexpr, count: tl.constexpr, aligned: tl.constexpr):
    """Turn an address into a pointer; `aligned` promises that so many elements can be accessed at once.

    All arrays of a kernel have the same `count`: elsewise what is loaded has to change threads before it is stored.
    """
    if aligned:
        return tl.multiple_of(address.to(tl.pointer_type(kind)), count * (kind.primitive_bitwidth // 8))
    return address.to(tl.pointer_type(kind))


@triton.jit
def load_block(x, o, left, BLOCK: tl.constexpr):
    """Load the elements of a block, of which so many are left; a block without masks is loaded in wide words."""
    if left == BLOCK:
        y = tl.load(x + o)
    else:
        y = tl.load(x + o, mask=o < left, other=0)
    return y


@triton.jit
def store_block(x, o, y, left, BLOCK: tl.constexpr):
    """Store the elements of a block, of which so many are left."""
    if left == BLOCK:
        tl.store(x + o, y)
    else:
        tl.store(x + o, y, mask=o < left)


@triton.jit
def _encode_raw(
    rows, work, state, BLOCK: tl.constexpr, is_checked: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr
):
    i, _, block = entry(work)
    numel = column(rows, i, NUMEL)
    start = block * BLOCK
    left = tl.minimum(numel - start, BLOCK).to(tl.int32)
    o = tl.arange(0, BLOCK)
    # bodies begin on 8-byte boundaries
    y = load_block(wide_pointer(column(rows, i, X), kind, 2, aligned) + start, o, left, BLOCK).to(tl.float32)
    if is_checked:
        note_bad(state, i, tl.abs(y) < float("inf"))
    store_block(wide_pointer(column(rows, i, PAYLOAD) + HEADER, tl.float32, 2, True) + start, o, y, left, BLOCK)
    if block == 0:
        note_body(state, i, numel, 4 * numel)


@triton.jit
def _encode_float16(
    rows, work, state, BLOCK: tl.constexpr, is_checked: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr
):
    i, _, block = entry(work)
    numel = column(rows, i, NUMEL)
    start = block * BLOCK
    left = tl.minimum(numel - start, BLOCK).to(tl.int32)
    o = tl.arange(0, BLOCK)
    y = load_block(wide_pointer(column(rows, i, X), kind, 4, aligned) + start, o, left, BLOCK).to(tl.float32)
    half = _bits_of_float16(y)
    if is_checked:
        note_bad(state, i, (half & 0x7C00) != 0x7C00)
    store_block(wide_pointer(column(rows, i, PAYLOAD) + HEADER, tl.uint16, 4, True) + start, o, half, left, BLOCK)
    if block == 0:
        note_body(state, i, numel, 2 * numel)


@triton.jit
def _encode_bfloat16(
    rows, work, state, BLOCK: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr
):
    i, _, block = entry(work)
    numel = column(rows, i, NUMEL)
    start = block * BLOCK
    left = tl.minimum(numel - start, BLOCK).to(tl.int32)
    o = tl.arange(0, BLOCK)
    x = wide_pointer(column(rows, i, X), tl.float32 if feedback else kind, 4, aligned) + start
    gradient = wide_pointer(column(rows, i, GRADIENT), kind, 4, aligned) + start
    if left == BLOCK:
        y, good = corrected(x, gradient, o, tl.full((BLOCK,), 1, tl.int1), feedback)
    else:
        y, good = corrected(x, gradient, o, o < left, feedback)
    half = _bits_of_bfloat16(y)
    if feedback:
        # the largest numbers are rounded to infinity
        value = (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        is_sent = tl.abs(value) < float("inf")
        half = tl.where(is_sent, half, 0)
        good &= is_sent
        store_block(x, o, y - tl.where(is_sent, value, 0.0), left, BLOCK)
    note_bad(state, i, good)
    store_block(wide_pointer(column(rows, i, PAYLOAD) + HEADER, tl.uint16, 4, True) + start, o, half, left, BLOCK)
    if block == 0:
        note_body(state, i, numel, 2 * numel)


@triton.jit
def _decode(
    rows, work, state, scale, BLOCK: tl.constexpr, body_kind: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr,
    force: tl.constexpr,
):  # fmt: skip
    first_row, count, block = entry(work)
    numel = column(rows, first_row, NUMEL)
    start = block * BLOCK
    left = tl.minimum(numel - start, BLOCK).to(tl.int32)
    o = tl.arange(0, BLOCK)
    out = wide_pointer(column(rows, first_row, X), kind, 4, aligned) + start
    is_first = column(rows, first_row, ADD) == 0
    sums = tl.zeros((BLOCK,), tl.float32)
    if is_first == 0:
        sums = load_block(out, o, left, BLOCK).to(tl.float32)
    # bfloat16 as bits: Triton's interpreter need not convert it
    loaded: tl.constexpr = tl.uint16 if body_kind == tl.bfloat16 else body_kind
    for i in range(first_row, first_row + count):
        flags = tl.load(state_of(state, i, 5))
        if force or (flags & (NONFINITE | ABSENT)) == 0:
            body = wide_pointer(column(rows, i, PAYLOAD) + HEADER, loaded, 2 if body_kind == tl.float32 else 4, True)
            sent = load_block(body + start, o, left, BLOCK)
            if body_kind == tl.bfloat16:
                v = (sent.to(tl.uint32) << 16).to(tl.float32, bitcast=True) * scale
            else:
                v = sent.to(tl.float32) * scale
            # not added to zero, which would make +0 of -0
            sums = tl.where(is_first & (i == first_row), v, sums + v)
        elif (flags & NONFINITE) != 0:
            sums = tl.full((BLOCK,), float("nan"), tl.float32)
    store_block(out, o, rounded(sums, kind), left, BLOCK)


@triton.jit
def _verify(rows, work, state, itemsize: tl.constexpr, may_be_wide: tl.constexpr):
    i, _, _ = entry(work)
    expect_body(state, i, (column(rows, i, NUMEL) * itemsize + 7) & ~7)
    if may_be_wide:
        found = tl.load(state_of(state, i, 5))
        if (found >= 0) & ((found & (NONFINITE | ABSENT)) == 0) & ((found & _FLOAT64) != 0):
            tl.store(state_of(state, i, 5), -1)


def encode_raw(launch: Launch, codec: int, is_checked: bool) -> None:
    """Encode a table as float32; see `hvd_compress.kernels.cast.encode_raw_rows`."""
    work = launch.work_by_blocks(_BLOCK)
    start(_encode_raw, work.shape[0],
        launch.rows, work, launch.state, _BLOCK, is_checked, launch.kind, launch.aligned,
        num_warps=_WARPS,
    )  # fmt: skip
    launch.seal(codec, 0)


def encode_float16(launch: Launch, codec: int, is_checked: bool) -> None:
    """Encode a table as halves; see `hvd_compress.kernels.cast.encode_fp16_rows`."""
    work = launch.work_by_blocks(_BLOCK)
    start(_encode_float16, work.shape[0],
        launch.rows, work, launch.state, _BLOCK, is_checked, launch.kind, launch.aligned,
        num_warps=_WARPS,
    )  # fmt: skip
    launch.seal(codec, 0)


def encode_bfloat16(launch: Launch, codec: int) -> None:
    """Encode a table as bfloat16; see `hvd_compress.kernels.cast.encode_bf16_rows`."""
    work = launch.work_by_blocks(_BLOCK)
    start(_encode_bfloat16, work.shape[0],
        launch.rows, work, launch.state, _BLOCK, launch.feedback, launch.kind, launch.aligned,
        num_warps=_WARPS,
    )  # fmt: skip
    launch.seal(codec, 0)


def verify_raw(launch: Launch, may_be_wide: bool) -> None:
    """Check the sizes of bodies of float32; with `may_be_wide`, payloads that say so hold float64, and are refused."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, 4, may_be_wide, num_warps=1)


def verify_halves(launch: Launch) -> None:
    """Check the sizes of bodies of 16-bit values."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, 2, False, num_warps=1)


def _decode_as(kind: tl.dtype, launch: Launch, scale: float, force: bool) -> None:
    work = launch.work_by_blocks(_BLOCK)
    start(_decode, work.shape[0],
        launch.rows, work, launch.state, scale, _BLOCK, kind, launch.kind, launch.aligned, force,
        num_warps=_WARPS,
    )  # fmt: skip


def decode_raw(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    _decode_as(tl.float32, launch, scale, force)


def decode_float16(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode like `decode_raw`, halves."""
    _decode_as(tl.float16, launch, scale, force)


def decode_bfloat16(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode like `decode_raw`, bfloat16."""
    _decode_as(tl.bfloat16, launch, scale, force)
