"""Find the k-th largest elements of each sign of a group that one program holds, exactly."""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_compress.kernels.cuda.signs import INFINITE, float_of, key_of, marks_of

_LOW = tl.constexpr(0xFFFF)


@triton.jit
def _rank(count, SUBSETS: tl.constexpr):
    """Estimate how many subsets have one of the `count` largest elements."""
    return tl.floor(SUBSETS * (1.0 - tl.exp(-count.to(tl.float32) / SUBSETS)) + 0.5).to(tl.int32)


@triton.jit
def _next_rank(count, k, SUBSETS: tl.constexpr):
    """Return the rank, among the largest of the subsets, to try after the one where `count` and not k were found."""
    before = _rank(k, SUBSETS)
    more = tl.maximum(_rank(tl.maximum(2 * k - count + 1, 1), SUBSETS), before + 1)
    less = tl.minimum(_rank(tl.maximum(2 * k - count - 1, 1), SUBSETS), before - 1)
    return tl.where(count < k, more, less)


@triton.jit
def _at_rank(keys, ranks, rank, SUBSETS: tl.constexpr):
    """Return the key that has this rank, from 1 on; `ranks` says how many are larger than each."""
    rank = tl.minimum(tl.maximum(rank, 1), SUBSETS)
    return tl.min(tl.where(ranks < rank, keys, INFINITE), 0)


@triton.jit
def _between(low, n_low, high, n_high, k):
    """Return a key from which on about k elements lie, if their number falls exponentially from n_low to n_high."""
    count, target = n_low.to(tl.float32), tl.maximum(k, 1).to(tl.float32)
    least = tl.maximum(n_high.to(tl.float32), 0.5)
    # log(r) is about (r - 1) / sqrt(r)
    share = (count - target) / tl.maximum(count - least, 0.5) * tl.sqrt(least / target)
    return key_of(float_of(low) + (float_of(high) - float_of(low)) * share)


@triton.jit
def _inside(t, low, high):
    """Return the key between two others that is next to `t`."""
    return tl.minimum(tl.maximum(t, low + 1), high - 1)


@triton.jit
def _is_open(low, n_low, high, k):
    """Tell whether the threshold is still unknown: the bounds have others between them, and too many lie above."""
    return (n_low > k) & (high - low > 1)


@triton.jit
def _narrowed(low, n_low, high, n_high, k, t, n):
    """Replace one of two bounds by `t`, from which on n elements lie."""
    is_low = _is_open(low, n_low, high, k) & (n >= k)
    is_high = _is_open(low, n_low, high, k) & (n < k)
    return (
        tl.where(is_low, t, low),
        tl.where(is_low, n, n_low),
        tl.where(is_high, t, high),
        tl.where(is_high, n, n_high),
    )


@triton.jit
def _count(y, up, down):
    """Count the elements whose magnitudes are at least that of their sign; both numbers in one."""
    return tl.sum(tl.where(y >= float_of(up), 1, tl.where(y <= -float_of(down), 65536, 0)), 0)


@triton.jit
def _tightened(y, up, up_to, down, down_to):
    """Return the first and the last element between two keys of each sign; between them there is one at least."""
    least_up = tl.min(tl.where(y >= float_of(up), y, float("inf")), 0)
    largest_up = tl.max(tl.where(y < float_of(up_to), y, 0.0), 0)
    least_down = tl.max(tl.where(y <= -float_of(down), y, float("-inf")), 0)
    largest_down = tl.min(tl.where(y > -float_of(down_to), y, 0.0), 0)
    return key_of(least_up), key_of(largest_up), key_of(-least_down), key_of(-largest_down)


@triton.jit
def _after_tightening(t, low, n_low, high, n_high, k):
    """Return what to try where the bounds are elements: without the first one, or with the last one, it may be k."""
    t = tl.where(n_high + 1 == k, high - 1, t)
    return tl.where(n_low == k + 1, low + 1, t)


