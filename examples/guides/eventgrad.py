"""Ranks that train on their own and average parameters with their neighbours when enough has changed (EventGraD).

horovodrun -np 2 --gloo python examples/guides/eventgrad.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import Ring, SlopeThreshold, TopK


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(1 + hvd.rank())  # each rank has data of its own
    opt = hvd.EventGraDOptimizer(
        opt,
        named_parameters=model.named_parameters(),
        named_buffers=model,  # batch norm's are averaged at the end
        trigger=SlopeThreshold(horizon=1.0),  # as much change as lately in one step; ConstantThreshold(delta)
        topology=Ring(),  # FullyConnected(), Exponential(), Graph(any networkx graph)
        compression=TopK(0.01),
    )
    for _ in range(10):  # ranks may make different numbers of steps
        opt.zero_grad()
        x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    print(opt.event_stats()["total"], opt.consensus_distance())
    opt.average_parameters()  # when all ranks have come here, all hold the mean


if __name__ == "__main__":
    main()
