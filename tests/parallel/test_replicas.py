from __future__ import annotations

import pytest

from tests.parallel.launch import exhaustive, launched, thorough
from tests.parallel.workers import crowd, replicas

STARTS = [(3, "gloo"), thorough(4, "mpi")]


@pytest.mark.parametrize("case", replicas.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_replicas_after_200_steps(case: str, ranks: int, launcher: str) -> None:
    launched("replicas", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), [*STARTS, exhaustive(16, "mpi")])
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("crowd" if ranks == 16 else "replicas", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", crowd.cases)
def test_sixteen_ranks(case: str) -> None:
    launched("crowd", 16, "mpi").check(case)
