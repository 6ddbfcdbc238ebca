"""Ranks that are threads: the contract of all ranks, and what becomes of ranks that do not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_compress import ConstantThreshold, OneBit, ThreadRanks
from hvd_compress.errors import HvdCompressError, MismatchError
from hvd_compress.gossip import GossipLoopback, GossipMember, GossipSettings, ParameterSpec
from hvd_compress.topology import Ring
from tests.ranks_contract import PROGRAMS


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_contract_of_ranks(program: Callable[[Any], None], size: int) -> None:
    ThreadRanks.run_all(size, program)


def test_the_contract_of_some_of_them() -> None:
    def on_some(ranks: ThreadRanks) -> None:
        mine = [p for p in range(5) if p % 2 == ranks.position % 2]
        some = ranks.among(mine)
        assert (some.size, some.position) == (len(mine), mine.index(ranks.position))
        for program in PROGRAMS.values():
            program(some)

    ThreadRanks.run_all(5, on_some)


def test_results_are_in_the_order_of_the_ranks() -> None:
    assert ThreadRanks.run_all(4, lambda ranks: ranks.position) == [0, 1, 2, 3]


def test_names_of_one_program_are_those_of_the_next() -> None:
    runs = [ThreadRanks.run_all(2, lambda ranks: ranks.numbered("test")) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    told: list[str] = []

    def program(ranks: ThreadRanks) -> None:
        if ranks.position == 2:
            return
        try:
            ranks.run("allreduce", "step", np.zeros(1, np.float32))
        except HvdCompressError as error:
            told.append(str(error))
            raise

    begin = time.monotonic()
    with pytest.raises(HvdCompressError, match=r"waits in 'step' for the ranks \[2\].*some have ended"):
        ThreadRanks.run_all(3, program, seconds=60)
    assert time.monotonic() - begin < 20
    assert len(told) == 2


def test_what_the_first_rank_that_fails_has_raised_is_raised() -> None:
    def program(ranks: ThreadRanks) -> None:
        if ranks.position == 1:
            raise KeyError("mine")
        ranks.barrier("never")

    with pytest.raises(KeyError, match="mine"):
        ThreadRanks.run_all(3, program)


@pytest.mark.parametrize(
    ("call", "shapes"),
    [("allgather", [(), ()]), ("allgather", [(2, 3), (2, 4)]), ("broadcast", [(3,), (3,)])],
)
def test_what_is_impossible_is_told_all_at_once(call: str, shapes: Any) -> None:
    told = []

    def program(ranks: ThreadRanks) -> None:
        root = {"root": 5} if call == "broadcast" else {}
        with pytest.raises(MismatchError, match="impossible") as error:
            ranks.wait(ranks.start(call, "x", np.ones(shapes[ranks.position]), **root))
        told.append(str(error.value))

    begin = time.monotonic()
    ThreadRanks.run_all(2, program, seconds=60)
    assert time.monotonic() - begin < 20
    assert len(told) == 2
    assert str(shapes[1]) in told[0]


def test_an_alltoall_of_rows_is_refused() -> None:
    with pytest.raises(TypeError, match=r"shape \(2, 2\): give a flat one"):
        ThreadRanks.run_all(2, lambda ranks: ranks.run("alltoall", "x", np.ones((2, 2))))


def test_what_all_have_started_comes_though_a_rank_has_ended() -> None:
    def program(ranks: ThreadRanks) -> list[int]:
        handle = ranks.start("allgather", "last", np.array([ranks.position]))
        if ranks.position == 0:
            return []
        return ranks.wait(handle).tolist()

    assert ThreadRanks.run_all(3, program) == [[], [0, 1, 2], [0, 1, 2]]


def test_a_rank_that_is_elsewhere_is_waited_for_no_longer_than_asked() -> None:
    over = threading.Event()

    def program(ranks: ThreadRanks) -> None:
        if ranks.position == 1:
            over.wait(60)
            return
        try:
            ranks.barrier("step")
        finally:
            over.set()

    with pytest.raises(HvdCompressError, match=r"\[1\], which have not come within 0.1 seconds.*run_all\(seconds="):
        ThreadRanks.run_all(2, program, seconds=0.1)


WRONG: dict[str, tuple[Callable[[int], tuple[Any, ...]], str]] = {
    "collective": (
        lambda r: ("allgather" if r else "allreduce", np.zeros(2)),
        "has the collective allreduce",
    ),
    "dtype": (lambda r: ("allgather", np.zeros(2, "float32" if r else "float64")), "position 1 has float32"),
    "elements": (lambda r: ("allreduce", np.zeros(2 + r)), "number of elements 2, position 1 has 3"),
    "root": (lambda r: ("broadcast", np.zeros(2), None, r), "root 0, position 1 has 1"),
    "parts": (lambda r: ("alltoall", np.zeros(2 + r)), "position 1 gives sizes=None for 3 elements"),
    "sizes": (lambda r: ("alltoall", np.zeros(2), [1] * (2 + r)), r"position 1 gives sizes=\(1, 1, 1\)"),
    "too many": (lambda r: ("alltoall", np.zeros(2), [1, 1 + r]), r"position 1 gives sizes=\(1, 2\)"),
    "negative": (lambda r: ("alltoall", np.zeros(2), [1, -r]), r"position 1 gives sizes=\(1, -1\)"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_an_error_on_all_ranks(given: Callable[[int], tuple[Any, ...]], message: str) -> None:
    def program(ranks: ThreadRanks) -> None:
        collective, *arguments = given(ranks.position)
        with pytest.raises(MismatchError, match=f"disagree on 'wrong': .*{message}"):
            ranks.run(collective, "wrong", *arguments)
        assert ranks.maximum([1.0]) == [1.0]

    ThreadRanks.run_all(2, program)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size=0\): must be at least 1"):
        ThreadRanks.run_all(0, lambda ranks: None)
    with pytest.raises(ValueError, match=r"among\(\[1\]\): position 0"):
        ThreadRanks.run_all(2, lambda ranks: ranks.among([1 - ranks.position]))


@pytest.mark.parametrize("compression", [None, OneBit()])
def test_event_triggered_averaging_on_threads_is_that_of_the_loopback(compression: Any) -> None:
    tensors = [ParameterSpec("w", (40, 3)), ParameterSpec("v", (7,))]
    settings: dict[str, Any] = {} if compression is None else {"compression": compression}

    def start(rank: int) -> list[np.ndarray]:
        rng = np.random.default_rng(rank)
        return [rng.normal(size=t.numel).astype(np.float32) for t in tensors]

    def program(ranks: ThreadRanks) -> list[np.ndarray]:
        def one_sided(*_: Any) -> Any:
            raise NotImplementedError

        asked = GossipSettings(ConstantThreshold(0.1), Ring(), **settings)
        member, arrays = GossipMember(tensors, asked, ranks, one_sided), start(ranks.position)
        for _ in range(5):
            member.mix(arrays)
        return arrays

    group = GossipLoopback(tensors, 4, ConstantThreshold(0.1), **settings)
    expected = [start(rank) for rank in range(4)]
    for _ in range(5):
        group.step(expected)
    for found, of_loopback in zip(ThreadRanks.run_all(4, program), expected, strict=True):
        for x, y in zip(found, of_loopback, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("positions", [[0, 0, 1], [0, 1, 2], [-1, 0, 1]])
def test_ranks_are_among_different_positions_that_there_are(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="must be different positions from 0 to 1"):
        ThreadRanks.run_all(2, lambda ranks: ranks.among(positions), seconds=5)
