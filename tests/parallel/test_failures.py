"""When a rank goes wrong, all ranks end soon and somebody says why."""

from __future__ import annotations

import pytest

from tests.parallel.launch import Outcome, run, thorough

# what launcher and ranks may take to notice: Horovod's stall check ends a rank that waits for one which is gone after
# 60 seconds (see launch.py), but the launcher or the closed connection should tell it long before
SECONDS = 25.0
LIMIT_SECONDS = 120.0


def check_all_ended(outcome: Outcome) -> None:
    assert outcome.returncode is not None, outcome.describe(f"no end, and no report for {LIMIT_SECONDS} s")
    assert outcome.returncode != 0, outcome.describe("the launcher calls it a success")
    assert set(outcome.value("wrong")) == {1}, outcome.describe("rank 1 never went wrong")
    took = outcome.ended - outcome.value("wrong")[1]
    assert took < SECONDS, outcome.describe(f"the end came {took:.0f} s after the mistake")
    assert set(outcome.reports) == set(range(outcome.ranks)), outcome.describe("not every rank had started")
    assert not outcome.left, outcome.describe(f"ranks left running: {outcome.left}")
    ended = outcome.value("end")
    assert not ended, f"ranks that call it a success: {ended}"


@pytest.mark.parametrize(
    ("ranks", "launcher", "how"),
    [
        (2, "gloo", "raise-after-backward"),
        thorough(4, "mpi", "raise-before-backward"),
        thorough(2, "horovodrun-mpi", "raise-after-backward"),
    ],
)
def test_a_rank_that_raises_ends_all(ranks: int, launcher: str, how: str) -> None:
    outcome = run("failures", ranks, launcher, how, limit_seconds=LIMIT_SECONDS)
    check_all_ended(outcome)
    assert "UserError: the user's own mistake" in outcome.output, outcome.describe("the cause is not told")


@pytest.mark.parametrize(
    ("ranks", "launcher", "how"), [(2, "gloo", "corrupt-two_phase"), thorough(4, "mpi", "corrupt-allgather")]
)
def test_a_corrupted_payload_ends_all_with_a_wire_error(ranks: int, launcher: str, how: str) -> None:
    outcome = run("failures", ranks, launcher, how, limit_seconds=LIMIT_SECONDS)
    check_all_ended(outcome)
    told = [error for error in outcome.value("error").values() if error.startswith("WireError")]
    assert told, outcome.describe("no rank was told of a WireError")
    assert "WireError" in outcome.output
