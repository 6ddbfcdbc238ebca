from __future__ import annotations

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import launched, thorough
from tests.parallel.workers import cli

cli_tensorflow = of_tensorflow("cli_tensorflow")


@pytest.mark.parametrize("case", cli.cases)
@pytest.mark.parametrize("launcher", ["mpi", thorough("horovodrun-mpi")])
def test_cli(launcher: str, case: str) -> None:
    launched("cli", 2, launcher).check(case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", cli_tensorflow.cases)
def test_cli_with_tensorflow(case: str) -> None:
    launched("cli_tensorflow", 2, "gloo").check(case)


@pytest.mark.parametrize(
    ("topic", "launcher"), [("cli", "mpi"), thorough("cli", "horovodrun-mpi"), thorough("cli_tensorflow", "gloo")]
)
def test_every_rank_took_part(topic: str, launcher: str) -> None:
    outcome = launched(topic, 2, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(2), 2)
