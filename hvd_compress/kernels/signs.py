"""Sparse signs: entries `index << 1 | positive`, ascending within a group, one value per sign and group."""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels.collect import TILE, append_bits, collect
from hvd_compress.kernels.common import bucket_norm, correct, kth_largest, mix, uniform, with_margin
from hvd_compress.kernels.jit import kernel


@kernel
def encode_threshold(x, r, group, tau, counts, entries):
    """Entries of |x| > tau (strictly); their number, or -1 if a value is not finite."""
    feedback = r.size > 0
    bad = np.float32(0)
    total = 0
    found = np.empty(min(group, x.size), np.int32)
    for g in range(counts.size):
        start = g * group
        stop = min(start + group, x.size)
        y = x[start:stop]
        bad += correct(y, r[start:stop] if feedback else r)
        candidates = collect(y, tau, -tau, found)
        first = total
        for c in range(candidates):
            i = found[c]
            v = y[i]
            if v == tau or v == -tau:
                continue
            entries[total] = (i << 1) | (v > 0)
            total += 1
            if feedback:
                y[i] = v - tau if v > 0 else v + tau
        counts[g] = total - first
    return total if bad == 0 else -1


@kernel
def _keep_largest(top, wanted, filled, v):
    """Insert v into the descending list top[:filled] of at most `wanted` values; the new length."""
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
    """Thresholds above which slightly more than k entries of each sign are expected, from `sample` draws."""
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
def _exact(y, found, count, sign, k, values):
    """Of the candidates of one sign: their number, the k-th largest magnitude, how many equal to it go along."""
    n = 0
    for c in range(count):
        v = y[found[c]] * sign
        values[n] = v
        n += (v > 0) | ((v == 0) & (sign > 0))
    if n < k or k == 0:
        return n, values.dtype.type(0), 0
    threshold = kth_largest(values[:n], k)
    larger = 0
    for i in range(n):
        larger += values[i] > threshold
    return n, threshold, k - larger


@kernel
def _keep_chosen(y, found, candidates, high, high_ties, low, low_ties):
    """Leave in `found` the candidates above the exact thresholds, and of those equal to it the first ones."""
    kept = 0
    for c in range(candidates):
        i = found[c]
        v = y[i]
        magnitude = abs(v)
        threshold = high if v > 0 else low
        take = magnitude > threshold
        if magnitude == threshold and magnitude > 0:
            if v > 0:
                take = high_ties > 0
                high_ties -= 1
            else:
                take = low_ties > 0
                low_ties -= 1
        found[kept] = i
        kept += take
    return kept


@kernel
def _means_of_chosen(y, found, kept):
    positive = 0.0
    negative = 0.0
    count = 0
    for c in range(kept):
        v = np.float64(y[found[c]])
        positive += max(v, 0.0)
        negative += min(v, 0.0)
        count += v > 0
    return np.float32(positive / max(count, 1)), np.float32(negative / max(kept - count, 1))


