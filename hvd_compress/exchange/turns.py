"""Two memories for arrays that are computed anew in each step from what they were: they take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.exchange.memory import aligned_empty
from hvd_compress.kernels import many as kernels

__all__ = ["Turns"]

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

_LINE = 16  # elements of a cache line: arrays begin on one


class Turns:
    """Float32 arrays as they are now, and memory for what they become; a step that is taken back changes nothing.

    Args:
        numels: elements of each.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.exchange.turns import Turns
        >>> turns = Turns([3, 2])
        >>> turns.make()
        >>> first = turns.take_over(0, np.ones(3))
        >>> turns.next[0][:] = first + 1
        >>> turns.turn([0])
        >>> turns.now[0]
        array([2., 2., 2.], dtype=float32)
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self.now: list[Array] = []
        self.next: list[Array] = []
        self.now_at: Numbers = np.empty(0, np.int64)
        """Addresses of `now`."""
        self.next_at: Numbers = np.empty(0, np.int64)

    def make(self) -> None:
        """Get the memory, if that has not been done; before anything else."""
        if not self.now:
            self.now, self.now_at = self._made()
            self.next, self.next_at = self._made()

    def take_over(self, i: int, values: Array | None) -> Array:
        """What array `i` is now, from here on, with values from elsewhere; zeros for None."""
        mine = self.now[i]
        mine[...] = 0 if values is None else values
        return mine

    def turn(self, which: Sequence[int] | None = None) -> None:
        """What was to come is what these arrays are now; None for all of them."""
        if which is None:
            self.now, self.next = self.next, self.now
            self.now_at, self.next_at = self.next_at, self.now_at
            return
        for i in which:
            self.now[i], self.next[i] = self.next[i], self.now[i]
            self.now_at[i], self.next_at[i] = self.next_at[i], self.now_at[i]

    def _made(self) -> tuple[list[Array], Numbers]:
        rooms = [-(-numel // _LINE) * _LINE for numel in self._numels]
        starts = np.cumsum([0, *rooms])
        memory = aligned_empty(int(starts[-1]), np.float32)
        arrays = [memory[start : start + numel] for start, numel in zip(starts[:-1], self._numels, strict=True)]
        return arrays, kernels.address_of(memory) + 4 * starts[:-1]
