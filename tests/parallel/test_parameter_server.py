"""exchange=ParameterServer(...) with real ranks: torch, TensorFlow, both launchers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import STARTS_OF_TWO, exhaustive, launched, thorough

parameter_server_tensorflow = of_tensorflow("parameter_server_tensorflow")

STARTS = [(2, "mpi"), exhaustive(2, "gloo"), exhaustive(3, "mpi"), thorough(4, "mpi")]


@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_torch(ranks: int, launcher: str) -> None:
    outcome = launched("parameter_server", ranks, launcher)
    outcome.check_ended_well()
    names = {line["case"] for line in outcome.reports[0] if "case" in line}
    # servers by messages of MPI are left to more than two ranks
    assert len(names) > (70 if ranks == 2 else 100)
    for name in sorted(names):
        outcome.check(name)


@pytest.mark.parametrize("case", parameter_server_tensorflow.cases)
@pytest.mark.parametrize(("ranks", "launcher"), [*STARTS_OF_TWO, exhaustive(3, "mpi")])
def test_tensorflow(ranks: int, launcher: str, case: str) -> None:
    outcome = launched("parameter_server_tensorflow", ranks, launcher)
    outcome.check(case)
