"""Training that goes on with another number of ranks keeps what was owed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_compress.feedback import redistribute
from tests.parallel.launch import run, thorough


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


CHAINS = [[(4, "mpi"), (2, "gloo"), (3, "mpi")], thorough([(2, "gloo"), (3, "mpi"), (1, "gloo"), (4, "mpi")])]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(str(ranks) for ranks, _ in chain))
def test_what_is_owed_goes_from_one_number_of_ranks_to_the_next(tmp_path: Path, chain: list[tuple[int, str]]) -> None:
    outcome = run("resize", *chain[0], str(tmp_path), "no")
    outcome.check_ended_well()
    for (old, _), (new, launcher) in pairwise(chain):
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
