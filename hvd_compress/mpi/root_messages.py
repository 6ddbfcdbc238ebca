"""Messages to the root of a bucket and back: point to point, non-blocking, of whatever size a payload has.

What MPI's `Igatherv` would do, without its order: non-blocking collectives must be started in the same order on all
ranks, and gradients do not come in one. A message is told from others by the channel of its bucket. Receivers have room
for the largest one, so no sizes are exchanged beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Parcel, aligned_empty
from hvd_compress.mpi.links import MOST_BYTES, WORD

__all__ = ["Channel", "Pending", "RootMessages"]

Bytes = npt.NDArray[np.uint8]

_FEW = 64


class _UnderWay:
    """Messages that MPI may still read or write, whoever has lost interest in them meanwhile."""

    def __init__(self) -> None:
        self._pending: set[Pending] = set()
        self._enough = _FEW

    def add(self, pending: Pending) -> None:
        # each look is a call of MPI, which may give the core away: not at all messages for every new one
        if len(self._pending) >= self._enough:
            # a list: other threads may add to the set
            self._pending.difference_update([kept for kept in list(self._pending) if kept.is_done()])
            self._enough = max(_FEW, 2 * len(self._pending))
        self._pending.add(pending)

    def discard(self, pending: Pending) -> None:
        self._pending.discard(pending)


_under_way = _UnderWay()


class Pending:
    """Messages under way, whose memory is kept until they are complete.

    Args:
        mpi: the module `mpi4py.MPI`.
        requests: of the messages, first those received.
        memory: what they are received in, or sent from.
        slots: of the memory, one for each sender, this rank's own included.
        sizes: bytes in each slot; None where the message that comes will tell.
    """

    def __init__(
        self, mpi: Any, requests: list[Any], memory: Bytes, slots: Sequence[slice], sizes: Sequence[int | None]
    ) -> None:
        self._mpi = mpi
        self._requests = requests
        self._memory = memory
        self._slots, self._sizes = slots, sizes
        _under_way.add(self)

    def is_done(self) -> bool:
        """Whether all have come and gone; never waits."""
        # each call moves MPI on, so none is left out; and a request stays what it is until `wait`
        return all([request.Get_status() for request in self._requests])  # noqa: C419

    def wait(self) -> Bytes:
        """What has come, in the order of the senders without gaps, or what was sent."""
        statuses = [self._mpi.Status() for _ in self._requests]
        self._mpi.Request.Waitall(self._requests, statuses)
        _under_way.discard(self)
        arrived = iter(WORD * status.Get_count(self._mpi.INT64_T) for status in statuses)
        end = self._slots[0].start
        begin = end
        for slot, size in zip(self._slots, self._sizes, strict=True):
            size = next(arrived) if size is None else size
            if slot.start != end:
                self._memory[end : end + size] = self._memory[slot.start : slot.start + size]
            end += size
        return self._memory[begin:end]


class RootMessages:
    """Carries what buckets send to their roots, and the answers; one for all optimizers of the same ranks.

    Args:
        mpi: the module `mpi4py.MPI`; importing it starts MPI, which is up to the caller.
        comm: of the ranks that take part, in their order, for these messages alone; a communicator of mpi4py.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._channels = count()

    def channel(self) -> Channel:
        """That of a new bucket; all ranks make them in the same order."""
        return Channel(self._mpi, self._comm, next(self._channels))


class Channel:
    """The messages of one bucket, which no others are taken for.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: see `RootMessages`.
        number: of the bucket, the same on all ranks.
    """

    def __init__(self, mpi: Any, comm: Any, number: int) -> None:
        self._mpi, self._comm = mpi, comm
        self._number = number
        self._memory: Bytes = aligned_empty(0, np.uint8)

    def gather(self, root: int, parcel: Parcel) -> Pending:
        """Send the bucket's payloads to its root; the root receives those of all.

        Args:
            root: position among the ranks.
            parcel: what an alltoall would be given; its buffer is as long as a message can be, on all ranks.

        Raises:
            UnsupportedError: a message can be 16 GiB or larger.
        """
        self._check(parcel.buffer.size)
        used = parcel.buffer.size if parcel.sizes is None else parcel.sizes[root]
        message = parcel.buffer[:used]
        if self._comm.rank != root:
            request = self._comm.Isend(self._words(message), root, self._tag(answers=False))
            return Pending(self._mpi, [request], message, [slice(0, 0)], [0])
        ranks, most = self._comm.size, parcel.buffer.size
        memory = self._room(ranks * most)
        slots = [slice(sender * most, (sender + 1) * most) for sender in range(ranks)]
        memory[slots[root]][:used] = message
        requests = [
            self._comm.Irecv(self._words(memory[slot]), sender, self._tag(answers=False))
            for sender, slot in enumerate(slots)
            if sender != root
        ]
        return Pending(self._mpi, requests, memory, slots, [used if r == root else None for r in range(ranks)])

    def answer(self, root: int, message: Bytes, most: int) -> Pending:
        """Send a root's message to all; the others receive it.

        Args:
            root: position among the ranks.
            message: of the root; of others, where it has the size of what comes, the memory for it.
            most: bytes that it can have, the same on all ranks.

        Raises:
            UnsupportedError: it can have 16 GiB or more.
        """
        self._check(most)
        tag = self._tag(answers=True)
        if self._comm.rank == root:
            others = [rank for rank in range(self._comm.size) if rank != root]
            requests = [self._comm.Isend(self._words(message), rank, tag) for rank in others]
            return Pending(self._mpi, requests, message, [slice(0, message.size)], [message.size])
        memory = message if message.size == most else self._room(most)
        request = self._comm.Irecv(self._words(memory), root, tag)
        return Pending(self._mpi, [request], memory, [slice(0, most)], [None])

    def _room(self, nbytes: int) -> Bytes:
        if self._memory.size != nbytes:
            self._memory = aligned_empty(nbytes, np.uint8)
        return self._memory

    def _tag(self, answers: bool) -> int:
        return 2 * self._number + answers

    def _words(self, message: Bytes) -> list[Any]:
        # payloads, and so messages, are padded to whole words
        return [message, message.size // WORD, self._mpi.INT64_T]

    def _check(self, nbytes: int) -> None:
        if nbytes > MOST_BYTES:
            raise UnsupportedError(
                f'transport="mpi" with messages of up to {nbytes} bytes: MPI counts {MOST_BYTES} at '
                'most. Use smaller bucket_bytes, or transport="horovod"'
            )
