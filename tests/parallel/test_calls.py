from __future__ import annotations

import pytest

from tests.parallel.launch import launched, thorough
from tests.parallel.workers import calls

STARTS = [(2, "gloo"), thorough(4, "mpi")]
# what only some ranks begin is left behind, and is not to end the cases after it
ENVIRONMENT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}


@pytest.mark.parametrize("case", calls.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_calls(case: str, ranks: int, launcher: str) -> None:
    launched("calls", ranks, launcher, **ENVIRONMENT).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    launched("calls", ranks, launcher, **ENVIRONMENT).check_ended_well()
