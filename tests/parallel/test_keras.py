from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.parallel.launch import exhaustive, launched, thorough

MAIN = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "torch": {"KERAS_BACKEND": "torch"},
    # Keras 2 beside a TensorFlow whose own Keras is Keras 3
    "tf_keras": {"HVD_COMPRESS_KERAS": "2", "TF_USE_LEGACY_KERAS": "1"},
}
# `make test-keras2`
SECOND = {"keras2": {"HVD_COMPRESS_KERAS": "2"}}
FLAVOURS = SECOND if version("keras").startswith("2.") else MAIN

# most of a start is the import of a framework and of Keras; Keras 2 runs at four ranks in the second environment
FIT = [
    (2, "mpi", "tensorflow"),
    exhaustive(2, "gloo", "tf_keras"),
    # two ranks fit with every compressor, and this start leaves none out
    thorough(2, "horovodrun-mpi", "torch"),
    exhaustive(4, "mpi", "torch"),
    exhaustive(4, "mpi", "tensorflow"),
]
if FLAVOURS is SECOND:
    FIT = [(2, "mpi", "keras2"), (4, "mpi", "keras2")]


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


@pytest.mark.parametrize(("ranks", "launcher", "flavour"), FIT)
def test_fit_and_averaging(ranks: int, launcher: str, flavour: str) -> None:
    topics = ["keras_fit"]
    if (ranks, launcher, flavour) != (2, "mpi", "tensorflow"):
        topics += ["keras_adam", "keras_diloco"]
    # two nodes of two ranks; in the main environment Keras 2 has two of one
    if flavour == "tf_keras" or ranks == 4:
        topics += ["keras_daso"]
    check_all("+".join(topics), ranks, launcher, flavour)


@pytest.mark.thorough
@pytest.mark.skipif(FLAVOURS is SECOND, reason="Keras 2 has shown it with what it fits")
def test_averaging_and_adam_on_tensorflow() -> None:
    check_all("keras_diloco+keras_adam", 2, "mpi", "tensorflow")


@pytest.mark.skipif(FLAVOURS is SECOND, reason="Keras 2 has shown it among its four ranks")
@pytest.mark.parametrize("backend", [exhaustive("tensorflow"), thorough("torch")])
def test_nodes_of_two_ranks(backend: str) -> None:
    check_all("keras_daso", 4, "mpi", backend)


@pytest.mark.parametrize("flavour", [(exhaustive if f == "tensorflow" else thorough)(f) for f in FLAVOURS])
def test_corners_and_adagrad(flavour: str) -> None:
    topics = "keras_corners+keras_adagrad"
    check_all(f"{topics}+keras_adam" if flavour == "torch" else topics, 2, "mpi", flavour)


@pytest.mark.parametrize("flavour", [(thorough if f != "torch" else exhaustive)(f) for f in FLAVOURS])
def test_one_rank(flavour: str) -> None:
    check_all("keras_adagrad+keras_alone", 1, "gloo", flavour)
