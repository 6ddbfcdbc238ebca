"""Exchange gradients compressed inside of a host: payloads of the shards of its other ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import WireError
from hvd_compress.exchange import message
from hvd_compress.exchange.account import INSIDE, Account
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.inside import Inside, Parcel
from hvd_compress.exchange.outbox import NARROW, Outbox, by_kind
from hvd_compress.memory import aligned, aligned_empty

__all__ = ["CompressedInside", "inside_of"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class CompressedInside(Inside):
    """Exchanges the tensors of a bucket, compressed, among the ranks of one host.

    A rank encodes the shards of the others, and keeps its own as it is. What payloads leave out is pending, see
    `Account.pending`. What is pending of the own shard goes into its sum.

    Args:
        accounts: of the tensors.
        hosts: of all ranks.
    """

    def __init__(self, accounts: Sequence[Account], hosts: Hosts) -> None:
        super().__init__(accounts, hosts)
        self._outbox = Outbox(message.sent_inside(accounts, hosts), accounts, INSIDE)
        self._received = message.received_inside(accounts, hosts)
        self._sent = {int(i) for i in self._outbox.message.tensors}
        """The tensors of which others have a shard."""
        self._sizes: Numbers = np.empty(0, np.int64)
        self._kinds: dict[int, str] = {}
        self._values_at = np.zeros(len(accounts), np.int64)
        self._totals: dict[int, Array] = {}
        self._totals_at = np.zeros(len(accounts), np.int64)

    def take(self, gradients: Mapping[int, Array], skipped: Collection[int]) -> None:
        """Encode gradients, by number, and what is pending of them."""
        self._taken = sorted(gradients)
        self._gradients = {i: self._with_pending(i, gradients[i]) for i in self._taken}
        self._kinds = {i: x.dtype.name for i, x in self._gradients.items() if x.dtype.name != NARROW}
        for i, x in self._gradients.items():
            self._values_at[i] = x.ctypes.data
        self._outbox.begin()
        self._outbox.encode([i for i in self._taken if i in self._sent], self._values_at, self._kinds)
        self._outbox.say(skipped)

    def _with_pending(self, number: int, gradient: Array) -> Array:
        pending = self._accounts[number].pending
        # kernels add what is pending where it is the residual
        return gradient if pending is None or self._accounts[number].keeps_pending else gradient + pending

    def cut(self) -> Parcel:
        """Address the payloads to the ranks of this host."""
        sent = self._outbox.message
        self._sizes = self._outbox.close()
        runs = sent.slots_of_runs if sent.fixed_size else sent.sizes_of_runs(self._sizes)
        return Parcel(self._outbox.buffer, tuple(runs))

    def sent_bytes(self) -> dict[int, float]:
        """Return the bytes of each tensor that `cut` has sent to other ranks."""
        return dict(enumerate(self._outbox.message.bytes_crossing(self._sizes)))

    def sums(self, received: Bytes) -> dict[int, Array]:
        """Sum the gradients of this host's ranks, in this rank's shard; returns arrays by number.

        Raises:
            Damaged: a payload is truncated, corrupted or foreign.
            WireError: fewer or more bytes than there must be.
        """
        received = aligned(received)
        try:
            at, sizes = self._received.cut(received)
        except WireError as error:
            raise WireError(f"rank {self._position}, from the other ranks of its host: {error}") from error
        totals = {i: self._own(i) for i in self._taken}
        flags = np.zeros(len(self._received.parts), np.int64)
        for kind, held in by_kind(self._taken, self._kinds):
            for table in self._received.tables(held):
                table.check(at, sizes, flags, at, kind)
                table.decode(self._totals_at, at, sizes, flags, at, kind, 1.0)
        return totals

    def _own(self, number: int) -> Array:
        """Begin a sum with this rank's own gradient, which is not rounded."""
        account, x = self._accounts[number], self._gradients[number]
        own = x[account.shard]
        total = self._totals.get(number)
        if total is None or total.dtype != own.dtype:
            total = self._totals[number] = aligned_empty(own.size, own.dtype)
            self._totals_at[number] = total.ctypes.data
        total[...] = own
        if account.keeps_pending and account.pending is not None:
            total += account.pending[account.shard]
        return total

    def take_back(self, lost: npt.NDArray[np.bool_]) -> None:
        """Make what is pending what it was before `take`; gradients that are lost stay owed."""
        self._outbox.take_back(self._values_at, lost)

    def end(self, keep: bool) -> None:
        """End the step; with `keep`, nothing is pending of this rank's own shard."""
        for account in (self._accounts[i] for i in self._taken if keep):
            if account.keeps_pending and account.pending is not None:
                account.pending[account.shard] = 0
            else:
                account.pending = None
        self._taken, self._gradients = [], {}
        self._outbox.end()


def inside_of(accounts: Sequence[Account]) -> Inside | None:
    """Return what exchanges the tensors of a bucket inside of hosts; None if hosts do not matter."""
    hosts = accounts[0].hosts
    if hosts is None:
        return None
    return Inside(accounts, hosts) if accounts[0].inside is None else CompressedInside(accounts, hosts)
