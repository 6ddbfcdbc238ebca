"""Training that goes on with another number of ranks keeps what was owed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_compress.feedback import redistribute
from tests.parallel.launch import run


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
