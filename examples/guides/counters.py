"""What compression_stats() counts:

horovodrun -np 2 --gloo python examples/guides/counters.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(8, 512)).square().mean().backward()
        opt.step()
    stats = opt.compression_stats()
    if hvd.rank() == 0:
        print(stats["compressor"], f"{stats['total']['ratio']:.0f} times fewer bytes")
        print(stats["tensors"]["weight"]["bytes_sent"], "bytes of the weights in", stats["total"]["steps"], "steps")


if __name__ == "__main__":
    main()
