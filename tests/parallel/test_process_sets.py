from __future__ import annotations

import pytest

from tests.parallel.launch import launched, thorough
from tests.parallel.workers import process_sets

STARTS = [(3, "gloo"), thorough(4, "mpi")]


@pytest.mark.parametrize("case", process_sets.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_process_sets(case: str, ranks: int, launcher: str) -> None:
    launched("process_sets", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("process_sets", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
