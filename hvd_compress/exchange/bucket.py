"""Run the stages of several tensors in one exchange: what each collective sends, and when a message is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import WireError
from hvd_compress.exchange.batch import batches_of
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.layout import Layout
from hvd_compress.exchange.memory import aligned_empty
from hvd_compress.exchange.transfer import Transfer

__all__ = ["Bucket", "Parcel"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


@dataclass(frozen=True)
class Parcel:
    """Carries the bytes that a stage hands to the next collective.

    Args:
        buffer: flat uint8; for an alltoall one part per receiver, one after the other.
        sizes: bytes for each receiver of an alltoall; None where all are equal, and for an allgather.
    """

    buffer: Bytes
    sizes: tuple[int, ...] | None = None


class Bucket(Generic[AnyTransfer]):
    """Runs the stages of tensors that share an exchange, on one rank.

    Args:
        transfers: of the tensors by name, with plans that were made together; the same order on all ranks.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit
        >>> from hvd_compress.exchange import Bucket, Transfer, plan_together
        >>> plans = plan_together("allgather", {"w": ((4,), OneBit())}, ranks=1)
        >>> bucket = Bucket({"w": Transfer("w", plans["w"], OneBit(), position=0)})
        >>> bucket.encode("w", np.array([1, -1, 2, -2], np.float32))
        True
        >>> bucket.arrive(bucket.parcel().buffer)  # what an allgather among one rank brings
        True
        >>> bucket.finish(keep=True, scale=1.0)["w"]
        array([ 1.5, -1.5,  1.5, -1.5], dtype=float32)
    """

    def __init__(self, transfers: Mapping[str, AnyTransfer]) -> None:
        self.transfers = dict(transfers)
        first = next(iter(self.transfers.values()))
        self.exchange = first.plan.exchange
        self.ranks = first.plan.ranks
        self.position = first.position
        self.hosts = first.hosts
        self.root = first.plan.root
        """With a parameter server, the rank that sums."""
        self._layout = Layout(self.transfers)
        self.collectives = first.plan.collectives
        """What follows each stage."""
        if self.root is not None and not self._layout.fixed_answers:
            # a broadcast has a shape that all ranks must know
            self.collectives = (*self.collectives[:-1], "allgather")
        self._batches = batches_of(self.transfers, self._layout)
        self._batch_of = {name: batch for batch in self._batches for name in batch.transfers}
        self._send = np.empty(0, np.uint8)
        self._slots: dict[str, list[Bytes]] = {}
        self._result = np.empty(0, np.uint8)
        self._uncompressed = np.empty(0, np.uint8)
        self._used: dict[str, list[int]] = {}
        self._given: set[str] = set()
        self._skipped: list[str] = []

    @property
    def name(self) -> str:
        """The name of its collectives, which is that of its first tensor."""
        return next(iter(self.transfers))

    @property
    def answer_bytes(self) -> int:
        """The most bytes that the last collective brings."""
        return self._layout.answer_bytes

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return any(t.busy for t in self.transfers.values())

    # -- the first stage -----------------------------------------------------------------------------------------

    def encode(self, name: str, gradient: Array) -> bool:
        """Take a gradient, in any order; returns whether it was the last one, so that `parcel` is to be sent.

        The gradient is read until the step has ended. Then `finish` overwrites it with the result, unless `move` has
        named another place for that.
        """
        transfer = self.transfers[name]
        batch = self._batch_of.get(name) if gradient.dtype == np.float32 else None
        if batch is not None:
            batch.hold(name, gradient)
        elif self.hosts is None:
            self._used[name] = transfer.encode(gradient, self._slots_of(name))
        else:
            transfer.hold(gradient)
        self._given.add(name)
        return self._is_complete()

    def waits(self, name: str) -> bool:
        """Whether `encode` only holds a float32 gradient of this tensor until all are here."""
        return name in self._batch_of

    def encode_at(self, addresses: Mapping[str, int]) -> bool:
        """Do as `encode`, for tensors that wait: contiguous float32 gradients that the caller keeps where they are.

        See `encode` for how long they are read, and where results go.
        """
        for batch in self._batches:
            batch.hold_at({name: addresses[name] for name in batch.transfers if name in addresses})
        self._given.update(addresses)
        return self._is_complete()

    def move(self, name: str, out: Array) -> None:
        """Write the result of this step into `out`, flat and of the gradient's type, and not into the gradient."""
        batch = self._batch_of.get(name)
        if batch is not None and name in batch.held:
            batch.move(name, out)
        else:
            self.transfers[name].move(out)

    def lose_gradient(self, name: str) -> None:
        """Note that a gradient was overwritten: a step taken back cannot subtract it, so it stays owed."""
        batch = self._batch_of.get(name)
        if batch is not None and name in batch.held:
            batch.lost.add(name)
        else:
            self.transfers[name].lose_gradient()

    def skip(self, name: str) -> bool:
        """Leave a tensor out of this step, on all ranks; returns what `encode` does, but False if all are left out."""
        self._skipped.append(name)
        return self._is_complete()

    def _is_complete(self) -> bool:
        if len(self._given) + len(self._skipped) < len(self.transfers):
            return False
        skipped, self._skipped = self._skipped, []
        if not self._given:
            return False
        for name in skipped:
            self._used[name] = self.transfers[name].skip(self._slots_of(name))
        for batch in self._batches:
            batch.encode(self._buffer())
        return True

    def parcel(self) -> Parcel:
        """Return what the first collective sends, once every tensor is here."""
        return self._payloads() if self.hosts is None else self._parts_inside(self.hosts)

    def _payloads(self) -> Parcel:
        sizes = self._filled() if self._layout.fixed_size else self._moved_together()
        if self.exchange == "allgather":
            return Parcel(self._send[: sizes[0]])
        # the whole buffer, though not all of it is sent: Horovod's response cache wants equal shapes in every step
        return Parcel(self._send, self._layout.by_rank(sizes))

    def _filled(self) -> Mapping[int, int]:
        """Count the bytes for each owner of a chunk, or for an allgather, where payloads stay in their slots."""
        for name, of_chunks in self._used.items():
            for slot, used in zip(self._slots[name], of_chunks, strict=True):
                # the unused end of a slot travels too, and must not show what this memory held before
                if used < slot.size:
                    slot[used:] = 0
        return self._layout.slots_of_chunks

    def _moved_together(self) -> Mapping[int, int]:
        """Close the gaps between payloads; returns the bytes for each owner of a chunk, or all of an allgather."""
        sizes: dict[int, int] = {}
        at = start = 0
        for chunk, contents in self._layout.sent.items():
            begin = at
            for name, index, slot in contents:
                used = self._used[name][index]
                self._send[at : at + used] = self._send[start : start + used]
                if self.transfers[name].payloads:
                    self.transfers[name].payloads[index] = self._send[at : at + used]
                at += used
                start += slot
            sizes[chunk] = at - begin
        return sizes

    # -- the stages between collectives ------------------------------------------------------------------------------

    def advance(self, collective: str, received: Bytes) -> Parcel:
        """Return what the next collective sends, from what `collective`, which is not the last one, has brought.

        Raises:
            WireError: a payload, or a message, is truncated, corrupted or foreign.
        """
        if collective == "scatter_inside":
            return self._encode_sums(received)
        if collective == "alltoall":
            return self.reduce(received)
        return self._forwarded(received)

    def reduce(self, received: Bytes) -> Parcel:
        """Sum what all ranks sent of this rank's chunks; returns the payloads of the sums.

        Raises:
            WireError: a payload is truncated, corrupted or foreign.
        """
        chunk = next(iter(self.transfers.values())).chunk
        contents = self._layout.owned
        payloads = self._layout.cut_sent(received)
        self._prepare_result(chunk)
        together: set[str] = set()
        for batch in self._batches:
            together |= batch.reduce(received, self._result)
        at = 0
        for i, (name, _, slot) in enumerate(contents):
            if name in together:
                # its compressor is that of the answer, and fills the same slot
                at += slot
                continue
            slot = self.transfers[name].plan.answer_slots[chunk]
            used = self.transfers[name].reduce(payloads[i :: len(contents)], self._result[at : at + slot])
            self._refuse_alone(name)
            end = at + (slot if self._layout.fixed_answers else used)
            if at + used < end:
                self._result[at + used : end] = 0
            at = end
        if self.collectives[-1] == "broadcast":
            # a rank that is not the root needs memory for what it receives
            return Parcel(self._result)
        result = self._result[:at]
        if self.hosts is None:
            return Parcel(result)
        return self._copies(result, self.hosts.between(self.position))

    def _prepare_result(self, chunk: int) -> None:
        """Allocate memory for the payloads of the sums that this rank makes."""
        if self._result.size:
            return
        slots = [transfer.plan.answer_slots[chunk] for transfer in self.transfers.values()]
        is_broadcast = self.collectives[-1] == "broadcast"
        self._result = aligned_empty(self._layout.answer_bytes if is_broadcast else sum(slots), np.uint8)

    def arrive(self, received: Bytes) -> bool:
        """Check the last payloads; returns whether all of them, and so the sums, are finite.

        Raises:
            WireError: truncated or foreign.
        """
        payloads = self._layout.cut_last(received)
        together = [batch.arrive(received) for batch in self._batches if batch.held]
        checked = {name for batch in self._batches if batch.has_arrived for name in batch.held}
        finite = True
        for name, transfer in self.transfers.items():
            if name not in checked:
                finite = transfer.arrive([payloads[i] for i in self._layout.arriving[name]]) and finite
                self._refuse_alone(name)
        return finite and all(together)

    def _refuse_alone(self, name: str) -> None:
        """Raise WireError if a batch gave up a payload in which the tensor's own stage then found nothing wrong."""
        batch = self._batch_of.get(name)
        if batch is not None and name in batch.held:
            raise WireError(f"exchange of {name!r}, received by rank {self.position}: a payload is damaged")

    def finish(self, keep: bool, scale: float) -> dict[str, Array | None]:
        """Decode all tensors; see `Transfer.finish`. Results of `encode_at` are written in place and not returned.

        Raises:
            WireError: a payload is corrupted.
        """
        results: dict[str, Array | None] = {}
        for batch in self._batches:
            results |= batch.finish(keep, scale)
        for name, transfer in self.transfers.items():
            if name not in results and transfer.busy:
                results[name] = transfer.finish(keep, scale)
        self._used, self._given = {}, set()
        return results

    def settle_counts(self) -> None:
        """Tell all transfers what they have cost; see `Transfer.note`."""
        for batch in self._batches:
            batch.settle_counts()

    def abandon(self) -> None:
        """Forget a step in flight and make residuals what they were before it."""
        for batch in self._batches:
            batch.abandon()
        for transfer in self.transfers.values():
            transfer.abandon()
        self._used, self._given, self._skipped = {}, set(), []

    # -- inside a host and between hosts -----------------------------------------------------------------------------

    def _parts_inside(self, hosts: Hosts) -> Parcel:
        """Cut each gradient into the shards of this host's ranks, uncompressed."""
        parts = {
            peer: [t.held(hosts.shard_of(peer)) for t in self._held()] for peer in sorted(hosts.inside(self.position))
        }
        nbytes = {peer: sum(part.nbytes for part in of_peer) for peer, of_peer in parts.items()}
        if self._uncompressed.size != sum(nbytes.values()):
            self._uncompressed = aligned_empty(sum(nbytes.values()), np.uint8)
        pieces = [part.view(np.uint8) for of_peer in parts.values() for part in of_peer]
        np.concatenate(pieces, out=self._uncompressed)
        return Parcel(self._uncompressed, tuple(nbytes.get(rank, 0) for rank in range(self.ranks)))

    def _encode_sums(self, received: Bytes) -> Parcel:
        """Sum the gradients of this host's ranks, in this rank's shard; returns the payloads of the sum."""
        hosts = self._of_hosts()
        peers = sorted(hosts.inside(self.position))
        sizes = [t.held(hosts.shard_of(self.position)).nbytes for t in self._held()]
        if received.size != len(peers) * sum(sizes):
            raise WireError(
                f"rank {self.position} received {received.size} bytes from the {len(peers)} ranks of its host, "
                f"expected {sum(sizes)} from each"
            )
        at = {peer: i * sum(sizes) for i, peer in enumerate(peers)}
        for transfer, size in zip(self._held(), sizes, strict=True):
            others = [received[at[p] : at[p] + size] for p in hosts.inside(self.position) if p != self.position]
            at = {peer: start + size for peer, start in at.items()}
            self._used[transfer.name] = transfer.encode_inside(others, self._slots_of(transfer.name))
        return self._payloads()

    def _forwarded(self, received: Bytes) -> Parcel:
        """Pass the final payloads of this rank's shard on to every rank of its host."""
        return self._copies(received, self._of_hosts().inside(self.position))

    def _copies(self, message: Bytes, receivers: Sequence[int]) -> Parcel:
        sizes = tuple(message.size if rank in receivers else 0 for rank in range(self.ranks))
        return Parcel(np.tile(message, len(receivers)), sizes)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _slots_of(self, name: str) -> list[Bytes]:
        self._buffer()
        return self._slots[name]

    def _buffer(self) -> Bytes:
        """The memory that the first collective sends."""
        if not self._slots:
            nbytes, places = self._layout.places()
            self._send = aligned_empty(nbytes, np.uint8)
            self._slots = {n: [self._send[place] for place in of_tensor] for n, of_tensor in places.items()}
        return self._send

    def _held(self) -> list[AnyTransfer]:
        return [transfer for name, transfer in self.transfers.items() if name in self._given]

    def _of_hosts(self) -> Hosts:
        if self.hosts is None:
            raise RuntimeError(f"exchange {self.exchange!r} knows no hosts")
        return self.hosts
