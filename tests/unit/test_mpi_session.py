"""MPI that ends on another thread, with a module in the place of mpi4py's that keeps the callback it would call."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_compress.errors import HvdCompressError
from hvd_compress.mpi.session import Session


class FakeMpi:
    """What a session asks of `mpi4py.MPI`."""

    def __init__(self, finalized: bool = False) -> None:
        self.finalized = finalized
        self.delete: Any = None
        self.Comm = SimpleNamespace(Create_keyval=self._keep)
        self.COMM_SELF = SimpleNamespace(Set_attr=lambda key, value: None)

    def Is_finalized(self) -> bool:
        return self.finalized

    def _keep(self, delete_fn: Any) -> int:
        self.delete = delete_fn
        return 1

    def end(self) -> None:
        """As `MPI_Finalize` does, first of all."""
        self.delete(self.COMM_SELF, 1, None)
        self.finalized = True


def test_no_call_begins_after_the_end() -> None:
    mpi = FakeMpi()
    session = Session(mpi)
    last: list[bool] = []
    session.before_end(lambda: last.append(mpi.finalized))
    with session:
        pass
    mpi.end()
    assert last == [False]
    with pytest.raises(HvdCompressError, match="MPI has ended beneath this rank"), session:
        raise AssertionError("a call of MPI")


def test_the_end_waits_for_a_call_under_way() -> None:
    mpi = FakeMpi()
    session = Session(mpi)
    order: list[str] = []
    ends = threading.Thread(target=lambda: (mpi.end(), order.append("ended")))
    with session:
        ends.start()
        ends.join(0.2)
        order.append("called")
    ends.join(10)
    assert order == ["called", "ended"]


def test_who_waits_for_a_message_is_told() -> None:
    mpi = FakeMpi()
    session = Session(mpi)
    looks: list[int] = []

    def never() -> bool:
        looks.append(0)
        if len(looks) == 3:
            # on another thread, as Horovod's
            threading.Thread(target=mpi.end).start()
        return False

    with pytest.raises(HvdCompressError, match="MPI has ended beneath this rank"):
        session.wait_until(never)


def test_a_session_after_the_end_refuses_all() -> None:
    with pytest.raises(HvdCompressError, match="MPI has ended beneath this rank"), Session(FakeMpi(finalized=True)):
        raise AssertionError("a call of MPI")
