from __future__ import annotations

import pytest

from tests.parallel.launch import STARTS_OF_TWO, launched
from tests.parallel.workers import habits


@pytest.mark.parametrize("case", habits.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_habits(case: str, ranks: int, launcher: str) -> None:
    launched("habits", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("habits", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
