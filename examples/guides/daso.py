"""Nodes that train on their own for a while, and average parameters now and then (DASO).

horovodrun -np 2 --gloo python examples/guides/daso.py

Here each rank stands for a node; without `ranks_per_node` nodes are the hosts.
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive


def main(epochs: int = 4, steps: int = 10) -> None:
    hvd.init(process_sets=hvd.daso_process_sets(ranks_per_node=1))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(1 + hvd.rank())  # each rank has data of its own
    opt = hvd.DASO(
        opt,
        named_parameters=model.named_parameters(),
        named_buffers=model,  # batch norm's are averaged at the end of each epoch
        total_epochs=epochs,
        warmup_epochs=1,  # nodes average after every step
        cooldown_epochs=1,
        global_skips=4,  # B: after every 4th step
        batches_to_wait=1,  # S: what is sent arrives one step later
        steps_per_epoch=steps,
        compression=Adaptive(pi=64),
        ranks_per_node=1,
    )
    for _ in range(epochs):
        loss = torch.zeros(())
        for _ in range(steps):
            opt.zero_grad()
            x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()  # gradients are averaged inside of the node
            opt.step()
        opt.epoch_end(loss)  # all ranks have the same parameters now
    print(opt.daso_stats())


if __name__ == "__main__":
    main()
