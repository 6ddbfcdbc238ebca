from __future__ import annotations

import pytest

from tests.parallel.launch import STARTS, launched
from tests.parallel.workers import training


@pytest.mark.parametrize("case", training.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_training(case: str, ranks: int, launcher: str) -> None:
    launched("training", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("training", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
