from __future__ import annotations

import pytest

from tests.parallel.launch import exhaustive, launched, thorough

STARTS = [thorough(1, "gloo"), exhaustive(2, "gloo"), (4, "mpi")]


def cases() -> list[str]:
    # a worker asks its launcher how many ranks there are
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_SIZE", "1")
        patch.setenv("HOROVOD_LOCAL_SIZE", "1")
        from tests.parallel.workers import daso

        return list(daso.cases)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_daso(case: str, ranks: int, launcher: str) -> None:
    launched("daso", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("daso", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
