"""Training that goes on with another number of ranks keeps what was owed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_compress.feedback import redistribute
from tests.parallel.launch import run, thorough
from tests.parallel.workers.neutral import SHAPES, numbers
from tests.parallel.workers.resize_chain import STEPS


def owed(states: list[dict[str, Any]], name: str) -> np.ndarray:
    """What all ranks together owe of a tensor."""
    total = np.zeros(int(np.prod(states[0]["residuals"][name]["shape"])))
    for state in states:
        if name in state["residuals"]:  # a rank that is new owes nothing
            total += np.asarray(state["residuals"][name]["values"])
        if name in state["owner_residuals"]:
            entry = state["owner_residuals"][name]
            total[entry["start"] : entry["start"] + len(entry["values"])] += np.asarray(entry["values"])
    return total


@pytest.mark.thorough
def test_from_four_ranks_to_two_to_three(tmp_path: Path) -> None:
    outcome = run("resize", 4, "mpi", str(tmp_path), "no")
    outcome.check_ended_well()
    for old, new, launcher in ((4, 2, "gloo"), (2, 3, "mpi")):
        saved = [torch.load(tmp_path / f"saved-{rank}.pt", weights_only=True) for rank in range(old)]
        divided = redistribute(saved, new)
        for name in ("first.weight", "second.weight"):
            np.testing.assert_allclose(owed(divided, name), owed(saved, name), atol=1e-5)
            assert np.abs(owed(saved, name)).max() > 0.1
        for rank, state in enumerate(divided):
            torch.save(state, tmp_path / f"divided-{rank}.pt")
            if rank >= old:
                torch.save(saved[0], tmp_path / f"saved-{rank}.pt")
        outcome = run("resize", new, launcher, str(tmp_path), "yes")
        outcome.check_ended_well()
        squares = [sum(np.sum(e["values"] ** 2.0) for e in state["residuals"].values()) for state in divided]
        for rank, norm in outcome.value("loaded_norm").items():
            assert norm == pytest.approx(squares[rank] ** 0.5, rel=1e-5)


CHAINS = [((2, "gloo"), (1, "gloo"), (3, "mpi")), thorough(((2, "gloo"), (3, "mpi"), (1, "gloo"), (4, "mpi")))]
"""Ranks, and what starts them."""


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(str(ranks) for ranks, _ in chain))
def test_what_is_owed_comes_through_a_run_of_one_rank(chain: Sequence[tuple[int, str]], tmp_path: Path) -> None:
    """What was applied and what is still owed is what an uncompressed training would have added."""
    former = 0
    for link, (ranks, launcher) in enumerate(chain):
        outcome = run("resize_chain", ranks, launcher, str(tmp_path), str(former), str(link * STEPS))
        outcome.check_ended_well()
        former = ranks
    for setting in ("average", "sum", "sum in buckets"):
        averages = setting == "average"
        for name, shape in SHAPES.items():
            wanted, applied = np.zeros(shape), np.zeros(shape)
            for link, (ranks, _) in enumerate(chain):
                steps = range(link * STEPS, (link + 1) * STEPS)
                gradients = [numbers(name, rank, step, shape) for rank in range(ranks) for step in steps]
                wanted += np.sum(gradients, axis=0, dtype=np.float64) / (ranks if averages else 1)
                applied += saved_by(tmp_path, setting, ranks)[0]["applied"][name].numpy()
            states = [of_rank["owed"] for of_rank in saved_by(tmp_path, setting, former)]
            if name in states[0]["residuals"]:
                late = owed(states, name).reshape(shape) / (former if averages else 1)
                assert np.abs(late).max() > 0.1
                applied += late
            np.testing.assert_allclose(applied, wanted, atol=2e-4)
        (alone,) = saved_by(tmp_path, setting, 1)
        assert set(alone["loaded"]["residuals"]) == {"first.weight", "second.weight"}
        assert alone["owed"]["residuals"] == {}
    # updates that owners owe wait for owners
    (alone,) = saved_by(tmp_path, "adagrad", 1)
    assert alone["owed"]["residuals"] == {}
    for name, entry in alone["loaded"]["owner_residuals"].items():
        assert entry["values"].abs().max() > 0
        np.testing.assert_array_equal(alone["owed"]["owner_residuals"][name]["values"], entry["values"])


def saved_by(folder: Path, setting: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank of a link has saved."""
    return [torch.load(folder / f"{setting}-{ranks}-{rank}.pt", weights_only=True) for rank in range(ranks)]
