"""A compressor for each tensor by its name, or the fastest way for each bucket by measurement.

horovodrun -np 2 --gloo python examples/guides/auto.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive, Auto, OneBit, Policy, TopK

# the first pattern that matches a name decides
BY_NAME = Policy({"embedding*": TopK(0.01), "*.bias": hvd.Compression.bf16}, default=Adaptive(pi=64))
# those are the compressors that you would accept
BY_MEASUREMENT = Auto([OneBit(), Adaptive(pi=64)])


def train(compression: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = {"embedding": torch.nn.Linear(784, 512), "head": torch.nn.Linear(512, 10)}
    model = torch.nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=compression)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(16, 784)).square().mean().backward()
        opt.step()
    stats: dict[str, Any] = opt.compression_stats()
    return stats


def main() -> None:
    hvd.init()
    by_name, measured = train(BY_NAME), train(BY_MEASUREMENT)
    if hvd.rank() == 0:
        print(f"by name: {by_name['total']['ratio']:.0f} times fewer bytes")
        print("by measurement:", measured["auto"])


if __name__ == "__main__":
    main()
