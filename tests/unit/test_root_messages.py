"""Messages under way when a rank ends, with requests in the place of MPI's."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvd_compress.mpi.root_messages import Pending


class FakeRequest:
    """One that is complete when it is told to be, or when it is cancelled in time."""

    def __init__(self, complete: bool = False, matched: bool = False) -> None:
        self.complete, self.matched = complete, matched
        self.cancelled = 0

    def Get_status(self) -> bool:
        return self.complete

    def Cancel(self) -> None:
        self.cancelled += 1
        self.complete = self.complete or not self.matched


class Session(nullcontext[None]):
    """MPI that never ends."""

    mpi = SimpleNamespace(Request=SimpleNamespace(Testall=lambda requests: all(r.complete for r in requests)))


def pending(requests: dict[int, FakeRequest], size: int | None, gone: frozenset[int] = frozenset()) -> Pending:
    wire: Any = SimpleNamespace(session=Session(), gone=lambda: gone)
    return Pending(wire, requests, np.empty(8, np.uint8), [slice(0, 8)], [size])


def test_what_goes_to_ranks_that_have_ended_is_not_waited_for() -> None:
    requests = {1: FakeRequest(complete=True), 2: FakeRequest()}
    assert not pending(requests, 8).has_left()
    assert not pending(requests, 8, gone=frozenset({1})).has_left()
    assert pending(requests, 8, gone=frozenset({2})).has_left()


def test_what_is_expected_is_given_up_once() -> None:
    requests = {0: FakeRequest(), 1: FakeRequest(complete=True)}
    expected = pending(requests, None)
    assert not expected.is_sent
    assert expected.give_up()
    assert expected.give_up()
    assert [request.cancelled for request in requests.values()] == [1, 1]


def test_a_message_that_has_begun_to_come_is_let_come() -> None:
    request = FakeRequest(matched=True)
    expected = pending({0: request}, None)
    assert not expected.give_up()
    request.complete = True
    assert expected.give_up()
    assert request.cancelled == 1
