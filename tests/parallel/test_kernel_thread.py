"""What holds where kernels run in the hooks holds where a thread runs them: the same cases, with that thread."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launched, thorough
from tests.parallel.workers import buckets, values

THREAD = {"HVD_COMPRESS_KERNEL_THREAD": "1"}


@pytest.mark.parametrize("case", values.cases)
@pytest.mark.parametrize(("ranks", "launcher"), [(2, "mpi"), thorough(2, "horovodrun-mpi")])
def test_values(case: str, ranks: int, launcher: str) -> None:
    launched("values", ranks, launcher, **THREAD).check(case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", buckets.cases)
@pytest.mark.parametrize(("ranks", "launcher"), [(3, "mpi")])
def test_buckets(case: str, ranks: int, launcher: str) -> None:
    launched("buckets", ranks, launcher, **THREAD).check(case)


@pytest.mark.parametrize(("topic", "ranks", "launcher"), [("values", 2, "mpi"), thorough("buckets", 3, "mpi")])
def test_every_rank_took_part(topic: str, ranks: int, launcher: str) -> None:
    outcome = launched(topic, ranks, launcher, **THREAD)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
