"""Lightning and accelerate, where they are installed."""

from __future__ import annotations

import importlib.util

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import frameworks

PACKAGES = {"lightning": "pytorch_lightning", "accelerate": "accelerate"}


@pytest.mark.parametrize("case", frameworks.cases)
def test_frameworks(case: str) -> None:
    package = PACKAGES.get(case.partition("_")[0])
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    launched("frameworks", 2, "gloo").check(case)


def test_every_rank_took_part() -> None:
    outcome = launched("frameworks", 2, "gloo")
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(2), 2)
