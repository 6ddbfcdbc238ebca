"""One bucket through Horovod and through a hook of DDP: the same bytes come back, step for step."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import Any
from unittest import mock

import horovod.torch as horovod
import torch
import torch.distributed as dist

import hvd_compress.torch as hvd
from hvd_compress import ddp
from hvd_compress.exchange import kinds
from tests.parallel.cases import Cases
from tests.parallel.workers.ddp import MIN_NUMEL, Known, hook_of, use
from tests.parallel.workers.neutral import COMPRESSORS_AND_EXCHANGES

cases = Cases()


def join_distributed() -> None:
    """Start torch.distributed among the ranks that Horovod has."""
    if dist.is_initialized():
        return
    mine = tempfile.mkdtemp() if horovod.rank() == 0 else None
    folder = horovod.broadcast_object(mine, 0, name="tests.folder")
    store = dist.FileStore(os.path.join(folder, "store"), horovod.size())
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=horovod.rank(), world_size=horovod.size(), timeout=limit)


@cases.each(COMPRESSORS_AND_EXCHANGES)
def the_bytes_are_those_of_horovod(setting: Any) -> None:
    compressor, exchange = setting
    join_distributed()
    # no bucket is divided anew where parameters may be unused
    ours = torch.nn.parallel.DistributedDataParallel(Known(), find_unused_parameters=True)
    with mock.patch.object(kinds, "saves_bytes", return_value=True):
        ddp.register_comm_hook(ours, compressor, exchange=exchange, min_numel=MIN_NUMEL)
        ours(0).backward()
        (order,) = hook_of(ours)._plan
        theirs = Known()
        named = dict(theirs.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(theirs.parameters(), lr=0.0), named.items(), compressor, exchange=exchange,
            min_numel=MIN_NUMEL, groups=[[named[name] for name in order]],
        )  # fmt: skip
        for step in range(4):
            if step:
                ours(step).backward()
            theirs(step).backward()
            optimizer.synchronize()
            for (name, p), q in zip(ours.module.named_parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), f"{name} in step {step}"
            with optimizer.skip_synchronize():
                optimizer.step()
            use(ours)
            ours.zero_grad()
            optimizer.zero_grad()
    mine, other = ddp.state_dict(ours), optimizer.compression_state_dict()
    for kind in ("residuals", "owner_residuals"):
        assert mine[kind].keys() == other[kind].keys()
        for name, entry in mine[kind].items():
            assert torch.equal(entry["values"], other[kind][name]["values"]), f"{kind} of {name}"
