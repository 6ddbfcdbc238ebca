"""What a hierarchical exchange does inside a host: cut gradients up, sum them, and pass the answers on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import WireError
from hvd_compress.exchange.account import Account
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.memory import aligned_empty

__all__ = ["Inside", "Parcel"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Parcel:
    """Carries the bytes that a stage hands to the next collective.

    Args:
        buffer: flat uint8; for an alltoall one part per receiver, one after the other.
        sizes: bytes for each receiver of an alltoall; None where all are equal, and for an allgather.
    """

    buffer: Bytes
    sizes: tuple[int, ...] | None = None


class Inside:
    """Exchanges the tensors of a bucket, uncompressed, among the ranks of one host.

    The order is: `take` the gradients, `cut`, collective, `sums`, and `end` or `take_back`.

    Args:
        accounts: of the tensors.
        hosts: of all ranks.
    """

    def __init__(self, accounts: Sequence[Account], hosts: Hosts) -> None:
        self._accounts = accounts
        self.hosts = hosts
        self._position, self._ranks = accounts[0].position, accounts[0].plan.ranks
        self._gradients: dict[int, Array] = {}
        self._taken: list[int] = []
        """The tensors of this step."""
        self._buffer: Bytes = np.empty(0, np.uint8)

    def take(self, gradients: Mapping[int, Array], skipped: Collection[int]) -> None:
        """Take gradients, by number, and what is pending with them; `skipped` tensors have none in this step."""
        self._taken = sorted(gradients)
        for i in self._taken:
            pending = self._accounts[i].pending
            self._gradients[i] = gradients[i] if pending is None else gradients[i] + pending

    def cut(self) -> Parcel:
        """Cut gradients into the shards of this host's ranks."""
        parts = {
            peer: [x[self._accounts[i].shard_of(peer)] for i, x in self._gradients.items()]
            for peer in sorted(self.hosts.inside(self._position))
        }
        nbytes = {peer: sum(part.nbytes for part in of_peer) for peer, of_peer in parts.items()}
        if self._buffer.size != sum(nbytes.values()):
            self._buffer = aligned_empty(sum(nbytes.values()), np.uint8)
        pieces = [part.view(np.uint8) for of_peer in parts.values() for part in of_peer]
        np.concatenate(pieces, out=self._buffer)
        return Parcel(self._buffer, tuple(nbytes.get(rank, 0) for rank in range(self._ranks)))

    def sent_bytes(self) -> dict[int, float]:
        """Return the bytes of each tensor that `cut` has sent to other ranks."""
        return {i: x.nbytes - x[self._accounts[i].shard].nbytes for i, x in self._gradients.items()}

    def sums(self, received: Bytes) -> dict[int, Array]:
        """Sum the gradients of this host's ranks, in this rank's shard; returns new arrays by number.

        Raises:
            WireError: fewer or more bytes than there must be.
        """
        peers = sorted(self.hosts.inside(self._position))
        shards = {i: x[self._accounts[i].shard] for i, x in self._gradients.items()}
        size = sum(shard.nbytes for shard in shards.values())
        if received.size != len(peers) * size:
            raise WireError(
                f"rank {self._position} received {received.size} bytes from the {len(peers)} ranks of its host, "
                f"expected {size} from each"
            )
        at = {peer: number * size for number, peer in enumerate(peers)}
        totals = {}
        for i, shard in shards.items():
            total = totals[i] = aligned_empty(shard.size, shard.dtype)
            total[...] = shard
            # in the order of the ranks of the host, whoever sums: floating point sums depend on it
            for peer in self.hosts.inside(self._position):
                if peer != self._position:
                    total += received[at[peer] : at[peer] + shard.nbytes].view(shard.dtype)
                at[peer] += shard.nbytes
        self._gradients = {}
        return totals

    def take_back(self, lost: npt.NDArray[np.bool_]) -> None:
        """Make what is pending what it was before `take`; gradients that are lost stay owed."""

    def end(self, keep: bool) -> None:
        """End the step; with `keep`, what was pending has been sent."""
        for i in self._taken if keep else ():
            self._accounts[i].pending = None
        self._taken, self._gradients = [], {}

    def copies(self, payloads: Bytes, receivers: Sequence[int]) -> Parcel:
        """Address the same payloads to several ranks."""
        sizes = tuple(payloads.size if rank in receivers else 0 for rank in range(self._ranks))
        return Parcel(np.tile(payloads, len(receivers)), sizes)

    def between(self, payloads: Bytes) -> Parcel:
        """Address answers to the ranks that share this one's shard."""
        return self.copies(payloads, self.hosts.between(self._position))

    def passed_on(self, payloads: Bytes) -> Parcel:
        """Address the answers of this rank's shard to every rank of its host."""
        return self.copies(payloads, self.hosts.inside(self._position))
