"""One GPU for each rank, where there are GPUs; else the same on the CPU.

horovodrun -np 2 python examples/guides/gpus.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit


def main() -> None:
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())  # nothing to switch on
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(16, 64, device=device)).square().mean().backward()
        opt.step()
    print(f"rank {hvd.rank()} on {device}: NCCL {'is' if hvd.nccl_built() else 'is not'} in this Horovod")


if __name__ == "__main__":
    main()
