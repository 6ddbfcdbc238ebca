"""A model that is compiled, and the same one that is not: their results agree to rounding.

horovodrun -np 2 --gloo python examples/guides/compiled.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit


def train(is_compiled: bool) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())
    forward: Any = torch.compile(model) if is_compiled else model  # the parameters stay those of `model`
    torch.manual_seed(1 + hvd.rank())
    for _ in range(4):
        opt.zero_grad()
        forward(torch.randn(16, 64)).square().mean().backward()
        opt.step()
    return sum(float(p.detach().double().sum()) for p in model.parameters())


def main() -> None:
    hvd.init()
    plain, compiled = train(False), train(True)
    assert abs(plain - compiled) < 1e-4 * abs(plain), (plain, compiled)
    print(f"sum of the parameters: {plain:.6f}, compiled {compiled:.6f}")


if __name__ == "__main__":
    main()
