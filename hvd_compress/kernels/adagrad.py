"""AdaGrad: divide gradients by the root of the sum of their squares so far."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel


@kernel
def precondition(x, accumulated, factor, epsilon, after):
    """Divide the gradient `x * factor` by the root of its accumulated squares plus `epsilon`, in place.

    The squares with those of this step go to `after`; `accumulated` is only read, so that a step can still be taken
    back. Returns False, and writes NaN to `x`, where a sum of squares is not finite: all later updates would be 0.
    """
    bad = x.dtype.type(0)
    for i in range(x.size):
        gradient = x[i] * factor
        total = accumulated[i] + gradient * gradient
        after[i] = total
        # 0, and NaN if the total is not finite
        zero = total * x.dtype.type(0)
        x[i] = gradient / (np.sqrt(total) + epsilon) + zero
        bad += zero
    return bad == 0
