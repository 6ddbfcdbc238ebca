"""Adam, dense, with compressed gradients and with compressed momentum: is the loss the same on *your* problem?

horovodrun -np 2 --gloo python examples/guides/adam.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive, OneBit


def gradients(model: torch.nn.Module, compression: Any) -> Any:
    opt: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return hvd.DistributedOptimizer(opt, model.named_parameters(), compression=compression)


def momentum(model: torch.nn.Module, compression: Any) -> Any:
    return hvd.CompressedAdam(model.named_parameters(), lr=1e-3, compression=compression, warmup_steps=15)


def loss_after(make: Any, compression: Any, steps: int = 60) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    opt = make(model, compression)
    torch.manual_seed(1 + hvd.rank())
    last: list[float] = []
    for _ in range(steps):
        opt.zero_grad()
        x = torch.randn(32, 64)
        loss = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        opt.step()
        last = [*last[-9:], loss.item()]
    return float(hvd.allreduce(torch.tensor(sum(last) / len(last)), name="loss"))


def main() -> None:
    hvd.init()
    ways: list[tuple[Any, Any]] = [(gradients, hvd.Compression.none)]
    ways += [(make, compression) for make in (gradients, momentum) for compression in (OneBit(), Adaptive(pi=64))]
    for make, compression in ways:
        loss = loss_after(make, compression)
        if hvd.rank() == 0:
            print(f"{loss:.4f}  {make.__name__}, {compression}")


if __name__ == "__main__":
    main()
