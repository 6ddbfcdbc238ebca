from __future__ import annotations

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import calls

STARTS = [(2, "gloo"), (4, "mpi")]


@pytest.mark.parametrize("case", calls.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_calls(case: str, ranks: int, launcher: str) -> None:
    launched("calls", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    launched("calls", ranks, launcher).check_ended_well()
