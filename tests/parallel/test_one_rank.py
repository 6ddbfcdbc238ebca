from __future__ import annotations

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import one_rank


@pytest.mark.parametrize("case", one_rank.cases)
def test_one_rank(case: str) -> None:
    launched("one_rank", 1, "gloo").check(case)


def test_it_ended_well() -> None:
    outcome = launched("one_rank", 1, "gloo")
    outcome.check_ended_well()
    assert outcome.value("size") == {0: 1}
