"""Lightning and accelerate, where they are installed."""

from __future__ import annotations

import importlib.util

import pytest

from tests.parallel.launch import launched
from tests.parallel.workers import frameworks

STARTS = [(2, "gloo")]
PACKAGES = {"lightning": "pytorch_lightning", "accelerate": "accelerate"}


@pytest.mark.parametrize("case", frameworks.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_frameworks(case: str, ranks: int, launcher: str) -> None:
    package = PACKAGES.get(case.partition("_")[0])
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    launched("frameworks", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("frameworks", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)
