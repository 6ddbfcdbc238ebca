from __future__ import annotations

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import launched, thorough
from tests.parallel.workers import cli

STARTS = [(2, "gloo"), thorough(2, "mpi")]
cli_tensorflow = of_tensorflow("cli_tensorflow")


@pytest.mark.parametrize("case", cli.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_cli(case: str, ranks: int, launcher: str) -> None:
    launched("cli", ranks, launcher).check(case)


@pytest.mark.parametrize("case", cli_tensorflow.cases)
@pytest.mark.parametrize(("ranks", "launcher"), [thorough(2, "gloo")])
def test_cli_with_tensorflow(case: str, ranks: int, launcher: str) -> None:
    launched("cli_tensorflow", ranks, launcher).check(case)


@pytest.mark.parametrize(
    ("ranks", "launcher", "topic"),
    [(2, "gloo", "cli"), thorough(2, "mpi", "cli"), thorough(2, "gloo", "cli_tensorflow")],
)
def test_every_rank_took_part(ranks: int, launcher: str, topic: str) -> None:
    outcome = launched(topic, ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
