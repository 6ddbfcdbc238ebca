from __future__ import annotations

import pytest

from tests.parallel.launch import launched, thorough
from tests.parallel.workers import values

STARTS = [(2, "gloo"), thorough(4, "mpi")]


@pytest.mark.parametrize("case", values.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_values(case: str, ranks: int, launcher: str) -> None:
    launched("values", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("values", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
