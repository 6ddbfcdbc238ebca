"""Send messages between two ranks by MPI's non-blocking point-to-point operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.exchange import aligned_empty
from hvd_compress.mpi.session import Session

__all__ = ["MOST_BYTES", "WORD", "MpiConnection"]

Bytes = npt.NDArray[np.uint8]

WORD = 8
"""MPI is told to count words of so many bytes."""
MOST_BYTES = WORD * (2**31 - 1)
"""The most bytes of a message: MPI counts with 32 bits, and here it counts words."""
_TAG = 0


class MpiConnection:
    """Carries messages, whose bytes are multiples of 8, between this rank and another; see `async_server.Connection`.

    A receive with room for the longest message is posted before that message comes, and MPI tells its real size. So no
    size goes ahead of a message, and none is asked for.

    Args:
        peer: rank of the other end.
        most_bytes: of a message that comes from there.
        session: MPI.
        comm: a communicator of mpi4py that nobody else uses.
    """

    def __init__(self, peer: int, most_bytes: int, session: Session, comm: Any) -> None:
        self._peer = peer
        self._session = session
        self._mpi = session.mpi
        self._comm = comm
        self._status = session.mpi.Status()
        self._room: Bytes = aligned_empty(most_bytes, np.uint8)
        self._sends: list[Any] = []
        self._receive: Any = None

    def send(self, message: Bytes) -> None:
        """Start sending; the bytes are in use until `flush` returns."""
        with self._session:
            self._sends.append(self._comm.Isend(self._words(message), self._peer, _TAG))

    def flush(self) -> None:
        """Wait until no bytes are in use."""
        if self._sends:
            self._session.wait_until(lambda: bool(self._mpi.Request.Testall(self._sends)))
        self._sends.clear()

    def receive(self) -> Bytes | None:
        """Return a message that has arrived, which lasts until the next call, or None; never waits."""
        # callers ask only when a message is to come, so no receive is left at the end
        with self._session:
            if self._receive is None:
                self._receive = self._comm.Irecv(self._words(self._room), self._peer, _TAG)
            if not self._receive.Test(self._status):
                return None
            self._receive = None
            return self._room[: WORD * self._status.Get_count(self._mpi.INT64_T)]

    def _words(self, message: Bytes) -> list[Any]:
        return [message, message.size // WORD, self._mpi.INT64_T]
