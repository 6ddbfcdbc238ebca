"""The kernels of codes on arrays: None where a code is not shorter, WireError where a stream does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hvd_compress.errors import WireError
from hvd_compress.kernels import elias as elias_kernels
from hvd_compress.kernels import golomb as golomb_kernels

__all__ = ["elias", "golomb"]

Array = np.ndarray[Any, Any]
Stream = tuple[Array, int, int]
"""The words, the number of the form they are in, and how many levels are not zero."""


def _encode(counts: Array, entries: Array, group: int, numel: int, flag_bits: int) -> Array | None:
    words = np.zeros(-(-entries.nbytes // 8), np.uint64)
    used = golomb_kernels.encode(counts, entries, group, numel, flag_bits, words) if words.size else -1
    return None if used < 0 else words[: -(-used // 64)]


def _decode(words: Array, counts: Array, count: int, dtype: Any, group: int, numel: int, flag_bits: int) -> Array:
    entries = np.empty(count, dtype)
    if not golomb_kernels.decode(words, counts, group, numel, flag_bits, entries):
        raise WireError("does not fit")
    return entries


def _encode_levels(packed: Array, bits: int, numel: int) -> Stream | None:
    most = -(-packed.nbytes // 8)
    words, used, form, nonzeros = elias_kernels.encode_levels(packed, bits, numel, most)
    size = -(-used // 64)
    return (words[:size], form, nonzeros) if used >= 0 and size < most else None


def _decode_levels(stream: Stream, norms: Array, bucket: int, bits: int, scale: np.float32, out: Array) -> None:
    words, form, nonzeros = stream
    levels = max(1, 2 ** (bits - 1) - 1)
    if form not in (1, 2, 3) or nonzeros > out.size:
        raise WireError("no such form, or too many levels")
    known = np.zeros(2**elias_kernels.TABLE_BITS, np.int32)
    if form == elias_kernels.DENSE:
        elias_kernels.dense_table(levels, known)
        fits = elias_kernels.decode_dense(words, nonzeros, norms, bucket, levels, known, scale, out)
    else:
        is_omega = form == elias_kernels.SPARSE_OMEGA
        elias_kernels.sparse_table(levels, is_omega, known)
        fits = elias_kernels.decode_sparse(words, nonzeros, norms, bucket, levels, is_omega, known, scale, out)
    if not fits:
        raise WireError("does not fit")


golomb = SimpleNamespace(encode=_encode, decode=_decode)
elias = SimpleNamespace(encode_levels=_encode_levels, decode=_decode_levels)
