"""The repetitions of the papers' experiments, a few steps of each with real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import places
import pytest
from reproduce import dryden, page
from reproduce.data import cifar_folders
from reproduce.experiments import EXPERIMENTS, settings_of
from reproduce.runner import run
from reproduce.store import Record, Store

import hvd_compress
from tests.parallel.launch import ROOT, exhaustive, launched, thorough
from tests.parallel.workers.reproduce import cases


def tiny(name: str, folder: Path, label: str) -> Record:
    """The record of one unit of the tiny form, which real ranks have made."""
    (unit,) = [u for u in EXPERIMENTS[name].plan(settings_of(name, "tiny"), [0]) if u.label == label]
    store = Store(folder / "results")
    assert run(name, [unit], store, ["python"]) == []
    page.write(folder / "page.md", store)
    record = store.read(unit)
    assert record is not None
    return record


def needs_cifar() -> None:
    if not any(folder.is_dir() for folder in cifar_folders()):
        pytest.skip(f"no CIFAR-10 in {', '.join(map(str, cifar_folders()))}")


def needs(*names: str) -> None:
    missing = [name for name in names if not hasattr(hvd_compress, name)]
    if missing:
        pytest.skip(f"hvd_compress has no {', '.join(missing)}")


@pytest.mark.thorough
@pytest.mark.parametrize("case", cases)
def test_an_interrupted_training_loses_nothing(case: str) -> None:
    launched("reproduce", 2, "mpi").check(case)


@pytest.mark.thorough
def test_every_rank_took_part() -> None:
    launched("reproduce", 2, "mpi").check_ended_well()


@pytest.mark.thorough
def test_dryden_starts(tmp_path: Path) -> None:
    result = tiny("dryden", tmp_path, "adaptive")["result"]
    assert result["replicas_identical"]
    assert len(result["test"]) == 2
    # 400 images, 10 on each of 2 ranks
    assert result["steps"] == 40
    # of all ranks: what one sends for the layer more than its share, the other sends less
    assert result["watched"]["of"] == dryden.OF_ALL
    assert len(result["watched"]["bytes"]) == 40
    assert min(result["watched"]["bytes"]) > 0
    assert set(result["watched"]["bytes"]) == {result["watched"]["bytes"][0]}
    assert result["watched"]["step"] == list(range(40))


@pytest.mark.exhaustive
def test_qsgd_starts(tmp_path: Path) -> None:
    result = tiny("qsgd", tmp_path, "MNIST, 4 bits, Elias coded")["result"]
    assert result["replicas_identical"]
    dense = 4 * result["parameters"] * result["steps"]
    assert 0 < result["bytes_sent"][0] < dense / 8


@pytest.mark.parametrize(
    "method", [thorough("adaptive(64), Golomb coded"), exhaustive("Percentile(90), error feedback")]
)
def test_methods_start(method: str, tmp_path: Path) -> None:
    result = tiny("methods", tmp_path, f"MNIST, {method}")["result"]
    assert result["replicas_identical"]
    dense = 4 * result["parameters"] * result["steps"]
    assert 0 < result["bytes_sent"][0] < dense / 7


@pytest.mark.exhaustive
def test_lam_starts(tmp_path: Path) -> None:
    needs("Percentile", "ParameterServer")
    needs_cifar()
    result = tiny("lam", tmp_path, "Percentile(90)")["result"]
    assert result["replicas_identical"]
    assert len(result["train"]) == 4
    # the first rank is the server, which sends dense sums
    assert result["bytes_sent"][1] < result["bytes_sent"][0]
    assert result["watched"]["step"][0] == 0


@pytest.mark.thorough
def test_lam_times_all_methods_in_turns(tmp_path: Path) -> None:
    needs("Percentile", "ParameterServer")
    needs_cifar()
    result = tiny("lam", tmp_path, "steps of 2 workers")["result"]
    assert len({len(row["seconds"]) for row in result["rows"].values()}) == 1
    assert {"dense, allreduce", "Percentile(90)", "Percentile(90), error feedback"} <= set(result["rows"])


@pytest.mark.parametrize(
    "method", [thorough("adaptive(64)"), *map(exhaustive, ("DASO", "DiLoCo, adaptive(64)", "D-PSGD"))]
)
def test_the_transformer_learns(tmp_path: Path, method: str) -> None:
    result = tiny("gpt", tmp_path, method)["result"]
    assert result["step"] == [4, 8]
    # a byte of 256 has 5.545 nats
    assert result["test"][1] < result["test"][0] < 5.6
    assert 0 < result["bytes"][0] < result["bytes"][1]


@pytest.mark.thorough
def test_trainings_at_the_same_time_need_no_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places.shutil, "which", lambda name, **_: None)
    changes = ["rates=[]", 'methods=["one-bit", "SparseLoCo"]', "device=cpu", "precision=bf16"]
    units, store = EXPERIMENTS["gpt"].plan(settings_of("gpt", "tiny", changes), [0]), Store(tmp_path)
    assert run("gpt", units, store, ["python"], jobs=2) == []
    for unit in units:
        record = store.read(unit)
        assert record is not None
        result = record["result"]
        assert (result["device"], result["replicas_identical"]) == ("CPU", True)
        assert result["test"][1] < result["test"][0] < 5.6


@pytest.mark.thorough
def test_steps_of_the_transformer_are_timed(tmp_path: Path) -> None:
    rows = tiny("gpt", tmp_path, "steps at unlimited")["result"]["rows"]
    assert {"dense fp32", "one-bit", "DiLoCo"} <= set(rows)
    assert {len(row["seconds"]) for row in rows.values()} == {2}


@pytest.mark.exhaustive
def test_sievert_starts(tmp_path: Path) -> None:
    needs("ParameterServer")
    needs_cifar()
    result = tiny("sievert", tmp_path, "2 workers")["result"]
    assert len(result["ranks"]) == 2
    for of_rank in result["ranks"]:
        counted = sum(of_rank[key] for key in ("encode_seconds", "start_seconds", "exchange_seconds", "decode_seconds"))
        assert 0 < counted < of_rank["compute"]


@pytest.mark.parametrize("start", [["-m", "benchmarks.reproduce"], ["benchmarks/reproduce"]])
def test_both_commands_write_the_page(start: list[str], tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    command = [sys.executable, *start, "--page-only", "--results", str(tmp_path), "--page", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "**Missing:**" in target.read_text()
