"""Lay values and their 16-bit indices, or the coded gaps between these, into the bodies of top-k and percentile.

Sections: counts of the blocks (uint32), indices (uint16), values (float32); coded: counts, values, Golomb-Rice code of
the gaps, which comes last, so that its length need not be stated.
"""

from __future__ import annotations

import numpy as np

from hvd_compress import wire
from hvd_compress.coding import golomb
from hvd_compress.compressors.base import Array, Bytes, count_groups
from hvd_compress.errors import WireError
from hvd_compress.kernels import topk as kernels

__all__ = ["BLOCK", "body_bytes", "code", "code_indices", "decode_coded"]

BLOCK = 65536  # what 16 bits of index reach


def body_bytes(numel: int, group: int, kept: int) -> int:
    """Return the most bytes of a body, coded or not."""
    return wire.padded(4 * count_groups(numel, group)) + wire.padded(2 * kept) + 4 * kept


def code(body: Bytes, entries: int, numel: int, group: int) -> int | None:
    """Replace a body that `encode` laid by its coded form; returns the bytes used, or None if that is not shorter."""
    sections = wire.Sections(body)
    counts = sections.take(count_groups(numel, group), np.uint32)
    indices = sections.take(entries, np.uint16)
    return code_indices(body, counts, indices, sections.take(entries, np.float32), numel, group)


def code_indices(body: Bytes, counts: Array, indices: Array, values: Array, numel: int, group: int) -> int | None:
    """Replace a body by the coded form of these entries, which may be parts of it; returns as `code` does."""
    words = golomb.encode(counts, indices, group, numel, 0)
    if words is None or wire.padded(counts.nbytes) + wire.padded(values.nbytes) + words.nbytes >= body.size:
        return None
    values = values.copy()
    sections = wire.Sections(body)
    sections.blank(counts.size, np.uint32)[...] = counts
    sections.blank(values.size, np.float32)[...] = values
    sections.take(words.size, np.uint64)[...] = words
    return sections.used


def decode_coded(entries: int, body: wire.Sections, group: int, scale: np.float32, out: Array, add: bool) -> bool:
    """Write or add `scale` times the values of a coded body; returns False if an index does not fit.

    Raises:
        WireError: a block that 16 bits do not reach, or no sections of so many entries.
    """
    if group > BLOCK:
        raise WireError(f"payload of 16-bit indices in blocks of {group} elements; {BLOCK} is the most")
    counts = body.take(count_groups(out.size, group), np.uint32)
    values = body.take(entries, np.float32)
    indices: Array = golomb.decode(body.rest(), counts, entries, np.uint16, group, out.size, 0)
    return bool(kernels.decode(counts, indices, values, group, scale, out, add))
