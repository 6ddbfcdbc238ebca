"""What Triton kernels are called with: a table in device memory, a list of work, and what becomes of each row.

The columns of a table are those of `hvd_compress.kernels.table`; here a row has one more. An entry of the list of
work is four int32: the first row, how many rows from there on are added up, and the number of a block of their
elements; one program of a launch does one entry. So one launch handles as many tensors as there are rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels import table

WIDTH = 16
"""Columns of a table in device memory."""
GROUPS_AT = 12  # the number of the first group of this row among the groups of all rows
ROW_COLUMNS = table.COLUMNS

# what becomes of a row: int64, zeros before the first launch, and again after `seal` or `check` has read them
STATE = 8
BAD = 0  # not zero if a value is not finite
ENTRIES = 1  # in the body
BODY = 2  # bytes of the body, without the padding at its end
SUM = 3  # of the checksums of its parts
TICKET = 4  # parts that are done
# what `seal` and `check` say of it
FOUND = 5  # flags of the header; -1 for a payload that is not as expected, -2 for a checksum that a device cannot make
NBYTES = 6  # of the payload
# the last column has the parameter of a row, where rows of one table have different ones

# A constant stands behind the operator: Triton 3.7, which torch 2.13 brings, takes `constant + tensor` for a constant
# where it interprets.
X: tl.constexpr = tl.constexpr(table.X)
GRADIENT: tl.constexpr = tl.constexpr(table.GRADIENT)
NUMEL: tl.constexpr = tl.constexpr(table.NUMEL)
GROUP: tl.constexpr = tl.constexpr(table.GROUP)
LIMIT: tl.constexpr = tl.constexpr(table.LIMIT)
KEY: tl.constexpr = tl.constexpr(table.KEY)
PAYLOAD: tl.constexpr = tl.constexpr(table.PAYLOAD)
ROOM: tl.constexpr = tl.constexpr(table.ROOM)
ADD: tl.constexpr = tl.constexpr(table.ADD)
FLAGS: tl.constexpr = tl.constexpr(table.FLAGS)
HEADER: tl.constexpr = tl.constexpr(table.HEADER)
NONFINITE: tl.constexpr = tl.constexpr(table.NONFINITE)
ABSENT: tl.constexpr = tl.constexpr(table.ABSENT)
_WIDTH: tl.constexpr = tl.constexpr(WIDTH)
_STATE: tl.constexpr = tl.constexpr(STATE)


@triton.jit
def entry(work):
    """Return what this program does: the first row, how many rows, and which block of their elements."""
    at = work + 4 * tl.program_id(0)
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2).to(tl.int64)


@triton.jit
def column(rows, i, number: tl.constexpr):
    """Return a column of row `i`."""
    return tl.load(rows + i * _WIDTH + number)


@triton.jit
def pointer(address, kind: tl.constexpr, aligned: tl.constexpr = False):
    """Turn an address into a pointer to elements of type `kind`; `aligned` promises a 16-byte boundary."""
    if aligned:
        return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)
    return address.to(tl.pointer_type(kind))


@triton.jit
def state_of(state, i, number: tl.constexpr):
    """Return the pointer to an entry of what becomes of row `i`."""
    return state + i * _STATE + number


@triton.jit
def packed(chosen, BLOCK: tl.constexpr):
    """Return the words of 32 bits that say which elements are chosen, the first one in the lowest bit."""
    bits = tl.reshape(chosen.to(tl.uint32), (BLOCK // 32, 32))
    return tl.sum(bits << tl.arange(0, 32).to(tl.uint32)[None, :], 1).to(tl.int32, bitcast=True)


@triton.jit
def corrected(x, gradient, o, inside, feedback: tl.constexpr):
    """Load elements to encode: residual plus gradient, or the values; returns them as float32, and which are good.

    An element whose sum is not finite is given as its residual, which is what has to be left there.
    """
    y = tl.load(x + o, mask=inside, other=0.0).to(tl.float32)
    if feedback:
        return _kept(y, y + tl.load(gradient + o, mask=inside, other=0.0).to(tl.float32))
    return _kept(y, y)


@triton.jit
def corrected_all(x, gradient, o, feedback: tl.constexpr):
    """Do as `corrected` where all elements are inside: without masks, which take as many instructions as all else."""
    y = tl.load(x + o).to(tl.float32)
    if feedback:
        return _kept(y, y + tl.load(gradient + o).to(tl.float32))
    return _kept(y, y)


@triton.jit
def _kept(y, v):
    good = tl.abs(v) < float("inf")
    return tl.where(good, v, y), good


@triton.jit
def note_bad(state, i, good):
    """Note that row `i` has a value that is not finite, if one is not `good`."""
    bad = tl.max((good == 0).to(tl.int32), 0)
    if bad != 0:
        tl.atomic_or(state + i * _STATE, 1)  # BAD


@triton.jit
def note_body(state, i, entries, nbytes):
    """Note what `seal` is to write of the body of row `i`: its entries, and its bytes without the padding."""
    tl.store(state_of(state, i, 1), entries)
    tl.store(state_of(state, i, 2), nbytes)


@triton.jit
def expect_body(state, i, nbytes):
    """Note that the payload of row `i` is damaged, unless its body has so many bytes, or it has none.

    Returns whether it has a body that may be read.
    """
    found = tl.load(state_of(state, i, 5))
    fits = tl.load(state_of(state, i, 6)) == nbytes + HEADER
    has_body = (found >= 0) & ((found & (NONFINITE | ABSENT)) == 0)
    if has_body & (fits == 0):
        tl.store(state_of(state, i, 5), -1)
    return has_body & fits
