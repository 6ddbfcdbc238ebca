"""Every public name of Horovod's, of its submodules too, is there under the name of the edge that stands for it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

# names of Horovod's own values: what else a module has are the modules that it imports
PROBE = """
import importlib, inspect, json, sys, types
theirs, mine = sys.argv[1], sys.argv[2]
importlib.import_module(mine)
importlib.import_module(theirs)

def public(module):
    def is_foreign(value):
        return isinstance(value, types.ModuleType) and "horovod" not in value.__name__

    return {n for n, v in vars(module).items() if not n.startswith("_") and not is_foreign(v)}

def lacking(ours, theirs):
    if not (inspect.isroutine(ours) and inspect.isfunction(theirs)) or ours is theirs:
        return set()
    known = inspect.signature(ours).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return set()
    return set(inspect.signature(theirs).parameters) - set(known)

missing = []
below = [n for n in sys.modules if n.startswith(theirs + ".") and not n.rpartition(".")[2].startswith("_")]
for name in sorted([theirs, *below]):
    ours = importlib.import_module(mine + name.removeprefix(theirs))
    there = sys.modules[name]
    missing += [f"{ours.__name__}.{n}" for n in sorted(public(there)) if not hasattr(ours, n)]
    for n in sorted(public(there) & set(vars(ours))):
        missing += [f"{ours.__name__}.{n}({p}=)" for p in sorted(lacking(getattr(ours, n), getattr(there, n)))]
print(json.dumps({"modules": len(below), "missing": missing}))
"""


def run(program: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("edge", ["torch", "tensorflow", "tensorflow.keras"])
def test_an_edge_has_all_of_horovods_names(edge: str) -> None:
    if edge == "torch" and find_spec("torch") is None:
        pytest.skip("this environment has no torch (`make test-keras2`)")
    found = json.loads(run(PROBE, f"horovod.{edge}", f"hvd_compress.{edge}"))
    assert found["modules"] > 1
    assert found["missing"] == []


def names_in(module: str) -> set[str]:
    """Public names that a module of Horovod defines, or imports from Horovod: it needs a Keras that is not there."""
    package = Path(str(find_spec("horovod.common").submodule_search_locations[0])).parent  # type: ignore[union-attr]
    path = package / module
    nodes = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("horovod")
        for alias in node.names
    }
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in imported | defined if not name.startswith("_")}


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_has_all_of_horovods_names(backend: str) -> None:
    if version("keras").startswith("2."):
        pytest.skip("hvd_compress.keras is for Keras 3, this environment has Keras 2 (`make test-keras2`)")
    modules = {"": "keras", ".callbacks": "keras/callbacks", ".elastic": "keras/elastic"}
    wanted = {f"hvd_compress.keras{inner}": sorted(names_in(path)) for inner, path in modules.items()}
    assert all(wanted.values())
    program = (
        "import importlib, json, sys\n"
        "wanted = json.loads(sys.argv[1])\n"
        "importlib.import_module('hvd_compress.keras')\n"
        "print([f'{m}.{n}' for m, names in wanted.items() for n in names"
        " if not hasattr(importlib.import_module(m), n)])"
    )
    assert run(program, json.dumps(wanted), KERAS_BACKEND=backend) == "[]"
