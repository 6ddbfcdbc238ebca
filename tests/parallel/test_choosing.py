from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import exhaustive, is_left_out, launched, thorough

choosing_tensorflow = of_tensorflow("choosing_tensorflow")

STARTS = [(2, "mpi"), thorough(2, "horovodrun-mpi"), exhaustive(4, "mpi")]


@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_torch(ranks: int, launcher: str) -> None:
    from tests.parallel.workers import choosing

    outcome = launched("choosing", ranks, launcher)
    outcome.check_ended_well()
    for case in choosing.cases:
        if not is_left_out("test_choosing", case, ranks, launcher):
            outcome.check(case)


@pytest.mark.parametrize("case", choosing_tensorflow.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_tensorflow(ranks: int, launcher: str, case: str) -> None:
    launched("choosing_tensorflow", ranks, launcher).check(case)
