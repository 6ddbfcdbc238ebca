"""Merge the parameters of one node with what arrives from all nodes, in one pass over memory."""

from __future__ import annotations

from hvd_compress.kernels.jit import kernel_in_order


@kernel_in_order
def blend(x, total, keep, divisor):
    """Compute x = (keep * x + total) / divisor, in place."""
    for i in range(x.size):
        x[i] = (keep * x[i] + total[i]) / divisor


@kernel_in_order
def follow(x, mean, snapshot, keep):
    """Compute x = mean + keep * (x - snapshot), in place."""
    for i in range(x.size):
        x[i] = mean[i] + keep * (x[i] - snapshot[i])


@kernel_in_order
def weighted_difference(x, reference, weight, out):
    """Compute out = weight * (x - reference)."""
    for i in range(x.size):
        out[i] = weight * (x[i] - reference[i])


@kernel_in_order
def mix(x, other, keep):
    """Compute x = keep * x + (1 - keep) * other, in place."""
    one = x.dtype.type(1)
    for i in range(x.size):
        x[i] = keep * x[i] + (one - keep) * other[i]
