"""Train while ranks come and go:

horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/guides/elastic.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit

STEPS = 60


def main() -> None:
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # wrapped here by ranks that join, too, while others train: ranks meet in the state's sync
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())
    state = hvd.elastic.TorchState(model, opt, step=0)

    @hvd.elastic.run  # called again whenever ranks have come or gone
    def train(state: Any) -> None:
        while state.step < STEPS:
            torch.manual_seed(STEPS * hvd.rank() + state.step)  # each rank has data of its own
            x = torch.randn(32, 64)
            opt.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            opt.step()
            state.step += 1
            if state.step % 10 == 0:  # what is made after it is made again where a rank is lost
                state.commit()

    train(state)
    stats = opt.compression_stats()
    owed, lost = stats["total"]["residual_norm"], stats["lost_norm"]
    print(f"rank {hvd.rank()} of {hvd.size()}: step {state.step}, owes {owed:.2f}; lost {lost:.2f}")


if __name__ == "__main__":
    main()
