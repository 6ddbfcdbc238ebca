"""Train a ReLU network on MNIST with compressed gradients.

horovodrun -np 2 python examples/pytorch_mnist.py --compression "Adaptive(pi=64)"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import mnist_data
import torch
from arguments import compressor
from torch import nn
from tqdm import tqdm

import hvd_compress.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", type=compressor, default="Adaptive(pi=64)", help="an expression, none or fp16")
    parser.add_argument("--exchange", default="auto", choices=["auto", "two_phase", "allgather"])
    parser.add_argument(
        "--min-numel", type=int, help="smaller tensors go dense (default: that of DistributedOptimizer)"
    )
    parser.add_argument("--width", type=int, default=1024, help="of the three hidden layers")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="at the start; falls linearly to 0")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", help="holds MNIST's four idx.gz files, or a folder mnist/ with them")
    parser.add_argument("--limit-train", type=int, help="use only so many training images")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps")
    parser.add_argument("--json", type=Path, help="rank 0 writes its results there")
    parser.add_argument("--no-progress", action="store_true")
    return parser.parse_args()


def network(features: int, width: int) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def shards(count: int, options: argparse.Namespace, epoch: int) -> torch.Tensor:
    """Return the indices of this rank's batches, (steps, batch): all ranks deal out the same shuffled deck."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * options.seed + epoch))
    steps = count // (options.batch_size * hvd.size())
    return order[: steps * options.batch_size * hvd.size()].view(steps, hvd.size(), options.batch_size)[:, hvd.rank()]


def train(model: nn.Module, optimizer: Any, data: mnist_data.Digits, options: argparse.Namespace) -> list[float]:
    """Train; returns the seconds of every step."""
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    total = options.epochs * len(shards(len(y), options, 0))
    if total == 0:
        raise SystemExit(f"{len(y)} images are too few for {hvd.size()} ranks with --batch-size {options.batch_size}")
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
    total = min(total, options.max_steps or total)
    batches = (batch for epoch in range(options.epochs) for batch in shards(len(y), options, epoch))
    quiet = options.no_progress or hvd.rank() != 0
    seconds = []
    bar = tqdm(range(total), desc=repr(options.compression), unit="step", disable=quiet)
    for _, batch in zip(bar, batches, strict=False):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - start)
    return seconds


@torch.no_grad()
def accuracy(model: nn.Module, data: mnist_data.Digits) -> float:
    guesses = torch.cat([model(part).argmax(1) for part in torch.from_numpy(data.test_x).split(2000)])
    return (guesses == torch.from_numpy(data.test_y)).double().mean().item()


def replicas_identical(model: nn.Module) -> bool:
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).digest()
    digests = hvd.allgather(torch.frombuffer(bytearray(digest), dtype=torch.uint8)[None], name="digest_of_parameters")
    return bool((digests == digests[0]).all())


def main() -> None:
    options = arguments()
    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    torch.manual_seed(options.seed)
    data = mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, options.data_dir, options.limit_train)
    model = network(data.train_x.shape[1], options.width)
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    extra = {} if options.min_numel is None else {"min_numel": options.min_numel}
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), options.compression, exchange=options.exchange, **extra
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    seconds = train(model, optimizer, data, options)
    identical = replicas_identical(model)
    if hvd.rank() == 0:
        sent = optimizer.compression_stats()["total"]
        result = {
            "compression": repr(options.compression),
            "data": data.source,
            "ranks": hvd.size(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": len(seconds),
            "test_accuracy": accuracy(model, data),
            "replicas_identical": identical,
            "bytes_per_step": sent["bytes_sent"] / len(seconds),
            "dense_bytes_per_step": sent["dense_bytes"] / len(seconds),
            # the median: the first steps compile kernels
            "seconds_per_step": statistics.median(seconds),
            "residual_norm": sent["residual_norm"],
        }
        print(json.dumps(result, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result))
    if not identical:
        raise SystemExit("the ranks hold different parameters")


if __name__ == "__main__":
    main()
