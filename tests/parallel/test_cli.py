from __future__ import annotations

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import launched, thorough
from tests.parallel.workers import cli

cli_tensorflow = of_tensorflow("cli_tensorflow")

STARTS = [(2, "mpi"), thorough(2, "horovodrun-mpi")]


@pytest.mark.parametrize("case", cli.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_cli(ranks: int, launcher: str, case: str) -> None:
    launched("cli", ranks, launcher).check(case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", cli_tensorflow.cases)
def test_cli_with_tensorflow(case: str) -> None:
    launched("cli_tensorflow", 2, "gloo").check(case)


@pytest.mark.parametrize(
    ("topic", "ranks", "launcher"),
    [("cli", 2, "mpi"), thorough("cli", 2, "horovodrun-mpi"), thorough("cli_tensorflow", 2, "gloo")],
)
def test_every_rank_took_part(topic: str, ranks: int, launcher: str) -> None:
    outcome = launched(topic, ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
