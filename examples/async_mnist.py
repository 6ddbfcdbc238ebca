"""Train a ReLU network on MNIST with an asynchronous parameter server: rank 0 serves, the others do not wait.

mpirun -np 4 python examples/async_mnist.py --compression "QSGD(bits=4)"
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
    options = mnist_arguments(__doc__)
    hvd.init()
    torch.manual_seed(options.seed)
    data = mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, options.data_dir, options.limit_train)
    model = network(data.train_x.shape[1], options.width)
    workers = hvd.size() - 1
    # each worker's gradient is an update of its own: a rate for all of them together is divided among them
    optimizer = hvd.AsyncParameterServerOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr / workers),
        model.named_parameters(),
        staleness=4,
        compression=options.compression,
        answer=options.compression,
    )
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    # the server is rank 0, so worker 1 has the first share
    shares = [
        mnist_data.deal(len(y), options.batch_size, max(0, hvd.rank() - 1), workers, options.seed, epoch)
        for epoch in range(options.epochs)
    ]
    steps = sum(len(share) for share in shares)
    start = time.perf_counter()

    def lower_rate(updates: int) -> None:
        optimizer.param_groups[0]["lr"] = options.lr / workers * (1 - updates / (steps * workers))

    if optimizer.is_server:
        optimizer.serve(lower_rate)
    else:
        for epoch, share in enumerate(shares):
            for batch in torch.from_numpy(share):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                optimizer.step()
            print(f"worker {hvd.rank()}, epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    seconds = time.perf_counter() - start
    optimizer.close()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    everyone = hvd.allgather(torch.cat([p.detach().view(-1) for p in model.parameters()])[None], name="parameters")
    stats = hvd.allgather_object(optimizer.server_stats(), name="stats")
    if hvd.rank() == 0:
        with torch.no_grad():
            guesses = model(torch.from_numpy(data.test_x)).argmax(1)
        sent = [s["bytes_sent"] + s["bytes_received"] for s in stats[1:]]
        dense = [s["dense_bytes_sent"] + s["dense_bytes_received"] for s in stats[1:]]
        result = {
            "compression": repr(options.compression), "data": data.source, "ranks": hvd.size(), "steps": steps,
            "seconds_per_step": seconds / steps,
            "test_accuracy": float((guesses == torch.from_numpy(data.test_y)).double().mean()),
            "replicas_identical": bool((everyone == everyone[0]).all()),
            "staleness": stats[0]["staleness"]["mean"],
            "bytes_per_step": sum(sent) / workers / steps, "dense_bytes_per_step": sum(dense) / workers / steps,
        }  # fmt: skip
        print(json.dumps(result, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
