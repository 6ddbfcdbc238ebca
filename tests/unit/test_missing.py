"""Who lacks a framework, Horovod or MPI, or has a Horovod that does not fit, is told which command mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hvd_compress

ROOT = Path(hvd_compress.__file__).parents[1]
BUILD = "hvd-compress build-horovod"

# (files of a folder that is looked at first, by their paths; packages of this environment are hidden by empty ones)
NO_MODULE = "raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')"
FRAMEWORK = {"torch": "__version__ = '2.13.0'", "tensorflow": "__version__ = '2.21.0'\nkeras = None"}
NOT_BUILT = "raise ImportError('Extension horovod.{0} has not been built: /x/mpi_lib.so not found\\nIf')"
MISMATCH = "raise type('HorovodVersionMismatchError', (ImportError,), {{}})('Framework {0} installed with version 2.1')"
UNDEFINED = "raise OSError('/x/mpi_lib.so: undefined symbol: _ZN3c10')"


def imported(tmp_path: Path, files: dict[str, str], program: str) -> str:
    """What a program that must fail with an ImportError prints: error and cause."""
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    check = (
        f"try:\n    {program}\nexcept ImportError as error:\n"
        "    print(type(error).__name__, error, '| cause:', repr(error.__cause__))\nelse:\n    print('no error')"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop("KERAS_BACKEND", None)
    done = subprocess.run([sys.executable, "-W", "error", "-c", check], capture_output=True, text=True, timeout=120,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


EDGES = {"hvd_compress.torch": "torch", "hvd_compress.tensorflow": "tensorflow",
         "hvd_compress.tensorflow.keras": "tensorflow"}  # fmt: skip


def witnessed_edges() -> list[Any]:
    """Those of Keras and of TensorFlow begin alike."""
    return [
        pytest.param(edge, framework, marks=[pytest.mark.thorough] if edge.endswith("keras") else [])
        for edge, framework in EDGES.items()
    ]


@pytest.mark.parametrize(("edge", "framework"), EDGES.items())
def test_without_horovod(tmp_path: Path, edge: str, framework: str) -> None:
    files = {f"{framework}.py": FRAMEWORK[framework], "horovod.py": NO_MODULE.format("horovod")}
    text = imported(tmp_path, files, f"import {edge}")
    assert text.startswith("MissingError Horovod is not installed")
    assert BUILD in text
    assert text.endswith("""cause: ModuleNotFoundError("No module named 'horovod'")""")


@pytest.mark.parametrize(("edge", "framework"), witnessed_edges())
@pytest.mark.parametrize("horovod", [True, False])
def test_without_the_framework(tmp_path: Path, edge: str, framework: str, horovod: bool) -> None:
    files = {f"{framework}.py": NO_MODULE.format(framework)}
    if horovod:
        files |= {"horovod/__init__.py": "", f"horovod/{framework}/__init__.py": f"import {framework}"}
    else:
        files["horovod.py"] = NO_MODULE.format("horovod")
    text = imported(tmp_path, files, f"import {edge}")
    assert f"pip install {framework}" in text
    assert BUILD in text
    assert "cause: ModuleNotFoundError" in text


@pytest.mark.parametrize(("edge", "framework"), witnessed_edges())
@pytest.mark.parametrize(
    ("reason", "shown"),
    [(NOT_BUILT, "has not been built"), (MISMATCH, "installed with version 2.1"), (UNDEFINED, "undefined symbol"),
     ("", "No module named 'horovod.{0}.mpi_ops'"), (NO_MODULE.format("cloudpickle"), "cloudpickle")],
    ids=["not built", "other version", "does not load", "halved", "needs more"],
)  # fmt: skip
def test_a_horovod_that_does_not_fit(tmp_path: Path, edge: str, framework: str, reason: str, shown: str) -> None:
    place = f"horovod/{framework}"
    # TensorFlow's part fails by itself; torch's swallows the reason and is left without names
    at_once = framework == "tensorflow" and reason
    files = {
        f"{framework}.py": FRAMEWORK[framework],
        "horovod/__init__.py": "",
        f"{place}/__init__.py": reason.format(framework) if at_once else "",
    }
    if reason and not at_once:
        files[f"{place}/mpi_ops.py"] = reason.format(framework)
    if framework == "tensorflow" and not reason:
        files[f"{place}/__init__.py"] = "import horovod.tensorflow.mpi_ops"
    text = imported(tmp_path, files, f"import {edge}")
    assert text.startswith("MissingError Horovod is installed, but")
    assert shown.format(framework) in text
    assert BUILD in text
    assert "cause: None" not in text


def test_a_framework_that_cannot_be_loaded_is_not_horovods_fault(tmp_path: Path) -> None:
    files = {"torch.py": "raise OSError('libcudart.so.13: cannot open shared object file')", "horovod/__init__.py": "",
             "horovod/torch/__init__.py": "import torch"}  # fmt: skip
    text = imported(tmp_path, files, "import hvd_compress.torch")
    assert "PyTorch is installed, but cannot be loaded (OSError: libcudart.so.13" in text
    assert BUILD not in text


@pytest.mark.parametrize(
    ("torch", "shown"),
    [(NO_MODULE.format("torch"), 'pip install "hvd_compress[torch]"'),
     ("raise OSError('libcudart.so.13: cannot open')", "--force-reinstall torch")],
)  # fmt: skip
def test_hooks_need_torch_alone(tmp_path: Path, torch: str, shown: str) -> None:
    text = imported(tmp_path, {"torch.py": torch, "horovod.py": NO_MODULE.format("horovod")}, "import hvd_compress.ddp")
    assert text.startswith("MissingError")
    assert shown in text
    assert BUILD not in text


@pytest.mark.parametrize(
    ("files", "shown"),
    [({"keras.py": NO_MODULE.format("keras")}, ["pip install keras"]),
     ({"keras.py": "import tensorflow", "tensorflow.py": NO_MODULE.format("tensorflow")},
      ["pip install tensorflow", "KERAS_BACKEND"]),
     ({"keras.py": "raise ImportError('half of it')"}, ["half of it", "--force-reinstall keras"]),
     ({"keras.py": "class backend:\n    backend = staticmethod(lambda: 'torch')", "torch.py": FRAMEWORK["torch"],
       "horovod.py": NO_MODULE.format("horovod")}, ["Horovod is not installed", BUILD])],
    ids=["no keras", "no backend", "broken", "no horovod"],
)  # fmt: skip
def test_keras(tmp_path: Path, files: dict[str, str], shown: list[str]) -> None:
    text = imported(tmp_path, files, "import hvd_compress.keras")
    assert text.startswith("MissingError")
    assert all(part in text for part in shown), text


@pytest.mark.parametrize(
    ("mpi", "shown"),
    [(NO_MODULE.format("mpi4py"), 'pip install "hvd_compress[mpi]"'),
     ("raise RuntimeError('cannot load MPI library')", "cannot load MPI library")],
)  # fmt: skip
def test_the_asynchronous_server_without_mpi(tmp_path: Path, mpi: str, shown: str) -> None:
    program = (
        "import numpy, hvd_compress.mpi as m; "
        "m.AsyncParameterServer({'w': numpy.zeros(2, numpy.float32)}, lambda gradients: None)"
    )
    text = imported(tmp_path, {"mpi4py.py": mpi}, program)
    assert text.startswith("MissingError AsyncParameterServer needs")
    assert shown in text


def test_real_ranks_of_the_command_line(tmp_path: Path) -> None:
    files = {f"{name}.py": NO_MODULE.format(name) for name in ("torch", "tensorflow", "horovod")}
    text = imported(tmp_path, files, "from hvd_compress.cli.ranks import open_ranks; open_ranks()")
    assert "hvd-compress check" in text
    assert "pip install torch" in text
    assert "pip install tensorflow" in text


@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
def test_the_edge_of_this_environment_is_not_disturbed() -> None:
    program = "import hvd_compress.torch as hvd, horovod.torch as stock; print(hvd.init is stock.init)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr
