from __future__ import annotations

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import STARTS, STARTS_OF_TWO, launched
from tests.parallel.workers import adagrad

tensorflow_adagrad = of_tensorflow("tensorflow_adagrad")

NEED_SEVERAL_RANKS = ("compressed_tensors_are_the_loopbacks", "ranks_must_agree_on_it")


@pytest.mark.parametrize("case", adagrad.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_adagrad(case: str, ranks: int, launcher: str) -> None:
    launched("adagrad", ranks, launcher).check(case)


@pytest.mark.parametrize("case", tensorflow_adagrad.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS_OF_TWO)
def test_adagrad_of_a_tape(case: str, ranks: int, launcher: str) -> None:
    launched("tensorflow_adagrad", ranks, launcher).check(case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in tensorflow_adagrad.cases if case not in NEED_SEVERAL_RANKS])
@pytest.mark.parametrize(("ranks", "launcher"), [(1, "gloo")])
def test_adagrad_of_a_tape_on_one_rank(case: str, ranks: int, launcher: str) -> None:
    launched("tensorflow_adagrad", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("adagrad", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
