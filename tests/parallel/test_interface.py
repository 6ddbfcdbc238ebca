from __future__ import annotations

import pytest

from tests.parallel.launch import STARTS_OF_TWO, launched
from tests.parallel.workers import interface


@pytest.mark.parametrize("case", interface.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_interface(case: str, ranks: int, launcher: str) -> None:
    launched("interface", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("interface", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
