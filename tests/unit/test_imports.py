"""Importing the core is free of side effects, whatever else is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import hvd_compress

CORE = [
    "hvd_compress",
    "hvd_compress._keras.binding",
    "hvd_compress.async_server",
    "hvd_compress.cli",
    "hvd_compress.compressors",
    "hvd_compress.cost",
    "hvd_compress.engine",
    "hvd_compress.errors",
    "hvd_compress.exchange",
    "hvd_compress.feedback",
    "hvd_compress.fingerprint",
    "hvd_compress.kernels",
    "hvd_compress.loopback",
    "hvd_compress.missing",
    "hvd_compress.mpi",
    "hvd_compress.wire",
]
FOREIGN = ["torch", "tensorflow", "keras", "horovod", "mpi4py", "jax", "ml_dtypes", "sklearn"]

PROBE = """
import json, os, sys, threading, warnings
import numpy, numba  # what these do on import is theirs
before = (list(warnings.filters), threading.active_count(), len(os.listdir("/proc/self/task")), dict(os.environ))
random_state = numpy.random.get_state()[1].tobytes()
printer = numpy.get_printoptions(), numpy.geterr()
import importlib
for module in sys.argv[1].split():
    importlib.import_module(module)
print(json.dumps({
    "modules": sorted(sys.modules),
    "filters": warnings.filters == before[0],
    "threads": threading.active_count() - before[1],
    "tasks": len(os.listdir("/proc/self/task")) - before[2],
    "environ": dict(os.environ) == before[3],
    "random": numpy.random.get_state()[1].tobytes() == random_state,
    "numpy": (numpy.get_printoptions(), numpy.geterr()) == printer,
}))
"""


def probe(*modules: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, " ".join(modules)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


# each in a process of its own, too, since one may rely on what another one has imported
@pytest.mark.parametrize("modules", [" ".join(CORE), *(pytest.param(m, marks=pytest.mark.thorough) for m in CORE)])
def test_importing_the_core_has_no_side_effect(modules):
    seen = probe(*modules.split())
    loaded = {name.partition(".")[0] for name in seen.pop("modules")}
    assert not loaded & set(FOREIGN)
    assert seen == {"filters": True, "threads": 0, "tasks": 0, "environ": True, "random": True, "numpy": True}


@pytest.mark.parametrize(
    ("module", "backend", "not_loaded"),
    [
        ("hvd_compress.torch", "", ["tensorflow", "keras"]),
        ("hvd_compress.tensorflow", "", ["torch"]),
        ("hvd_compress.keras", "torch", ["tensorflow"]),
        ("hvd_compress.keras", "tensorflow", ["torch"]),
    ],
)
def test_an_edge_loads_no_framework_but_its_own(module, backend, not_loaded):
    needed = backend or module.rpartition(".")[2]
    if find_spec(needed) is None or (backend and version("keras").startswith("2.")):
        pytest.skip(f"this environment has no {needed} for {module} (`make test-keras2`)")
    program = f"import sys, {module}; print([n for n in {not_loaded} if n in sys.modules])"
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_module_starts_mpi():
    # MPI writes into the environment of its process, and `mpirun` refuses to start below such a one
    package = Path(hvd_compress.__file__).parent
    files = [f.relative_to(package.parent).with_suffix("") for f in package.rglob("*.py")]
    modules = [".".join(f.parts) for f in files if f.name not in ("__init__", "__main__")]
    assert "hvd_compress.mpi.one_sided" in modules
    for framework, needing in (("torch", ("torch", "ddp", "cli.rehearse")), ("tensorflow", ("tensorflow", "keras"))):
        if find_spec(framework) is None:
            modules = [module for module in modules if not any(name in module for name in needing)]
    program = (
        "import importlib, sys\n"
        "for module in sys.argv[1].split():\n"
        "    importlib.import_module(module)\n"
        "print([name for name in sys.modules if name.startswith('mpi4py')])"
    )
    command = [sys.executable, "-c", program, " ".join(modules)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    assert all(hasattr(hvd_compress, name) for name in hvd_compress.__all__)
    assert len(set(hvd_compress.__all__)) == len(hvd_compress.__all__)
    compressors = {"OneBit", "Threshold", "Adaptive", "QSGD", "TopK", "FP16", "BF16", "NoCompression"}
    assert compressors | {"Key", "from_config", "errors", "decode"} <= set(hvd_compress.__all__)
