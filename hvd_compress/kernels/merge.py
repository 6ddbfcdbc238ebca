"""Parameters of one node and what arrives of all nodes, merged in one pass over memory."""

from __future__ import annotations

from hvd_compress.kernels.jit import kernel_in_order


@kernel_in_order
def blend(x, total, keep, divisor):
    """x = (keep * x + total) / divisor, in place."""
    for i in range(x.size):
        x[i] = (keep * x[i] + total[i]) / divisor


@kernel_in_order
def follow(x, mean, snapshot, keep):
    """x = mean + keep * (x - snapshot), in place."""
    for i in range(x.size):
        x[i] = mean[i] + keep * (x[i] - snapshot[i])


@kernel_in_order
def weighted_difference(x, reference, weight, out):
    """out = weight * (x - reference)."""
    for i in range(x.size):
        out[i] = weight * (x[i] - reference[i])
