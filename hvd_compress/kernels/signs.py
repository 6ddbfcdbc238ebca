"""Encode sparse signs: entries `index << 1 | positive`, ascending within a group, one value per sign and group."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import table
from hvd_compress.kernels.collect import AHEAD, TILE, collect, count_at_least
from hvd_compress.kernels.common import (
    bucket_norm,
    correct,
    count_from,
    kth_largest,
    least_above_zero,
    mix,
    take_back,
    uniform,
    with_margin,
)
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import fetch

CHOSEN_BELOW = np.float32(-np.inf)
_ZERO = np.float32(0)
INDEX_GROUP = 32768  # what 15 bits of index reach
_SHORT, _LONG = np.empty(0, np.uint16), np.empty(0, np.uint32)  # types of counts and entries
_CACHED = 2**20  # so many elements may still be in a cache
_WEIGHT = np.float32(0.25)  # weight of a new group in a running mean
_FARTHER, _CLOSER = np.float32(0.85), np.float32(1.15)  # factor on the threshold after too few or too many candidates
_BEYOND = np.float32(1.05)  # a group's threshold is seldom so far above the expected one
_LESS, _MORE = np.float32(0.97), np.float32(1.01)  # and what becomes of the share of the expected one


@kernel
def encode_threshold(x, gradient, group, tau, counts, entries):
    """List the entries with |x| > tau (strictly); returns their number and whether all are finite. See `correct`."""
    feedback = gradient.size > 0
    bad = np.float32(0)
    total = 0
    found = np.empty(TILE + 64, np.int32)
    # an owner's sums and residuals are multiples of tau: most end up equal to it, and must not even be candidates
    above = max(np.nextafter(tau, x.dtype.type(np.inf)), least_above_zero(x, x.size))
    for g in range(counts.size):
        first = total
        start = g * group
        stop = min(start + group, x.size)
        for tile in range(start, stop, TILE):
            end = min(tile + TILE, stop)
            y = x[tile:end]
            bad += correct(y, gradient[tile:end])
            for c in range(collect(y, above, -above, 0, found, 0)):
                i = found[c]
                v = y[i]
                entries[total] = ((tile - start + i) << 1) | (v > 0)
                total += 1
                if feedback:
                    y[i] = v - tau if v > 0 else v + tau
        counts[g] = total - first
    return total, bad == 0


@kernel
def _keep_largest(top, wanted, filled, v):
    """Insert v into the descending list top[:filled] of at most `wanted` values; returns the new length."""
    if filled == wanted and v <= top[filled - 1]:
        return filled
    at = filled if filled < wanted else wanted - 1
    while at > 0 and top[at - 1] < v:
        top[at] = top[at - 1]
        at -= 1
    top[at] = v
    return min(filled + 1, wanted)


@kernel
def _guess(y, positives, k_positive, k_negative, sample, key, top):
    """Guess thresholds above which slightly more than k entries of each sign lie, from `sample` draws."""
    negatives = y.size - positives
    want_positive = with_margin(k_positive, y.size, sample)
    want_negative = with_margin(k_negative, y.size, sample)
    n_positive = 0
    n_negative = 0
    top_negative = top[want_positive:]
    # one draw from each of `sample` equal strata: every (size / sample)-th entry, from a keyed start
    stride = y.size // sample
    at = np.int64(key) % stride
    for _ in range(sample):
        v = y[at]
        at += stride
        if v >= 0:
            n_positive = _keep_largest(top, want_positive, n_positive, v)
        else:
            n_negative = _keep_largest(top_negative, want_negative, n_negative, -v)
    zero = y.dtype.type(0)
    above = top[want_positive - 1] if n_positive == want_positive and positives > 0 else zero
    below = -top_negative[want_negative - 1] if n_negative == want_negative and negatives > 0 else zero
    return above, below


@kernel
def _split(y, found, count, values, upper, lower):
    """Take the candidates' values, and split their magnitudes by sign; returns how many of each sign there are."""
    n_upper = 0
    n_lower = 0
    for c in range(count):
        v = y[found[c]]
        values[c] = v
        upper[n_upper] = v
        lower[n_lower] = -v
        n_upper += v >= 0
        n_lower += v < 0
    return n_upper, n_lower


