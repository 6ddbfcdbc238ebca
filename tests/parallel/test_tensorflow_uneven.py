from __future__ import annotations

import pytest

from tests.parallel.launch import exhaustive, launched, thorough
from tests.parallel.workers import tensorflow_uneven


@pytest.mark.parametrize("case", tensorflow_uneven.cases)
@pytest.mark.parametrize(("ranks", "launcher"), [(2, "mpi"), thorough(2, "horovodrun-mpi"), exhaustive(4, "mpi")])
def test_uneven(case: str, ranks: int, launcher: str) -> None:
    launched("tensorflow_uneven", ranks, launcher).check(case)
