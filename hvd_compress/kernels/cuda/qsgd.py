"""Stochastic levels: a norm per bucket and some bits per element; see `hvd_compress.kernels.qsgd`."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.cast import rounded
from hvd_compress.kernels.cuda.draws import key_words, uniform
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    ADD,
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

_ELEMENTS = 1024
"""Elements of a warp, 32 of each thread: a warp has whole buckets, where these are short."""

_HUGE = tl.constexpr(3e38)  # factors beyond it are multiplied in float64, as no float32 may hold them
_ULP = tl.constexpr(2.0**-23)


@triton.jit
def offsets(BUCKET: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where elements of buckets, padded to BLOCK elements, lie behind the first; and which are no padding."""
    column_of = tl.arange(0, BLOCK)[None, :]
    o = tl.arange(0, BUCKETS)[:, None] * BUCKET + column_of
    return o, (column_of < BUCKET) & (o >= 0)


@triton.jit
def load_buckets(x, o, inside, left, SIZE: tl.constexpr, is_dense: tl.constexpr):
    """Load elements, of which so many are left in the row; only at its end masks keep loads from being wide."""
    if left == SIZE:
        y = tl.load(x + o) if is_dense else tl.load(x + o, mask=inside, other=0.0)
    else:
        y = tl.load(x + o, mask=inside & (o < left), other=0.0)
    return y.to(tl.float32)


@triton.jit
def store_buckets(out, o, v, inside, left, SIZE: tl.constexpr, is_dense: tl.constexpr):
    """Store elements, of which so many are left in the row; see `load_buckets`."""
    if left == SIZE:
        if is_dense:
            tl.store(out + o, v)
        else:
            tl.store(out + o, v, mask=inside)
    else:
        tl.store(out + o, v, mask=inside & (o < left))


@triton.jit
def largest_of(y):
    """Return the largest magnitude of each bucket; NaN if one is."""
    # as integers magnitudes are in the same order, and NaN is above all
    return tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)


@triton.jit
def in_levels(y, norm, levels: tl.constexpr, BUCKETS: tl.constexpr):
    """Return magnitudes in units of the distance of two levels; a norm that is not finite makes them 0."""
    is_good = (norm > 0) & (norm < float("inf"))
    factor = tl.where(is_good, levels / tl.where(is_good, norm, 1.0).to(tl.float64), 0.0)
    # Triton rounds a number that is compared with float64 to float32
    most = tl.full((BUCKETS,), _HUGE, tl.float64)
    is_huge = factor > most
    scaled = tl.abs(y) * tl.minimum(factor, most).to(tl.float32)[:, None]
    if tl.max(is_huge.to(tl.int32), 0) != 0:
        exact = (tl.abs(y).to(tl.float64) * factor[:, None]).to(tl.float32)
        scaled = tl.where(is_huge[:, None], exact, scaled)
    return scaled


@triton.jit
def step_of(norm, levels: tl.constexpr):
    """Return the distance of two levels."""
    step = (norm.to(tl.float64) / levels).to(tl.float32)
    # the quotient may be rounded up where the norm is next to the largest float32
    is_over = tl.abs(step * (levels * 1.0)) == float("inf")
    return tl.where(is_over, step - step * _ULP, step)


@triton.jit
def values_of(code, step, levels: tl.constexpr):
    """Return what codes stand for; higher bits than those of level and sign are others'."""
    level = code & levels
    return tl.where((code & (levels + 1)) != 0, -level, level).to(tl.float32) * step[:, None]


