from __future__ import annotations

import pytest

from tests.parallel.launch import STARTS_OF_TWO, launched
from tests.parallel.workers import functions


@pytest.mark.parametrize("case", functions.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_functions(case: str, ranks: int, launcher: str) -> None:
    launched("functions", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    launched("functions", ranks, launcher).check_ended_well()
