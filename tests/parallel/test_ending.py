"""MPI and Horovod end beneath a call of ours when a rank ends: all others end soon, with an error that says why."""

from __future__ import annotations

import pytest

from tests.parallel.launch import exhaustive, run, thorough

# a rank that has failed leaves its messages some seconds to be taken
SECONDS = 45.0
LIMIT_SECONDS = 90.0
RANKS = 3
WHO_STARTS_MPI = "TESTS_MPI_IS_STARTED_FIRST"

ENDS = [
    ("root", "after-backward", "raises", ""),
    exhaustive("one_sided", "wrapping", "raises", ""),
    thorough("one_sided", "after-backward", "raises", ""),
    exhaustive("one_sided", "training", "exits", ""),
    thorough("one_sided", "training", "shutdown", ""),
    exhaustive("one_sided", "closing", "raises", "1"),
    thorough("alltoall", "after-backward", "raises", ""),
    exhaustive("root", "wrapping", "raises", ""),
    exhaustive("root", "training", "raises", "1"),
    exhaustive("root", "training", "exits", "1"),
    exhaustive("async", "wrapping", "raises", ""),
    thorough("async", "training", "raises", ""),
    exhaustive("async", "serving", "raises", ""),
    thorough("async", "closing", "exits", "1"),
    exhaustive("daso", "training", "raises", ""),
    exhaustive("diloco", "training", "raises", ""),
]


@pytest.mark.parametrize(("what", "when", "how", "first"), ENDS)
def test_a_rank_that_ends_ends_all_without_a_crash(what: str, when: str, how: str, first: str) -> None:
    environment = {WHO_STARTS_MPI: first}
    outcome = run("ending", RANKS, "mpi", what, when, how, limit_seconds=LIMIT_SECONDS, environment=environment)
    assert outcome.returncode is not None, outcome.describe("no end")
    assert outcome.returncode != 0, outcome.describe("the launcher calls it a success")
    (wrong,) = outcome.value("wrong").values()
    assert outcome.ended - wrong < SECONDS, outcome.describe(f"the end came after {outcome.ended - wrong:.0f} s")
    assert "signal 11" not in outcome.output, outcome.describe("a rank has crashed")
    told = ("the user's own mistake", "MPI has ended beneath", "has ended, and this rank waits", "has been shut down")
    assert any(text in outcome.output for text in told), outcome.describe("nobody says why")
    if how == "raises":
        assert told[0] in outcome.output, outcome.describe("the cause is not told")
    assert not outcome.value("end"), outcome.describe("a rank calls it a success")
    assert not outcome.left, outcome.describe(f"ranks left running: {outcome.left}")
