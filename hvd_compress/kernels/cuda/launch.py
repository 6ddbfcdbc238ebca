"""A table in device memory, and the lists of work for its launches, which are made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl

from hvd_compress.kernels import table
from hvd_compress.kernels.cuda import envelope
from hvd_compress.kernels.cuda.rows import FOUND, GROUPS_AT, STATE, WIDTH

Numbers = npt.NDArray[np.int64]

KINDS = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
"""Types of gradients that kernels read and write."""


class Launch:
    """What the kernels of a compressor are launched with, for one table.

    Args:
        rows: the table on the host; addresses may change later, sizes may not.
        upload: copies a NumPy array into device memory, without waiting, and returns it there.
        empty: (count, name of a type): allocates device memory, which is not initialized.
    """

    def __init__(
        self, rows: Numbers, upload: Callable[[npt.NDArray[Any]], Any], empty: Callable[[int, str], Any]
    ) -> None:
        self._upload, self._empty = upload, empty
        count = len(rows)
        self.numels: Numbers = rows[:, table.NUMEL].copy()
        self.groups: Numbers = np.minimum(rows[:, table.GROUP], np.maximum(self.numels, 1))
        """Elements per group, at most those of the row."""
        self.limits: Numbers = rows[:, table.LIMIT].copy()
        """The most entries that each row sends, for compressors that have such a limit."""
        self._rooms: Numbers = rows[:, table.ROOM].copy()
        self.counts: Numbers = -(-self.numels // rows[:, table.GROUP])
        """Groups of each row."""
        self._host = np.zeros((count, WIDTH), np.int64)
        self._host[:, GROUPS_AT] = np.cumsum(self.counts) - self.counts
        adds = rows[:, table.ADD] != 0
        starts = np.flatnonzero(~adds) if not adds.all() else np.zeros(1, np.int64)
        self._runs = np.stack([starts, np.diff([*starts, count])], 1)
        """The first row of each tensor, and how many rows are added up."""
        self.is_single = count == len(starts)
        """Whether there is one row for each tensor."""
        self.longest, self.shortest = int(self.groups.max()), int(self.groups.min())
        """Elements of the longest and of the shortest group."""
        self.has_even_rows = not (self.numels % 4).any()
        """Whether rows end where four elements end, so that wide accesses need no look at each."""
        self.has_even_groups = self.has_even_rows and not (self.groups % 32).any()
        """Whether groups begin where words of 32 bits begin, too."""
        self.adds = False
        """Whether what is decoded is added to what is there."""
        self._kept: dict[Any, Any] = {}
        self.rows: Any = None
        self.state: Any = upload(np.zeros((count, STATE), np.int64))
        self.kind: Any = tl.float32
        """Of gradients when encoding, of what is written when decoding."""
        self.feedback = False
        """Whether residuals are encoded, to which gradients are added."""
        self.aligned = False
        """Whether all arrays begin on 16-byte boundaries."""

    def place(self, rows: Numbers, kind: str, feedback: bool) -> None:
        """Take the addresses of this step, and upload them if they have changed."""
        self.kind, self.feedback = KINDS[kind], feedback
        # a list of work reaches as far as a slot does
        rows = rows.copy()
        rows[:, table.ROOM] = np.minimum(rows[:, table.ROOM], self._rooms)
        # what kernels fill comes after these
        if self.rows is not None and np.array_equal(self._host[:, : table.USED], rows[:, : table.USED]):
            return
        self._host[:, : table.USED] = rows[:, : table.USED]
        self.aligned = not ((rows[:, table.X] | rows[:, table.GRADIENT]) & 15).any()
        self.adds = bool(rows[0, table.ADD])
        self.rows = self._upload(self._host)

    def scratch(self, name: str, count: int, kind: str) -> Any:
        """Return device memory for so many elements, the same in each step."""
        kept = self._kept.get(name)
        if kept is None or kept.shape[0] < count:
            kept = self._kept[name] = self._empty(max(count, 1), kind)
        return kept

    @staticmethod
    def found_in(state: Numbers) -> Numbers:
        """Return what `check` has found of each row, from a copy of `state`: flags, or less than 0."""
        return state[:, FOUND]

    # -- lists of work -------------------------------------------------------------------------------------------

    def work_by_groups(self) -> Any:
        """Return (row, 1, group) for each group of each row."""
        return self._work(
            "groups", lambda: _spread(np.arange(len(self.numels)), np.ones_like(self.counts), self.counts)
        )

    def work_by_parts(self, block: int) -> Any:
        """Return (first row, rows, part) where groups of tensors are cut into parts of `block` elements.

        Some may be empty.
        """

        def work() -> npt.NDArray[np.int32]:
            first, rows = self._runs.T
            parts = self.counts * -(-self._host[:, table.GROUP] // block)
            return _spread(first, rows, parts[first])

        return self._work(("parts", block), work)

    def work_by_blocks(self, block: int) -> Any:
        """Return (first row, rows, block) for each block of `block` elements of each tensor."""
        first, rows = self._runs.T
        return self._work(("blocks", block), lambda: _spread(first, rows, -(-self.numels[first] // block)))

    def work_by_groups_of_tensors(self) -> Any:
        """Return (first row, rows, group) for each group of each tensor."""
        first, rows = self._runs.T
        return self._work("groups of tensors", lambda: _spread(first, rows, self.counts[first]))

    def work_by_rows(self) -> Any:
        """Return (row, 1, 0) for each row."""

        def work() -> npt.NDArray[np.int32]:
            ones = np.ones_like(self.counts)
            return _spread(np.arange(len(ones)), ones, ones)

        return self._work("rows", work)

    def work_by_words(self, words: int = envelope.PART) -> Any:
        """Return (row, 1, part) for each part of so many words of the room of each payload."""

        def work() -> npt.NDArray[np.int32]:
            parts = np.maximum(-(-self._rooms // (4 * words)), 1)
            return _spread(np.arange(len(parts)), np.ones_like(parts), parts)

        return self._work(("words", words), work)

    def _work(self, name: Any, make: Callable[[], npt.NDArray[np.int32]]) -> Any:
        kept = self._kept.get(("work", name))
        if kept is None:
            kept = self._kept["work", name] = self._upload(make())
        return kept

    # -- headers -------------------------------------------------------------------------------------------------

    def seal(self, codec: int, parameter: int) -> None:
        """Complete the payloads; see `envelope.seal`."""
        envelope.seal(self.rows, self.work_by_words(), self.state, codec, parameter)

    def check(self, codec: int) -> None:
        """Check what has come; see `envelope.check`."""
        envelope.check(self.rows, self.work_by_words(), self.state, codec)


def _spread(first: Numbers, count: Numbers, blocks: Numbers) -> npt.NDArray[np.int32]:
    """Return (first, count, block, 0) for each of so many blocks."""
    total = int(blocks.sum())
    work = np.zeros((total, 4), np.int32)
    work[:, 0] = np.repeat(first, blocks)
    work[:, 1] = np.repeat(count, blocks)
    work[:, 2] = np.arange(total) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return work
