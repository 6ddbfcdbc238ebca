"""Say what a random choice depends on, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

__all__ = ["Key"]


@dataclass(frozen=True)
class Key:
    """Identifies one encode call, so that its random choices can be repeated and differ from those of all other calls.

    Args:
        seed: chosen by the user.
        name: of the tensor.
        step: number of the optimizer step.
        rank: of the process.
        hop: 0 for gradients, 1 for the sums that an owner encodes again, 4 for gradients inside of a host.
        chunk: part of the tensor.

    Example:
        >>> from hvd_compress import Key
        >>> Key(seed=1, name="w").words() == Key(seed=1, name="w", step=1).words()
        False
    """

    seed: int = 0
    name: str = ""
    step: int = 0
    rank: int = 0
    hop: int = 0
    chunk: int = 0

    def words(self) -> tuple[np.uint32, np.uint32]:
        """Return two 32-bit words that stand for this key in a kernel."""
        text = f"{self.seed}/{self.step}/{self.rank}/{self.hop}/{self.chunk}/{self.name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return np.uint32(int.from_bytes(digest[:4], "little")), np.uint32(int.from_bytes(digest[4:], "little"))
