"""One link of a chain of runs, some of one rank: what was applied and what is owed is what all gradients have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import AdaGrad, OneBit, TopK
from hvd_compress._torch.states import with_tensors
from hvd_compress.feedback import redistribute
from tests.parallel.workers.common import MIN_NUMEL, Net, check_equal_on_all_ranks, train

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "average": {"compression": OneBit(), "exchange": "two_phase"},
    "sum": {"compression": TopK(0.05), "exchange": "allgather", "op": horovod.Sum},
    "sum in buckets": {"compression": OneBit(), "exchange": "two_phase", "op": horovod.Sum, "bucket_bytes": 2**20},
    "adagrad": {"compression": OneBit(), "exchange": "two_phase", "adagrad": AdaGrad()},
}


def main(report: Any, folder: str, former: str, first: str) -> None:
    """Take up what `former` ranks have saved, train from step `first` on, and save.

    `report` gets nothing; files hold what this link has loaded, applied, and owes.
    """
    rank, size = horovod.rank(), horovod.size()
    for name, settings in SETTINGS.items():
        model = Net()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), min_numel=MIN_NUMEL, **settings)
        loaded = None
        if int(former):
            paths = [Path(folder) / f"{name}-{former}-{other}.pt" for other in range(int(former))]
            states = [torch.load(path, weights_only=True)["owed"] for path in paths]
            averages = settings.get("op", horovod.Average) == horovod.Average
            loaded = with_tensors(redistribute(states, size, average=averages)[rank])
            optimizer.load_compression_state_dict(loaded)
        train(model, optimizer, range(int(first), int(first) + STEPS), check=lambda step: None)
        check_equal_on_all_ranks(model)
        applied = {n: before[n] - p.detach() for n, p in model.named_parameters()}
        owed = optimizer.compression_state_dict()
        torch.save({"owed": owed, "applied": applied, "loaded": loaded}, Path(folder) / f"{name}-{size}-{rank}.pt")
