"""Code ascending indices by Golomb-Rice codes (Rice and Plaunt 1971; Strom 2015; Dryden et al. 2016, 3.2 and 3.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import WireError
from hvd_compress.kernels import golomb as kernels

__all__ = ["decode", "encode"]

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]


def encode(counts: Array, entries: Array, group: int, numel: int, flag_bits: int) -> Words | None:
    """Code entries `index << flag_bits | flags`, ascending within each group, in fewer bytes.

    Of each index only the gap to the one before is sent, with the parameter that suits the mean gap of its group; both
    sides compute it from the count. Difference from the papers, which do not say how they choose one: none is sent.

    Args:
        counts: entries of each group, unsigned.
        entries: uint16 or uint32.
        group: elements per group.
        numel: elements of all groups.
        flag_bits: low bits of an entry that are sent as they are.

    Returns:
        uint64 array, or None if it would not be shorter than `entries`, both padded to 8 bytes.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.coding import golomb
        >>> entries = np.arange(40, 1000, 50).astype(np.uint16)
        >>> words = golomb.encode(np.array([20], np.uint32), entries, 1000, 1000, 0)
        >>> entries.nbytes, words.nbytes
        (40, 24)
        >>> bool((golomb.decode(words, np.array([20], np.uint32), 20, np.uint16, 1000, 1000, 0) == entries).all())
        True
    """
    # the kernel leaves the last word unused: a stream as long as the entries does not fit
    words = np.zeros(-(-entries.nbytes // 8), np.uint64)
    used = kernels.encode(counts, entries, group, numel, flag_bits, words) if words.size else -1
    return None if used < 0 else words[: -(-used // 64)]


def decode(
    words: Words, counts: Array, count: int, dtype: npt.DTypeLike, group: int, numel: int, flag_bits: int
) -> Array:
    """Decode the `count` entries that `encode` was given.

    Args:
        words: the stream, all of it.
        counts: entries of each group, unsigned.
        count: their sum.
        dtype: uint16 or uint32.
        group: elements per group.
        numel: elements of all groups.
        flag_bits: low bits of an entry that are sent as they are.

    Raises:
        WireError: the counts do not add up, an index lies outside of its group, or the stream does not end with the
            last one.
    """
    # each index takes at least a bit, so a forged number allocates little
    if count > min(numel, 64 * words.size):
        raise WireError(f"payload claims {count} of {numel} indices in {words.nbytes} bytes of Golomb-Rice code")
    entries = np.empty(count, dtype)
    if not kernels.decode(words, counts, group, numel, flag_bits, entries):
        raise WireError(
            f"payload corrupted: {words.nbytes} bytes of Golomb-Rice code are not {count} indices within their groups"
        )
    return entries