@kernel
def _exact(magnitudes, n, k, bound):
    """Find the k-th largest of n magnitudes, and how many equal to it are not sent; (0, 0) if there are too few.

    `magnitudes` has 64 places more.
    """
    if n < k or k == 0:
        return magnitudes.dtype.type(0), 0
    # where squares have overflowed, the bound is no number
    threshold = kth_largest(magnitudes, n, k, bound if bound > 0 else np.inf)
    return threshold, count_from(magnitudes, n, threshold) - k


@kernel
def _keep_from(found, values, candidates, high, low):
    """Keep candidates whose magnitude is at least their sign's threshold, which is above 0; returns their number."""
    kept = 0
    for c in range(candidates):
        v = values[c]
        found[kept] = found[c]
        values[kept] = v
        kept += (v >= high) | (v <= -low)
    return kept


@kernel
def _drop_last_ties(found, values, count, tie, surplus):
    """Take out the last `surplus` entries whose value is `tie`; returns the new count."""
    kept = count
    while surplus > 0:
        kept -= 1
        surplus -= values[kept] == tie
    for c in range(kept, count):
        found[kept] = found[c]
        values[kept] = values[c]
        kept += values[c] != tie
    return kept


@kernel
def _means_of_chosen(values):
    positive = 0.0
    negative = 0.0
    count = 0
    for c in range(values.size):
        v = np.float64(values[c])
        positive += max(v, 0.0)
        negative += min(v, 0.0)
        count += v > 0
    return np.float32(positive / max(count, 1)), np.float32(negative / max(values.size - count, 1))


@kernel
def _correct_and_measure(x, gradient):
    """Correct `x`; returns how many are >= 0, the squares of these and of the others, and what `correct` returns."""
    zero = x.dtype.type(0)
    upper = zero
    lower = zero
    bad = _ZERO
    positives = np.int32(0)
    if gradient.size == x.size:
        for i in range(x.size):
            v = x[i] + gradient[i]
            none = np.float32(v) * _ZERO
            v = v if none == _ZERO else x[i]
            x[i] = v
            bad += none
            p = max(v, zero)
            upper += p * p
            lower += (v - p) * (v - p)
            positives += np.int32(v >= zero)
    else:
        for i in range(x.size):
            v = x[i]
            bad += np.float32(v) * _ZERO
            p = max(v, zero)
            upper += p * p
            lower += (v - p) * (v - p)
            positives += np.int32(v >= zero)
    return np.int64(positives), upper, lower, bad


@kernel
def _followed(ratio, threshold, rms):
    """Return the ratio of threshold and root mean square to expect next."""
    if not (threshold > 0 and rms > 0):
        return ratio
    new = threshold / rms
    return ratio + (new - ratio) * _WEIGHT if ratio > 0 else new


