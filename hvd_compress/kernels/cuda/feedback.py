"""Take steps of error feedback back; see `hvd_compress.kernels.common.take_back`."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.cast import wide_pointer
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import GRADIENT, NUMEL, X, column, entry
from hvd_compress.kernels.cuda.start import start

_BLOCK = 4096
_SHARE = tl.constexpr(2.0**-22)
_HUGE = tl.constexpr(2.0**128 * (1 - 2.0**-10))
_LARGEST = tl.constexpr(2.0**128 - 2.0**104)


@triton.jit
def _take_back(rows, work, BLOCK: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    i, _, block = entry(work)
    if column(rows, i, GRADIENT) != 0:
        start = block * BLOCK
        left = tl.minimum(column(rows, i, NUMEL) - start, BLOCK).to(tl.int32)
        x = wide_pointer(column(rows, i, X), tl.float32, 4, aligned) + start
        gradient = wide_pointer(column(rows, i, GRADIENT), kind, 4, aligned) + start
        o = tl.arange(0, BLOCK)
        if left == BLOCK:
            # without masks, in wide words
            y = tl.load(x + o)
            given = tl.load(gradient + o).to(tl.float32)
        else:
            y = tl.load(x + o, mask=o < left, other=0.0)
            given = tl.load(gradient + o, mask=o < left, other=0.0).to(tl.float32)
        v = tl.minimum(tl.maximum(y - given, -_LARGEST), _LARGEST)
        size = tl.maximum(tl.abs(given), tl.abs(y))
        is_kept = (tl.abs(v) > size * _SHARE) & (tl.abs(y + given) < _HUGE)
        v = tl.where(tl.abs(given) < float("inf"), tl.where(is_kept, v, 0.0), y)
        if left == BLOCK:
            tl.store(x + o, v)
        else:
            tl.store(x + o, v, mask=o < left)


def take_back(launch: Launch) -> None:
    """Subtract the gradients of a table from residuals to which their decoded payloads were added."""
    work = launch.work_by_blocks(_BLOCK)
    start(
        _take_back, work.shape[0], launch.rows, work, _BLOCK, launch.kind, launch.aligned, num_warps=8
    )  # fmt: skip
