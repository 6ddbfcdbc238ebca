"""Train a ReLU network on MNIST, averaging parameters with neighbours on a ring when they have changed enough.

horovodrun -np 4 python examples/eventgrad_mnist.py --compression "TopK(0.01)"
"""

from __future__ import annotations

import json
import time

import mnist_data
import torch
from arguments import mnist_arguments
from torch import nn

import hvd_compress.torch as hvd
from hvd_compress import Ring, SlopeThreshold


def network(features: int, width: int) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def main() -> None:
    options = mnist_arguments(__doc__)
    hvd.init()
    torch.manual_seed(options.seed)
    data = mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, options.data_dir, options.limit_train)
    model = network(data.train_x.shape[1], options.width)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.EventGraDOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr),
        model.named_parameters(),
        trigger=SlopeThreshold(horizon=1.0),
        topology=Ring(),
        compression=options.compression,
    )
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    start = time.perf_counter()
    for epoch in range(options.epochs):
        batches = mnist_data.deal(len(y), options.batch_size, hvd.rank(), hvd.size(), options.seed, epoch)
        for i, batch in enumerate(torch.from_numpy(batches)):
            optimizer.param_groups[0]["lr"] = options.lr * (1 - (epoch + i / len(batches)) / options.epochs)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        apart = optimizer.consensus_distance()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss of rank 0 {loss.item():.4f}, ranks are {apart:.3f} apart", flush=True)
    seconds, steps = time.perf_counter() - start, options.epochs * len(batches)
    sent = optimizer.event_stats()["total"]
    optimizer.average_parameters()
    everyone = hvd.allgather(torch.cat([p.detach().view(-1) for p in model.parameters()])[None], name="parameters")
    if hvd.rank() == 0:
        with torch.no_grad():
            guesses = model(torch.from_numpy(data.test_x)).argmax(1)
        result = {
            "compression": repr(options.compression), "data": data.source, "ranks": hvd.size(), "steps": steps,
            "seconds_per_step": seconds / steps,
            "test_accuracy": float((guesses == torch.from_numpy(data.test_y)).double().mean()),
            "replicas_identical": bool((everyone == everyone[0]).all()),
            "messages_percent": sent["messages_percent"],
            "bytes_per_step": sent["bytes"] / steps, "dense_bytes_per_step": sent["bytes_always"] / steps,
        }  # fmt: skip
        print(json.dumps(result, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
