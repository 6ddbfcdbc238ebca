"""Train on Ray while a worker dies, the others go on, and a new one joins:

python examples/guides/elastic_ray.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
from horovod.ray import RayExecutor
from ray.cluster_utils import Cluster

RANKS = 3


def train(died: str, steps: int = 60) -> dict[str, Any]:
    """What each rank does; the one that finds no file `died` in step 25 makes it, and kills itself."""
    import os
    import signal

    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import OneBit

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())
    state = hvd.elastic.TorchState(model, opt, step=0)
    losses = []

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        while state.step < steps:
            if state.step == 25 and hvd.rank() == 1 and not Path(died).exists():
                Path(died).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            torch.manual_seed(steps * hvd.rank() + state.step)  # each rank has data of its own
            x = torch.randn(32, 64)
            opt.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    go_on(state)
    stats = opt.compression_stats()
    checked = sum(float(p.detach().double().sum()) for p in model.parameters())
    result = {"rank": hvd.rank(), "size": hvd.size(), "step": state.step, "losses": losses, "checked": checked}
    return {**result, "lost_ranks": stats["lost_ranks"], "lost_norm": stats["lost_norm"]}


def show(results: list[dict[str, Any]]) -> None:
    """Print what all ranks have returned, and fail if they differ or have learned nothing."""
    for r in sorted(results, key=lambda result: result["rank"]):
        made, first, last = len(r["losses"]), r["losses"][0], r["losses"][-1]
        print(f"rank {r['rank']} of {r['size']}: step {r['step']}, made {made} steps, loss {first:.1f} to {last:.1f}")
        print(f"ranks lost: {r['lost_ranks']}, which owed {r['lost_norm']:.2f}")
        if last >= first:
            raise SystemExit("the loss has not fallen")
    if len({r["checked"] for r in results}) != 1:
        raise SystemExit("the ranks ended with different parameters")
    print(f"{len(results)} ranks agree bit for bit")


if __name__ == "__main__":
    # one node more than ranks, all on this Linux machine; on a cluster ray.init(address="auto") is enough
    cluster = Cluster()
    limits: Any = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    for number in range(2, RANKS + 3):  # Ray takes 127.0.0.1 for the machine's address in its network
        cluster.add_node(node_ip_address=f"127.0.0.{number}", **limits)
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2")
    with tempfile.TemporaryDirectory() as folder:
        settings = RayExecutor.create_settings(nics={"lo"})  # on a cluster, the interface that its nodes share
        executor = RayExecutor(settings, min_workers=RANKS, max_workers=RANKS, elastic_timeout=60)
        executor.start()
        show(executor.run(train, kwargs={"died": f"{folder}/died"}))
        executor.shutdown()
    ray.shutdown()
    cluster.shutdown()
