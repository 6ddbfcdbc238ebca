"""The public names of all public modules are those in `public_names.txt`: none comes or goes unnoticed.

After a deliberate change write the file anew, and tell users in CHANGELOG:
`pytest tests/unit/test_public_names.py --write-names`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

SNAPSHOT = Path(__file__).parent / "public_names.txt"
# "core" stands for all modules directly below the package that are no edges
PARTS = {
    "core": [],
    "torch": ["hvd_compress.torch", "hvd_compress.ddp"],
    "tensorflow": [
        "hvd_compress.tensorflow",
        "hvd_compress.tensorflow.keras",
        "hvd_compress.tensorflow.keras.callbacks",
        "hvd_compress.tensorflow.keras.elastic",
        "hvd_compress.keras",
        "hvd_compress.keras.callbacks",
        "hvd_compress.keras.elastic",
    ],
}

# a foreign module among the names is what Horovod happens to import
PROBE = """
import importlib, json, pkgutil, sys, types
import hvd_compress

EDGES = ("ddp", "keras", "tensorflow", "torch")

def is_public(name, value):
    is_foreign = isinstance(value, types.ModuleType) and not value.__name__.startswith(("horovod", "hvd_compress"))
    return not name.startswith("_") and not is_foreign

def public(module):
    names = getattr(module, "__all__", None) or vars(module)
    return sorted({name for name in names if is_public(name, getattr(module, name))})

def core():
    below = [module.name for module in pkgutil.iter_modules(hvd_compress.__path__)]
    return ["hvd_compress", *(f"hvd_compress.{n}" for n in below if n not in EDGES and not n.startswith("_"))]

names = {module: public(importlib.import_module(module)) for module in sys.argv[1:] or core()}
print(json.dumps([f"{module}.{name}" for module in names for name in names[module]]))
"""


def found(part: str) -> list[str]:
    """The names that a part has in a process of its own, where nothing else is imported."""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *PARTS[part]], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def is_of(part: str, name: str) -> bool:
    """Whether a line of the snapshot belongs to a part."""
    edges = {
        "torch": ("hvd_compress.torch.", "hvd_compress.ddp."),
        "tensorflow": ("hvd_compress.tensorflow.", "hvd_compress.keras."),
    }
    if part in edges:
        return name.startswith(edges[part])
    return not name.startswith(sum(edges.values(), ()))


@pytest.mark.parametrize("part", PARTS)
def test_public_names_are_those_of_the_snapshot(part: str, pytestconfig: pytest.Config) -> None:
    if part != "core" and find_spec(part) is None:
        pytest.skip(f"{part} is not installed")
    if part == "tensorflow" and version("keras").startswith("2."):
        pytest.skip("the snapshot is of Keras 3, this environment has Keras 2 (`make test-keras2`)")
    recorded = SNAPSHOT.read_text().splitlines()
    names = found(part)
    if pytestconfig.getoption("write_names"):
        recorded = sorted([name for name in recorded if not is_of(part, name)] + names)
        SNAPSHOT.write_text("\n".join(recorded) + "\n")
    assert sorted(names) == [name for name in recorded if is_of(part, name)], (
        "public names have changed; if you mean it: pytest tests/unit/test_public_names.py --write-names, and CHANGELOG"
    )
