"""Powers of two: a byte per element, and the lowest exponent of each block; see `hvd_compress.kernels.natural`."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels import natural
from hvd_compress.kernels.cuda.cast import load_block, rounded, store_block, wide_pointer
from hvd_compress.kernels.cuda.draws import key_words, mix
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

_WARPS = 8
_CHECKED = 1024  # blocks that are looked at together
_BLOCK = tl.constexpr(natural.BLOCK)
_MANTISSA = tl.constexpr(0x007FFFFF)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(254)  # exponent, as float32 keeps it, of 2**127
_CODES = tl.constexpr(127)  # exponents that a byte can tell, beside zero


@triton.jit
def _codes_at(body, numel):
    """Return the address of the codes of a body, behind the exponents of its blocks."""
    return body + ((((numel + _BLOCK - 1) // _BLOCK) + 7) & ~7)


@triton.jit
def _encode(rows, work, state, kind: tl.constexpr, aligned: tl.constexpr):
    i, _, block = entry(work)
    numel = column(rows, i, NUMEL)
    start = block * _BLOCK
    o = tl.arange(0, _BLOCK)
    left = tl.minimum(numel - start, _BLOCK).to(tl.int32)
    x = wide_pointer(column(rows, i, X), kind, 4, aligned) + start
    word = load_block(x, o, left, _BLOCK).to(tl.float32).to(tl.int32, bitcast=True)
    note_bad(state, i, (word & _MAGNITUDE) < _INFINITE)
    low, high = key_words(rows, i)
    drawn = mix(start.to(tl.uint32) + o.to(tl.uint32), low, high) & _MANTISSA
    # what was drawn carries into the exponent with the probability with which a magnitude is to be rounded up
    exponent = ((word & _MAGNITUDE).to(tl.uint32) + drawn) >> 23
    exponent = tl.where(o < left, tl.minimum(exponent.to(tl.int32), _LARGEST), 0)
    base = tl.maximum(tl.max(exponent, 0) - _CODES, 0)
    # what is so far below the largest counts as zero
    code = tl.maximum(exponent - base, 0) | ((word >> 24) & 128)
    body = column(rows, i, PAYLOAD) + HEADER
    tl.store(pointer(body, tl.uint8) + block, base.to(tl.uint8))
    codes = wide_pointer(_codes_at(body, numel), tl.uint8, 4, True) + start
    store_block(codes, o, code.to(tl.uint8), left, _BLOCK)
    if block == 0:
        note_body(state, i, numel, _codes_at(body, numel) - body + numel)


@triton.jit
def _decode(rows, work, state, scale, kind: tl.constexpr, aligned: tl.constexpr, force: tl.constexpr):
    first_row, senders, block = entry(work)
    numel = column(rows, first_row, NUMEL)
    start = block * _BLOCK
    o = tl.arange(0, _BLOCK)
    left = tl.minimum(numel - start, _BLOCK).to(tl.int32)
    out = wide_pointer(column(rows, first_row, X), kind, 4, aligned) + start
    sums = tl.zeros((_BLOCK,), tl.float32)
    if column(rows, first_row, ADD) != 0:
        sums = load_block(out, o, left, _BLOCK).to(tl.float32)
    for i in range(first_row, first_row + senders):
        flags = tl.load(state_of(state, i, 5))
        if force or (flags & (NONFINITE | ABSENT)) == 0:
            body = column(rows, i, PAYLOAD) + HEADER
            base = tl.load(pointer(body, tl.uint8) + block).to(tl.int32)
            codes = wide_pointer(_codes_at(body, numel), tl.uint8, 4, True) + start
            code = load_block(codes, o, left, _BLOCK).to(tl.int32)
            exponent = tl.where((code & 127) != 0, (code & 127) + base, 0)
            word = ((code >> 7) << 31) | (exponent << 23)
            sums += word.to(tl.float32, bitcast=True) * scale
        elif (flags & NONFINITE) != 0:
            sums = tl.full((_BLOCK,), float("nan"), tl.float32)
    store_block(out, o, rounded(sums, kind), left, _BLOCK)


@triton.jit
def _verify(rows, work, state, SIZE: tl.constexpr):
    i, _, _ = entry(work)
    numel = column(rows, i, NUMEL)
    body = column(rows, i, PAYLOAD) + HEADER
    if expect_body(state, i, _codes_at(body, numel) - body + ((numel + 7) & ~7)):
        blocks = (numel + _BLOCK - 1) // _BLOCK
        largest = tl.zeros((SIZE,), tl.int32)
        for begin in range(0, blocks, SIZE):
            o = begin + tl.arange(0, SIZE)
            largest = tl.maximum(largest, tl.load(pointer(body, tl.uint8) + o, mask=o < blocks, other=0).to(tl.int32))
        # no encoder makes an exponent beyond it
        if tl.max(largest, 0) > _CODES:
            tl.store(state_of(state, i, 5), -1)


def encode(launch: Launch, codec: int) -> None:
    """Encode a table; see `hvd_compress.kernels.natural.encode_rows`."""
    work = launch.work_by_blocks(natural.BLOCK)
    start(
        _encode, work.shape[0], launch.rows, work, launch.state, launch.kind, launch.aligned, num_warps=_WARPS
    )  # fmt: skip
    launch.seal(codec, 0)


def verify(launch: Launch) -> None:
    """Check the sizes of bodies, and the exponents of blocks, of payloads whose headers are good."""
    work = launch.work_by_rows()
    start(_verify, work.shape[0], launch.rows, work, launch.state, _CHECKED, num_warps=4)


def decode(launch: Launch, scale: float, force: bool = False) -> None:
    """Decode a table of checked payloads, and add up the rows of one tensor in their order."""
    work = launch.work_by_blocks(natural.BLOCK)
    start(
        _decode, work.shape[0], launch.rows, work, launch.state, scale, launch.kind, launch.aligned, force,
        num_warps=_WARPS,
    )  # fmt: skip
