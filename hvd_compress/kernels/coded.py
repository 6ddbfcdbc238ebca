"""Make payloads shorter without loss, and decode them: gaps between indices (`golomb`), levels of QSGD (`elias`).

A coded body has the sections of a plain one, but for the entries: the words of the stream come last, so that their
number need not be stated. A payload stays plain where its coded form would not be shorter.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.kernels import bitmap, chunked, elias, golomb, qsgd, signs, table, topk
from hvd_compress.kernels.jit import kernel

_SHORT, _LONG = np.empty(0, np.uint16), np.empty(0, np.uint32)  # types of counts and entries
_MOST_BUCKET_OF_ONE_BIT = 2**30  # gaps reach any distance; a bucket for all of any tensor


@kernel
def _stream(counts, entries, group, numel, flag_bits):
    """Code entries; returns words, and how many of them are used, or -1 if the entries are not longer."""
    words = np.zeros((entries.nbytes + 7) >> 3, np.uint64)
    used = golomb.encode(counts, entries, group, numel, flag_bits, words) if words.size > 0 else -1
    return words, (used + 63) >> 6 if used >= 0 else -1


@kernel
def _entries(rows, i, counts, index, at, flag_bits):
    """Decode the stream of row `i`, which begins at `at`; returns the entries, and whether they fit."""
    group, _, number, _, end = table.opened(rows, i)
    words = table.array_at(at, (end - at) >> 3, np.uint64)
    # each index takes at least a bit, so a forged number allocates little
    if number > min(rows[i, table.NUMEL], 64 * words.size):
        return np.empty(0, index.dtype), False
    entries = np.empty(number, index.dtype)
    return entries, golomb.decode(words, counts, group, rows[i, table.NUMEL], flag_bits, entries)


# -- signs: adaptive and threshold -----------------------------------------------------------------------------------


@kernel
def _shorten_signs(rows, i, codec, counts, index, at):
    """Code the entries of row `i`, of the type of `index`, which begin at `at`."""
    group, parameter, number, body, _ = table.opened(rows, i)
    words, size = _stream(counts, table.array_at(at, number, index.dtype), group, rows[i, table.NUMEL], 1)
    if size >= 0:
        table.array_at(at, size, np.uint64)[:] = words[:size]
        table.reseal(rows, i, codec, parameter, number, at - body + 8 * size)


@kernel
def _shorten_pairs(rows, i, codec, index):
    group, _, _, body, _ = table.opened(rows, i)
    count = table.count_groups(rows[i, table.NUMEL], group)
    counts = table.array_at(body, count, index.dtype)
    _shorten_signs(rows, i, codec, counts, index, body + table.padded(count * index.itemsize) + 8 * count)


@kernel
def shorten_adaptive_rows(codec, rows):
    """Shorten the payloads of a table; `codec` is that of the coded form."""
    for i in range(rows.shape[0]):
        if not table.is_empty(rows, i):
            if table.opened(rows, i)[0] <= signs.INDEX_GROUP:
                _shorten_pairs(rows, i, codec, _SHORT)
            else:
                _shorten_pairs(rows, i, codec, _LONG)


@kernel
def _decode_pairs_row(rows, i, like, index, scale):
    """Do for a coded payload what `signs.decode_pairs_row` does for a plain one."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    group, _, _, body, end = table.opened(rows, i)
    count = table.count_groups(out.size, group)
    means_at = body + table.padded(count * index.itemsize)
    at = means_at + 8 * count
    if at > end:
        return False
    counts = table.array_at(body, count, index.dtype)
    entries, fits = _entries(rows, i, counts, index, at, 1)
    recon = table.array_at(means_at, 2 * count, np.float32)
    return fits and signs.decode(counts, recon, 2, entries, group, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_adaptive_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        is_short = table.opened(rows, i)[0] <= signs.INDEX_GROUP
        if not rows[i, table.FLAGS] & table.CODED:
            fits = signs.decode_adaptive_row(rows, i, like, scale)
        elif is_short:
            fits = _decode_pairs_row(rows, i, like, _SHORT, scale)
        else:
            fits = _decode_pairs_row(rows, i, like, _LONG, scale)
        if not fits:
            return i
    return -1


@kernel
def shorten_threshold_rows(codec, rows):
    """Shorten the payloads of a table; `codec` is that of the coded form."""
    for i in range(rows.shape[0]):
        if not table.is_empty(rows, i):
            group, _, _, body, _ = table.opened(rows, i)
            count = table.count_groups(rows[i, table.NUMEL], group)
            counts = table.array_at(body, count, np.uint32)
            _shorten_signs(rows, i, codec, counts, _SHORT, body + table.padded(4 * count))


@kernel
def _decode_threshold_row(rows, i, like, scale):
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    group, parameter, _, body, end = table.opened(rows, i)
    count = table.count_groups(out.size, group)
    at = body + table.padded(4 * count)
    tau = np.full(1, parameter, np.uint32).view(np.float32)[0]
    if group > signs.INDEX_GROUP or at > end or not 0 < tau < np.inf:
        return False
    counts = table.array_at(body, count, np.uint32)
    entries, fits = _entries(rows, i, counts, _SHORT, at, 1)
    return fits and signs.decode(counts, signs.pair(tau), 0, entries, group, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_threshold_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        if rows[i, table.FLAGS] & table.CODED:
            fits = _decode_threshold_row(rows, i, like, scale)
        else:
            fits = signs.decode_threshold_row(rows, i, like, scale)
        if not fits:
            return i
    return -1


# -- values and their indices: top-k and percentile ------------------------------------------------------------------


@kernel
def _shorten_values(rows, i, codec, parameter, counts, indices, values_at):
    """Make the body of row `i` counts, the values that begin at `values_at`, and the code of their indices."""
    group, _, number, body, end = table.opened(rows, i)
    words, size = _stream(counts, indices, group, rows[i, table.NUMEL], 0)
    to = body + table.padded(4 * counts.size)
    at = to + table.padded(4 * number)
    if size < 0 or at + 8 * size >= end:
        return
    # the values move down: bits or indices lay before them
    source = table.array_at(values_at, number, np.float32)
    target = table.array_at(to, number, np.float32)
    for j in range(number):
        target[j] = source[j]
    stated, _ = table.section(body, counts.size, np.uint32)
    stated[:] = counts
    # its padding, where other values lay
    table.section(to, number, np.float32)
    table.array_at(at, size, np.uint64)[:] = words[:size]
    table.reseal(rows, i, codec, parameter, number, at - body + 8 * size)


@kernel
def _shorten_indices(rows, i, codec):
    group, parameter, number, body, _ = table.opened(rows, i)
    count = table.count_groups(rows[i, table.NUMEL], group)
    at = body + table.padded(4 * count)
    counts, indices = table.array_at(body, count, np.uint32).copy(), table.array_at(at, number, np.uint16)
    _shorten_values(rows, i, codec, parameter, counts, indices, at + table.padded(2 * number))


@kernel
def shorten_topk_rows(codec, rows):
    """Shorten the payloads of a table; `codec` is that of the coded form."""
    for i in range(rows.shape[0]):
        if not table.is_empty(rows, i):
            _shorten_indices(rows, i, codec)


@kernel
def shorten_bitmap_rows(codec, parameter_of_indices, rows):
    """Shorten the payloads of a table; `codec` is that of the coded form."""
    for i in range(rows.shape[0]):
        if table.is_empty(rows, i):
            continue
        group, parameter, number, body, _ = table.opened(rows, i)
        if parameter == parameter_of_indices:
            _shorten_indices(rows, i, codec)
            continue
        bits = table.array_at(body, (rows[i, table.NUMEL] + 63) >> 6, np.uint64)
        counts = np.empty(table.count_groups(rows[i, table.NUMEL], group), np.uint32)
        indices = np.empty(number, np.uint16)
        bitmap.indices(bits, group, counts, indices)
        _shorten_values(rows, i, codec, parameter_of_indices, counts, indices, body + bits.nbytes)


@kernel
def _decode_values_row(rows, i, like, scale):
    """Do for a coded payload what `topk.decode_row` does for a plain one."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    block, _, number, body, end = table.opened(rows, i)
    count = table.count_groups(out.size, block)
    values_at = body + table.padded(4 * count)
    at = values_at + table.padded(4 * number)
    if block > topk.MOST_BLOCK or at > end:
        return False
    counts = table.array_at(body, count, np.uint32)
    indices, fits = _entries(rows, i, counts, _SHORT, at, 0)
    values = table.array_at(values_at, number, np.float32)
    return fits and topk.decode(counts, indices, values, block, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_topk_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        if rows[i, table.FLAGS] & table.CODED:
            fits = _decode_values_row(rows, i, like, scale)
        else:
            fits = topk.decode_row(rows, i, like, scale)
        if not fits:
            return i
    return -1


@kernel
def decode_bitmap_rows(parameter, parameter_of_indices, rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        if not rows[i, table.FLAGS] & table.CODED:
            fits = bitmap.decode_row(parameter, parameter_of_indices, rows, i, like, scale)
        else:
            is_known = table.opened(rows, i)[1] == parameter_of_indices
            fits = is_known and _decode_values_row(rows, i, like, scale)
        if not fits:
            return i
    return -1


# -- values of few bits and their indices: chunked top-k --------------------------------------------------------------


@kernel
def shorten_chunked_rows(codec, rows):
    """Shorten the payloads of a table; `codec` is that of the coded form."""
    for i in range(rows.shape[0]):
        if table.is_empty(rows, i):
            continue
        counts, _, at, _ = chunked.sections_of(rows, i)
        entries, _ = chunked.entries_of(rows, i, at)
        group, bits, number, body, end = table.opened(rows, i)
        words, size = _stream(counts, entries, group, rows[i, table.NUMEL], bits)
        if size >= 0 and at + 8 * size < end:
            table.array_at(at, size, np.uint64)[:] = words[:size]
            table.reseal(rows, i, codec, bits, number, at - body + 8 * size)


@kernel
def _decode_chunked_row(rows, i, like, scale):
    """Do for a coded payload what `chunked.decode_row` does for a plain one."""
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    counts, scales, at, fits = chunked.sections_of(rows, i)
    if not fits:
        return False
    group, bits, _, _, _ = table.opened(rows, i)
    entries, fits = _entries(rows, i, counts, _LONG, at, bits)
    return fits and chunked.decode(counts, scales, entries, group, bits, scale, out, rows[i, table.ADD] != 0)


@kernel
def decode_chunked_rows(rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1."""
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        if rows[i, table.FLAGS] & table.CODED:
            fits = _decode_chunked_row(rows, i, like, scale)
        else:
            fits = chunked.decode_row(rows, i, like, scale)
        if not fits:
            return i
    return -1


# -- levels: QSGD ----------------------------------------------------------------------------------------------------


@kernel
def shorten_levels_rows(codec, rows):
    """Shorten the payloads of a table, of 2 bits or more; `codec` is that of the coded form."""
    for i in range(rows.shape[0]):
        if table.is_empty(rows, i):
            continue
        numel = rows[i, table.NUMEL]
        bucket, bits, _, body, _ = table.opened(rows, i)
        at = body + table.padded(4 * table.count_groups(numel, bucket))
        packed = table.array_at(at, ((numel + 7) >> 3) * bits, np.uint8)
        most = (packed.size + 7) >> 3
        words, used, form, nonzeros = elias.encode_levels(packed, bits, numel, most)
        size = (used + 63) >> 6
        if used >= 0 and size < most:
            table.array_at(at, size, np.uint64)[:] = words[:size]
            table.reseal(rows, i, codec, bits | form << 8, nonzeros, at - body + 8 * size)


@kernel
def _decode_levels_row(symbols, rows, i, like, scale):
    out = table.array_at(rows[i, table.X], rows[i, table.NUMEL], like.dtype)
    bucket, parameter, nonzeros, body, end = table.opened(rows, i)
    bits, form = parameter & 255, parameter >> 8
    if not 1 <= bits <= 8 or bucket & 7 or not elias.SPARSE_GAMMA <= form <= elias.DENSE:
        return False
    if bucket > (_MOST_BUCKET_OF_ONE_BIT if bits == 1 else qsgd.MOST_BUCKET):
        return False
    count = table.count_groups(out.size, bucket)
    at = body + table.padded(4 * count)
    if at > end or nonzeros > out.size:
        return False
    norms = table.array_at(body, count, np.float32)
    words = table.array_at(at, (end - at) >> 3, np.uint64)
    if not rows[i, table.ADD]:
        out[:] = 0
    levels = max(1, (1 << (bits - 1)) - 1)
    known = symbols[bits - 1, form - 1]
    if form == elias.DENSE:
        return elias.decode_dense(words, nonzeros, norms, bucket, levels, known, scale, out)
    is_omega = form == elias.SPARSE_OMEGA
    return elias.decode_sparse(words, nonzeros, norms, bucket, levels, is_omega, known, scale, out)


@kernel
def decode_levels_rows(symbols, rows, like, scale):
    """Decode a table of checked payloads; returns the number of the first whose body does not fit, or -1.

    `symbols` is what `elias.tabulate` has filled.
    """
    for i in range(rows.shape[0]):
        if not table.has_body(rows, i, like):
            continue
        if rows[i, table.FLAGS] & table.CODED:
            fits = _decode_levels_row(symbols, rows, i, like, scale)
        else:
            fits = qsgd.decode_row(rows, i, like, scale)
        if not fits:
            return i
    return -1
