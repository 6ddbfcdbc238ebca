"""Train a ReLU network on MNIST with compressed gradients under DistributedDataParallel, without Horovod.

torchrun --nproc-per-node 2 examples/ddp_mnist.py --compression "Adaptive(pi=64)"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import mnist_data
import torch
import torch.distributed as dist
from arguments import compressor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import ddp


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", type=compressor, default="Adaptive(pi=64)", help="an expression, none or fp16")
    parser.add_argument("--width", type=int, default=1024, help="of the three hidden layers")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="at the start; falls linearly to 0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", help="holds MNIST's four idx.gz files, or a folder mnist/ with them")
    parser.add_argument("--limit-train", type=int, help="use only so many training images")
    parser.add_argument("--json", type=Path, help="rank 0 writes its results there")
    return parser.parse_args()


def train(model: DistributedDataParallel, data: mnist_data.Digits, options: argparse.Namespace) -> int:
    """Train, and tell rank 0 how it goes; returns the number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    in_all = options.epochs * (len(y) // (options.batch_size * dist.get_world_size()))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=in_all)
    steps = 0
    for epoch in range(options.epochs):
        begin = time.perf_counter()
        batches = mnist_data.deal(
            len(y), options.batch_size, dist.get_rank(), dist.get_world_size(), options.seed, epoch
        )
        for batch in torch.from_numpy(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
            if steps == 0 and dist.get_rank() == 0:
                print(
                    f"first step after {time.perf_counter() - begin:.1f} s, most of it to compile kernels", flush=True
                )
            steps += 1
        if dist.get_rank() == 0:
            found, taken = accuracy(model.module, data), time.perf_counter() - begin
            print(f"epoch {epoch + 1}: {len(batches)} steps in {taken:.1f} s, test accuracy {found:.4f}", flush=True)
    return steps


@torch.no_grad()
def accuracy(model: nn.Module, data: mnist_data.Digits) -> float:
    guesses = torch.cat([model(part).argmax(1) for part in torch.from_numpy(data.test_x).split(2000)])
    return (guesses == torch.from_numpy(data.test_y)).double().mean().item()


def replicas_identical(model: nn.Module) -> bool:
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return len(set(digests)) == 1


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    torch.manual_seed(options.seed)
    data = mnist_data.load_on_all_ranks(rank, dist.barrier, options.data_dir, options.limit_train)
    sizes = [data.train_x.shape[1], *[options.width] * 3]
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    # each rank starts with the values of rank 0, as DDP does it
    model = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(options.width, 10)))
    ddp.register_comm_hook(model, options.compression)
    steps = train(model, data, options)
    identical = replicas_identical(model.module)
    if rank == 0:
        sent = ddp.stats(model)["total"]
        result = {
            "compression": repr(options.compression),
            "data": data.source,
            "ranks": ranks,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": steps,
            "test_accuracy": accuracy(model.module, data),
            "replicas_identical": identical,
            "bytes_per_step": sent["bytes_sent"] / steps,
            "dense_bytes_per_step": sent["dense_bytes"] / steps,
        }
        print(json.dumps(result, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result))
    dist.destroy_process_group()
    if not identical:
        raise SystemExit("the ranks hold different parameters")


if __name__ == "__main__":
    main()
