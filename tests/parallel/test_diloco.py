from __future__ import annotations

import pytest

from tests.parallel.launch import exhaustive, launched, thorough

STARTS = [thorough(1, "gloo"), (2, "mpi"), exhaustive(2, "gloo"), thorough(4, "mpi")]


def cases() -> list[str]:
    # a worker asks its launcher how many ranks there are
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_SIZE", "1")
        patch.setenv("HOROVOD_LOCAL_SIZE", "1")
        from tests.parallel.workers import diloco

        return list(diloco.cases)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_diloco(case: str, ranks: int, launcher: str) -> None:
    launched("diloco", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("diloco", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
