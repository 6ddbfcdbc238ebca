"""Code the levels of QSGD by Elias codes (Elias 1975; Alistarh et al. 2017, section 3.2)."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import WireError
from hvd_compress.kernels import elias as kernels

__all__ = ["Stream", "decode", "encode_levels", "encode_ternary_rows", "ternary_words"]

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]
Stream = tuple[Words, int, int]
"""The words, the number of the form they are in, and how many levels are not zero."""

# geometric gaps of this mean take as many bits in omega as in gamma code, those of a larger mean take fewer
_GAP_OF_OMEGA = 135
# normal and Laplacian values take equally many bits in both forms at 0.8, and dense is faster: from here on it takes at
# most some per cent more bits
_DENSE_SHARE = 0.7


def ternary_words(numel: int) -> int:
    """Return the most words that a stream of `numel` levels -1, 0 and 1 takes, with the two that it does not fill."""
    return -(-2 * numel // 64) + 2


encode_ternary_rows = partial(kernels.encode_ternary_rows, _GAP_OF_OMEGA)
"""(codec, coded_codec, norm_is_max, rows, like): quantize as QSGD with one bit does, and code the levels.

Each that is not zero is sent as its gap to the one before, and a sign. Gaps run on over the bounds of buckets. They are
in Elias gamma code, or in omega, the recursive one, where the levels of normal values are so sparse that it is shorter.
"""


def encode_levels(packed: Array, bits: int, numel: int) -> Stream | None:
    """Code levels of `bits` bits with their signs, given as QSGD packs them: eight in `bits` bytes.

    Where most of them are zero, gap, sign and level (if it can be other than 1) are sent for each that is not, else all
    levels. Difference from the paper: there the bound of the variance decides between the two, here the share of zeros.

    Args:
        packed: uint8.
        bits: 2 to 8.
        numel: number of levels; the rest of the last eight are zero.

    Returns:
        The stream, or None if it would not be shorter than `packed`, both padded to 8 bytes.
    """
    most = -(-packed.nbytes // 8)
    words = np.zeros(most + 2, np.uint64)  # the kernels leave two unused
    nonzeros = int(kernels.count_levels(packed, bits))
    if nonzeros > _DENSE_SHARE * numel:
        form = kernels.DENSE
        used = kernels.encode_dense(packed, numel, bits, words)
    else:
        is_omega = numel > _GAP_OF_OMEGA * nonzeros
        form = _sparse(is_omega)
        used = kernels.encode_sparse(packed, bits, is_omega, words)
    size = -(-used // 64)
    return (words[:size], form, nonzeros) if used >= 0 and size < most else None


def decode(stream: Stream, norms: Array, bucket: int, bits: int, scale: np.float32, out: Array) -> None:
    """Add `scale` times what the levels stand for to `out`.

    Args:
        stream: what an encoder returned.
        norms: of each bucket.
        bucket: elements per bucket.
        bits: 1 to 8, from which the number of levels follows.
        scale: factor of the norms.
        out: float32 or float64, flat.

    Raises:
        WireError: the stream is of no known form, a level or a place is out of range, or it does not end with the last.
    """
    words, form, nonzeros = stream
    levels = max(1, 2 ** (bits - 1) - 1)
    if nonzeros > out.size:
        raise WireError(f"payload claims {nonzeros} levels that are not zero among {out.size}")
    if form in (kernels.SPARSE_GAMMA, kernels.SPARSE_OMEGA):
        is_omega = form == kernels.SPARSE_OMEGA
        table = _sparse_table(levels, is_omega)
        fits = kernels.decode_sparse(words, nonzeros, norms, bucket, levels, is_omega, table, scale, out)
    elif form == kernels.DENSE:
        fits = kernels.decode_dense(words, nonzeros, norms, bucket, levels, _dense_table(levels), scale, out)
    else:
        raise WireError(f"payload of an Elias code of form {form}; known are 1 to 3")
    if not fits:
        raise WireError(
            f"payload corrupted: {words.nbytes} bytes of Elias code are not {nonzeros} levels up to {levels} among "
            f"{out.size}"
        )


def _sparse(is_omega: bool) -> int:
    return kernels.SPARSE_OMEGA if is_omega else kernels.SPARSE_GAMMA


@cache
def _sparse_table(levels: int, is_omega: bool) -> Array:
    table = np.zeros(2**kernels.TABLE_BITS, np.int32)
    kernels.sparse_table(levels, is_omega, table)
    return table


@cache
def _dense_table(levels: int) -> Array:
    table = np.zeros(2**kernels.TABLE_BITS, np.int32)
    kernels.dense_table(levels, table)
    return table
