"""Send messages to the root of a bucket and back: point to point, non-blocking, of whatever size a payload has.

What MPI's `Igatherv` would do, without its order: non-blocking collectives must be started in the same order on all
ranks, and gradients do not come in one. A message is told from others by the channel of its bucket. Receivers have room
for the largest one, so no sizes are exchanged beforehand.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import HvdCompressError, UnsupportedError
from hvd_compress.exchange import aligned_empty
from hvd_compress.mpi.connections import MOST_BYTES, WORD
from hvd_compress.mpi.session import Session
from hvd_compress.ranks import Ranks
from hvd_compress.waiting import waiting

__all__ = ["Channel", "Pending", "RootMessages"]

Bytes = npt.NDArray[np.uint8]

_FEW = 64
# the tag of a rank's last word; those of buckets are larger
_GONE = 0
_NOTHING: Bytes = np.empty(0, np.uint8)
# how long a rank that has failed waits for its messages to be taken, before it ends all the same
_PATIENCE_SECONDS = 5.0


class _UnderWay:
    """Keeps messages that MPI may still read or write, whoever has lost interest in them meanwhile."""

    def __init__(self) -> None:
        self._pending: set[Pending] = set()
        self._enough = _FEW

    def add(self, pending: Pending) -> None:
        # each look is a call of MPI, which may give the core away: so not every new message looks at all others
        if len(self._pending) >= self._enough:
            # a copy, since other threads may add to the set
            self._pending.difference_update([kept for kept in list(self._pending) if kept.is_done()])
            self._enough = max(_FEW, 2 * len(self._pending))
        self._pending.add(pending)

    def discard(self, pending: Pending) -> None:
        self._pending.discard(pending)

    def has_left(self) -> bool:
        """Tell whether all that this rank sends has gone, but for what goes to ranks that have ended."""
        # a list, so that all messages are looked at: each look moves MPI on
        return all([pending.has_left() for pending in list(self._pending) if pending.is_sent])  # noqa: C419

    def give_up(self) -> bool:
        """Have nothing received any more; returns whether MPI has let go of the memory of all that was expected."""
        expected = [pending for pending in list(self._pending) if not pending.is_sent]
        return all([pending.give_up() for pending in expected])  # noqa: C419


_under_way = _UnderWay()


class _Wire:
    """Holds MPI and a communicator, and knows which of its ranks have said that they end.

    Horovod does not tell a rank that waits for a message of MPI that its sender has ended. The end of MPI would tell,
    but Horovod ends MPI only where it has started it.

    Args:
        session: MPI.
        comm: see `RootMessages`.
    """

    def __init__(self, session: Session, comm: Any) -> None:
        self.session, self.comm = session, comm
        self._gone: set[int] = set()
        self._told: list[Any] = []
        # registered after Horovod's own end, and so called before it
        atexit.register(self._tell)

    def gone(self) -> set[int]:
        """Return the ranks that send nothing any more; to be called within the session."""
        status = self.session.mpi.Status()
        while self.comm.Iprobe(tag=_GONE, status=status):
            self.comm.Recv(self.words(_NOTHING), status.source, _GONE)
            self._gone.add(status.source)
        return self._gone

    def words(self, message: Bytes) -> list[Any]:
        """Describe a message as MPI takes it; payloads, and so messages, are padded to whole words."""
        return [message, message.size // WORD, self.session.mpi.INT64_T]

    def _tell(self) -> None:
        # where MPI has ended, or ends meanwhile, all ranks know
        with suppress(HvdCompressError):
            self._say_last_word()

    def _say_last_word(self) -> None:
        # what is sent before the last word arrives before it; if this rank has failed, others may never take it
        failed = getattr(sys, "last_value", None) is not None
        deadline = time.monotonic() + (_PATIENCE_SECONDS if failed else math.inf)
        self.session.wait_until(lambda: _under_way.has_left() or time.monotonic() > deadline)
        with self.session:
            others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
            self._told = [self.comm.Isend(self.words(_NOTHING), rank, _GONE) for rank in others]
        # MPI may end after Python, and would write what comes until then into memory that Python has given back
        deadline = time.monotonic() + _PATIENCE_SECONDS
        self.session.wait_until(lambda: _under_way.give_up() or time.monotonic() > deadline)


class Pending:
    """Holds messages under way, and their memory until they are complete.

    Args:
        wire: carries them.
        requests: MPI's, of the messages, by the rank at the other end.
        memory: where they are received, or sent from.
        slots: parts of the memory, one for each sender, this rank included.
        sizes: the bytes in each slot; None where the message that comes will tell.
    """

    def __init__(
        self,
        wire: _Wire,
        requests: Mapping[int, Any],
        memory: Bytes,
        slots: Sequence[slice],
        sizes: Sequence[int | None],
    ) -> None:
        self._wire = wire
        self._peers, self._requests = list(requests), list(requests.values())
        self._memory = memory
        self._slots, self._sizes = slots, sizes
        self.is_sent = None not in sizes
        """Whether this rank sends these messages; else it receives them."""
        self._is_given_up = False
        _under_way.add(self)

    def is_done(self) -> bool:
        """Tell whether all have come and gone; never waits.

        Raises:
            HvdCompressError: MPI has ended.
        """
        # every request is asked, since each call moves MPI on; a request stays valid until `wait`
        with self._wire.session:
            return all([request.Get_status() for request in self._requests])  # noqa: C419

    def has_left(self) -> bool:
        """Tell whether all have gone, or the ranks that they go to have ended, which take nothing any more."""
        with self._wire.session:
            gone = self._wire.gone()
            ends = zip(self._peers, self._requests, strict=True)
            return all([request.Get_status() or peer in gone for peer, request in ends])  # noqa: C419

    def give_up(self) -> bool:
        """Expect no messages any more; returns whether none can come into the memory. Call it until that is so."""
        with self._wire.session:
            for request in [] if self._is_given_up else self._requests:
                request.Cancel()
            self._is_given_up = True
            return bool(self._wire.session.mpi.Request.Testall(self._requests))

    def wait(self) -> Bytes:
        """Wait; returns what has come, in the order of the senders and without gaps, or what was sent.

        Raises:
            HvdCompressError: MPI has ended, or the rank at the other end.
        """
        mpi = self._wire.session.mpi
        statuses = [mpi.Status() for _ in self._requests]

        def are_done() -> bool:
            # in this order: when a rank's last word has come, so has all that it sent before
            gone = self._wire.gone()
            if mpi.Request.Testall(self._requests, statuses):
                return True
            if gone:
                self._refuse_to_wait_for(gone)
            return False

        # not `Waitall`, which would wait for ranks that have ended
        with waiting(f"for messages of the ranks {self._peers} that share a parameter server"):
            self._wire.session.wait_until(are_done)
        _under_way.discard(self)
        arrived = iter([WORD * status.Get_count(mpi.INT64_T) for status in statuses])
        end = self._slots[0].start
        begin = end
        for slot, size in zip(self._slots, self._sizes, strict=True):
            size = next(arrived) if size is None else size
            if slot.start != end:
                self._memory[end : end + size] = self._memory[slot.start : slot.start + size]
            end += size
        return self._memory[begin:end]

    def _refuse_to_wait_for(self, gone: set[int]) -> None:
        for peer, request in zip(self._peers, self._requests, strict=True):
            if peer in gone and not request.Get_status():
                raise HvdCompressError(
                    f"rank {peer} of {self._wire.comm.size} has ended, and this rank waits for a message of it: look "
                    "for its error. If there is none, it has made fewer steps than this rank"
                )


class RootMessages:
    """Carries what buckets send to their roots, and the answers; one for all optimizers of the same ranks.

    Args:
        session: MPI.
        comm: of the ranks that take part, in their order, for these messages alone; a communicator of mpi4py.
    """

    def __init__(self, session: Session, comm: Any) -> None:
        self._wire = _Wire(session, comm)
        self._channels = count(1)

    def channel(self) -> Channel:
        """Make the channel of a new bucket; all ranks make them in the same order."""
        return Channel(self._wire, next(self._channels))


class Channel(Ranks):
    """Carries the messages of one bucket, which are never taken for those of another: to its root, and back.

    Args:
        wire: see `Pending`.
        number: of the bucket, from 1 on, the same on all ranks.
    """

    def __init__(self, wire: _Wire, number: int) -> None:
        super().__init__(wire.comm.size, wire.comm.rank, f"mpi.{number}")
        self._wire, self._comm = wire, wire.comm
        self._number = number
        self._memory: Bytes = aligned_empty(0, np.uint8)
        self.answer_bytes = 0
        """The most bytes that come back from the root, the same on all ranks; to be set before the first do."""

    def start(
        self, collective: str, name: str, array: Bytes, sizes: Sequence[int] | None = None, root: int = 0
    ) -> Pending:
        """Start an alltoall in which only the root gets something, or that which brings what the root has to all.

        Args:
            collective: "alltoall"; or "broadcast", or the "allgather" in which nobody else has anything.
            name: of no use here, where the channel tells messages apart.
            array: of bytes. That of an alltoall is as long as a message can be, on all ranks; that of a broadcast is
                the memory for what comes.
            sizes: see `Ranks.start`.
            root: see there.

        Raises:
            UnsupportedError: a message can be 16 GiB or larger.
        """
        return self._gather(root, array, sizes) if collective == "alltoall" else self._answer(root, array)

    def is_done(self, handle: Pending) -> bool:
        return handle.is_done()

    def wait(self, handle: Pending) -> Bytes:
        return handle.wait()

    def _gather(self, root: int, buffer: Bytes, sizes: Sequence[int] | None) -> Pending:
        self._check(buffer.size)
        used = buffer.size if sizes is None else sizes[root]
        message = buffer[:used]
        if self._comm.rank != root:
            with self._wire.session:
                request = self._comm.Isend(self._wire.words(message), root, self._tag(answers=False))
            return Pending(self._wire, {root: request}, message, [slice(0, 0)], [0])
        ranks, most = self._comm.size, buffer.size
        memory = self._room(ranks * most)
        slots = [slice(sender * most, (sender + 1) * most) for sender in range(ranks)]
        memory[slots[root]][:used] = message
        with self._wire.session:
            requests = {
                sender: self._comm.Irecv(self._wire.words(memory[slot]), sender, self._tag(answers=False))
                for sender, slot in enumerate(slots)
                if sender != root
            }
        return Pending(self._wire, requests, memory, slots, [used if r == root else None for r in range(ranks)])

    def _answer(self, root: int, message: Bytes) -> Pending:
        most = self.answer_bytes
        self._check(most)
        tag = self._tag(answers=True)
        if self._comm.rank == root:
            others = [rank for rank in range(self._comm.size) if rank != root]
            with self._wire.session:
                requests = {rank: self._comm.Isend(self._wire.words(message), rank, tag) for rank in others}
            return Pending(self._wire, requests, message, [slice(0, message.size)], [message.size])
        memory = message if message.size == most else self._room(most)
        with self._wire.session:
            request = self._comm.Irecv(self._wire.words(memory), root, tag)
        return Pending(self._wire, {root: request}, memory, [slice(0, most)], [None])

    def _room(self, nbytes: int) -> Bytes:
        if self._memory.size != nbytes:
            self._memory = aligned_empty(nbytes, np.uint8)
        return self._memory

    def _tag(self, answers: bool) -> int:
        return 2 * self._number + answers

    def _check(self, nbytes: int) -> None:
        if nbytes > MOST_BYTES:
            raise UnsupportedError(
                f'transport="mpi" with messages of up to {nbytes} bytes: MPI counts {MOST_BYTES} at '
                'most. Use smaller bucket_bytes, or transport="horovod"'
            )
