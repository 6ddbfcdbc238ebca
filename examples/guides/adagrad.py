"""AdaGrad inside the exchange: owners of elements turn sums into updates before they compress them again.

horovodrun -np 2 --gloo python examples/guides/adagrad.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import AdaGrad, OneBit


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(784, 512)
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.005)  # the learning rate of AdaGrad
    opt: Any = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), compression=OneBit(), adagrad=AdaGrad(epsilon=1e-8)
    )
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(16, 784)).square().mean().backward()
        opt.step()
    print(opt.compression_stats()["total"]["ratio"])


if __name__ == "__main__":
    main()
