"""AdaGrad: gradients divided by the root of what their squares add up to."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel


@kernel
def precondition(x, accumulated, factor, epsilon, after):
    """Divide the gradient `x * factor` by the root of its accumulated squares plus `epsilon`, in place.

    The squares with those of this step go to `after`; `accumulated` is only read, so that a step can still be taken
    back. False, and NaN in `x`, where a square or a sum of them is not finite: it would make all later updates 0.
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
