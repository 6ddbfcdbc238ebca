"""The payloads of several tensors in one exchange: where each lies in the messages, and when a message is complete.

A message to an owner, or from one, holds the payloads of its chunks in the order of the tensors. Where all of them have
a fixed size they lie at fixed places; else they follow one another, and state their own lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.errors import WireError
from hvd_compress.exchange.memory import aligned_empty
from hvd_compress.exchange.transfer import Transfer

__all__ = ["Bucket", "Parcel"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


@dataclass(frozen=True)
class Parcel:
    """What a stage hands to the next collective.

    Args:
        buffer: flat uint8; for an alltoall one part per receiver, one after the other.
        sizes: bytes for each receiver of an alltoall; None where all are equal, and for an allgather.
    """

    buffer: Bytes
    sizes: tuple[int, ...] | None = None


class Bucket(Generic[AnyTransfer]):
    """The stages of tensors that share an exchange, on one rank.

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
        self.fixed_size = all(t.plan.fixed_size for t in self.transfers.values())
        # {receiver: (tensor, number of its payload, bytes of its slot)}
        self._contents = self._laid_out()
        self._send = np.empty(0, np.uint8)
        self._result = np.empty(0, np.uint8)
        self._used: dict[str, list[int]] = {}
        self._skipped: list[str] = []

    @property
    def name(self) -> str:
        """For its collectives: that of its first tensor."""
        return next(iter(self.transfers))

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return any(t.busy for t in self.transfers.values())

    # -- stage 1 -------------------------------------------------------------------------------------------------

    def encode(self, name: str, flat: Array) -> bool:
        """Encode a gradient, in any order; whether that was the last one, so that `parcel` is to be sent."""
        self._used[name] = self.transfers[name].encode(flat, self._slots_of(name))
        return self._is_complete()

    def skip(self, name: str) -> bool:
        """Leave a tensor out of this step, on all ranks; as `encode`, but nothing is to be sent if all are left out."""
        self._skipped.append(name)
        return self._is_complete()

    def _is_complete(self) -> bool:
        if len(self._used) + len(self._skipped) < len(self.transfers):
            return False
        skipped, self._skipped = self._skipped, []
        if not self._used:
            return False
        for name in skipped:
            self._used[name] = self.transfers[name].skip(self._slots_of(name))
        return True

    def parcel(self) -> Parcel:
        """What the first collective sends, once every tensor is encoded."""
        sizes = []
        at = start = 0
        for contents in self._contents:
            begin = at
            for name, index, slot in contents:
                used = self._used[name][index]
                if self.fixed_size:
                    # what a payload leaves of its slot travels too: it must not be what this memory held before
                    self._send[at + used : at + slot] = 0
                    at += slot
                else:
                    self._send[at : at + used] = self._send[start : start + used]
                    at += used
                start += slot
            sizes.append(at - begin)
        if self.exchange == "allgather":
            return Parcel(self._send[:at])
        # the whole buffer, though not all of it is sent: Horovod's response cache wants equal shapes in every step
        return Parcel(self._send, None if len(set(sizes)) == 1 and self.fixed_size else tuple(sizes))

    # -- stages 2 and 3 ------------------------------------------------------------------------------------------

    def reduce(self, received: Bytes) -> Parcel:
        """Stage 2 of two phases: what all ranks sent of this rank's chunks becomes the payloads of their sums.

        Raises:
            WireError: a payload is truncated, corrupted or foreign.
        """
        contents = self._contents[self.position]
        if self._result.size == 0:
            self._result = aligned_empty(sum(slot for _, _, slot in contents), np.uint8)
        payloads = self._cut(received, [contents] * self.ranks)
        at = 0
        for i, (name, _, slot) in enumerate(contents):
            used = self.transfers[name].reduce(payloads[i :: len(contents)], self._result[at : at + slot])
            end = at + (slot if self.fixed_size else used)
            self._result[at + used : end] = 0
            at = end
        return Parcel(self._result[:at])

    def arrive(self, received: Bytes) -> bool:
        """The last payloads are here; whether all of them, and so the sums, are finite.

        Raises:
            WireError: truncated or foreign.
        """
        everyone = self._contents if self.exchange == "two_phase" else self._contents * self.ranks
        of_tensor: dict[str, list[Bytes]] = {name: [] for name in self.transfers}
        names = (name for contents in everyone for name, _, _ in contents)
        for name, payload in zip(names, self._cut(received, everyone), strict=True):
            of_tensor[name].append(payload)
        finite = [self.transfers[name].arrive(payloads) for name, payloads in of_tensor.items()]
        return all(finite)

    def finish(self, keep: bool, scale: float) -> dict[str, Array | None]:
        """Decode all tensors, in the order in which they were encoded; see `Transfer.finish`.

        Raises:
            WireError: a payload is corrupted.
        """
        results = {name: self.transfers[name].finish(keep, scale) for name in self._used}
        self._used = {}
        return results

    def abandon(self) -> None:
        """Forget a step in flight; residuals stay as before it."""
        for transfer in self.transfers.values():
            transfer.abandon()
        self._used, self._skipped = {}, []

    # -- places --------------------------------------------------------------------------------------------------

    def _laid_out(self) -> list[list[tuple[str, int, int]]]:
        """What goes to each receiver; an allgather has one that stands for all."""
        receivers = range(self.ranks) if self.exchange == "two_phase" else range(1)
        contents: list[list[tuple[str, int, int]]] = [[] for _ in receivers]
        for name, transfer in self.transfers.items():
            for index, (chunk, _) in enumerate(transfer.plan.chunks):
                contents[chunk].append((name, index, transfer.plan.slots[chunk]))
        return contents

    def _slots_of(self, name: str) -> list[Bytes]:
        if self._send.size == 0:
            self._send = aligned_empty(sum(slot for c in self._contents for _, _, slot in c), np.uint8)
        slots = []
        at = 0
        for contents in self._contents:
            for owner, _, slot in contents:
                if owner == name:
                    slots.append(self._send[at : at + slot])
                at += slot
        return slots

    def _cut(self, received: Bytes, messages: Sequence[Sequence[tuple[str, int, int]]]) -> list[Bytes]:
        """The payloads in the bytes of a collective."""
        slots = [slot for contents in messages for _, _, slot in contents]
        if not self.fixed_size:
            return wire.frames(received, len(slots))
        if received.size != sum(slots):
            raise WireError(f"received {received.size} bytes, expected {sum(slots)} in {len(slots)} payloads")
        payloads = []
        at = 0
        for slot in slots:
            payloads.append(received[at : at + slot])
            at += slot
        return payloads
