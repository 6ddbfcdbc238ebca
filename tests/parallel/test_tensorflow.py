from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.parallel.launch import STARTS_OF_TWO, exhaustive, launched, run, thorough
from tests.parallel.workers import tensorflow_process_sets, tensorflow_values


@pytest.mark.parametrize("case", tensorflow_values.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_values(case: str, ranks: int, launcher: str) -> None:
    launched("tensorflow_values", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("tensorflow_values", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)


@pytest.mark.thorough
@pytest.mark.parametrize("case", tensorflow_process_sets.cases)
def test_process_sets(case: str) -> None:
    launched("tensorflow_process_sets", 4, "mpi").check(case)


@pytest.mark.parametrize("inter_op", [exhaustive("1"), thorough("2")])
def test_64_variables_in_one_function_never_stall(inter_op: str) -> None:
    environment = {"TF_NUM_INTEROP_THREADS": inter_op}
    outcome = run("tensorflow_many", 4, "mpi", limit_seconds=280.0, environment=environment)
    outcome.check_ended_well()
    assert outcome.value("steps") == dict.fromkeys(range(4), 200)
    assert len(set(outcome.value("digest").values())) == 1


@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
def test_torch_tensorflow_and_loopback_send_the_same_bytes() -> None:
    outcome = run("mixed_frameworks", 2, "mpi")
    outcome.check_ended_well()
    assert outcome.value("framework") == {0: "torch", 1: "tensorflow"}
    assert outcome.value("same") == {0: True, 1: True}
