from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.parallel.launch import launched, thorough
from tests.thorough import witnessed_by

MAIN = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "torch": {"KERAS_BACKEND": "torch"},
    # Keras 2 beside a TensorFlow whose own Keras is Keras 3
    "tf_keras": {"HVD_COMPRESS_KERAS": "2", "TF_USE_LEGACY_KERAS": "1"},
}
# `make test-keras2`
SECOND = {"keras2": {"HVD_COMPRESS_KERAS": "2"}}
FLAVOURS = SECOND if version("keras").startswith("2.") else MAIN

# Keras 2 runs at four ranks in the second environment
FIT = [(2, "gloo" if flavour in ("torch", "tf_keras") else "mpi", flavour) for flavour in FLAVOURS]
FIT += [(4, "mpi", flavour) for flavour in FLAVOURS if flavour != "tf_keras"]


def check_all(topic: str, ranks: int, launcher: str, flavour: str) -> None:
    outcome = launched(topic, ranks, launcher, **FLAVOURS[flavour])
    outcome.check_ended_well()
    # the worker imports one Keras for one backend, so that its cases are known from what it reports
    sources = [(Path(__file__).parent / "workers" / f"{name}.py").read_text() for name in topic.split("+")]
    nodes = [node for source in sources for node in ast.parse(source).body]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list}
    reported = {line["case"] for lines in outcome.reports.values() for line in lines if "case" in line}
    # beside these there are cases for one Keras or one backend only
    assert {name.partition("[")[0] for name in reported} >= defined
    for case in sorted(reported):
        outcome.check(case)


# most of a start is the import of a framework and of Keras
@pytest.mark.parametrize(
    ("ranks", "launcher", "flavour"),
    [start if start == (2, "mpi", "tensorflow") else thorough(*start) for start in FIT],
)
def test_fit_and_averaging(ranks: int, launcher: str, flavour: str) -> None:
    # two nodes of two ranks; in the main environment Keras 2 has two of one
    with_daso = flavour == "tf_keras" or ranks == 4
    topics = "keras_fit+keras_adam+keras_diloco"
    check_all(f"{topics}+keras_daso" if with_daso else topics, ranks, launcher, flavour)


@pytest.mark.parametrize("flavour", witnessed_by(["torch"], FLAVOURS))
def test_corners_and_adagrad(flavour: str) -> None:
    topics = "keras_corners+keras_adagrad"
    # the other backend has shown it in `make test` where it fits models
    check_all(f"{topics}+keras_adam" if flavour == "torch" else topics, 2, "mpi", flavour)


@pytest.mark.thorough
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_one_rank(flavour: str) -> None:
    check_all("keras_adagrad+keras_alone", 1, "gloo", flavour)
