"""Call MPI only while there is one: Horovod ends it from its own thread, whatever other threads are doing with it.

A rank that ends, by an error or at its last line, ends Horovod on all ranks; and Horovod's thread, where it has started
MPI, then ends MPI too. A call of MPI that is under way at that moment, or comes later, is a segmentation fault. MPI has
a word for the moment before: it deletes the attributes of `COMM_SELF` before it ends anything. There this object waits
until no call of ours is under way, and lets none begin from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from hvd_compress.errors import HvdCompressError
from hvd_compress.waiting import waiting

__all__ = ["Session", "session"]

# a message inside of a host takes a few microseconds: so many looks before the core goes to others
_LOOKS = 200
_NAP_SECONDS = 5e-5


class Session:
    """Guards calls of MPI: `with session:` around each of them, and nothing that waits for another rank's program.

    Args:
        mpi: the module `mpi4py.MPI`; importing it starts MPI, which is up to the caller.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.has_ended = bool(mpi.Is_finalized())
        self._lock = threading.RLock()
        self._last: list[Callable[[], object]] = []
        if not self.has_ended:
            key = mpi.Comm.Create_keyval(delete_fn=lambda *_: self._end())
            mpi.COMM_SELF.Set_attr(key, self)

    def __enter__(self) -> None:
        """Keep MPI from ending.

        Raises:
            HvdCompressError: it has ended.
        """
        self._lock.acquire()
        if self.has_ended:
            self._lock.release()
            raise HvdCompressError(
                "MPI has ended beneath this rank: Horovod ends it on all ranks when one of them ends or calls "
                "hvd.shutdown(). Look for the error of another rank; if there is none, a rank has come to its last "
                "line before the others: let ranks wait for each other there, as average_parameters() and close() do"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def before_end(self, call: Callable[[], object]) -> None:
        """Have this called before MPI ends, by whichever thread ends it."""
        with self:
            self._last.append(call)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Ask MPI again and again until a condition holds.

        Args:
            holds: calls MPI, and does not wait.

        Raises:
            HvdCompressError: MPI has ended.
        """
        looks = 0
        while True:
            with self:
                if holds():
                    return
            looks += 1
            time.sleep(0 if looks < _LOOKS else _NAP_SECONDS)

    def meet(self, comm: Any) -> None:
        """Wait for all ranks; to be called before collectives that MPI has only in a form that blocks.

        Raises:
            HvdCompressError: MPI has ended, as it does when a rank ends before it has come here.
        """
        with self:
            request = comm.Ibarrier()
        with waiting("for all ranks to come to what they set up or give up together over MPI"):
            self.wait_until(request.Test)

    def _end(self) -> None:
        with self._lock:
            self.has_ended = True
            for call in reversed(self._last):
                call()


@cache
def session() -> Session:
    """Return the session of this process; starts MPI if nobody has."""
    from mpi4py import MPI

    return Session(MPI)
