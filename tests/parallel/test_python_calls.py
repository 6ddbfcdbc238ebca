from __future__ import annotations

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import python_calls


@pytest.mark.parametrize("case", python_calls.cases)
@pytest.mark.parametrize(("ranks", "launcher"), [(2, "gloo")])
def test_python_calls(case: str, ranks: int, launcher: str) -> None:
    launched("python_calls", ranks, launcher).check(case)
