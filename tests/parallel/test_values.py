from __future__ import annotations

import pytest

from tests.parallel.launch import STARTS, launched
from tests.parallel.workers import values


@pytest.mark.parametrize("case", values.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_values(case: str, ranks: int, launcher: str) -> None:
    launched("values", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("values", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