@kernel
def encode_adaptive(x, r, group, pi, sample, key_low, key_high, counts, recon, entries):
    """The ceil(k / pi) largest of the k non-negative, and likewise of the negative, entries of each group.

    counts[groups], recon[2 * groups] (means of the sent non-negative and negative entries). Returns the number of
    entries, or -1 if a value is not finite. Zeros are never sent. Candidates come from a guessed threshold (that of
    the group before, else one from `sample` draws); the selection among them is exact.
    """
    feedback = r.size > 0
    total = 0
    size = min(group, x.size)
    plus = x.dtype.type(1)
    minus = x.dtype.type(-1)
    # room for all entries of a group, and for the two lists of the guess in the tiniest group
    values = np.empty(size + 16, x.dtype)
    found = np.empty(size, np.int32)
    high = low = x.dtype.type(0)
    nearness = x.dtype.type(0.85)
    closer = x.dtype.type(1.002)
    farther = x.dtype.type(0.95)
    for g in range(counts.size):
        start = g * group
        stop = min(start + group, x.size)
        y = x[start:stop]
        if np.isnan(correct(y, r[start:stop] if feedback else r)):
            return -1
        positives = 0
        for i in range(y.size):
            positives += y[i] >= 0
        k_positive = -(-positives // pi)
        k_negative = -(-(y.size - positives) // pi)

        # attempt 0: just below the neighbour's thresholds; 1: sampled ones; 2: every entry is a candidate
        for attempt in range(3):
            if attempt == 0:
                above = high * nearness
                below = -low * nearness
                if not (above > 0 and below < 0):
                    continue
            elif attempt == 1:
                draws = min(y.size, sample, max(128, y.size >> 4))
                key = mix(g, key_low, key_high)
                above, below = _guess(y, positives, k_positive, k_negative, draws, key, values)
            else:
                above = below = x.dtype.type(0)
            room = min(4 * (k_positive + k_negative) + 64, y.size) if attempt == 0 else y.size
            candidates = collect(y, above, below, found[:room])
            if candidates < 0:
                continue
            n_positive, high, high_ties = _exact(y, found, candidates, plus, k_positive, values)
            n_negative, low, low_ties = _exact(y, found, candidates, minus, k_negative, values)
            if n_positive >= k_positive and n_negative >= k_negative:
                break
        # groups alike need few spare candidates, groups unlike need more: steer towards one miss in some dozens
        nearness = nearness * closer if attempt == 0 else nearness * farther
        nearness = min(max(nearness, x.dtype.type(0.5)), x.dtype.type(0.99))

        kept = _keep_chosen(y, found, candidates, high, high_ties, low, low_ties)
        positive, negative = _means_of_chosen(y, found, kept)
        counts[g] = kept
        recon[2 * g] = positive
        recon[2 * g + 1] = negative
        for c in range(kept):
            i = found[c]
            is_positive = y[i] > 0
            entries[total + c] = (i << 1) | is_positive
            if feedback:
                y[i] -= positive if is_positive else negative
        total += kept
    return total


@kernel
def _mask_chosen(y, first, norm, key_low, key_high, draws, mask):
    """Bits of the entries that a draw of probability |y| / norm chooses."""
    for i in range(y.size):
        draws[i] = uniform(first + i, key_low, key_high)
    mask[(y.size + 7) >> 3 :] = 0
    for j in range((y.size + 7) >> 3):
        byte = np.uint8(0)
        octet = y[8 * j : 8 * j + 8]
        for k in range(octet.size):
            chosen = abs(np.float32(octet[k])) > draws[8 * j + k] * norm
            byte |= np.uint8(chosen) << np.uint8(k)
        mask[j] = byte


@kernel
def encode_ternary(x, bucket, norm_is_max, key_low, key_high, counts, recon, entries):
    """Each x sent as sign(x) * norm with probability |x| / norm; the number of entries, or -1 if not finite."""
    total = 0
    draws = np.empty(TILE, np.float32)
    mask = np.empty(TILE // 8, np.uint8)
    found = np.empty(TILE, np.int32)
    for g in range(counts.size):
        start = g * bucket
        stop = min(start + bucket, x.size)
        norm = bucket_norm(x[start:stop], norm_is_max)
        if not np.isfinite(norm):
            return -1
        first = total
        for tile in range(start, stop, TILE):
            y = x[tile : min(tile + TILE, stop)]
            _mask_chosen(y, tile, norm, key_low, key_high, draws, mask)
            candidates = append_bits(mask, 0, found, 0)
            for c in range(candidates):
                i = found[c]
                entries[total] = ((tile - start + i) << 1) | (y[i] > 0)
                total += 1
        counts[g] = total - first
        recon[2 * g] = norm
        recon[2 * g + 1] = -norm
    return total


@kernel
def decode(counts, recon, stride, entries, group, scale, out):
    """Add `scale` times the reconstruction values at the entries; False at the first entry that does not fit.

    recon holds a pair per group (stride 2) or one pair for all (stride 0).
    """
    at = 0
    for g in range(counts.size):
        start = g * group
        size = min(start + group, out.size) - start
        positive = recon[g * stride] * scale
        negative = recon[g * stride + 1] * scale
        previous = -1
        for _ in range(counts[g]):
            if at >= entries.size:
                return False
            index = np.int64(entries[at]) >> 1
            if index <= previous or index >= size:
                return False
            out[start + index] += positive if entries[at] & 1 else negative
            previous = index
            at += 1
    return at == entries.size