@kernel
def encode_adaptive(x, gradient, group, pi, sample, counts, recon, entries):
    """Send the ceil(k / pi) largest of the k non-negative, and likewise of the negative, entries of each group.

    counts[groups], recon[2 * groups] (means of the sent non-negative and negative entries). Returns the number of
    entries, and whether all values are finite. Zeros are never sent. Candidates come from a guessed threshold (that of
    the group before, in units of the root mean square of a sign, else one from `sample` draws); the selection among
    them is exact. See `correct` for `x` and `gradient`.
    """
    feedback = gradient.size > 0
    # memory would be idle while a group is searched; in cache there is nothing to be fetched
    is_large = x.size > _CACHED
    bad = _ZERO
    total = 0
    size = min(group, x.size)
    # room for all entries of a group, and for the two lists of the guess in the tiniest group
    values = np.empty(size + 16, x.dtype)
    upper = np.empty(size + 64, x.dtype)
    lower = np.empty(size + 64, x.dtype)
    found = np.empty(size + 64, np.int32)
    zero = x.dtype.type(0)
    tiny = least_above_zero(x, x.size)
    high_of_rms = low_of_rms = zero
    nearness = x.dtype.type(0.85)
    for g in range(counts.size):
        start = g * group
        stop = min(start + group, x.size)
        y = x[start:stop]
        positives, squares_upper, squares_lower, of_group = _correct_and_measure(y, gradient[start:stop])
        bad += of_group
        if bad != 0 and not feedback:
            # there is nothing to take back, and NaN has no order
            return 0, False
        negatives = y.size - positives
        k_positive = -(-positives // pi)
        k_negative = -(-negatives // pi)
        # gradients of neighbouring groups differ by orders of magnitude, but are distributed alike
        rms_upper = np.sqrt(squares_upper / max(positives, 1))
        rms_lower = np.sqrt(squares_lower / max(negatives, 1))

        closer = x.dtype.type(_CLOSER)
        farther = x.dtype.type(_FARTHER)
        above = high_of_rms * rms_upper * nearness
        below = -low_of_rms * rms_lower * nearness if negatives > 0 else -tiny
        want = k_positive
        if not above > 0:
            # sums of few sparse payloads are mostly zeros, all of which would be candidates
            want = min(k_positive, count_at_least(y, tiny))
            above = tiny if want < k_positive or want == 0 else zero
        # attempts 0 to 4: near the neighbour's thresholds, then off where that was wrong; 5: sampled thresholds;
        # 6: all are candidates
        for attempt in range(7):
            if attempt < 5:
                if not (0 < above < np.inf and 0 > below > -np.inf):
                    continue
            elif attempt == 5:
                draws = min(y.size, sample, max(128, y.size >> 4))
                # the same places in every step: what is sent does not depend on them
                key = mix(g, 0, 0)
                above, below = _guess(y, positives, k_positive, k_negative, draws, key, values)
                if want < k_positive:
                    above = tiny
            else:
                above = below = zero
            room = min(4 * (k_positive + k_negative) + 192, y.size) if attempt < 5 else y.size
            if attempt == 0 and is_large:
                candidates = collect(y, above, below, 0, found[: room + 64], 0, x, gradient, stop)
            else:
                candidates = collect(y, above, below, 0, found[: room + 64], 0)
            if candidates < 0:
                nearness *= _MORE
                above *= closer
                below *= closer
                closer *= closer
                continue
            n_upper, n_lower = _split(y, found, candidates, values, upper, lower)
            if n_upper < want:
                # zeros count as positive, but are not sent: there may be fewer others than the proportion allows
                want = min(k_positive, count_at_least(y, tiny))
                above = above * farther if want == k_positive else tiny
            if n_upper >= want and n_lower >= k_negative:
                break
            if n_lower < k_negative:
                below *= farther
            farther *= farther
            nearness *= _LESS
        high, high_surplus = _exact(upper, n_upper, k_positive, high_of_rms * rms_upper * _BEYOND)
        low, low_surplus = _exact(lower, n_lower, k_negative, low_of_rms * rms_lower * _BEYOND)
        # a group with too few entries of a sign teaches nothing
        high_of_rms = _followed(high_of_rms, high, rms_upper)
        low_of_rms = _followed(low_of_rms, low, rms_lower)
        # groups alike need few spare candidates, groups unlike need more: steer towards one miss in some dozens
        nearness *= _MORE if candidates > 2 * (k_positive + k_negative) else x.dtype.type(1.002)
        nearness = min(max(nearness, x.dtype.type(0.5)), x.dtype.type(0.99))

        kept = _keep_from(found, values, candidates, max(high, tiny), max(low, tiny))
        if high_surplus > 0 and high > 0:
            kept = _drop_last_ties(found, values, kept, high, high_surplus)
        if low_surplus > 0 and low > 0:
            kept = _drop_last_ties(found, values, kept, -low, low_surplus)
        positive, negative = _means_of_chosen(values[:kept])
        counts[g] = kept
        recon[2 * g] = positive
        recon[2 * g + 1] = negative
        for c in range(kept):
            i = found[c]
            v = values[c]
            entries[total + c] = (i << 1) | (v > 0)
            if feedback:
                y[i] = v - (positive if v > 0 else negative)
        total += kept
    return total, bad == 0


@kernel
def excess_over_draws(y, first, norm, key_low, key_high, excess):
    """Compute by how much each magnitude exceeds the norm times a number drawn from [0, 1)."""
    # a draw is written before it is used: three factors in one expression would be multiplied in any order, and lose a
    # norm next to the denormals
    for i in range(y.size):
        excess[i] = uniform(first + i, key_low, key_high)
    for i in range(y.size):
        excess[i] = abs(np.float32(y[i])) - excess[i] * norm


@kernel
def encode_ternary(x, bucket, norm_is_max, key_low, key_high, counts, recon, entries):
    """Send each x as sign(x) * norm with probability |x| / norm; returns the number of entries, or -1 if not finite."""
    total = 0
    excess = np.empty(TILE, np.float32)
    found = np.empty(TILE + 64, np.int32)
    chosen = least_above_zero(excess, x.size)
    for g in range(counts.size):
        start = g * bucket
        stop = min(start + bucket, x.size)
        norm = bucket_norm(x[start:stop], norm_is_max)
        if not np.isfinite(norm):
            return -1
        first = total
        for tile in range(start, stop, TILE):
            y = x[tile : min(tile + TILE, stop)]
            excess_over_draws(y, tile, norm, key_low, key_high, excess)
            for c in range(collect(excess[: y.size], chosen, CHOSEN_BELOW, 0, found, 0)):
                i = found[c]
                entries[total] = ((tile - start + i) << 1) | (y[i] > 0)
                total += 1
        counts[g] = total - first
        recon[2 * g] = norm
        recon[2 * g + 1] = -norm
    return total


@kernel
def decode(counts, recon, stride, entries, group, scale, out, add):
    """Write or add `scale` times the reconstruction values at the entries; returns False at one that does not fit.

    recon holds a pair per group (stride 2) or one pair for all (stride 0).
    """
    at = 0
    for g in range(counts.size):
        start = g * group
        size = min(start + group, out.size) - start
        y = out[start : start + size]
        if not add:
            y[:] = 0
        if counts[g] > entries.size - at:
            return False
        positive = recon[g * stride] * scale
        negative = recon[g * stride + 1] * scale
        previous = -1
        end = at + np.int64(counts[g])
        while at < end:
            # the entries ahead are in this group or the next one; a wrong place costs nothing but the hint
            ahead = min(at + AHEAD, entries.size - 1)
            fetch(out, (start if ahead < end else start + group) + (np.int64(entries[ahead]) >> 1))
            entry = entries[at]
            index = np.int64(entry) >> 1
            if index <= previous or index >= size:
                return False
            y[index] += positive if entry & 1 else negative
            previous = index
            at += 1
    return at == entries.size


# -- tables ----------------------------------------------------------------------------------------------------------


@kernel
def encode_adaptive_rows(index, codec, pi, sample, rows, like):
    """Encode a table of tensors; a body is the counts, the means, and the entries. See `encode_adaptive`.

    Counts and entries have the type of the empty array `index`.
    """
    for i in range(rows.shape[0]):
        x, gradient = table.given(rows, i, like)
        group = rows[i, table.GROUP]
        count = table.count_groups(x.size, group)
        body = table.body_of(rows, i)
        counts, at = table.section(body, count, index.dtype)
        recon, at = table.section(at, 2 * count, np.float32)
        entries = table.array_at(at, rows[i, table.LIMIT], index.dtype)
        found, is_finite = encode_adaptive(x, gradient, group, pi, min(sample, group), counts, recon, entries)
        if not is_finite and gradient.size > 0:
            decode(counts, recon, 2, entries[:found], group, np.float32(1), x, True)
            take_back(x, gradient)
        used = at - body + found * index.itemsize
        table.seal(rows, i, like, codec, index.itemsize, found, used, is_finite)


@kernel
def decode_pairs_row(rows, i, like, index, scale):
    """Decode the checked payload of row `i`, with two values per group; returns False if its body does not fit."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    group, _, number, body, end = table.opened(rows, i)
    count = table.count_groups(out.size, group)
    means_at = body + table.padded(count * index.itemsize)
    at = means_at + 8 * count
    if at + table.padded(number * index.itemsize) != end:
        return False
    counts = table.array_at(body, count, index.dtype)
    recon = table.array_at(means_at, 2 * count, np.float32)
    entries = table.array_at(at, number, index.dtype)
    return decode(counts, recon, 2, entries, group, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_adaptive_row(rows, i, like, scale):
    """Decode the checked payload of row `i`, whose group says of which type counts and entries are."""
    if table.opened(rows, i)[0] <= INDEX_GROUP:
        return decode_pairs_row(rows, i, like, _SHORT, scale)
    return decode_pairs_row(rows, i, like, _LONG, scale)


@kernel
def decode_adaptive_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if table.has_body(rows, i, like) and not decode_adaptive_row(rows, i, like, scale):
            return i
    return -1


@kernel
def encode_threshold_rows(codec, tau, rows, like):
    """Encode a table of tensors; a body is the counts, and then the entries. See `encode_threshold`."""
    for i in range(rows.shape[0]):
        x, gradient = table.given(rows, i, like)
        group, values = rows[i, table.GROUP], pair(tau)
        body = table.body_of(rows, i)
        counts, at = table.section(body, table.count_groups(x.size, group), np.uint32)
        entries = table.array_at(at, x.size, np.uint16)
        found, is_finite = encode_threshold(x, gradient, group, x.dtype.type(tau), counts, entries)
        if not is_finite and gradient.size > 0:
            decode(counts, values, 0, entries[:found], group, np.float32(1), x, True)
            take_back(x, gradient)
        table.seal(rows, i, like, codec, values.view(np.uint32)[0], found, at - body + 2 * found, is_finite)


@kernel
def decode_threshold_row(rows, i, like, scale):
    """Decode the checked payload of row `i`; returns False if its body does not fit."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    group, parameter, number, body, end = table.opened(rows, i)
    count = table.count_groups(out.size, group)
    at = body + table.padded(4 * count)
    if group > INDEX_GROUP or at + table.padded(2 * number) != end:
        return False
    tau = np.full(1, parameter, np.uint32).view(np.float32)[0]
    if not 0 < tau < np.inf:
        return False
    counts = table.array_at(body, count, np.uint32)
    entries = table.array_at(at, number, np.uint16)
    return decode(counts, pair(tau), 0, entries, group, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_threshold_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if table.has_body(rows, i, like) and not decode_threshold_row(rows, i, like, scale):
            return i
    return -1


@kernel
def pair(tau):
    """Return what the two signs stand for."""
    values = np.empty(2, np.float32)
    values[0] = tau
    values[1] = -tau
    return values


@kernel
def encode_ternary_rows(codec, norm_is_max, rows, like):
    """Encode a table of tensors; a body is the counts, the norms, and the entries. See `encode_ternary`."""
    for i in range(rows.shape[0]):
        x, _ = table.given(rows, i, like)
        group = rows[i, table.GROUP]
        count = table.count_groups(x.size, group)
        body = table.body_of(rows, i)
        counts, at = table.section(body, count, np.uint16)
        recon, at = table.section(at, 2 * count, np.float32)
        entries = table.array_at(at, x.size, np.uint16)
        low, high = table.key_of(rows, i)
        found = encode_ternary(x, group, norm_is_max, low, high, counts, recon, entries)
        table.seal(rows, i, like, codec, 1, found, at - body + 2 * found, found >= 0)
