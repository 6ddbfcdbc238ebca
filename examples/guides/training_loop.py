"""A training loop with all that a real one has: a sampler, accumulation, bfloat16, clipping and a schedule.

horovodrun -np 2 --gloo python examples/guides/training_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvd_compress.torch as hvd
from hvd_compress import OneBit

PASSES = 2  # backward passes for each step


def dataset() -> TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=numbers)
    return TensorDataset(x, (x.sum(1) > 0).long())


def main() -> float:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2))
    opt: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=2 * 4)  # of the plain optimizer
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit(), backward_passes_per_step=PASSES)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)

    sampler: Any = DistributedSampler(dataset(), num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
    loss = torch.zeros(())
    for epoch in range(2):
        sampler.set_epoch(epoch)  # or each epoch has the same order
        for number, (x, y) in enumerate(DataLoader(dataset(), batch_size=16, sampler=sampler)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x), y) / PASSES
            loss.backward()  # the last of the passes exchanges
            if number % PASSES == PASSES - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # .grad is the combined gradient
                opt.step()
                opt.zero_grad()
                schedule.step()
    mean = hvd.allreduce(PASSES * loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print(f"loss {mean:.3f}, {opt.compression_stats()['total']['ratio']:.0f} times fewer bytes")
    return mean


if __name__ == "__main__":
    main()
