"""Measure how far parameters are from copies, and average with the neighbours' copies."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel, kernel_in_order

_TILE = 1024  # elements, so that a tile of all copies stays in the first cache


@kernel
def distance(x, y):
    """Compute the Euclidean norm of x - y, summed in float64."""
    squares = 0.0
    for i in range(x.size):
        v = np.float64(x[i]) - np.float64(y[i])
        squares += v * v
    return np.sqrt(squares)


@kernel_in_order
def mix(x, copies, weights):
    """Add sum_j weights[j] * (copies[j] - x) to x in place."""
    # differences, not values times weights: where all agree nothing changes, not even by rounding
    if copies.shape[0] == 1:
        for i in range(x.size):
            x[i] += weights[0] * (copies[0, i] - x[i])
    elif copies.shape[0] == 2:
        for i in range(x.size):
            b = x[i]
            x[i] = b + (weights[0] * (copies[0, i] - b) + weights[1] * (copies[1, i] - b))
    else:
        # `x` is read and written, and a second view of it would keep the loops from being vectorized
        _mix_many(x, np.empty(0, x.dtype), copies, weights)


@kernel_in_order
def mix_differences(x, own, copies, weights):
    """Add sum_j weights[j] * (copies[j] - own) to x in place."""
    if copies.shape[0] == 1:
        for i in range(x.size):
            x[i] += weights[0] * (copies[0, i] - own[i])
    elif copies.shape[0] == 2:
        for i in range(x.size):
            b = own[i]
            x[i] += weights[0] * (copies[0, i] - b) + weights[1] * (copies[1, i] - b)
    else:
        _mix_many(x, own, copies, weights)


@kernel_in_order
def _mix_many(x, own, copies, weights):
    base = np.empty(_TILE, x.dtype)
    total = np.empty(_TILE, x.dtype)
    for begin in range(0, x.size, _TILE):
        count = min(_TILE, x.size - begin)
        for i in range(count):
            base[i] = own[begin + i] if own.size else x[begin + i]
            total[i] = 0
        for j in range(copies.shape[0]):
            for i in range(count):
                total[i] += weights[j] * (copies[j, begin + i] - base[i])
        for i in range(count):
            x[begin + i] += total[i]
