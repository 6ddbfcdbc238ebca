"""Adam, dense and compressed, on the same data: is the loss the same on *your* problem?

horovodrun -np 2 --gloo python examples/guides/adam.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive, OneBit


def loss_after(compression: Any, steps: int = 60) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    opt: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=compression)
    torch.manual_seed(1 + hvd.rank())
    last: list[float] = []
    for _ in range(steps):
        opt.zero_grad()
        x = torch.randn(32, 64)
        loss = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()  # .grad is the combined gradient: Adam's moments are the same on all ranks
        opt.step()
        last = [*last[-9:], loss.item()]
    return float(hvd.allreduce(torch.tensor(sum(last) / len(last)), name="loss"))


def main() -> None:
    hvd.init()
    for compression in (hvd.Compression.none, OneBit(), Adaptive(pi=64)):
        loss = loss_after(compression)
        if hvd.rank() == 0:
            print(f"{loss:.4f}  {compression}")


if __name__ == "__main__":
    main()
