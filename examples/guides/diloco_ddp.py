"""Many steps on each rank alone, then one outer step together, without Horovod:

torchrun --nproc-per-node 2 examples/guides/diloco_ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hvd_compress import TopK, ddp

dist.init_process_group("gloo")  # or "nccl"
model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
for p in model.parameters():  # all ranks begin with the same parameters
    dist.broadcast(p.data, 0)

opt = ddp.DiLoCo(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    model.named_parameters(),
    sync_every=30,
    outer=lambda params: torch.optim.SGD(params, lr=1.0),
    compression=TopK(chunk=4096, ratio=1 / 64, value_bits=2),
    feedback_decay=0.95,
)
torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
for _ in range(90):
    opt.zero_grad()
    x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
opt.average_parameters()

if dist.get_rank() == 0:
    stats = opt.diloco_stats()
    dense = 90 * 2 * (dist.get_world_size() - 1) / dist.get_world_size() * stats["parameter_bytes"]
    print(f"{dense / stats['bytes_between_nodes']:.0f} times fewer bytes than an allreduce of float32 in each step")
dist.destroy_process_group()
