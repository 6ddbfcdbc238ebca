from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.parallel.launch import Outcome, launched

STARTS = [(2, "gloo"), (4, "mpi")]
BACKENDS = ["tensorflow", "torch"]


def outcome_of(ranks: int, launcher: str, backend: str) -> Outcome:
    return launched("keras_fit", ranks, launcher, KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_fit(ranks: int, launcher: str, backend: str) -> None:
    outcome = outcome_of(ranks, launcher, backend)
    outcome.check_ended_well()
    # the worker imports Keras for one backend, so that its cases are known from what it reports
    source = ast.parse((Path(__file__).parent / "workers" / "keras_fit.py").read_text())
    defined = {node.name for node in source.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    reported = {line["case"] for lines in outcome.reports.values() for line in lines if "case" in line}
    assert {name.partition("[")[0] for name in reported} == defined
    for case in sorted(reported):
        outcome.check(case)
