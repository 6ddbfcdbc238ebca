"""In an elastic run without compression a rank that ends is replaced, and the others go on, as with Horovod."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.elastic_run import elastic_run
from tests.parallel.workers.elastic import DEATH, DOOMED, STEPS

# two hosts that are both this one, so that no ssh is needed; the one that a rank died on is not used again
HOSTS = f"""#!/bin/sh
echo {DOOMED}:1
if [ -e {{folder}}/died ]; then echo localhost:2; else echo localhost:1; fi
"""


def run(folder: Path, way: str, package: str, **environment: str) -> list[list[dict[str, Any]]]:
    """What each process that took part has noted, those that began first before the others."""
    worker = ["tests.parallel.workers.elastic", way, package, str(folder)]
    ranks = "-np 2 --min-np 1 --max-np 2"
    return [*elastic_run(folder, HOSTS.format(folder=folder), ranks, worker, **environment).values()]


def check(processes: list[list[dict[str, Any]]]) -> dict[int, float]:
    """Three took part and two came to the end, with equal numbers; the sum of the weights before each step."""
    assert len(processes) == 3
    ended = [lines[:-1] for lines in processes if lines[-1:] == [{"end": True}]]
    assert len(ended) == 2
    survivor, joined = ended if len(ended[0]) > len(ended[1]) else ended[::-1]
    assert [line["step"] for line in survivor][: DEATH + 1] == [*range(DEATH + 1)]
    together = {line["step"]: line["total"] for line in survivor if line["ranks"] == 2}
    for line in joined:
        assert line["step"] >= DEATH
        assert line["total"] == together[line["step"]], line
    return {line["step"]: line["total"] for line in survivor if line["step"] <= STEPS}


@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
def test_a_rank_that_dies_is_replaced_as_with_horovod(tmp_path: Path) -> None:
    totals = {}
    for package in ("horovod", "hvd_compress"):
        folder = tmp_path / package
        folder.mkdir()
        totals[package] = check(run(folder, "torch", package))
    steps = totals["horovod"].keys() & totals["hvd_compress"].keys()
    assert steps >= set(range(STEPS))
    # every rank has the same gradient, so it does not matter when the other one joined
    for step in steps:
        assert totals["hvd_compress"][step] == pytest.approx(totals["horovod"][step], rel=1e-6)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
def test_models_of_any_type_and_layout_go_on(tmp_path: Path) -> None:
    totals = check(run(tmp_path, "types", "hvd_compress"))
    assert len(set(totals.values())) == len(totals)


@pytest.mark.thorough
def test_tapes_go_on(tmp_path: Path) -> None:
    totals = check(run(tmp_path, "tensorflow", "hvd_compress"))
    assert totals[STEPS - 1] < totals[0]


KERAS = [] if find_spec("keras") is None or version("keras").startswith("2.") else ["tensorflow", "torch"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", KERAS)
def test_keras_goes_on(tmp_path: Path, backend: str) -> None:
    totals = check(run(tmp_path, "keras", "hvd_compress", KERAS_BACKEND=backend))
    assert totals[STEPS - 1] != totals[0]
