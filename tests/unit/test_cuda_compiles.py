"""Whether kernels of devices compile: the interpreter, in which other tests run them, takes what a compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("arguments", [[], pytest.param(["--all"], marks=pytest.mark.thorough)], ids=["each", "all"])
def test_every_kernel_compiles_for_a_gpu_without_one(arguments):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compiled", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    told = done.stdout.splitlines()
    assert len(told) > 10
    assert all("_check" in line and "_decode" in line for line in told), told