@triton.jit
def thresholds(y, k_up, n_up, k_down, n_down, BLOCK: tl.constexpr, SUBSETS: tl.constexpr, wide: tl.constexpr):
    """Find the k-th largest of n elements above 0, and likewise below, or what lies between it and the next one.

    Returns two keys and how many elements are at least as large; more than k only if some are equal to the k-th.
    """
    # the largest of each subset, whose elements few threads have: a sample of the largest ones
    width: tl.constexpr = 4 if wide and BLOCK >= 4 * SUBSETS else 1
    subsets = tl.reshape(y, (BLOCK // (width * SUBSETS), SUBSETS, width))
    tops_up = key_of(tl.maximum(tl.max(tl.max(subsets, 2), 0), 0.0))
    tops_down = key_of(tl.maximum(-tl.min(tl.min(subsets, 2), 0), 0.0))
    larger = (tops_up[:, None] > tops_up[None, :]).to(tl.int32)
    larger += (tops_down[:, None] > tops_down[None, :]).to(tl.int32) << 16
    ranks = tl.sum(larger, 0)
    ranks_up, ranks_down = ranks & _LOW, ranks >> 16

    low_up, low_down = tl.full((), 1, tl.int32), tl.full((), 1, tl.int32)
    high_up, high_down = tl.max(tops_up, 0) + 1, tl.max(tops_down, 0) + 1
    above_up, above_down = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if _is_open(low_up, n_up, high_up, k_up) | _is_open(low_down, n_down, high_down, k_down):
        up = _inside(_at_rank(tops_up, ranks_up, _rank(k_up, SUBSETS), SUBSETS), low_up, high_up)
        down = _inside(_at_rank(tops_down, ranks_down, _rank(k_down, SUBSETS), SUBSETS), low_down, high_down)
        n = _count(y, up, down)
        rank_up = _next_rank(n & _LOW, k_up, SUBSETS)
        rank_down = _next_rank((n >> 16) & _LOW, k_down, SUBSETS)
        low_up, n_up, high_up, above_up = _narrowed(low_up, n_up, high_up, above_up, k_up, up, n & _LOW)
        low_down, n_down, high_down, above_down = _narrowed(
            low_down, n_down, high_down, above_down, k_down, down, (n >> 16) & _LOW
        )
        attempt = 1
        while _is_open(low_up, n_up, high_up, k_up) | _is_open(low_down, n_down, high_down, k_down):
            up = _between(low_up, n_up, high_up, above_up, k_up)
            down = _between(low_down, n_down, high_down, above_down, k_down)
            if attempt == 1:
                other = _at_rank(tops_up, ranks_up, rank_up, SUBSETS)
                up = tl.where((low_up < other) & (other < high_up), other, up)
                other = _at_rank(tops_down, ranks_down, rank_down, SUBSETS)
                down = tl.where((low_down < other) & (other < high_down), other, down)
            if (attempt > 5) & (attempt % 2 == 1):
                # ends for any distribution
                up, down = low_up + (high_up - low_up) // 2, low_down + (high_down - low_down) // 2
            if (attempt > 4) & (attempt % 4 == 1):
                # ends soon where few values are left, each of many elements
                first_up, last_up, first_down, last_down = _tightened(y, low_up, high_up, low_down, high_down)
                is_wide = high_up - low_up > 1
                low_up, high_up = tl.where(is_wide, first_up, low_up), tl.where(is_wide, last_up + 1, high_up)
                is_wide = high_down - low_down > 1
                low_down = tl.where(is_wide, first_down, low_down)
                high_down = tl.where(is_wide, last_down + 1, high_down)
                up = _after_tightening(up, low_up, n_up, high_up, above_up, k_up)
                down = _after_tightening(down, low_down, n_down, high_down, above_down, k_down)
            up, down = _inside(up, low_up, high_up), _inside(down, low_down, high_down)
            n = _count(y, up, down)
            low_up, n_up, high_up, above_up = _narrowed(low_up, n_up, high_up, above_up, k_up, up, n & _LOW)
            low_down, n_down, high_down, above_down = _narrowed(
                low_down, n_down, high_down, above_down, k_down, down, (n >> 16) & _LOW
            )
            attempt += 1
    low_up, low_down = tl.where(k_up > 0, low_up, INFINITE), tl.where(k_down > 0, low_down, INFINITE)
    return low_up, n_up, low_down, n_down


@triton.jit
def marks_of_last(y, size, up, n_up, down, n_down, BLOCK: tl.constexpr):
    """Mark the elements that are equal to the thresholds, but for the first ones, so many of each."""
    o = tl.arange(0, BLOCK)
    # the first ones end between these and as many elements behind them; what no element is stands for all others
    up_at, down_at = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    up_range, down_range = size, size
    while (up_range > 0) | (down_range > 0):
        up_step, down_step = (up_range + 1) // 2, (down_range + 1) // 2
        is_up = y == tl.where(o < up_at + up_step, up, float("inf"))
        is_down = y == tl.where(o < down_at + down_step, down, float("inf"))
        n = tl.sum(tl.where(is_up, 1, tl.where(is_down, 65536, 0)), 0)
        is_more = (n & _LOW) <= n_up
        up_at += tl.where(is_more, up_step, 0)
        up_range = tl.where(is_more, up_range - up_step, up_step - 1)
        is_more = ((n >> 16) & _LOW) <= n_down
        down_at += tl.where(is_more, down_step, 0)
        down_range = tl.where(is_more, down_range - down_step, down_step - 1)
    is_up = y == tl.where(o >= up_at, up, float("inf"))
    return marks_of(is_up, y == tl.where(o >= down_at, down, float("inf")), BLOCK)
