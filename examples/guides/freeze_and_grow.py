"""Train the head first, then the body, then a new head, with one optimizer.

horovodrun -np 2 --gloo python examples/guides/freeze_and_grow.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit


def train(model: torch.nn.Module, opt: Any, steps: int = 3) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        opt.step()


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    body, head = torch.nn.Linear(64, 512), torch.nn.Linear(512, 10)
    model = torch.nn.Sequential(body, torch.nn.ReLU(), head)
    body.requires_grad_(False)  # frozen before wrapping, or at any time after
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit(), min_numel=1)
    train(model, opt)

    body.requires_grad_(True)  # on all ranks before the same step
    train(model, opt)

    more = torch.nn.Linear(10, 4)
    model.append(more)
    hvd.broadcast_parameters(more.state_dict(), root_rank=0)
    opt.add_param_group({"params": list(more.parameters())})
    train(model, opt)

    sums = hvd.allgather_object([float(p.detach().double().sum()) for p in model.parameters()])
    assert all(s == sums[0] for s in sums), "ranks differ"
    print(sorted(opt.compression_stats()["tensors"]))


if __name__ == "__main__":
    main()
