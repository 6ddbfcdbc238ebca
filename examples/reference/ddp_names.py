"""Every name of `hvd_compress.ddp` at work, on two ranks or more:

    torchrun --nproc-per-node 2 examples/reference/ddp_names.py

The pages of the reference show these functions one by one; each is a collective call, so all ranks make all of them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import Adaptive, OneBit, ddp


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))


def train(net: torch.nn.Module, steps: int = 3) -> None:
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
    for _ in range(steps):
        opt.zero_grad()
        x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
        torch.nn.functional.cross_entropy(net(x), y).backward()
        opt.step()


def a_hook() -> None:
    net = DistributedDataParallel(model())
    ddp.register_comm_hook(net, compression=Adaptive(pi=32), start_step=1)
    train(net)
    print(ddp.stats(net)["total"])


def residuals() -> None:
    net = DistributedDataParallel(model())
    ddp.register_comm_hook(net, compression=OneBit())
    train(net)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"residuals-{dist.get_rank()}.pt"  # residuals differ from rank to rank
        torch.save(ddp.state_dict(net), file)
        again = DistributedDataParallel(model())
        again.module.load_state_dict(net.module.state_dict())
        ddp.register_comm_hook(again, compression=OneBit())
        ddp.load_state_dict(again, torch.load(file))
    train(again)


def replicas_of_shards() -> None:
    # here each replica is one rank; (2, 4) would be two replicas of four ranks
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    net: Any = fully_shard(model(), mesh=mesh["shard"])
    ddp.fsdp_all_reduce_hook(net, mesh["replicate"], compression=Adaptive(pi=32))
    train(net)
    print(ddp.stats(net)["total"]["ratio"])


def many_steps_alone() -> None:
    net = model()  # not in DistributedDataParallel, which would exchange gradients
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    opt = ddp.DiLoCo(inner, net.named_parameters(), sync_every=4, fragments=2, delay=1, compression=OneBit())
    for _ in range(9):
        opt.zero_grad()
        net(torch.randn(32, 64)).square().mean().backward()
        opt.step()
    opt.average_parameters()  # all ranks have the same parameters now
    print(opt.diloco_stats()["bytes_between_nodes"])


def arrays() -> None:
    group: Any = dist.new_group(backend="gloo")  # nobody else may use it
    ranks = ddp.GlooRanks(group, "sums")
    print(ranks.run("allreduce", "ones", np.ones(2, np.float32)))
    ranks.close()


def main() -> None:
    dist.init_process_group("gloo")
    for part in (a_hook, residuals, replicas_of_shards, many_steps_alone, arrays):
        part()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
