from __future__ import annotations

import pytest

from tests.parallel.launch import launched, thorough

STARTS = [(2, "mpi"), thorough(4, "mpi")]


def cases() -> list[str]:
    from tests.parallel.workers import momentum

    return list(momentum.cases)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_momentum(case: str, ranks: int, launcher: str) -> None:
    launched("momentum", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    launched("momentum", ranks, launcher).check_ended_well()
