"""Save a training, and go on with it on any number of ranks:

horovodrun -np 2 --gloo python examples/guides/checkpoints.py saved
horovodrun -np 3 --gloo python examples/guides/checkpoints.py saved
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive
from hvd_compress.feedback import redistribute


def save(folder: Path, model: torch.nn.Module, opt: Any, epoch: int) -> None:
    """Rank 0 writes what is the same everywhere, each rank what it owes."""
    folder.mkdir(parents=True, exist_ok=True)
    if hvd.rank() == 0:
        shared = {"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch, "size": hvd.size()}
        torch.save(shared, folder / "shared.pt")
    torch.save(opt.compression_state_dict(), folder / f"owed-{hvd.rank()}.pt")
    hvd.barrier()  # nobody goes on while a file is missing


def resume(folder: Path, model: torch.nn.Module, opt: Any) -> int:
    """Load what `save` has written; returns the epoch to go on with."""
    shared = torch.load(folder / "shared.pt")
    model.load_state_dict(shared["model"])
    opt.load_state_dict(shared["optimizer"])
    if shared["size"] == hvd.size():
        opt.load_compression_state_dict(torch.load(folder / f"owed-{hvd.rank()}.pt"))
    else:  # another number of ranks, whose gradients are averaged
        states = [torch.load(folder / f"owed-{rank}.pt") for rank in range(shared["size"])]
        opt.load_compression_state_dict(redistribute(states, hvd.size(), average=True)[hvd.rank()])
    return int(shared["epoch"]) + 1


def main() -> None:
    hvd.init()
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    opt: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=Adaptive(pi=64))
    torch.manual_seed(1 + hvd.rank())  # each rank has data of its own
    first = resume(folder, model, opt) if (folder / "shared.pt").exists() else 0
    for epoch in range(first, first + 2):
        for _ in range(5):
            opt.zero_grad()
            x = torch.randn(32, 64)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            opt.step()
        save(folder, model, opt, epoch)
    owed = opt.compression_stats()["total"]["residual_norm"]
    print(f"rank {hvd.rank()} of {hvd.size()}: epochs {first} to {first + 1}, owes {owed:.2f}")


if __name__ == "__main__":
    main()
