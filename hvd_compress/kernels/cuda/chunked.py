"""The largest entries of each chunk, with values of few bits; see `hvd_compress.kernels.chunked`.

Where the bits of a chunk begin depends on how many entries those before have. So one launch selects, and leaves the
entries elsewhere; another sums up how many there are; and a third one writes them into the stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda import signs
from hvd_compress.kernels.cuda.cast import rounded, wide_pointer
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import (
    ABSENT,
    GRADIENT,
    GROUP,
    HEADER,
    LIMIT,
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
from hvd_compress.kernels.cuda.select import chosen_of, kth, padded
from hvd_compress.kernels.cuda.signs import ROW_GROUPS_AT, fill, given, groups_of, leave, refuse, sum_counts
from hvd_compress.kernels.cuda.start import start

_ELEMENTS_OF_LANE = 16  # elements of a chunk that one thread holds in registers
_MOST_LISTED = 1024  # entries that a program looks at together
_WORDS = 128  # of a stream, that a program writes together
_LARGEST = tl.constexpr(2.0**128 - 2.0**104)


# -- sections of a body ----------------------------------------------------------------------------------------------


@triton.jit
def _scales_at(body, chunks):
    """Return the address of the scales, behind the counts."""
    return body + padded(2 * chunks)


@triton.jit
def _stream_at(body, chunks, bits: tl.constexpr):
    """Return the address of the stream of entries."""
    return _scales_at(body, chunks) + padded(4 * (1 if bits == 1 else 2) * chunks)


@triton.jit
def _line_of(body, chunks, c, has_body, bits: tl.constexpr):
    """Return the magnitude of the lowest level of a chunk, and the step from each level to the next."""
    scales = pointer(_scales_at(body, chunks), tl.float32)
    if bits == 1:
        return tl.load(scales + c, has_body, 0.0), tl.zeros((), tl.float32)
    return tl.load(scales + 2 * c, has_body, 0.0), tl.load(scales + 2 * c + 1, has_body, 0.0)


@triton.jit
def _magnitudes(level, base, step):
    """Return the magnitudes that levels stand for, as float32; in float64 the product is exact."""
    v = base.to(tl.float64) + level.to(tl.float64) * step.to(tl.float64)
    largest = tl.full((), _LARGEST, tl.float64)
    return tl.minimum(tl.maximum(v, -largest), largest).to(tl.float32)


# -- encoding --------------------------------------------------------------------------------------------------------


@triton.jit
def _level_of(v, low, per_level, LEVELS: tl.constexpr):
    """Return the levels of magnitudes that are given as float64."""
    return tl.minimum(((v - low) * per_level).to(tl.int32), LEVELS - 1)


@triton.jit
def _line(values, count, low, per_level, LEVELS: tl.constexpr, SIZE: tl.constexpr):
    """Fit the line that levels stand for to the magnitudes of a chunk, by least squares."""
    numbers, squares = tl.zeros((SIZE,), tl.int64), tl.zeros((SIZE,), tl.int64)
    total, products = tl.zeros((SIZE,), tl.float64), tl.zeros((SIZE,), tl.float64)
    at_zero, total_at_zero = tl.zeros((SIZE,), tl.int64), tl.zeros((SIZE,), tl.float64)
    for begin in range(0, count, SIZE):
        j = begin + tl.arange(0, SIZE)
        v = tl.abs(tl.load(values + j, mask=j < count, other=0.0)).to(tl.float64)
        level = tl.where(j < count, _level_of(v, low, per_level, LEVELS), 0)
        is_at_zero = (level == 0) & (j < count)
        numbers += level.to(tl.int64)
        squares += (level * level).to(tl.int64)
        total += v
        products += level.to(tl.float64) * v
        at_zero += is_at_zero.to(tl.int64)
        total_at_zero += tl.where(is_at_zero, v, 0.0)
    number, n = tl.sum(numbers, 0), tl.maximum(count, 1).to(tl.int64)
    some = tl.maximum(number, 1).to(tl.float64)
    everything = tl.sum(total, 0)
    if LEVELS == 2:
        of_zero = tl.sum(total_at_zero, 0)
        base = (of_zero / tl.maximum(tl.sum(at_zero, 0), 1).to(tl.float64)).to(tl.float32)
        step = ((everything - of_zero) / some - base.to(tl.float64)).to(tl.float32)
    else:
        spread = tl.maximum(n * tl.sum(squares, 0) - number * number, 1).to(tl.float64)
        slope = (n.to(tl.float64) * tl.sum(products, 0) - number.to(tl.float64) * everything) / spread
        base = ((everything - slope * number.to(tl.float64)) / n.to(tl.float64)).to(tl.float32)
        step = slope.to(tl.float32)
    # all of them have the lowest level
    base = tl.where(number == 0, (everything / n.to(tl.float64)).to(tl.float32), base)
    return base, tl.where(number == 0, 0.0, step)


@triton.jit
def _select(
    rows, work, state, found, values, most, BLOCK: tl.constexpr, SIZE: tl.constexpr, bits: tl.constexpr,
    feedback: tl.constexpr, kind: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Write count and scales of a chunk, leave its residual, and list its entries in `found`, `most` of each chunk."""
    i, _, c = entry(work)
    LEVELS: tl.constexpr = 2 ** (bits - 1)
    numel, chunk = column(rows, i, NUMEL), column(rows, i, GROUP)
    begin = c * chunk
    size = tl.minimum(chunk, numel - begin).to(tl.int32)
    x = column(rows, i, X)
    y, good = given(x, column(rows, i, GRADIENT), begin, size, BLOCK, feedback, kind, wide)
    note_bad(state, i, good)
    if feedback:
        leave(x, begin, size, y, BLOCK, wide)
    sizes = tl.abs(y)
    # the last chunk sends what the others leave of the limit
    k = tl.where(size == chunk, most, column(rows, i, LIMIT) - numel // chunk * most).to(tl.int32)
    above_zero = tl.sum((sizes > 0).to(tl.int32), 0)
    threshold, from_low, from_high = kth(sizes, tl.full((), 1, tl.int32), above_zero, k, 0)
    chosen, rank, _counted = chosen_of(sizes, threshold, tl.where(from_low <= k, BLOCK, k - from_high))
    count = tl.minimum(from_low, k)
    # y of the chosen in the order of their places, and behind it those
    place = tl.program_id(0).to(tl.int64) * most
    tl.store(values + place + rank, y, mask=chosen)
    tl.store(found + place + rank, tl.arange(0, BLOCK), mask=chosen)
    # what other threads have stored is there now
    tl.debug_barrier()
    low, high = tl.full((SIZE,), float("inf"), tl.float32), tl.zeros((SIZE,), tl.float32)
    for first in range(0, count, SIZE):
        j = first + tl.arange(0, SIZE)
        v = tl.abs(tl.load(values + place + j, mask=j < count, other=0.0))
        low, high = tl.minimum(low, tl.where(j < count, v, float("inf"))), tl.maximum(high, v)
    least, span = tl.min(low, 0).to(tl.float64), tl.max(high, 0).to(tl.float64) - tl.min(low, 0).to(tl.float64)
    has_span = (count > 0) & (span > 0)
    per_level = tl.where(has_span, tl.full((), LEVELS, tl.float64) / tl.where(has_span, span, 1.0), 0.0)
    least = tl.where(count > 0, least, 0.0)
    base, step = _line(values + place, count, least, per_level, LEVELS, SIZE)
    body, chunks = column(rows, i, PAYLOAD) + HEADER, groups_of(rows, i)
    tl.store(pointer(body, tl.uint16) + c, count.to(tl.uint16))
    scales = pointer(_scales_at(body, chunks), tl.float32)
    if bits == 1:
        tl.store(scales + c, base)
    else:
        tl.store(scales + 2 * c, base)
        tl.store(scales + 2 * c + 1, step)
    residual = pointer(x, tl.float32) + begin
    for first in range(0, count, SIZE):
        j = first + tl.arange(0, SIZE)
        v = tl.load(values + place + j, mask=j < count, other=0.0)
        index = tl.load(found + place + j, mask=j < count, other=0)
        level = _level_of(tl.abs(v).to(tl.float64), least, per_level, LEVELS)
        sign = (v < 0).to(tl.int32)
        if feedback:
            q = _magnitudes(level, base, step)
            tl.store(residual + index, v - tl.where(v < 0, -q, q), mask=j < count)
        tl.store(found + place + j, (index << bits) | (sign << (bits - 1)) | level, mask=j < count)


@triton.jit
def _scan(
    rows, work, state, offsets, LENGTH: tl.constexpr, SIZE: tl.constexpr, bits: tl.constexpr, verifying: tl.constexpr
):  # fmt: skip
    """Write how many entries the chunks before each chunk have; see `signs`."""
    i, _, _ = entry(work)
    chunks = groups_of(rows, i)
    body = column(rows, i, PAYLOAD) + HEADER
    stream = _stream_at(body, chunks, bits)
    has_body = chunks > 0
    entries = tl.zeros((), tl.int64)
    if verifying:
        flags = tl.load(state_of(state, i, 5))
        entries = tl.load(state_of(state, i, 1))
        has_body = (flags >= 0) & ((flags & (NONFINITE | ABSENT)) == 0)
        nbytes = stream - body + 8 * ((entries * LENGTH + 63) >> 6)
        parameter = (tl.load(pointer(body - HEADER, tl.int64) + 3) >> 32) & 0xFFFFFFFF
        is_good = (tl.load(state_of(state, i, 6)) == nbytes + HEADER) & (entries <= column(rows, i, NUMEL))
        is_good &= parameter == bits
        refuse(state, i, has_body & (is_good == 0))
        has_body &= is_good
    if has_body:
        total = sum_counts(pointer(body, tl.uint16), chunks, offsets + column(rows, i, ROW_GROUPS_AT), SIZE)
        if verifying:
            # the stream ends with zeros
            used = entries * LENGTH
            rest = tl.load(pointer(stream, tl.uint64) + (used >> 6), mask=(used & 63) != 0, other=0)
            refuse(state, i, (total != entries) | ((rest >> (used & 63).to(tl.uint64)) != 0))
        else:
            note_body(state, i, total, stream - body + 8 * ((total * LENGTH + 63) >> 6))


@triton.jit
def _write(
    rows, work, offsets, found, most, LENGTH: tl.constexpr, REACH: tl.constexpr, WORDS: tl.constexpr,
    bits: tl.constexpr,
):  # fmt: skip
    """Write the entries of a chunk into the stream; words that others write to, too, are joined."""
    i, _, c = entry(work)
    body, chunks = column(rows, i, PAYLOAD) + HEADER, groups_of(rows, i)
    count = tl.load(pointer(body, tl.uint16) + c).to(tl.int32)
    first_bit = tl.load(offsets + column(rows, i, ROW_GROUPS_AT) + c) * LENGTH
    # from here on all bits are counted from the word where the chunk begins
    stream = pointer(_stream_at(body, chunks, bits), tl.int32) + (first_bit >> 5)
    shift = (first_bit & 31).to(tl.int32)
    end = shift + count * LENGTH
    entries = found + tl.program_id(0).to(tl.int64) * most
    for begin in range(0, (end + 31) >> 5, WORDS):
        number = begin + tl.arange(0, WORDS)
        first = tl.maximum(32 * number - shift, 0) // LENGTH
        word = tl.zeros((WORDS,), tl.uint32)
        for ahead in tl.static_range(REACH):
            j = first + ahead
            at = shift + j * LENGTH - 32 * number
            inside = (j < count) & (at < 32)
            value = tl.load(entries + j, mask=inside, other=0).to(tl.uint32)
            up = value << tl.maximum(tl.minimum(at, 31), 0).to(tl.uint32)
            word |= tl.where(at >= 0, up, value >> tl.maximum(tl.minimum(-at, 31), 0).to(tl.uint32))
        packed = word.to(tl.int32, bitcast=True)
        is_whole = (32 * number >= shift) & (32 * number + 32 <= end)
        tl.store(stream + number, packed, mask=is_whole)
        tl.atomic_or(stream + number, packed, mask=(is_whole == 0) & (32 * number < end))


# -- checking and decoding -------------------------------------------------------------------------------------------


@triton.jit
def _entries(stream, number, inside, LENGTH: tl.constexpr):
    """Return entries of a stream by their numbers."""
    at = number * LENGTH
    word = at >> 5
    low = tl.load(stream + word, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    # an entry ends in the same word or in the next one
    high = tl.load(stream + word + 1, mask=inside & ((at & 31) + LENGTH > 32), other=0).to(tl.int64) & 0xFFFFFFFF
    return (((low | (high << 32)) >> (at & 31)) & ((1 << LENGTH) - 1)).to(tl.int32)


@triton.jit
def _verify(rows, work, state, offsets, LENGTH: tl.constexpr, SIZE: tl.constexpr, bits: tl.constexpr):
    """Refuse a payload with a chunk whose entries do not ascend, or reach beyond it, or whose line is not finite."""
    i, _, c = entry(work)
    flags = tl.load(state_of(state, i, 5))
    # sizes fit, so that all entries are there
    if (flags >= 0) & ((flags & (NONFINITE | ABSENT)) == 0):
        chunk, chunks = column(rows, i, GROUP), groups_of(rows, i)
        size = tl.minimum(chunk, column(rows, i, NUMEL) - c * chunk).to(tl.int32)
        body = column(rows, i, PAYLOAD) + HEADER
        base, step = _line_of(body, chunks, c, True, bits)
        is_finite = (tl.abs(base) < float("inf")) & (tl.abs(step) < float("inf"))
        refuse(state, i, is_finite == 0)
        count = tl.load(pointer(body, tl.uint16) + c).to(tl.int64)
        first = tl.load(offsets + column(rows, i, ROW_GROUPS_AT) + c)
        stream = pointer(_stream_at(body, chunks, bits), tl.int32)
        for begin in range(0, count, SIZE):
            j = begin + tl.arange(0, SIZE)
            index = _entries(stream, first + j, j < count, LENGTH) >> bits
            previous = _entries(stream, first + j - 1, (j > 0) & (j < count), LENGTH) >> bits
            is_wrong = (j < count) & ((index >= size) | ((j > 0) & (index <= previous)))
            refuse(state, i, tl.max(is_wrong.to(tl.int32), 0) != 0)


@triton.jit
def _put(
    out, rows, i, c, has_body, offsets, scale, LENGTH: tl.constexpr, SIZE: tl.constexpr, bits: tl.constexpr,
    kind: tl.constexpr,
):  # fmt: skip
    """Add what the entries of a chunk stand for; without a body nothing is read."""
    body, chunks = column(rows, i, PAYLOAD) + HEADER, groups_of(rows, i)
    base, step = _line_of(body, chunks, c, has_body, bits)
    count = tl.load(pointer(body, tl.uint16) + c, mask=has_body, other=0).to(tl.int64)
    first = tl.load(offsets + column(rows, i, ROW_GROUPS_AT) + c, mask=has_body, other=0)
    stream = pointer(_stream_at(body, chunks, bits), tl.int32)
    for begin in range(0, count, SIZE):
        j = begin + tl.arange(0, SIZE)
        sent = _entries(stream, first + j, j < count, LENGTH)
        v = _magnitudes(sent & ((1 << (bits - 1)) - 1), base, step)
        v = tl.where(((sent >> (bits - 1)) & 1) != 0, -v, v) * scale
        targets = out + (sent >> bits)
        sums = tl.load(targets, mask=j < count, other=0.0).to(tl.float32)
        tl.store(targets, rounded(sums + v, kind), mask=j < count)


@triton.jit
def _decode(
    rows, work, state, offsets, scale, BLOCK: tl.constexpr, LENGTH: tl.constexpr, SIZE: tl.constexpr,
    bits: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr, adds: tl.constexpr, force: tl.constexpr,
):  # fmt: skip
    """Fill a chunk with zeros, and then add the entries of one sender after the other where they belong."""
    first_row, senders, c = entry(work)
    numel, chunk = column(rows, first_row, NUMEL), column(rows, first_row, GROUP)
    begin = c * chunk
    size = tl.minimum(chunk, numel - begin).to(tl.int32)
    out = wide_pointer(column(rows, first_row, X), kind, 4, aligned)
    flags = tl.zeros((), tl.int64)
    if not force:
        for i in range(first_row, first_row + senders):
            flags |= tl.load(state_of(state, i, 5))
    is_nan = (flags & NONFINITE) != 0
    if (not adds) | is_nan:
        fill(out, begin, size, tl.where(is_nan, float("nan"), 0.0), BLOCK, kind, aligned)
        # elements that other threads have stored are there now
        tl.debug_barrier()
    for i in range(first_row, first_row + senders):
        has_body = (is_nan == 0) & (force | ((tl.load(state_of(state, i, 5)) & ABSENT) == 0))
        _put(out + begin, rows, i, c, has_body, offsets, scale, LENGTH, SIZE, bits, kind)
        tl.debug_barrier()


# -- tables ----------------------------------------------------------------------------------------------------------


def _length(chunk: int, bits: int) -> int:
    """Return the bits of an entry."""
    return (chunk - 1).bit_length() + bits


def _listed(most: int) -> int:
    """Return how many entries a program looks at together, of at most so many of a chunk."""
    return min(_MOST_LISTED, max(32, triton.next_power_of_2(most)))


def _scan_all(launch: Launch, length: int, bits: int, verifying: bool) -> None:
    work, size = launch.work_by_rows(), signs.scanned_at_once(launch)
    start(
        _scan, work.shape[0], launch.rows, work, launch.state, signs.offsets_of(launch), length, size, bits, verifying,
        num_warps=max(1, size // 512), num_stages=1,
    )  # fmt: skip


def encode(launch: Launch, codec: int, bits: int, chunk: int, most: int) -> None:
    """Encode a table, `most` entries of each whole chunk; see `hvd_compress.kernels.chunked.encode_rows`."""
    length, listed = _length(chunk, bits), _listed(most)
    work = launch.work_by_groups()
    count = work.shape[0]
    found = launch.scratch("found", count * most, "int32")
    values = launch.scratch("values", count * most, "float32")
    block = max(32, triton.next_power_of_2(launch.longest))
    wide = launch.aligned and launch.has_even_rows and chunk % 4 == 0
    start(
        _select, count, launch.rows, work, launch.state, found, values, most, block, listed, bits, launch.feedback,
        launch.kind, wide, num_warps=max(1, min(32, block // (32 * _ELEMENTS_OF_LANE))), num_stages=1,
    )  # fmt: skip
    _scan_all(launch, length, bits, False)
    start(
        _write, count, launch.rows, work, signs.offsets_of(launch), found, most, length, 32 // length + 2, _WORDS, bits,
        num_warps=1, num_stages=1,
    )  # fmt: skip
    launch.seal(codec, bits)


def verify(launch: Launch, bits: int, chunk: int, most: int) -> None:
    """Check bodies whose headers are good."""
    length, listed = _length(chunk, bits), _listed(most)
    _scan_all(launch, length, bits, True)
    work = launch.work_by_groups()
    start(
        _verify, work.shape[0], launch.rows, work, launch.state, signs.offsets_of(launch), length, listed, bits,
        num_warps=max(1, listed // 256), num_stages=1,
    )  # fmt: skip


def decode(launch: Launch, scale: float, force: bool = False, *, bits: int, chunk: int, most: int) -> None:
    """Decode a table of payloads that were verified, or with `force` encoded, in this launch; sums up rows in order."""
    if launch.kind != tl.float32 and not launch.is_single:
        raise NotImplementedError("sums of several payloads of chunks are made in float32")
    listed = _listed(most)
    work = launch.work_by_groups_of_tensors()
    block = max(128, min(1024, triton.next_power_of_2(launch.longest)))
    start(
        _decode, work.shape[0], launch.rows, work, launch.state, signs.offsets_of(launch), scale, block,
        _length(chunk, bits), listed, bits, launch.kind, launch.aligned, launch.adds, force,
        num_warps=max(1, min(4, block // 256)), num_stages=1,
    )  # fmt: skip
