"""Make the networks that are trained, and one step of one candidate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch
from candidates import compression_of
from measure import ALONE, DENSE
from torch import nn

import hvd_compress.torch as hvd

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import mnist_data

__all__ = ["Training", "batches", "mlp", "mnist_data", "network_of", "resnet"]

CLASSES = 10


def mlp(width: int, features: int, hidden: int = 3) -> nn.Module:
    """Make the paper's network: fully connected, ReLU."""
    sizes = [features, *[width] * hidden]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Bottleneck(nn.Module):
    """Has 1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2016, figure 5)."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner

        def convolution(a: int, b: int, size: int, step: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b))

        self.body = nn.Sequential(
            convolution(inputs, inner, 1),
            nn.ReLU(),
            convolution(inner, inner, 3, stride),
            nn.ReLU(),
            convolution(inner, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(width: int = 44, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """Make ResNet-50 with `width` channels in place of 64, and a convolution of stride 4 that suits images of 32x32."""
    stem = [nn.Conv2d(3, width, 4, 4, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks: list[nn.Module] = []
    channels = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            inner = width * 2**stage
            blocks.append(Bottleneck(channels, inner, 2 if stage and i == 0 else 1))
            channels = 4 * inner
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def batches(kind: str, batch_size: int, images: int = 6000) -> tuple[Callable[[int], tuple[Any, Any]], int]:
    """Return this rank's batch of each round, the same for all candidates, and the number of features of an image."""
    if kind == "resnet":
        generator = torch.Generator().manual_seed(hvd.rank())
        x = torch.randn(batch_size, 3, 32, 32, generator=generator)
        y = torch.randint(0, CLASSES, (batch_size,), generator=generator)
        return lambda number: (x, y), x[0].numel()
    data = mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, None, images)
    order = mnist_data.deal(len(data.train_y), batch_size, hvd.rank(), hvd.size(), seed=0, epoch=0)

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = order[number % len(order)]
        return torch.from_numpy(data.train_x[rows]), torch.from_numpy(data.train_y[rows])

    return batch, data.train_x.shape[1]


def network_of(kind: str, width: int, features: int) -> nn.Module:
    """Make a network with the same weights on every rank and for every candidate."""
    torch.manual_seed(0)
    return resnet(width) if kind == "resnet" else mlp(width, features)


class Training:
    """Holds one candidate's network and optimizer.

    Args:
        name: of a candidate, or ALONE.
        network: of its own.
        batch: what to learn from in a round.
    """

    def __init__(self, name: str, network: nn.Module, batch: Callable[[int], tuple[Any, Any]]) -> None:
        self.network = network
        self.optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.01)
        self._batch = batch
        if name != ALONE:
            # parameters' names become names of collectives, which candidates must not share
            named = [(f"{name}/{parameter}", p) for parameter, p in network.named_parameters()]
            wrap = horovod if name in DENSE else hvd
            self.optimizer = wrap.DistributedOptimizer(self.optimizer, named, compression=compression_of(name))

    def step(self, number: int) -> None:
        """Learn from one batch."""
        x, y = self._batch(number)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.network(x), y).backward()
        self.optimizer.step()

    def stats(self) -> dict[str, Any]:
        """Return what `compression_stats()` says of each tensor so far, by its parameter; {} for Horovod's own."""
        if not hasattr(self.optimizer, "compression_stats"):
            return {}
        tensors = self.optimizer.compression_stats()["tensors"]
        return {name.partition("/")[2]: counters for name, counters in tensors.items()}
