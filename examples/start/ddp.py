"""The smallest training with compressed gradients under DistributedDataParallel, without Horovod:

torchrun --nproc-per-node 2 examples/start/ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import OneBit, ddp

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.Linear(1024, 10))
model = DistributedDataParallel(net)
ddp.register_comm_hook(model, compression=OneBit())
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

torch.manual_seed(dist.get_rank())  # each rank has data of its own
for _ in range(10):
    opt.zero_grad()
    x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
    torch.nn.functional.cross_entropy(model(x), y).backward()  # exchanges start in here
    opt.step()

if dist.get_rank() == 0:
    print(f"{ddp.stats(model)['total']['ratio']:.0f} times fewer bytes")
dist.destroy_process_group()
