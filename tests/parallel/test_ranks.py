"""The contract of `Ranks`, which `tests/unit/test_ranks.py` shows for threads, on real ranks of both frameworks."""

from __future__ import annotations

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import STARTS_OF_TWO, launched, thorough
from tests.parallel.workers import ranks

ranks_tensorflow = of_tensorflow("ranks_tensorflow")

# in `make test`, Gloo carries them, too
OF_TORCH = [(2, "mpi"), (2, "gloo"), thorough(4, "mpi")]


@pytest.mark.parametrize("case", ranks.cases)
@pytest.mark.parametrize(("size", "launcher"), OF_TORCH)
def test_ranks(case: str, size: int, launcher: str) -> None:
    launched("ranks", size, launcher).check(case)


@pytest.mark.parametrize("case", ranks_tensorflow.cases)
@pytest.mark.parametrize(("size", "launcher"), STARTS_OF_TWO)
def test_ranks_with_tensorflow(case: str, size: int, launcher: str) -> None:
    launched("ranks_tensorflow", size, launcher).check(case)


@pytest.mark.parametrize(("size", "launcher"), OF_TORCH)
def test_every_rank_took_part(size: int, launcher: str) -> None:
    check_all_took_part("ranks", size, launcher)


@pytest.mark.parametrize(("size", "launcher"), STARTS_OF_TWO)
def test_every_rank_took_part_with_tensorflow(size: int, launcher: str) -> None:
    check_all_took_part("ranks_tensorflow", size, launcher)


def check_all_took_part(topic: str, size: int, launcher: str) -> None:
    outcome = launched(topic, size, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(size), size)
