"""Put messages into the neighbours' memory: nobody ever waits for another rank's step.

Each rank owns a window with a queue for each of its senders: bytes in a ring, and how many of them were ever written
(the tail), which the sender puts there last. How many the receiver has used up (the head) it puts into a window of the
sender. So the bytes between head and tail belong to the receiver, all others to the sender, and no message is read
before it is whole, or overwritten before it is read. All in one passive-target epoch that lasts as long as the window.

Where a queue has no room, the receiver is slow: what it misses is remembered, and goes whole when there is room again.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import aligned_empty
from hvd_compress.gossip import Node
from hvd_compress.gossip.message import cut_message
from hvd_compress.mpi.session import Session
from hvd_compress.topology import Neighbours

__all__ = ["OneSided"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_MESSAGES_IN_QUEUE = 2
_MOST_BYTES = 2**31 - 1
_WORD = 8


class OneSided:
    """Carries the messages of a node; creating it is a collective call.

    Args:
        node: whose messages; it was made with `in_order=False`.
        parts: of all ranks.
        session: MPI.
        comm: of the ranks, in their order; a communicator of mpi4py.

    Raises:
        UnsupportedError: a message can be 1 GiB or larger, or this MPI makes no windows of the unified model here.
    """

    waits = False

    def __init__(self, node: Node, parts: Sequence[Neighbours], session: Session, comm: Any) -> None:
        self._session = session
        self._mpi = mpi = session.mpi
        self._node = node
        self._part = part = node.part
        self._room = _MESSAGES_IN_QUEUE * node.capacity
        if self._room > _MOST_BYTES:
            raise UnsupportedError(
                f'transport="one_sided" with {node.capacity} bytes of parameters: MPI counts bytes with 32 bits, and '
                f'two messages must fit. Use transport="alltoall"'
            )
        self._late = [np.zeros(len(node.tensors), np.bool_) for _ in part.receivers]
        self._message: Bytes = aligned_empty(node.capacity, np.uint8)
        self._catch_up: Bytes = aligned_empty(node.capacity, np.uint8)
        # where my bytes and tail lie in the windows of my receivers, and my heads in those of my senders
        self._layouts = [_Layout(p, self._room) for p in parts]
        self._heads = [0] * len(part.senders)
        self._tails = [0] * len(part.receivers)
        self._comm = comm
        # a rank that fails above never comes here, and the others would wait for it within MPI
        session.meet(comm)
        with session:
            self._window = _allocated(self._layouts[part.position].nbytes, mpi, comm)
            if self._window.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
                raise UnsupportedError(
                    'transport="one_sided": this MPI keeps a window apart from the memory that a rank reads. Use '
                    'transport="alltoall"'
                )
            self._window.Lock_all()
            # an open epoch must not outlive MPI
            self._end_epoch = weakref.finalize(self, _unlock, session, self._window)
            self._end_epoch.atexit = False
            self._memory: Bytes = np.frombuffer(self._window.tomemory(), np.uint8)
            self._memory[:] = 0
            self._window.Sync()
        session.before_end(self._end_epoch)
        atexit.register(self._end_epoch)
        session.meet(comm)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, arrays: Sequence[Array | None]) -> None:
        """Decide what to send of these values, and put it where there is room.

        Raises:
            HvdCompressError: MPI has ended, as it does when another rank ends.
        """
        node = self._node
        due = node.decide(arrays)
        with self._session:
            self._send(arrays, due)

    def _send(self, arrays: Sequence[Array | None], due: npt.NDArray[np.bool_]) -> None:
        node = self._node
        message = self._message[: node.write(arrays, self._message)]
        present = np.array([x is not None for x in arrays], np.bool_)
        for i, receiver in enumerate(self._part.receivers):
            late = self._late[i]
            # what is frozen by now goes when it is trained again
            missed = late & present
            sent = due | missed
            if not sent.any():
                continue
            if missed.any():
                mine = self._catch_up[: node.write_for_late(arrays, late, self._catch_up)]
            else:
                mine = message
            if self._tails[i] + mine.size - self._head_of(i) > self._room:
                late |= due
                continue
            self._put(i, receiver, mine)
            node.count_sent(np.flatnonzero(sent), mine)
            late &= ~sent

    def answer(self) -> None:
        """Do nothing: nobody waits for an answer."""

    def _put(self, i: int, receiver: int, message: Bytes) -> None:
        layout = self._layouts[receiver]
        slot = layout.part.senders.index(self._part.position)
        begin = self._tails[i] % self._room
        first = min(message.size, self._room - begin)
        for part, at in ((message[:first], begin), (message[first:], 0)):
            if part.size:
                byte = self._mpi.BYTE
                self._window.Put([part, byte], receiver, (layout.queue(slot) + at, part.size, byte))
        # the bytes must have arrived before the tail says so
        self._window.Flush(receiver)
        self._tails[i] += message.size
        self._put_word(receiver, layout.tail(slot), self._tails[i])

    def _head_of(self, i: int) -> int:
        return self._own_word(self._layouts[self._part.position].head(i))

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take over what has arrived since the last time; never waits.

        Raises:
            HvdCompressError: MPI has ended, as it does when another rank ends.
        """
        with self._session:
            self._receive()

    def _receive(self) -> None:
        layout = self._layouts[self._part.position]
        for slot, sender in enumerate(self._part.senders):
            tail = self._own_word(layout.tail(slot))
            head = self._heads[slot]
            if head == tail:
                continue
            self._window.Sync()
            arrived = self._queued(layout.queue(slot), head, tail)
            at = 0
            while at < arrived.size:
                message = cut_message(arrived, at)
                self._node.read(slot, message)
                at += message.size
            self._heads[slot] = tail
            # the bytes must be read before the sender learns that they were
            self._window.Sync()
            theirs = self._layouts[sender]
            self._put_word(sender, theirs.head(theirs.part.receivers.index(self._part.position)), tail)

    def _queued(self, queue: int, head: int, tail: int) -> Bytes:
        """Copy the bytes from head to tail into one piece."""
        begin, count = head % self._room, tail - head
        ring = self._memory[queue : queue + self._room]
        arrived = aligned_empty(count, np.uint8)
        first = min(count, self._room - begin)
        arrived[:first] = ring[begin : begin + first]
        arrived[first:] = ring[: count - first]
        return arrived

    # -- words that two ranks share ------------------------------------------------------------------------------------

    def _own_word(self, at: int) -> int:
        # atomic: another rank accumulates to this word, and a plain load might see half of it
        ignored, value = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        me, word = self._part.position, self._mpi.UINT64_T
        self._window.Fetch_and_op([ignored, word], [value, word], me, at, self._mpi.NO_OP)
        self._window.Flush(me)
        return int(value[0])

    def _put_word(self, rank: int, at: int, value: int) -> None:
        new, word = np.array([value], np.uint64), self._mpi.UINT64_T
        self._window.Accumulate([new, word], rank, (at, 1, word), self._mpi.REPLACE)
        self._window.Flush(rank)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the window; a collective call."""
        self._session.meet(self._comm)
        self._end_epoch()
        self._memory = np.empty(0, np.uint8)
        with self._session:
            self._window.Free()


class _Layout:
    """Says where things lie in the window of one rank: heads of its receivers, tails and queues of its senders."""

    def __init__(self, part: Neighbours, room: int) -> None:
        self.part = part
        self._room = room
        self._words = len(part.receivers) + len(part.senders)
        self.nbytes = self._words * _WORD + len(part.senders) * room

    def head(self, receiver: int) -> int:
        """Return where a receiver writes how much it has used up."""
        return receiver * _WORD

    def tail(self, sender: int) -> int:
        """Return where a sender writes how much it has written."""
        return (len(self.part.receivers) + sender) * _WORD

    def queue(self, sender: int) -> int:
        """Return where the ring of a sender begins."""
        return self._words * _WORD + sender * self._room


def _allocated(nbytes: int, mpi: Any, comm: Any) -> Any:
    try:
        return mpi.Win.Allocate(nbytes, 1, comm=comm)
    except mpi.Exception as error:
        raise UnsupportedError(
            f'transport="one_sided": this MPI makes no window here ({error}). Open MPI 4 has none between hosts on TCP '
            "once several threads may call it, as Horovod wants; inside a host and on RDMA networks it has. Use "
            'transport="alltoall"'
        ) from error


def _unlock(session: Session, window: Any) -> None:
    # called while MPI ends, too: by then no other thread is in a call of MPI
    if not session.mpi.Is_finalized():
        window.Unlock_all()
