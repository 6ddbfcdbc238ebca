"""Factors of matrices: what all ranks compute alike after sums have come, in an order that no library chooses.

A matrix of n rows and m columns is about P' Q, with P of shape (r, n) and Q of shape (r, m), so that both are read
row by row. Products that only go into a sum are left to BLAS, whose order may differ between processors.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel_in_order

_LEAST = 1e-12  # what is left of a row beside what was there: less is rounding of float64


@kernel_in_order
def _dot(a, b):
    total = 0.0
    for i in range(a.size):
        total += np.float64(a[i]) * np.float64(b[i])
    return total


@kernel_in_order
def orthonormalize(p):
    """Make the rows of `p` (r, n), float32, orthonormal, in place; a row that depends on those before becomes 0.

    Gram-Schmidt in float64, each row twice: once leaves too much of the rows before where rows are nearly parallel.
    """
    rows = p.astype(np.float64)
    for k in range(p.shape[0]):
        row = rows[k]
        before = np.sqrt(_dot(row, row))
        for _ in range(2):
            for j in range(k):
                share = _dot(rows[j], row)
                for i in range(row.size):
                    row[i] -= share * rows[j, i]
        after = np.sqrt(_dot(row, row))
        factor = 1.0 / after if after > _LEAST * before else 0.0
        for i in range(row.size):
            row[i] *= factor
            p[k, i] = np.float32(row[i])


@kernel_in_order
def normalize(q, fresh, out):
    """Write the rows of `q` (r, m), each of length 1, to `out`; in place of one that is 0, that of `fresh`.

    A row of 0 would stay one in all steps to come.
    """
    largest = 0.0
    for k in range(q.shape[0]):
        largest = max(largest, _dot(q[k], q[k]))
    for k in range(q.shape[0]):
        square = _dot(q[k], q[k])
        is_there = square > _LEAST * _LEAST * largest
        factor = 1.0 / np.sqrt(square) if is_there else 1.0
        source = q if is_there else fresh
        for j in range(q.shape[1]):
            out[k, j] = np.float32(np.float64(source[k, j]) * factor)


@kernel_in_order
def rebuild(p, q, scale, out):
    """Write `scale` times the product of the factors to `out`, flat, of n * m elements."""
    m = q.shape[1]
    one = out.dtype.type(scale)
    for i in range(p.shape[1]):
        row = out[i * m : (i + 1) * m]
        share = out.dtype.type(p[0, i]) * one
        for j in range(m):
            row[j] = share * q[0, j]
        for k in range(1, p.shape[0]):
            share = out.dtype.type(p[k, i]) * one
            for j in range(m):
                row[j] += share * q[k, j]


@kernel_in_order
def leave_out(p, q, x):
    """Subtract the product of the factors from `x`, flat, of n * m elements."""
    m = q.shape[1]
    for i in range(p.shape[1]):
        row = x[i * m : (i + 1) * m]
        for k in range(p.shape[0]):
            share = x.dtype.type(p[k, i])
            for j in range(m):
                row[j] -= share * q[k, j]
