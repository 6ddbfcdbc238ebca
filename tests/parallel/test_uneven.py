"""Ranks that make different numbers of steps, or run different programs: an error on all, or a word on why."""

from __future__ import annotations

import pytest

from tests.parallel.launch import WITNESSES_STARTS, launched, thorough

CASES, WITNESSES = 39, 33
# what one rank has begun and the others never join is left behind, and is not to end the cases after it
ENVIRONMENT = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}


@pytest.mark.parametrize(("ranks", "launcher"), [(2, "gloo"), thorough(4, "mpi")])
def test_uneven(ranks: int, launcher: str) -> None:
    outcome = launched("uneven", ranks, launcher, **ENVIRONMENT)
    cases = {line["case"] for lines in outcome.reports.values() for line in lines if "case" in line}
    for case in sorted(cases):
        outcome.check(case)
    wanted = WITNESSES if (ranks, launcher) in WITNESSES_STARTS else CASES
    assert len(cases) == wanted, outcome.describe("other cases ran than there should be")
    outcome.check_ended_well()
