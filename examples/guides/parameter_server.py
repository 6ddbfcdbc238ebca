"""One rank sums what all send it, as in the papers: QSGD to a root, dense answers.

horovodrun -np 2 --gloo python examples/guides/parameter_server.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import QSGD, ParameterServer


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(784, 512)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = hvd.DistributedOptimizer(
        opt,
        model.named_parameters(),
        compression=QSGD(bits=1, coding="elias"),
        exchange=ParameterServer(root="round_robin", answer="dense"),
    )
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(16, 784)).square().mean().backward()
        opt.step()
    print(f"rank {hvd.rank()} sent {opt.compression_stats()['total']['bytes_sent']} bytes")


if __name__ == "__main__":
    main()
