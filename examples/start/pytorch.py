"""The smallest training with compressed gradients on PyTorch:

horovodrun -np 2 --gloo python examples/start/pytorch.py
"""

import torch

import hvd_compress.torch as hvd  # was: import horovod.torch as hvd
from hvd_compress import OneBit

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.Linear(1024, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(opt, root_rank=0)

for _ in range(10):
    opt.zero_grad()
    x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
    torch.nn.functional.cross_entropy(model(x), y).backward()  # exchanges start in here
    opt.step()

if hvd.rank() == 0:
    print(f"{opt.compression_stats()['total']['ratio']:.0f} times fewer bytes")
