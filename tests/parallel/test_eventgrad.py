from __future__ import annotations

import pytest

from tests.parallel.launch import exhaustive, launched, thorough
from tests.parallel.workers import eventgrad, one_sided

STARTS = [thorough(1, "gloo"), (2, "gloo"), thorough(4, "mpi")]
STARTS_ONE_SIDED = [exhaustive(1, "mpi"), (2, "horovodrun-mpi"), thorough(4, "mpi")]


@pytest.mark.parametrize("case", eventgrad.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_eventgrad(case: str, ranks: int, launcher: str) -> None:
    launched("eventgrad", ranks, launcher).check(case)


@pytest.mark.parametrize("case", one_sided.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS_ONE_SIDED)
def test_one_sided(case: str, ranks: int, launcher: str) -> None:
    launched("one_sided", ranks, launcher).check(case)


def check_all_took_part(topic: str, ranks: int, launcher: str) -> None:
    outcome = launched(topic, ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    check_all_took_part("eventgrad", ranks, launcher)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS_ONE_SIDED)
def test_every_rank_took_part_one_sided(ranks: int, launcher: str) -> None:
    check_all_took_part("one_sided", ranks, launcher)


@pytest.mark.parametrize(("ranks", "launcher"), [(2, "mpi"), exhaustive(2, "gloo"), thorough(3, "mpi")])
def test_tensorflow(ranks: int, launcher: str) -> None:
    outcome = launched("tensorflow_eventgrad", ranks, launcher)
    outcome.check_ended_well()
    cases = {line["case"] for lines in outcome.reports.values() for line in lines if "case" in line}
    assert len(cases) == 7
    for case in sorted(cases):
        outcome.check(case)
