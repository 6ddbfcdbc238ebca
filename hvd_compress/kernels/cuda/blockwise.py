"""Blocks of integers of 8 or 4 bits, perhaps rotated; see `hvd_compress.kernels.blockwise`.

Bodies are those of QSGD, whose functions pack and unpack them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.cast import rounded
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.qsgd import (
    blocks_of,
    codes_of,
    in_levels,
    largest_of,
    load_buckets,
    offsets,
    put_codes,
    step_of,
    store_buckets,
    values_of,
)
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
    entry,
    note_bad,
    note_body,
    pointer,
    state_of,
)
from hvd_compress.kernels.cuda.start import start

_ELEMENTS = 512  # of a warp: rotating takes registers
# of a block that is rotated; see the host's
_MOST_ROTATED = tl.constexpr(2.0**100)
_LEAST_ROTATED = tl.constexpr(2.0**-80)


@triton.jit
def _rotated(y, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr):
    """Multiply blocks of 2 ** PASSES elements by the Hadamard matrix, unscaled; in this order only, as the host does.

    A pass here has its two elements where they were, and the host moves them: that changes no sum.
    """
    is_second = tl.arange(0, 2)[None, :, None] == 1
    for number in tl.static_range(PASSES):
        pairs = tl.reshape(y, (BLOCKS << number, 2, BLOCK >> (number + 1)))
        plus = tl.sum(pairs, 1)
        minus = tl.sum(tl.where(is_second, -pairs, pairs), 1)
        y = tl.reshape(tl.where(is_second, minus[:, None, :], plus[:, None, :]), (BLOCKS, BLOCK))
    return y


@triton.jit
def _is_whole(left, BUCKET: tl.constexpr, BLOCKS: tl.constexpr):
    """Tell which blocks have all of their elements, of which so many are left."""
    return (tl.arange(0, BLOCKS) + 1) * BUCKET <= left


@triton.jit
def _encode(
    rows, work, state, BUCKET: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, bits: tl.constexpr,
    PASSES: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    i, _, part = entry(work)
    size: tl.constexpr = BLOCKS * BUCKET
    levels: tl.constexpr = 2 ** (bits - 1) - 1
    is_dense: tl.constexpr = BLOCK == BUCKET
    numel = column(rows, i, NUMEL)
    count = (numel + BUCKET - 1) // BUCKET
    start = part * size
    left = tl.minimum(numel - start, size).to(tl.int32)
    o, inside = offsets(BUCKET, BLOCKS, BLOCK)
    x = pointer(column(rows, i, X), tl.float32 if feedback else kind, aligned) + start
    y = load_buckets(x, o, inside, left, size, is_dense)
    if feedback:
        gradient = pointer(column(rows, i, GRADIENT), kind, aligned) + start
        v = y + load_buckets(gradient, o, inside, left, size, is_dense)
        good = tl.abs(v) < float("inf")
        y = tl.where(good, v, y)
        note_bad(state, i, tl.min(good.to(tl.int32), 1))
    norm = largest_of(y)
    if not feedback:
        note_bad(state, i, norm < float("inf"))
    stated, coded = norm, y
    if PASSES > 0:
        turned = _rotated(y * (1.0 / BLOCK), BLOCKS, BLOCK, PASSES)
        is_turned = (norm > _LEAST_ROTATED) & (norm < _MOST_ROTATED) & _is_whole(left, BUCKET, BLOCKS)
        coded = tl.where(is_turned[:, None], turned, y)
        norm = tl.where(is_turned, largest_of(turned), norm)
        # a negative scale says that the block is rotated
        stated = tl.where(is_turned, -norm, norm)
    codes = tl.minimum(in_levels(coded, norm, levels, BLOCKS) + 0.5, levels * 1.0).to(tl.int32)
    codes |= tl.where(coded < 0, levels + 1, 0)
    body = column(rows, i, PAYLOAD) + HEADER
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(pointer(body, tl.float32) + block, stated, mask=block < count)
    at = body + ((4 * count + 7) & ~7)
    put_codes(at + part * (size // 8 * bits), codes, left, BUCKET, BLOCKS, BLOCK, bits)
    if feedback:
        sent = values_of(codes, step_of(norm, levels), levels)
        if PASSES > 0:
            sent = tl.where(is_turned[:, None], _rotated(sent, BLOCKS, BLOCK, PASSES), sent)
        store_buckets(x, o, y - sent, inside, left, size, is_dense)
    if part == 0:
        note_body(state, i, numel, ((4 * count + 7) & ~7) + ((numel + 7) >> 3) * bits)


@triton.jit
def _decode(
    rows, work, state, scale, BUCKET: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, bits: tl.constexpr,
    PASSES: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr, force: tl.constexpr,
):  # fmt: skip
    first_row, senders, part = entry(work)
    size: tl.constexpr = BLOCKS * BUCKET
    levels: tl.constexpr = 2 ** (bits - 1) - 1
    numel = column(rows, first_row, NUMEL)
    count = (numel + BUCKET - 1) // BUCKET
    start = part * size
    left = tl.minimum(numel - start, size).to(tl.int32)
    o, inside = offsets(BUCKET, BLOCKS, BLOCK)
    out = pointer(column(rows, first_row, X), kind, aligned) + start
    sums = tl.zeros((BLOCKS, BLOCK), tl.float32)
    if column(rows, first_row, ADD) != 0:
        sums = load_buckets(out, o, inside, left, size, BLOCK == BUCKET)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    for i in range(first_row, first_row + senders):
        flags = tl.load(state_of(state, i, 5))
        if force or (flags & (NONFINITE | ABSENT)) == 0:
            body = column(rows, i, PAYLOAD) + HEADER
            stated = tl.load(pointer(body, tl.float32) + block, mask=block < count, other=0.0)
            at = body + ((4 * count + 7) & ~7) + part * (size // 8 * bits)
            code = codes_of(at, left, BUCKET, BLOCKS, BLOCK, bits)
            v = values_of(code, step_of(tl.abs(stated), levels) * scale, levels)
            if PASSES > 0:
                is_turned = (stated < 0) & _is_whole(left, BUCKET, BLOCKS)
                if tl.max(is_turned.to(tl.int32), 0) != 0:
                    v = tl.where(is_turned[:, None], _rotated(v, BLOCKS, BLOCK, PASSES), v)
            sums += v
        elif (flags & NONFINITE) != 0:
            sums = tl.full((BLOCKS, BLOCK), float("nan"), tl.float32)
    store_buckets(out, o, rounded(sums, kind), inside, left, size, BLOCK == BUCKET)


def _passes(block: int) -> int:
    """Return the passes that rotate a block; 0 where it cannot be rotated."""
    return block.bit_length() - 1 if block & (block - 1) == 0 else 0


def encode(launch: Launch, codec: int, bits: int, hadamard: bool, block: int) -> None:
    """Encode a table; see `hvd_compress.kernels.blockwise.encode_rows`."""
    blocks, padded, warps = blocks_of(block, _ELEMENTS)
    work = launch.work_by_blocks(blocks * block)
    start(_encode, work.shape[0],
        launch.rows, work, launch.state, block, blocks, padded, bits, _passes(block) if hadamard else 0,
        launch.feedback, launch.kind, launch.aligned, num_warps=warps,
    )  # fmt: skip
    launch.seal(codec, bits)


def decode(launch: Launch, scale: float, force: bool = False, *, bits: int, block: int) -> None:
    """Decode a table of checked payloads, rotated or not, and add up the rows of one tensor in their order."""
    blocks, padded, warps = blocks_of(block, _ELEMENTS)
    work = launch.work_by_blocks(blocks * block)
    start(_decode, work.shape[0],
        launch.rows, work, launch.state, scale, block, blocks, padded, bits, _passes(block), launch.kind,
        launch.aligned, force, num_warps=warps,
    )  # fmt: skip
