from __future__ import annotations

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import cli, cli_tensorflow

STARTS = [("cli", case, launcher) for case in cli.cases for launcher in ("gloo", "mpi")]
STARTS += [("cli_tensorflow", case, "gloo") for case in cli_tensorflow.cases]


@pytest.mark.parametrize(("topic", "case", "launcher"), STARTS)
def test_cli(topic: str, case: str, launcher: str) -> None:
    launched(topic, 2, launcher).check(case)


@pytest.mark.parametrize(("topic", "launcher"), [("cli", "gloo"), ("cli", "mpi"), ("cli_tensorflow", "gloo")])
def test_every_rank_took_part(topic: str, launcher: str) -> None:
    outcome = launched(topic, 2, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(2), 2)
