from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.launch import Outcome, exhaustive, launched, run, thorough

STARTS = [exhaustive(2), 4, exhaustive(8)]
# modules of workers that start MPI are not imported here: `mpirun` refuses to start below a process that has
NUMPY_CASES = 16
TORCH_CASES = 19
VICTIM = 1
STEPS = 40


@pytest.mark.parametrize("ranks", STARTS)
def test_numpy(ranks: int) -> None:
    check_cases(launched("async_numpy", ranks, "mpi"), NUMPY_CASES)


@pytest.mark.parametrize("ranks", STARTS)
def test_torch(ranks: int) -> None:
    check_cases(launched("async_torch", ranks, "mpi"), TORCH_CASES)


def test_gloo_is_refused() -> None:
    check_cases(launched("async_gloo", 2, "gloo"), 1)


def check_cases(outcome: Outcome, count: int) -> None:
    cases = {line["case"] for lines in outcome.reports.values() for line in lines if "case" in line}
    for case in sorted(cases):
        outcome.check(case)
    assert len(cases) == count, outcome.describe("other cases ran than there should be")
    check_ended(outcome)


def check_ended(outcome: Outcome) -> None:
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(outcome.ranks), outcome.ranks)
    assert outcome.left == []


def reports(outcome: Outcome) -> dict[int, dict[str, Any]]:
    return {rank: line for rank, lines in outcome.reports.items() for line in lines if "told" in line}


@pytest.mark.parametrize("topic", ["async_stop", thorough("async_stop_horovod")])
def test_a_worker_that_is_stopped_does_not_stop_the_rest_and_ends_with_them(topic: str) -> None:
    outcome = run(topic, 4, "mpi", "stays", limit_seconds=120)
    check_ended(outcome)
    found = reports(outcome)
    # when the server was done, the others had made all their steps, and the victim was where it was stopped
    assert outcome.value("left") == {0: [VICTIM]}
    counters = found[0]["stats"]["workers"]
    assert [counters[str(rank)]["applied"] for rank in (2, 3)] == [STEPS, STEPS]
    assert counters[str(VICTIM)]["applied"] < STEPS
    assert counters[str(VICTIM)]["given_up"] == 1
    assert [text.startswith(f"rank {VICTIM} has sent no gradient for more than") for text in found[0]["told"]] == [True]
    assert f"rank {VICTIM} was silent" in found[VICTIM]["told"][0]
    assert found[VICTIM]["over"]
    assert found[VICTIM]["steps"] < STEPS
    # each gradient that was applied counts once, and the victim ends with the parameters of the end
    assert found[0]["value"] == found[VICTIM]["value"] == -found[0]["stats"]["updates"]
    assert not found[2]["told"]
    assert not found[3]["told"]


@pytest.mark.thorough
@pytest.mark.parametrize("topic", ["async_stop", "async_stop_horovod"])
def test_a_worker_that_goes_on_takes_part_again(topic: str) -> None:
    outcome = run(topic, 4, "mpi", "returns", limit_seconds=120)
    check_ended(outcome)
    found = reports(outcome)
    victim = found[0]["stats"]["workers"][str(VICTIM)]
    assert victim["returned"] >= 1
    assert victim["applied"] + victim["too_stale"] == found[VICTIM]["stats"]["steps"]
    assert victim["too_stale"] == found[VICTIM]["stats"]["too_stale"]
    assert not found[VICTIM]["over"]
    assert found[0]["value"] == -found[0]["stats"]["updates"]


@pytest.mark.thorough
def test_a_worker_that_raises_lets_the_others_finish_and_the_start_fails() -> None:
    outcome = run("async_stop", 4, "mpi", "raises", limit_seconds=120)
    assert outcome.returncode not in (0, None), outcome.describe("the start should fail")
    assert set(outcome.value("end")) == {0, 2, 3}, outcome.describe("the others should end")
    assert "the user's own mistake" in outcome.output
    assert outcome.left == []


@pytest.mark.thorough
def test_a_worker_that_dies_ends_the_job() -> None:
    outcome = run("async_stop", 4, "mpi", "dies", limit_seconds=120)
    assert outcome.returncode not in (0, None), outcome.describe("the start should fail")
    assert outcome.left == []


@pytest.mark.thorough
def test_servers_that_workers_never_close_are_closed_at_exit() -> None:
    outcome = run("async_stop", 4, "mpi", "stays-open", limit_seconds=120)
    check_ended(outcome)
    served = [line for lines in outcome.reports.values() for line in lines if line.get("updates")]
    assert [(line["updates"], line["value"]) for line in served] == [(15, -15.0)] * 2
