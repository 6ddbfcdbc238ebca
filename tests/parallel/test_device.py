from __future__ import annotations

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import device


@pytest.mark.thorough
@pytest.mark.parametrize("case", device.cases)
def test_device(case: str) -> None:
    launched("device", 2, "gloo").check(case)
