from __future__ import annotations

import pytest

from tests.parallel.launch import STARTS_OF_TWO, launched
from tests.parallel.workers import resuming


@pytest.mark.parametrize("case", resuming.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_resuming(case: str, ranks: int, launcher: str) -> None:
    launched("resuming", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    launched("resuming", ranks, launcher).check_ended_well()
