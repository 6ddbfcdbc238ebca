"""Train a ReLU network on MNIST: each rank on its own, and now and then an outer step with what all have moved.

horovodrun -np 2 python examples/diloco_mnist.py --fragments 2 --delay 2 --compression "TopK(ratio=0.02)"
"""

from __future__ import annotations

import json
import time

import mnist_data
import torch
from arguments import mnist_arguments
from torch import nn

import hvd_compress.torch as hvd


def network(features: int, width: int) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def main() -> None:
    options = mnist_arguments(__doc__, outer=True)
    hvd.init()
    torch.manual_seed(options.seed)
    data = mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, options.data_dir, options.limit_train)
    model = network(data.train_x.shape[1], options.width)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DiLoCo(
        torch.optim.SGD(model.parameters(), lr=options.lr),
        model.named_parameters(),
        sync_every=options.sync_every,
        fragments=options.fragments,
        delay=options.delay,
        alpha=options.alpha,
        compression=options.compression,
    )
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    start = time.perf_counter()
    for epoch in range(options.epochs):
        batches = mnist_data.deal(len(y), options.batch_size, hvd.rank(), hvd.size(), options.seed, epoch)
        total = 0.0
        for i, batch in enumerate(torch.from_numpy(batches)):
            optimizer.param_groups[0]["lr"] = options.lr * (1 - (epoch + i / len(batches)) / options.epochs)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = hvd.allreduce(torch.tensor(total / len(batches)), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)
    # until here ranks differ in what they have moved since the last synchronization
    optimizer.average_parameters()
    seconds, steps = time.perf_counter() - start, options.epochs * len(batches)
    stats = optimizer.diloco_stats()
    everyone = hvd.allgather(torch.cat([p.detach().view(-1) for p in model.parameters()])[None], name="parameters")
    if hvd.rank() == 0:
        with torch.no_grad():
            guesses = model(torch.from_numpy(data.test_x)).argmax(1)
        result = {
            "compression": repr(options.compression), "data": data.source, "ranks": hvd.size(), "steps": steps,
            "synchronizations": stats["synchronizations"]["merged"], "seconds_per_step": seconds / steps,
            "test_accuracy": float((guesses == torch.from_numpy(data.test_y)).double().mean()),
            "replicas_identical": bool((everyone == everyone[0]).all()),
            "bytes_per_step": stats["bytes_between_nodes"] / steps,
            "dense_bytes_per_step": 2 * (hvd.size() - 1) / hvd.size() * stats["parameter_bytes"],
        }  # fmt: skip
        print(json.dumps(result, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
