"""How many bytes values and their 16-bit indices take in the bodies of top-k and percentile.

Sections: counts of the blocks (uint32), indices (uint16), values (float32); coded: counts, values, Golomb-Rice code of
the gaps (Rice and Plaunt 1971; Strom 2015; Dryden et al. 2016, 3.2 and 3.3). Difference from the papers, which do not
say how they choose the code's parameter: it follows from the count of a block, and is not sent.
"""

from __future__ import annotations

from hvd_compress import wire
from hvd_compress.compressors.base import count_groups

__all__ = ["BLOCK", "body_bytes"]

BLOCK = 65536  # what 16 bits of index reach


def body_bytes(numel: int, group: int, kept: int) -> int:
    """Return the most bytes of a body, coded or not."""
    return wire.padded(4 * count_groups(numel, group)) + wire.padded(2 * kept) + 4 * kept
