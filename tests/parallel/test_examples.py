"""The examples train on a part of MNIST, or on the digits of scikit-learn where that cannot be had."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launch import BIN, LAUNCHERS, exhaustive, thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--limit-train", "1280", "--width", "256", "--batch-size", "16", "--epochs", "3"]


def train(monkeypatch: pytest.MonkeyPatch, script: str, *options: str, **environment: str) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name, value in {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)]))
    launcher = importlib.import_module("launcher")
    mpi = tuple(LAUNCHERS["horovodrun-mpi"](2)[3:])
    launch = mpi if script == "async_mnist.py" else ("--gloo",)
    return launcher.train(2, *SMALL, *options, limit_seconds=200, script=script, launch=launch)


OPTIONS = {
    # one host stands for two nodes
    "daso_mnist.py": ["--ranks-per-node", "1"],
    "diloco_mnist.py": ["--sync-every", "8", "--fragments", "2", "--delay", "2", "--epochs", "6"],
}


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        ("pytorch_mnist.py", {}),
        thorough("eventgrad_mnist.py", {}),
        exhaustive("daso_mnist.py", {}),
        thorough("diloco_mnist.py", {}),
        thorough("async_mnist.py", {}),
        thorough("tensorflow2_mnist.py", {}),
        thorough("keras_mnist.py", {"KERAS_BACKEND": "tensorflow"}),
        exhaustive("keras_mnist.py", {"KERAS_BACKEND": "torch"}),
    ],
)
def test_an_example_learns(monkeypatch: pytest.MonkeyPatch, script: str, environment: dict[str, str]) -> None:
    result = train(monkeypatch, script, *OPTIONS.get(script, []), **environment)
    assert result["replicas_identical"]
    assert result["ranks"] == 2
    # guessing gives 0.1
    assert result["test_accuracy"] > 0.7
    assert result["dense_bytes_per_step"] > 10 * result["bytes_per_step"]


@pytest.mark.parametrize("heading", ["### PyTorch", thorough("### Keras"), thorough("### PyTorch without Horovod")])
def test_the_readme_runs(tmp_path: Path, heading: str) -> None:
    program = first_block((EXAMPLES.parent / "README.md").read_text().partition(f"\n{heading}\n")[2])
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    run_program(tmp_path, program)


@pytest.mark.thorough
@pytest.mark.parametrize("guide", ["diloco"])
def test_a_guide_runs(tmp_path: Path, guide: str) -> None:
    run_program(tmp_path, first_block((EXAMPLES.parent / "docs" / "guides" / f"{guide}.md").read_text()))


def first_block(section: str) -> str:
    return section.partition("```python\n")[2].partition("```")[0]


def run_program(tmp_path: Path, program: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(program)
    launcher = "torchrun" if "torch.distributed" in program else "mpi"
    command = [*LAUNCHERS[launcher](2), sys.executable, str(script)]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("script", ["tensorflow2_mnist.py", "keras_mnist.py"])
def test_an_example_is_short(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < 100
