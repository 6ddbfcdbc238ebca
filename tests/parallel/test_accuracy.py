"""The accuracy table, a few steps of some of its trainings with real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accuracy_cells import COMPRESSORS, CORRECTED, DENSE, OPTIMIZERS, SEEDS, Cell, candidates
from accuracy_training import name_of
from networks import mnist_data

from tests.parallel.launch import ROOT

LIMIT_SECONDS = 240


def tuned() -> list[dict[str, Any]]:
    """Rows that say that all rates and taus do alike, of the data that ranks will have."""
    data = name_of(mnist_data.load())

    def row(cell: Cell) -> dict[str, Any]:
        return {**cell._asdict(), "test": 1.0, "data": data}

    return [row(cell) for cell in candidates([row(cell) for cell in candidates([])])]


def made(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    record = folder / "accuracy.json"
    command = [sys.executable, "benchmarks/accuracy.py", "--tiny", "--jobs", "2", "--cells", *words]
    paths = ["--record", str(record), "--page", str(folder / "accuracy.md")]
    done = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    return done, json.loads(record.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record = {"form": "tiny", "runs": [], "tuning": tuned(), "rows": []}
    (tmp_path / "accuracy.json").write_text(json.dumps(record))
    return tmp_path


@pytest.mark.thorough
def test_every_compressor_trains_and_is_made_once(folder: Path) -> None:
    done, record = made(folder, "ResNet", "SGD", "seed=0")
    assert done.returncode == 0, done.stderr
    rows = {row["compressor"]: row for row in record["rows"]}
    assert set(rows) == set(COMPRESSORS)
    assert len(record["rows"]) == len(COMPRESSORS)
    assert all(0 < row["bytes"] <= rows[DENSE]["bytes"] for row in rows.values())
    assert f"**Not complete:** {len(COMPRESSORS)} of" in (folder / "accuracy.md").read_text()
    again, same = made(folder, "ResNet", "SGD", "seed=0")
    assert again.returncode == 0, again.stderr
    assert same["rows"] == record["rows"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("network", ["MLP", "transformer"])
def test_all_optimizers_train_the_other_networks(folder: Path, network: str) -> None:
    done, record = made(folder, network, "TopK(0.01)")
    assert done.returncode == 0, done.stderr
    assert {(row["optimizer"], row["seed"]) for row in record["rows"]} == {
        (optimizer, seed) for optimizer in (*OPTIMIZERS, *CORRECTED) for seed in SEEDS
    }
