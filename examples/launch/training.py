"""What each rank does in the programs of this folder; the launcher is another one in each of them."""

from __future__ import annotations

from typing import Any


def train(steps: int = 5) -> dict[str, Any]:
    """Train on random numbers; returns this rank, the number of ranks, the sum of all parameters and the ratio."""
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import OneBit

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(1 + hvd.rank())  # each rank has data of its own
    for _ in range(steps):
        opt.zero_grad()
        x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    checked = sum(float(p.detach().double().sum()) for p in model.parameters())
    ratio = opt.compression_stats()["total"]["ratio"]
    result = {"rank": hvd.rank(), "size": hvd.size(), "checked": checked, "ratio": ratio}
    hvd.shutdown()
    return result


def show(results: list[dict[str, Any]]) -> None:
    """Print what all ranks have returned, and fail if they differ."""
    sums = {result["checked"] for result in results}
    if len(sums) != 1:
        raise SystemExit(f"the ranks ended with different parameters: {sums}")
    print(f"{len(results)} ranks agree bit for bit, {results[0]['ratio']:.0f} times fewer bytes")


if __name__ == "__main__":
    print(train())
