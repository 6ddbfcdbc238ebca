"""Hooks of DistributedDataParallel and FSDP2, on ranks that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.launch import BIN, LAUNCHERS, ROOT, exhaustive, launched, run, thorough
from tests.parallel.workers import ddp, ddp_diloco, fsdp

STARTS = [(2, "torchrun"), thorough(4, "torchrun")]


@pytest.mark.parametrize("case", ddp.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_ddp(case: str, ranks: int, launcher: str) -> None:
    launched("ddp", ranks, launcher).check(case)


@pytest.mark.parametrize("case", ddp_diloco.cases)
@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_diloco(case: str, ranks: int, launcher: str) -> None:
    launched("ddp_diloco", ranks, launcher).check(case)


@pytest.mark.parametrize(("ranks", "launcher"), STARTS)
def test_every_rank_took_part(ranks: int, launcher: str) -> None:
    outcome = launched("ddp", ranks, launcher)
    outcome.check_ended_well()
    assert outcome.value("size") == dict.fromkeys(range(ranks), ranks)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dies", "LostRankError"),
        exhaustive("raises_in_its_loss", "LostRankError"),
        thorough("does_not_answer", "LostRankError"),
        thorough("gets_damaged_bytes", "LostRankError"),
    ],
)
def test_a_rank_that_fails_ends_the_others(kind: str, told: str) -> None:
    outcome = run("ddp_failures", 3, "torchrun", kind, limit_seconds=60.0)
    assert outcome.returncode == 0, outcome.describe("the start failed")
    errors = outcome.value("error")
    assert {0, 1} <= set(errors), outcome.describe("not all ranks were told")
    assert all(errors[rank].startswith(told) for rank in (0, 1)), errors
    # at once where a connection ends, else at the timeout of 4 s
    assert all(outcome.value("after")[rank] < 12.0 for rank in (0, 1))
    # the step that failed counts for nothing
    assert {outcome.value("steps")[rank] for rank in (0, 1)} == {3}
    assert all(outcome.value("finite").values())
    # and nothing goes on as if it had not been
    assert {0, 1} <= set(outcome.value("again"))
    assert not outcome.left
    of_itself = {"raises_in_its_loss": "ArithmeticError", "gets_damaged_bytes": "WireError"}
    if kind in of_itself:
        assert errors[2].startswith(of_itself[kind])


@pytest.mark.thorough
def test_a_rank_that_never_registers_is_told_to_the_others() -> None:
    outcome = run("ddp_failures", 3, "torchrun", "never_registers", limit_seconds=60.0)
    errors = outcome.value("error")
    assert set(errors) == {0, 1}, outcome.describe("not all ranks were told")
    for rank, error in errors.items():
        assert error.startswith(f"LostRankError: rank {rank} of 3 has not met all others"), error
        assert "All ranks of the process group must call ddp.register_comm_hook" in error
    assert all(after < 12.0 for after in outcome.value("after").values())


@pytest.mark.parametrize("case", fsdp.cases)
def test_fsdp(case: str) -> None:
    outcome = launched("fsdp", 4, "torchrun")
    outcome.check_ended_well()
    outcome.check(case)


@pytest.mark.thorough
def test_the_example_learns(tmp_path: Path) -> None:
    report = tmp_path / "result.json"
    command = [
        *LAUNCHERS["torchrun"](2),
        sys.executable,
        str(ROOT / "examples" / "ddp_mnist.py"),
        "--json",
        str(report),
    ]
    command += ["--limit-train", "1280", "--width", "256", "--batch-size", "16", "--epochs", "3"]
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(report.read_text())
    assert result["replicas_identical"]
    assert result["ranks"] == 2
    # guessing gives 0.1
    assert result["test_accuracy"] > 0.7
    assert result["dense_bytes_per_step"] > 10 * result["bytes_per_step"]


def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("\n### PyTorch without Horovod\n")[2]
    script = tmp_path / "train.py"
    script.write_text(section.partition("```python\n")[2].partition("```")[0])
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*LAUNCHERS["torchrun"](2), sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
