"""Measure bytes and accuracy of a hierarchical exchange with 4 bits between hosts, by what is sent inside of them.

    python benchmarks/widths.py [--data FOLDER] [--steps 600]

2 hosts with 2 ranks each, in one process: no link is timed. A network of two hidden layers learns handwritten digits
three times, from other first weights and in another order. Each row says how far its accuracy is from that of the
same seed without compression.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hvd_compress import Blockwise, Hierarchical
from hvd_compress.loopback import Loopback

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import mnist_data

HOSTS, PER_HOST, BATCH, SEEDS, MIN_NUMEL = 2, 2, 32, 3, 256
NARROW = Blockwise(bits=4)
EXCHANGES = {
    "no compression": None,
    "uncompressed": Hierarchical(),
    "8 bits": Hierarchical(inside=Blockwise(bits=8)),
    "4 bits": Hierarchical(inside=Blockwise(bits=4)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def trained(digits: Any, exchange: Hierarchical | None, optimizer: str, seed: int, steps: int) -> dict[str, float]:
    """Train, and return the accuracy in %, and bytes for each element and step."""
    torch.manual_seed(seed)
    sizes = (digits.train_x.shape[1], 128, 64)
    network = nn.Sequential(
        nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]), nn.ReLU(), nn.Linear(sizes[2], 10)
    )
    update = OPTIMIZERS[optimizer](network.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(update, lambda step: min((step + 1) / 20, 1 - step / steps))
    ranks = None if exchange is None else Loopback(HOSTS * PER_HOST, NARROW, exchange, ranks_per_host=PER_HOST)
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        of_ranks = [gradients(network, *batch(digits, draw)) for _ in range(HOSTS * PER_HOST)]
        large = {name for name, gradient in of_ranks[0].items() if gradient.size >= MIN_NUMEL and ranks is not None}
        combined = {name: np.mean([g[name] for g in of_ranks], axis=0) for name in of_ranks[0].keys() - large}
        if ranks is not None:
            combined |= ranks.grouped_allreduce([{n: g[n] for n in g if n in large} for g in of_ranks])[0]
        for name, p in network.named_parameters():
            p.grad = torch.from_numpy(combined[name])
        update.step()
        schedule.step()
    numel = sum(p.numel() for p in network.parameters() if p.numel() >= MIN_NUMEL)
    sent = 0.0 if ranks is None else ranks.bytes_sent[0] / numel / steps
    return {"accuracy": accuracy(network, digits), "bytes": sent}


def batch(digits: Any, draw: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of one rank and step."""
    chosen = draw.integers(len(digits.train_y), size=BATCH)
    return torch.from_numpy(digits.train_x[chosen]), torch.from_numpy(digits.train_y[chosen])


def gradients(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the gradients of one rank."""
    network.zero_grad()
    cross_entropy(network(x), y).backward()
    return {name: p.grad.numpy().copy() for name, p in network.named_parameters() if p.grad is not None}


def accuracy(network: nn.Module, digits: Any) -> float:
    """Return the share of the test's images that are told right, in %."""
    with torch.no_grad():
        told = network(torch.from_numpy(digits.test_x)).argmax(1).numpy()
    return 100 * float((told == digits.test_y).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of MNIST")
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    digits = mnist_data.load(options.data)
    print(f"{digits.source}, {len(digits.test_y)} images held out, {options.steps} steps, {SEEDS} seeds")
    for optimizer in OPTIMIZERS:
        plain: list[float] = []
        for name, exchange in EXCHANGES.items():
            found = [trained(digits, exchange, optimizer, seed, options.steps) for seed in range(SEEDS)]
            reached = [run["accuracy"] for run in found]
            plain = plain or reached
            off = [a - b for a, b in zip(reached, plain, strict=True)]
            print(
                f"{optimizer:5} {name:15} {np.mean(reached):.2f} % ({min(reached):.2f} to {max(reached):.2f}), against "
                f"no compression {np.mean(off):+.2f} ({min(off):+.2f} to {max(off):+.2f}), {found[0]['bytes']:.3f} B"
            )


if __name__ == "__main__":
    main()
