"""One link of a chain of runs with another number of ranks each: load what was divided, train on, save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit
from hvd_compress.errors import StateError
from tests.parallel.workers.common import MIN_NUMEL, Net, check_equal_on_all_ranks, raises, train


def main(report: Any, folder: str, loads: str) -> None:
    """Train 3 steps and save; with `loads` from what the run before has saved and the test has divided."""
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), OneBit(), exchange="two_phase", min_numel=MIN_NUMEL
    )
    rank = horovod.rank()
    if loads == "yes":
        undivided = torch.load(Path(folder) / f"saved-{rank}.pt", weights_only=True)
        raises(StateError, lambda: optimizer.load_compression_state_dict(undivided), "redistribute(states")
        horovod.barrier()
        state = torch.load(Path(folder) / f"divided-{rank}.pt", weights_only=False)
        optimizer.load_compression_state_dict(state)
        report(loaded_norm=optimizer.compression_stats()["total"]["residual_norm"])
    train(model, optimizer, range(3), check=lambda step: None)
    check_equal_on_all_ranks(model)
    torch.save(optimizer.compression_state_dict(), Path(folder) / f"saved-{rank}.pt")
