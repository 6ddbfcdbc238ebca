"""Select the k largest magnitudes: guess bounds from a sample, and find the exact threshold among few candidates."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.common import kth_largest, mix, room_for
from hvd_compress.kernels.jit import kernel


@kernel
def sampled_magnitudes(x, gradient, sample):
    """Sample magnitudes that `correct` will make, one from each of `sample` (1 or more) strata, for `kth_largest`."""
    values = np.empty(room_for(sample), x.dtype)
    stride = x.size // sample
    # the same places in every step: what is sent does not depend on them
    for j in range(sample):
        i = j * stride + ((np.int64(mix(j, 0, 0)) * stride) >> 32)
        v = abs(x[i] + gradient[i]) if gradient.size > 0 else abs(x[i])
        # NaN would break the selection; it is found, and reported, by the scan
        values[j] = v if v == v else x.dtype.type(0)
    return values


@kernel
def exact_threshold(values, k):
    """Return the magnitudes, the k-th largest of them, and how many are larger than it."""
    magnitudes = np.empty(room_for(values.size), values.dtype)
    for i in range(values.size):
        magnitudes[i] = abs(values[i])
    threshold = kth_largest(magnitudes, values.size, k)
    larger = 0
    for i in range(values.size):
        larger += magnitudes[i] > threshold
    return magnitudes, threshold, larger
