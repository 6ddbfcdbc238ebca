"""Train on CPU tensors, compressed and dense, with a Horovod that must have NCCL: a part of test_cuda_build.sh."""

import horovod.torch as stock
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit


def losses(compression: object) -> list[float]:
    """Return the losses of 30 steps; raises RuntimeError if the ranks end with different parameters."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    inputs = torch.randn(256, 32)
    targets = inputs[:, :1] - inputs[:, 1:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    found = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    if not torch.equal(stock.broadcast(flat, 0, name="check"), flat):
        raise RuntimeError(f"{compression}: rank {hvd.rank()} ended with other parameters than rank 0")
    if not found[-1] < found[0] / 2:
        raise RuntimeError(f"{compression}: losses {found[0]:.3f} to {found[-1]:.3f} in 30 steps")
    return found


def main() -> None:
    hvd.init()
    if not stock.nccl_built():
        raise RuntimeError("this Horovod was built without NCCL")
    for compression in (OneBit(), hvd.Compression.none):
        found = losses(compression)
        if hvd.rank() == 0:
            print(f"NCCL {stock.nccl_built()}, {compression}: loss {found[0]:.3f} to {found[-1]:.3f}")


if __name__ == "__main__":
    main()
