"""The sign of each element, and nothing else; see `hvd_compress.kernels.signsgd`."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda import onebit
from hvd_compress.kernels.cuda.cast import load_block, store_block, wide_pointer
from hvd_compress.kernels.cuda.draws import key_words, mix
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    GRADIENT,
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

_BLOCK = 1024
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _encode(rows, work, state, BLOCK: tl.constexpr, feedback: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    """Write the signs of a block; with `feedback`, what is left is the sum of which they are."""
    i, _, block = entry(work)
    numel = column(rows, i, NUMEL)
    start = block * BLOCK
    left = tl.minimum(numel - start, BLOCK).to(tl.int32)
    o = tl.arange(0, BLOCK)
    inside = o < left
    x = wide_pointer(column(rows, i, X), tl.float32 if feedback else kind, 4, aligned) + start
    gradient = wide_pointer(column(rows, i, GRADIENT), kind, 4, aligned) + start
    if left == BLOCK:
        # without masks, in wide words
        y, good = corrected(x, gradient, o, tl.full((BLOCK,), 1, tl.int1), feedback)
    else:
        y, good = corrected(x, gradient, o, inside, feedback)
    note_bad(state, i, good | (inside == 0))
    if feedback:
        store_block(x, o, y, left, BLOCK)
    low, high = key_words(rows, i)
    number = tl.arange(0, BLOCK // 32)
    drawn = mix((start >> 5).to(tl.uint32) + number.to(tl.uint32), low, high).to(tl.int32, bitcast=True)
    words = packed(y > 0, BLOCK) | (packed((y == 0) & inside, BLOCK) & drawn)
    bits = pointer(column(rows, i, PAYLOAD) + HEADER, tl.int32) + (start >> 5)
    tl.store(bits + number, words, mask=32 * number < left)
    if block == 0:
        note_body(state, i, numel, (numel + 7) >> 3)


@triton.jit
def _leave(rows, work, state, scale, BLOCK: tl.constexpr, aligned: tl.constexpr):
    """Take what the signs stand for out of the residual, unless a value of the row is not finite.

    A small residual would not survive that a large scale is taken from it and put back.
    """
    i, _, block = entry(work)
    start = block * BLOCK
    left = tl.minimum(column(rows, i, NUMEL) - start, BLOCK).to(tl.int32)
    o = tl.arange(0, BLOCK)
    x = wide_pointer(column(rows, i, X), tl.float32, 4, aligned) + start
    bits = pointer(column(rows, i, PAYLOAD) + HEADER, tl.int32) + (start >> 5)
    if tl.load(state_of(state, i, 0)) == 0:
        word = tl.load(bits + (o >> 5), mask=o < left, other=0)
        y = load_block(x, o, left, BLOCK)
        store_block(x, o, y - tl.where(((word >> (o & 31)) & 1) != 0, scale, -scale), left, BLOCK)


@triton.jit
def _verify(rows, work, state):
    i, _, _ = entry(work)
    has_body = expect_body(state, i, (((column(rows, i, NUMEL) + 7) >> 3) + 7) & ~7)
    magnitude = tl.load(pointer(column(rows, i, PAYLOAD), tl.int32) + 7)
    if has_body & ((magnitude <= 0) | (magnitude >= _INFINITE)):
        tl.store(state_of(state, i, 5), -1)


def encode(launch: Launch, codec: int, scale: float, parameter: int) -> None:
    """Encode a table; see `hvd_compress.kernels.signsgd.encode_rows`."""
    work = launch.work_by_blocks(_BLOCK)
    start(
        _encode, work.shape[0], launch.rows, work, launch.state, _BLOCK, launch.feedback, launch.kind, launch.aligned,
        num_warps=4,
    )  # fmt: skip
    if launch.feedback:
        start(_leave, work.shape[0], launch.rows, work, launch.state, scale, _BLOCK, launch.aligned, num_warps=4)
    launch.seal(codec, parameter)


def verify(launch: Launch) -> None:
    """Check the sizes of bodies, and the scales, of payloads whose headers are good."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, num_warps=1)


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    onebit.decode(launch, scale, force, per_group=0)
