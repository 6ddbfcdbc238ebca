"""What a rank sends in one stage of a bucket: payloads in one buffer, encoded with the residuals of that stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors.tables import bytes_at
from hvd_compress.exchange.account import Account
from hvd_compress.exchange.memory import Addresses, aligned_empty
from hvd_compress.exchange.message import Message
from hvd_compress.kernels import table as kernels

__all__ = ["NARROW", "WIDE", "Outbox", "by_dtype"]

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NARROW, WIDE = np.dtype(np.float32), np.dtype(np.float64)


def by_dtype(numbers: Collection[int], wide: Collection[int]) -> list[tuple[np.dtype[Any], list[int]]]:
    """Divide tensors, by number, into those whose gradients are float32 and those, the wide ones, of float64.

    Example:
        >>> from hvd_compress.exchange.outbox import by_dtype
        >>> by_dtype([3, 4, 5], wide={4})
        [(dtype('float32'), [3, 5]), (dtype('float64'), [4])]
    """
    if not wide:
        return [(NARROW, list(numbers))] if numbers else []
    divided = (NARROW, [i for i in numbers if i not in wide]), (WIDE, [i for i in numbers if i in wide])
    return [(dtype, of_type) for dtype, of_type in divided if of_type]


class Outbox:
    """Encodes tensors into the slots of a message, and takes that back where a step is given up.

    Args:
        message: which payloads lie where.
        accounts: of all tensors of the bucket.
        hop: 0 for gradients, which have the senders' residuals; 1 for sums, which have those of the owners.
        nbytes: of the buffer, if other ranks' messages are longer.
    """

    def __init__(self, message: Message, accounts: Sequence[Account], hop: int, nbytes: int | None = None) -> None:
        self.message = message
        self._accounts = accounts
        self._residuals = Addresses(accounts, of_owners=hop == 1)
        self._hop = hop
        self._nbytes = message.nbytes if nbytes is None else nbytes
        self.buffer: Bytes = np.empty(0, np.uint8)
        """What is sent, from its start on."""
        self._places: Numbers = np.empty(0, np.int64)
        self._used = np.zeros(len(message.parts), np.int64)
        self._is_begun = False

    def begin(self) -> None:
        """Begin a step, if it has not begun; nothing is allocated after the first one."""
        if self._is_begun:
            return
        self._is_begun = True
        if not self.buffer.size:
            self.buffer = aligned_empty(self._nbytes, np.uint8)
        self._places = kernels.address_of(self.buffer) + self.message.places

    def end(self) -> None:
        """End a step: what was sent is not to be taken back any more."""
        self._used[:] = 0
        self._is_begun = False

    def encode(self, numbers: Collection[int], values_at: Numbers, wide: Collection[int]) -> None:
        """Encode tensors, by number, into their slots.

        Args:
            numbers: of the tensors.
            values_at: where the values of each tensor of the bucket lie; they are read until the step has ended.
            wide: those of them that are float64.
        """
        for dtype, held in by_dtype(numbers, wide):
            residuals_at = self._residuals.of(held, dtype)
            for table in self.message.tables(held):
                x_at, gradients_at = (residuals_at, values_at) if table.has_feedback else (values_at, None)
                table.encode(
                    x_at, gradients_at, self._places, dtype,
                    lambda i, chunk: self._accounts[i].key_of(self._hop, chunk), self._used,
                )  # fmt: skip

    def say(self, numbers: Collection[int], absent: bool = True) -> None:
        """Write payloads that say that there is no gradient, or a value that is not finite."""
        for i, part in enumerate(self.message.parts):
            if part.tensor in numbers:
                say = part.compressor.say_absent if absent else part.compressor.say_nonfinite
                self._used[i] = say(bytes_at(self._places[i], part.slot), part.numel, part.group)

    def close(self) -> Numbers:
        """Make the buffer ready to be sent; returns the bytes of each part in it."""
        if self.message.fixed_size:
            kernels.clear_rest(self._places, self._used, self.message.slots)
            return self.message.slots
        kernels.close_gaps(self._places, self._used, kernels.address_of(self.buffer))
        return self._used

    def take_back(
        self, numbers: Collection[int], values_at: Numbers, wide: Collection[int], lost: Flags | None = None
    ) -> None:
        """Make residuals what they were before `encode`; values that are lost stay owed."""
        if not self._used.any():
            return
        lost = np.zeros(len(self._accounts), bool) if lost is None else lost
        for dtype, held in by_dtype(numbers, wide):
            residuals_at = self._residuals.of(held, dtype)
            for table in self.message.tables(held):
                if table.has_feedback:
                    table.take_back(residuals_at, values_at, lost, self._places, dtype, self._used)
        self.end()
