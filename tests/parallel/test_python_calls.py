from __future__ import annotations

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import python_calls


@pytest.mark.parametrize("case", python_calls.cases)
def test_python_calls(case: str) -> None:
    launched("python_calls", 2, "mpi").check(case)
