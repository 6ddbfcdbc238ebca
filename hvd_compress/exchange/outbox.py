"""What a rank sends in one stage of a bucket: payloads in one buffer, encoded with the residuals of that stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors.tables import bytes_at
from hvd_compress.exchange.account import Account
from hvd_compress.exchange.addresses import Addresses
from hvd_compress.exchange.message import Message
from hvd_compress.exchange.table import Table
from hvd_compress.kernels import table as kernels
from hvd_compress.memory import Slots

__all__ = ["NARROW", "WIDE", "Outbox", "by_kind", "computed_in"]

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NARROW, WIDE = "float32", "float64"


def by_kind(numbers: Collection[int], kinds: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Divide tensors, by number, by the types of their gradients, of which `kinds` has those that are not float32.

    Example:
        >>> from hvd_compress.exchange.outbox import by_kind
        >>> by_kind([3, 4, 5], {4: "float64"})
        [('float32', [3, 5]), ('float64', [4])]
    """
    if not kinds:
        return [(NARROW, list(numbers))] if numbers else []
    divided: dict[str, list[int]] = {}
    for i in numbers:
        divided.setdefault(kinds.get(i, NARROW), []).append(i)
    return sorted(divided.items())


def computed_in(kind: str) -> str:
    """Return the type of the residuals, and sums, of gradients of a type."""
    return WIDE if kind == WIDE else NARROW


class Outbox:
    """Encodes tensors into the slots of a message, and takes that back where a step is given up.

    Args:
        message: which payloads lie where.
        accounts: of all tensors of the bucket.
        hop: `GRADIENTS`, which have the senders' residuals; `SUMS`, which have those of the owners; or `INSIDE`.
        nbytes: of the buffer, if other ranks' messages are longer.
    """

    def __init__(self, message: Message, accounts: Sequence[Account], hop: int, nbytes: int | None = None) -> None:
        self.message = message
        self._accounts = accounts
        self._residuals = Addresses(accounts, hop)
        self._rests = any(account.rests for account in accounts)
        self._hop = hop
        self._nbytes = message.nbytes if nbytes is None else nbytes
        self._slots: Slots | None = None
        self.buffer: Bytes = np.empty(0, np.uint8)
        """What is sent, from its start on."""
        self._is_host = message.memory.is_host
        self._made_at: Numbers = np.empty(0, np.int64)
        """Where kernels write the payloads of the parts, and read those that are taken back."""
        self._places: Numbers = np.empty(0, np.int64)
        self._used = np.zeros(len(message.parts), np.int64)
        self._encoded: list[tuple[Table, str]] = []
        self._said: list[tuple[int, bool]] = []
        self._is_begun = False

    def begin(self) -> None:
        """Begin a step, if it has not begun; the buffer is allocated in the first one only."""
        if self._is_begun:
            return
        self._is_begun = True
        if self._slots is None:
            places = None if self.message.fixed_size else self.message.places
            self._slots = self.message.memory.slots(self._nbytes, places)
            self.buffer = self._slots.buffer
        self._places = kernels.address_of(self.buffer) + self.message.places
        self._made_at = self._places
        if not self._is_host:
            self._slots.clear()
            self._made_at = self._slots.address + self.message.places

    def end(self) -> None:
        """End a step: what was sent is not to be taken back any more."""
        self._used[:] = 0
        self._encoded, self._said = [], []
        self._is_begun = False
        if self._rests:
            self._residuals.end_step()

    def encode(self, numbers: Collection[int], values_at: Numbers, kinds: Mapping[int, str]) -> None:
        """Encode tensors, by number, into their slots.

        Args:
            numbers: of the tensors.
            values_at: where the values of each tensor of the bucket lie; they are read until the step has ended.
            kinds: the types of those that are not float32.
        """
        for kind, held in by_kind(numbers, kinds):
            residuals_at = self._residuals.of(held, WIDE if kind == WIDE else NARROW)
            try:
                for table in self.message.tables(held):
                    self._encoded.append((table, kind))
                    x_at, gradients_at = (residuals_at, values_at) if table.has_feedback else (values_at, None)
                    table.encode(
                        x_at, gradients_at, self._made_at, kind,
                        lambda i, chunk: self._accounts[i].key_of(self._hop, chunk), self._used,
                    )  # fmt: skip
            finally:
                if self._rests:
                    self._residuals.rest()

    def say(self, numbers: Collection[int], absent: bool = True) -> None:
        """Send payloads that say that there is no gradient, or a value that is not finite."""
        self._said += [(i, absent) for i, part in enumerate(self.message.parts) if part.tensor in numbers]

    def fetch(self) -> None:
        """Begin to bring all payloads to the host: no more are encoded in this step; never waits."""
        if self._slots is not None:
            self._slots.fetch()

    def is_here(self) -> bool:
        """Tell whether `close` has nothing to wait for."""
        return self._slots is None or self._slots.is_here()

    def wait(self) -> None:
        """Wait until the payloads are on the host."""
        if self._slots is not None:
            self._slots.wait()

    def close(self) -> Numbers:
        """Make the buffer ready to be sent, once it is on the host; returns the bytes of each part in it."""
        if self._slots is not None and not self._is_host:
            self._slots.wait()
            self._read_sizes()
        for i, is_absent in self._said:
            part = self.message.parts[i]
            say = part.compressor.say_absent if is_absent else part.compressor.say_nonfinite
            self._used[i] = say(bytes_at(self._places[i], part.slot), part.numel, part.group)
        if self.message.fixed_size:
            kernels.clear_rest(self._places, self._used, self.message.slots)
            return self.message.slots
        kernels.close_gaps(self._places, self._used, kernels.address_of(self.buffer))
        return self._used

    def _read_sizes(self) -> None:
        """Note how long payloads are that were made elsewhere."""
        made = np.flatnonzero(self._used)
        self._used[made] = self.buffer.view(np.int64)[(self.message.places[made] >> 3) + kernels.LENGTH_WORD]

    def take_back(self, values_at: Numbers, lost: Flags | None = None) -> None:
        """Make residuals what they were before `encode`; values that are lost stay owed."""
        lost = np.zeros(len(self._accounts), bool) if lost is None else lost
        for table, kind in self._encoded:
            if table.has_feedback:
                residuals_at = self._residuals.of(set(table.tensors.tolist()), computed_in(kind))
                table.take_back(residuals_at, values_at, lost, self._made_at, kind, self._used)
                if self._rests:
                    self._residuals.rest()
                    # what is added up of what was rounded is too coarse, and only what is lost needs it
                    self._residuals.go_back(np.flatnonzero(~lost).tolist())
        self.end()