@triton.jit
def put_codes(at, codes, left, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr, bits: tl.constexpr):
    """Write the codes of buckets, eight in `bits` bytes; those of elements that are not there are 0."""
    octets = (left + 7) >> 3
    if bits == 8:
        o, inside = offsets(BUCKET, BUCKETS, BLOCK)
        packed = tl.multiple_of(at.to(tl.pointer_type(tl.int8)), 8)
        tl.store(packed + o, codes.to(tl.int8), mask=inside & (o < tl.multiple_of(8 * octets, 8)))
    else:
        quads = tl.reshape(codes, (BUCKETS, BLOCK // 4, 4)) << (bits * tl.arange(0, 4))[None, None, :]
        quads = tl.sum(quads, 2)
        if bits == 2 or bits == 4:
            o, inside = offsets(BUCKET // 4, BUCKETS, BLOCK // 4)
            inside &= o < 2 * octets
            kind: tl.constexpr = tl.int8 if bits == 2 else tl.int16
            tl.store(pointer(at, kind) + o, quads.to(kind), mask=inside)
        else:
            low, high = tl.split(tl.reshape(quads, (BUCKETS, BLOCK // 8, 2)))
            words = low.to(tl.int64) | (high.to(tl.int64) << (4 * bits))
            o, inside = offsets(BUCKET // 8, BUCKETS, BLOCK // 8)
            inside &= o < octets
            # in pieces of the largest size that divides an octet
            nbytes: tl.constexpr = 2 if bits == 6 else 1
            piece: tl.constexpr = tl.int16 if bits == 6 else tl.int8
            for number in tl.static_range(bits // nbytes):
                value = (words >> (8 * nbytes * number)).to(piece)
                tl.store(pointer(at, piece) + (bits // nbytes) * o + number, value, mask=inside)


@triton.jit
def _encode(
    rows, work, state, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr, bits: tl.constexpr,
    is_max: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    i, _, part = entry(work)
    size: tl.constexpr = BUCKETS * BUCKET
    levels: tl.constexpr = 2 ** (bits - 1) - 1
    numel = column(rows, i, NUMEL)
    count = (numel + BUCKET - 1) // BUCKET
    start = part * size
    left = tl.minimum(numel - start, size).to(tl.int32)
    o, inside = offsets(BUCKET, BUCKETS, BLOCK)
    y = load_buckets(pointer(column(rows, i, X), kind, aligned) + start, o, inside, left, size, BLOCK == BUCKET)
    if is_max:
        norm = largest_of(y)
    else:
        wide = y.to(tl.float64)
        norm = tl.sqrt(tl.sum(wide * wide, 1)).to(tl.float32)
    note_bad(state, i, norm < float("inf"))
    scaled = in_levels(y, norm, levels, BUCKETS)
    low, high = key_words(rows, i)
    scaled += uniform(start.to(tl.uint32) + o.to(tl.uint32), low, high)
    codes = tl.minimum(scaled, levels * 1.0).to(tl.int32)
    codes |= tl.where(y < 0, levels + 1, 0)
    body = column(rows, i, PAYLOAD) + HEADER
    bucket = part * BUCKETS + tl.arange(0, BUCKETS)
    tl.store(pointer(body, tl.float32) + bucket, norm, mask=bucket < count)
    at = body + ((4 * count + 7) & ~7)
    put_codes(at + part * (size // 8 * bits), codes, left, BUCKET, BUCKETS, BLOCK, bits)
    if part == 0:
        note_body(state, i, numel, ((4 * count + 7) & ~7) + ((numel + 7) >> 3) * bits)


@triton.jit
def codes_of(at, left, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr, bits: tl.constexpr):
    """Load the codes of buckets, see `put_codes`; higher bits of what is returned are others'."""
    octets = (left + 7) >> 3
    if bits == 8:
        o, inside = offsets(BUCKET, BUCKETS, BLOCK)
        packed = tl.multiple_of(at.to(tl.pointer_type(tl.uint8)), 4)
        codes = tl.load(packed + o, mask=inside & (o < tl.multiple_of(8 * octets, 8)), other=0).to(tl.int32)
    else:
        if bits == 2 or bits == 4:
            o, inside = offsets(BUCKET // 4, BUCKETS, BLOCK // 4)
            inside &= o < 2 * octets
            kind: tl.constexpr = tl.uint8 if bits == 2 else tl.uint16
            quads = tl.load(pointer(at, kind) + o, mask=inside, other=0).to(tl.int32)
        else:
            o, inside = offsets(BUCKET // 8, BUCKETS, BLOCK // 8)
            inside &= o < octets
            nbytes: tl.constexpr = 2 if bits == 6 else 1
            piece: tl.constexpr = tl.uint16 if bits == 6 else tl.uint8
            words = tl.zeros((BUCKETS, BLOCK // 8), tl.int64)
            for number in tl.static_range(bits // nbytes):
                value = tl.load(pointer(at, piece) + (bits // nbytes) * o + number, mask=inside, other=0)
                words |= value.to(tl.int64) << (8 * nbytes * number)
            quads = tl.reshape(tl.join(words.to(tl.int32), (words >> (4 * bits)).to(tl.int32)), (BUCKETS, BLOCK // 4))
        codes = tl.reshape(quads[:, :, None] >> (bits * tl.arange(0, 4))[None, None, :], (BUCKETS, BLOCK))
    return codes


@triton.jit
def _decode(
    rows, work, state, scale, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr, bits: tl.constexpr,
    kind: tl.constexpr, aligned: tl.constexpr, force: tl.constexpr,
):  # fmt: skip
    first_row, senders, part = entry(work)
    size: tl.constexpr = BUCKETS * BUCKET
    levels: tl.constexpr = 2 ** (bits - 1) - 1
    numel = column(rows, first_row, NUMEL)
    count = (numel + BUCKET - 1) // BUCKET
    start = part * size
    left = tl.minimum(numel - start, size).to(tl.int32)
    o, inside = offsets(BUCKET, BUCKETS, BLOCK)
    out = pointer(column(rows, first_row, X), kind, aligned) + start
    sums = tl.zeros((BUCKETS, BLOCK), tl.float32)
    if column(rows, first_row, ADD) != 0:
        sums = load_buckets(out, o, inside, left, size, BLOCK == BUCKET)
    bucket = part * BUCKETS + tl.arange(0, BUCKETS)
    for i in range(first_row, first_row + senders):
        flags = tl.load(state_of(state, i, 5))
        if force or (flags & (NONFINITE | ABSENT)) == 0:
            body = column(rows, i, PAYLOAD) + HEADER
            norm = tl.load(pointer(body, tl.float32) + bucket, mask=bucket < count, other=0.0)
            step = step_of(norm, levels) * scale
            at = body + ((4 * count + 7) & ~7) + part * (size // 8 * bits)
            code = codes_of(at, left, BUCKET, BUCKETS, BLOCK, bits)
            sums += values_of(code, step, levels)
        elif (flags & NONFINITE) != 0:
            sums = tl.full((BUCKETS, BLOCK), float("nan"), tl.float32)
    store_buckets(out, o, rounded(sums, kind), inside, left, size, BLOCK == BUCKET)


@triton.jit
def _verify(rows, work, state, BUCKET: tl.constexpr, bits: tl.constexpr):
    i, _, _ = entry(work)
    numel = column(rows, i, NUMEL)
    count = (numel + BUCKET - 1) // BUCKET
    expect_body(state, i, ((4 * count + 7) & ~7) + ((((numel + 7) >> 3) * bits + 7) & ~7))
    found = tl.load(state_of(state, i, 5))
    parameter = (tl.load(pointer(column(rows, i, PAYLOAD), tl.int64) + 3) >> 32) & 0xFFFFFFFF
    if (found >= 0) & ((found & (NONFINITE | ABSENT)) == 0) & (parameter != bits):
        tl.store(state_of(state, i, 5), -1)


def blocks_of(bucket: int, elements: int = _ELEMENTS) -> tuple[int, int, int]:
    """Return the buckets of a program, the elements to which each is padded, and warps, of so many elements each."""
    block = triton.next_power_of_2(bucket)
    return max(1, elements // block), block, max(1, min(32, block // elements))


def encode(launch: Launch, codec: int, bits: int, is_max: bool, bucket: int) -> None:
    """Encode a table, 2 to 8 bits per element; see `hvd_compress.kernels.qsgd.encode_rows`."""
    buckets, block, warps = blocks_of(bucket)
    work = launch.work_by_blocks(buckets * bucket)
    start(_encode, work.shape[0],
        launch.rows, work, launch.state, bucket, buckets, block, bits, is_max, launch.kind, launch.aligned,
        num_warps=warps,
    )  # fmt: skip
    launch.seal(codec, bits)


def verify(launch: Launch, bits: int, bucket: int) -> None:
    """Check the sizes of the bodies of payloads whose headers are good, and that they have so many bits."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, bucket, bits, num_warps=1)


def decode(launch: Launch, scale: float, force: bool = False, *, bits: int, bucket: int) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    buckets, block, warps = blocks_of(bucket)
    work = launch.work_by_blocks(buckets * bucket)
    start(_decode, work.shape[0],
        launch.rows, work, launch.state, scale, bucket, buckets, block, bits, launch.kind, launch.aligned, force,
        num_warps=warps,
    )  # fmt: skip
