"""Share steps among kernels: correct with the residual, take back, hash and draw, select."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.jit import kernel, kernel_of_finite
from hvd_compress.kernels.llvm import at_least_64, count_ones, float32_of

_ZERO = np.float32(0)
_LEAST_NORMAL = np.float32(2.0**-126)
_HUGE = np.float32(2.0**128 * (1 - 2.0**-10))


@kernel
def least_above_zero(a, numel):
    """Return the least magnitude that this thread tells from zero.

    TensorFlow's own threads, and torch on demand, have the processor take denormals for zero: to them every zero would
    be at least the smallest denormal. `numel` is 1 or more, which the compiler must not know: then the processor makes
    the product.
    """
    smallest = np.nextafter(a.dtype.type(0), a.dtype.type(1)) * a.dtype.type(min(numel, 1))
    return smallest if smallest > 0 else a.dtype.type(_LEAST_NORMAL)


@kernel
def correct(x, gradient):
    """Add a gradient to the residual `x`; return 0 if every sum is finite as float32, else NaN.

    A sum that is not finite is not written: the element keeps its residual, and `take_back` restores the others. Where
    `gradient` is empty, `x` is what is to be encoded, and is only read.
    """
    bad = _ZERO
    if gradient.size == x.size:
        for i in range(x.size):
            v = x[i] + gradient[i]
            zero = np.float32(v) * _ZERO
            x[i] = v if zero == _ZERO else x[i]
            bad += zero
    else:
        for i in range(x.size):
            bad += np.float32(x[i]) * _ZERO
    return bad


@kernel
def take_back(x, gradient):
    """Subtract the gradient from `x`, residual plus decoded payload: it becomes the old residual, to rounding.

    Beside a gradient that is 2^22 times larger (2^51 in float64), what is left of a residual is noise of the
    subtraction, and becomes 0. So does a residual of sums so large that nobody can tell whether `correct` has
    written them. Rounding must not make a residual next to the largest number infinite.
    """
    one = x.dtype.type(1)
    largest = np.nextafter(x.dtype.type(np.inf), one)
    share = 2 * (np.nextafter(one, x.dtype.type(2)) - one)
    for i in range(x.size):
        given = gradient[i]
        v = max(min(x[i] - given, largest), -largest)
        size = max(abs(given), abs(x[i]))
        v = v if abs(v) > size * share and abs(x[i] + given) < _HUGE else x.dtype.type(0)
        x[i] = x[i] if np.float32(given) * _ZERO != _ZERO else v


@kernel
def all_finite(x):
    """Tell whether no element is NaN or infinite."""
    bad = x.dtype.type(0)
    for i in range(x.size):
        bad += x[i] - x[i]
    return bad == 0


@kernel
def mix(counter, key_low, key_high):
    """Hash a 32-bit counter under a 64-bit key to 32 well mixed bits."""
    # multiply-xorshift finalizer ("lowbias32"); every constant and shift must stay 32 bits wide to vectorize
    h = np.uint32(np.uint32(counter) * np.uint32(0x9E3779B1)) + np.uint32(key_low)
    h = np.uint32(h)
    h ^= np.uint32(h >> np.uint32(16))
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h ^= np.uint32(h >> np.uint32(15))
    h ^= np.uint32(key_high)
    h = np.uint32(h * np.uint32(0x846CA68B))
    h ^= np.uint32(h >> np.uint32(16))
    h = np.uint32(h * np.uint32(0x9E3779B1))
    h ^= np.uint32(h >> np.uint32(15))
    return np.uint32(h)


@kernel
def uniform(counter, key_low, key_high):
    """Draw a float32 in [0, 1), a multiple of 2**-24."""
    return np.float32(mix(counter, key_low, key_high) >> np.uint32(8)) * np.float32(2.0**-24)


@kernel
def largest_magnitude(y):
    """Return the largest magnitude as float32; infinite or NaN if one is."""
    if y.itemsize == 4:
        # magnitudes are in the order of their bits, whose maximum takes a third of the time
        largest = np.uint32(0)
        words = y.view(np.uint32)
        for i in range(words.size):
            largest = max(largest, np.uint32(words[i] & np.uint32(0x7FFFFFFF)))
        return float32_of(largest)
    if not all_finite(y):
        return np.float32(np.nan)
    return _largest_finite(y)


@kernel_of_finite
def _largest_finite(y):
    largest = _ZERO
    for i in range(y.size):
        largest = max(largest, abs(np.float32(y[i])))
    return largest


@kernel
def norm(x):
    """Compute the Euclidean norm, summed in float64."""
    squares = 0.0
    for i in range(x.size):
        v = np.float64(x[i])
        squares += v * v
    return np.sqrt(squares)


@kernel
def bucket_norm(y, is_max):
    """Compute the largest magnitude or Euclidean norm as float32; not finite if an element (or the norm) is not."""
    # squares of float32 cannot overflow in float64, so that the sum is finite exactly if the elements are
    squares = 0.0
    for i in range(y.size):
        v = np.float64(np.float32(y[i]))
        squares += v * v
    if is_max and np.isfinite(squares):
        return largest_magnitude(y)
    return np.float32(np.sqrt(squares))


@kernel
def draw(j, count, numel, key_low, key_high):
    """Draw the j-th of `count` indices from range(numel), one from each of `count` equal strata."""
    low = j * numel // count
    width = (j + 1) * numel // count - low
    return low + ((np.int64(mix(j, key_low, key_high)) * width) >> 32)


@kernel
def room_for(count):
    """Round `count` up to whole words of 64, the size that `kth_largest` wants."""
    return (count + 63) & ~63


@kernel_of_finite
def kth_largest(a, n, k, bound=np.inf):
    """Find the k-th largest (k from 1) of the finite values a[:n]; overwrites the rest up to room_for(n) with -inf.

    It is found sooner with a `bound` that it is probably just below.
    """
    # Narrowing an interval of values: each step counts with vector instructions, where quickselect mispredicts
    # branches. Steps alternate between where the counts say it is and the middle, so that none of the two can stall.
    # The order of a[:n] is irrelevant and is kept.
    low = a[0]
    high = a[0]
    for i in range(n):
        low = min(low, a[i])
        high = max(high, a[i])
    for i in range(n, room_for(n)):
        a[i] = -np.inf
    from_low = n
    from_high = count_from(a, n, high)
    if from_high >= k:
        return high
    bound = a.dtype.type(bound)
    if low < bound < high:
        count = count_from(a, n, bound)
        if count >= k:
            low = bound
            from_low = count
        else:
            high = bound
            from_high = count
    interpolate = True
    while True:
        at = low + (high - low) * a.dtype.type(0.5)
        if at <= low or at >= high:
            return low
        if interpolate:
            share = a.dtype.type(from_low - k + 0.5) / a.dtype.type(from_low - from_high)
            proposed = low + (high - low) * share
            at = proposed if low < proposed and proposed < high else at
        interpolate = not interpolate
        count = count_from(a, n, at)
        if count == k:
            return _smallest_from(a, n, at, high)
        if count > k:
            low = at
            from_low = count
        else:
            high = at
            from_high = count


@kernel
def count_from(a, n, bound):
    """Count the elements of a[:n] that are >= bound; those that follow, up to room_for(n), must be below it."""
    count = 0
    for i in range(0, n, 64):
        count += count_ones(at_least_64(a, i, bound))
    return count


@kernel_of_finite
def _smallest_from(a, n, bound, smallest):
    for i in range(room_for(n)):
        smallest = min(smallest, a[i] if a[i] >= bound else smallest)
    return smallest


@kernel
def with_margin(k, population, draws):
    """Return how many of `draws` samples to count down so that the k largest of `population` very likely lie above."""
    expected = k * draws / population
    return np.int64(expected + 3.0 * np.sqrt(expected) + 2.0)
