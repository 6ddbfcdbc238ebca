"""Hooks of DDP and Horovod's optimizer give the same bytes for the same bucket."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import ddp_and_horovod


@pytest.mark.parametrize("case", ddp_and_horovod.cases)
def test_ddp_and_horovod(case: str) -> None:
    outcome = launched("ddp_and_horovod", 2, "mpi")
    outcome.check_ended_well()
    outcome.check(case)
