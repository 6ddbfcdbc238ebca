"""One rank holds the parameters, the others send gradients as they come, and nobody waits for the slowest.

mpirun -np 3 python examples/guides/async_server.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import QSGD, TopK


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.05 / (hvd.size() - 1))  # each gradient is an update
    opt = hvd.AsyncParameterServerOptimizer(
        opt,
        named_parameters=model.named_parameters(),
        staleness=4,  # a worker may be so many gradients ahead of the slowest
        compression=QSGD(bits=4),  # of gradients
        answer=TopK(0.1),  # of parameters: the difference to what the worker has
    )
    torch.manual_seed(1 + hvd.rank())  # each worker has data of its own
    if opt.is_server:  # rank 0
        opt.serve()
    else:
        for _ in range(20):  # workers may make different numbers of steps
            opt.zero_grad()
            x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
            torch.nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
    opt.close()
    print(opt.server_stats())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # if all shall have the server's last ones


if __name__ == "__main__":
    main()
