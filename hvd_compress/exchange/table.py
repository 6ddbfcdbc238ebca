"""One table of a bucket: payloads of a message that kernels of one kind make or read in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, Key, tables
from hvd_compress.errors import WireError
from hvd_compress.kernels.table import (
    ADD,
    COLUMNS,
    DIMENSIONS,
    FLAGS,
    GRADIENT,
    GROUP,
    LIMIT,
    NONFINITE,
    NUMEL,
    PAYLOAD,
    ROOM,
    USED,
    X,
)
from hvd_compress.memory import HOST, ITEMSIZE, Memory, Verdict

if TYPE_CHECKING:
    from hvd_compress.exchange.message import Part

__all__ = ["Damaged", "Table"]

Numbers = npt.NDArray[np.int64]


class Damaged(WireError):
    """Says which tensor of a bucket, by its number, has a damaged payload."""

    def __init__(self, tensor: int, reason: WireError) -> None:
        super().__init__(str(reason))
        self.tensor = tensor


class Table:
    """Rows of payloads, with what is the same in every step filled in.

    Args:
        compressor: of all of them, with one kind of kernels for all of their groups.
        numbers: of the parts.
        parts: of the message.
        memory: that the arrays lie in.
    """

    def __init__(
        self, compressor: Compressor, numbers: Sequence[int], parts: Sequence[Part], memory: Memory = HOST
    ) -> None:
        self.compressor = compressor
        self.memory = memory
        self.prepared: dict[Any, Any] = {}
        """What the memory keeps from one step to the next."""
        self.has_feedback = compressor.feedback
        """Whether residuals are encoded, to which gradients are added."""
        self.numbers = np.array(numbers, np.int64)
        """Of the parts, in their message."""
        chosen = [parts[i] for i in numbers]
        self.tensors = np.array([part.tensor for part in chosen], np.int64)
        """The number of the tensor of each row."""
        self._chunks = [part.chunk for part in chosen]
        self._starts = np.array([part.start for part in chosen], np.int64)
        self.rows = np.zeros((len(chosen), COLUMNS), np.int64)
        self.rows[:, NUMEL] = [part.numel for part in chosen]
        self.rows[:, GROUP] = [part.group for part in chosen]
        self.rows[:, LIMIT] = [compressor.limit_of(part.numel, part.group) for part in chosen]
        self.rows[:, DIMENSIONS] = 1
        self.rows[:, ADD] = [part.adds for part in chosen]
        # kernels want at least one element
        is_empty = any(part.numel == 0 for part in chosen)
        self.kernels = None if is_empty else compressor.kernels(chosen[0].group)
        self.slots = np.array([part.slot for part in chosen], np.int64)
        """The most bytes of each payload."""

    def encode(
        self,
        x_at: Numbers,
        gradients_at: Numbers | None,
        places: Numbers,
        kind: str,
        key_of: Callable[[int, int], Key],
        used: Numbers,
    ) -> None:
        """Encode tensors into the slots at `places`, and fill `used` with the bytes of their payloads.

        Args:
            x_at: where the residual of each tensor lies, or its values where there are no gradients.
            gradients_at: where its gradient lies; None without error feedback.
            places: where the slot of each part lies.
            kind: the type of the values.
            key_of: (number of a tensor, chunk): what random choices depend on.
            used: by part.

        Raises:
            ContractError: see `tables.encode`.
        """
        rows = self._placed(x_at, gradients_at, places, self.slots, kind)
        try:
            self.memory.encode(self, kind, lambda i: key_of(int(self.tensors[i]), self._chunks[i]))
        finally:
            # what is encoded can be taken back, whatever happens to the next one
            used[self.numbers] = rows[:, USED]

    def check(
        self, places: Numbers, sizes: Numbers, flags: Numbers, at: Numbers, kind: str
    ) -> bool | Callable[[], bool]:
        """Check payloads that have come, and fill `flags`, by part; returns whether all is finite, or what tells it.

        The latter is a call that waits for the verdict, fills `flags`, and may raise.

        Args:
            places: where the payloads lie for kernels.
            sizes: the bytes that they may take.
            flags: by part.
            at: where they lie on the host.
            kind: the type of what they are decoded to.

        Raises:
            Damaged: the first one that is not as expected.
        """
        rows = self.rows
        rows[:, PAYLOAD], rows[:, ROOM] = places[self.numbers], sizes[self.numbers]
        verdict = self.memory.check(self, kind)
        if not isinstance(verdict, tuple):
            return lambda: self._is_finite(verdict(), flags, at, sizes, kind)
        return self._is_finite(verdict, flags, at, sizes, kind)

    def _is_finite(self, verdict: Verdict, flags: Numbers, at: Numbers, sizes: Numbers, kind: str) -> bool:
        bad, found = verdict
        if bad >= 0:
            raise self._damaged(bad, at, sizes, kind)
        flags[self.numbers] = found
        return not np.bitwise_or.reduce(found) & NONFINITE

    def decode(
        self, outs_at: Numbers, places: Numbers, sizes: Numbers, flags: Numbers, at: Numbers, kind: str, scale: float
    ) -> None:
        """Decode payloads that `check` has passed into the tensors at `outs_at`, times `scale`.

        Raises:
            Damaged: the first one with a damaged body.
        """
        rows = self._placed(outs_at, None, places, sizes, kind)
        rows[:, FLAGS] = flags[self.numbers]
        bad = self.memory.decode(self, kind, scale)
        if bad >= 0:
            raise self._damaged(bad, at, sizes, kind)

    def take_back(
        self, x_at: Numbers, gradients_at: Numbers, lost: npt.NDArray[np.bool_], places: Numbers, kind: str,
        used: Numbers,
    ) -> None:  # fmt: skip
        """Make residuals what they were before `encode`; gradients that are lost stay owed."""
        rows = self._placed(x_at, gradients_at, places, self.slots, kind)
        rows[lost[self.tensors], GRADIENT] = 0
        rows[:, USED] = used[self.numbers]
        self.memory.take_back(self, kind)

    def _placed(
        self, x_at: Numbers, gradients_at: Numbers | None, places: Numbers, room: Numbers, kind: str
    ) -> Numbers:
        """Return the rows with these addresses, of whole tensors and of slots."""
        rows, itemsize = self.rows, ITEMSIZE[kind]
        # what gradients are added to is a residual, of 4 bytes or more
        rows[:, X] = x_at[self.tensors] + (itemsize if gradients_at is None else max(itemsize, 4)) * self._starts
        rows[:, GRADIENT] = 0 if gradients_at is None else gradients_at[self.tensors] + itemsize * self._starts
        rows[:, PAYLOAD] = places[self.numbers]
        rows[:, ROOM] = room if room is self.slots else room[self.numbers]
        return rows

    def _damaged(self, i: int, at: Numbers, sizes: Numbers, kind: str) -> Damaged:
        part, row = self.numbers[i], self.rows[i].copy()
        row[PAYLOAD], row[ROOM] = at[part], sizes[part]
        like = tables.LIKE[np.dtype(np.float64 if kind == "float64" else np.float32)]
        return Damaged(int(self.tensors[i]), tables.explain(self.compressor, row, like))
