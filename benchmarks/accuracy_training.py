"""Make the trainings of the accuracy table: what each rank does for one cell."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import networks
import torch
from accuracy_cells import COMPRESSORS, CORRECTED, MIN_NUMEL, MOMENTUM, Cell
from reproduce.nets import from_seed
from reproduce.text import Gpt, Text, drawn, sources
from torch import nn
from torch.nn.functional import cross_entropy

import hvd_compress.torch as hvd

__all__ = ["Trainer", "name_of"]

_TESTED_AT_ONCE = 500
_PIXELS = 14  # of a side, for the ResNet; smaller images stay as they are
Batch = tuple[torch.Tensor, torch.Tensor]


class Trainer:
    """Holds the data, and trains one cell after the other.

    Args:
        form: sizes, one of `FORMS`.
        device: "cpu" or "cuda".
    """

    def __init__(self, form: Mapping[str, Any], device: str) -> None:
        self._form = form
        self._device = device

    def __call__(self, cell: Cell) -> dict[str, Any]:
        """Train, test and count bytes."""
        begin = time.perf_counter()
        network = from_seed(functools.partial(self._network, cell.network), cell.seed).to(self._device)
        optimizer = self._optimizer(cell, network)
        steps = self._form["steps"][cell.network]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._factor(step, steps))
        for x, y in self._batches(cell, steps):
            optimizer.zero_grad()
            cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            tested = _mean(self._tested(cell, network))
        total = optimizer.compression_stats()["total"]
        return {
            **cell._asdict(),
            # JSON has no NaN
            "test": tested if math.isfinite(tested) else None,
            "bytes": total["bytes_sent"] / steps,
            "parameters": sum(p.numel() for p in network.parameters()),
            "data": self._text.source if cell.network == "transformer" else name_of(self._digits),
            "seconds": time.perf_counter() - begin,
        }

    @functools.cached_property
    def _digits(self) -> Any:
        return networks.mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, None, self._form["images"])

    @functools.cached_property
    def _text(self) -> Text:
        return sources()

    def _network(self, kind: str) -> nn.Module:
        if kind == "transformer":
            return _Flat(Gpt(64, 1, 4, self._form["context"]))
        features = self._digits.train_x.shape[1]
        return _mlp(features) if kind == "MLP" else _resnet(math.isqrt(features))

    def _optimizer(self, cell: Cell, network: nn.Module) -> Any:
        if cell.optimizer in CORRECTED:
            warm_up = round(CORRECTED[cell.optimizer] * self._form["steps"][cell.network])
            return hvd.DGC(
                network.named_parameters(), cell.rate, MOMENTUM, compression=COMPRESSORS[cell.compressor](None),
                warmup_steps=warm_up, min_numel=MIN_NUMEL,
            )  # fmt: skip
        if cell.optimizer == "SGD":
            plain: Any = torch.optim.SGD(network.parameters(), cell.rate, momentum=MOMENTUM)
        else:
            plain = torch.optim.Adam(network.parameters(), cell.rate)
        compressor = COMPRESSORS[cell.compressor](cell.tau)
        # signs without magnitudes do not mix with values that have some
        least = 1 if compressor.votes else MIN_NUMEL
        return hvd.DistributedOptimizer(plain, network.named_parameters(), compression=compressor, min_numel=least)

    def _factor(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate: it rises for some steps, and falls to nothing."""
        return min(1.0, (step + 1) / self._form["warm_up"]) * (1 - step / steps)

    def _batches(self, cell: Cell, steps: int) -> Iterator[Batch]:
        for step in range(steps):
            if cell.network == "transformer":
                key = [cell.seed, 2, hvd.rank(), step]
                x, y = drawn(self._text.train, self._form["sequences"], self._form["context"], key)
                yield x.to(self._device), y.flatten().to(self._device)
            else:
                yield self._images(self._rows(cell.seed, step), "train")

    def _rows(self, seed: int, step: int) -> Any:
        epoch, number = divmod(step, len(self._digits.train_y) // (self._form["batch"] * hvd.size()))
        return self._deck(seed, epoch)[number]

    @functools.lru_cache(maxsize=1)  # noqa: B019  # there is one trainer
    def _deck(self, seed: int, epoch: int) -> Any:
        count, batch = len(self._digits.train_y), self._form["batch"]
        return networks.mnist_data.deal(count, batch, hvd.rank(), hvd.size(), seed, epoch)

    def _images(self, rows: Any, part: str) -> Batch:
        x, y = (torch.from_numpy(getattr(self._digits, f"{part}_{kind}")[rows]) for kind in "xy")
        return x.to(self._device), y.to(self._device)

    def _tested(self, cell: Cell, network: nn.Module) -> float:
        """Return this rank's part of the test: accuracy in %, or loss in nats a byte."""
        if cell.network == "transformer":
            share = self._form["held_out"] // hvd.size()
            # the same text for all seeds, so that seeds differ by what is learned alone
            x, y = drawn(self._text.test, share, self._form["context"], [1, hvd.rank()])
            return float(cross_entropy(network(x.to(self._device)), y.flatten().to(self._device)))
        mine = range(min(self._form["tested"], len(self._digits.test_y)))[hvd.rank() :: hvd.size()]
        right = 0
        for first in range(0, len(mine), _TESTED_AT_ONCE):
            x, y = self._images(list(mine[first : first + _TESTED_AT_ONCE]), "test")
            scores = network(x)
            if not torch.isfinite(scores).all():
                return math.nan
            right += int((scores.argmax(dim=1) == y).sum())
        return 100 * right / len(mine)


def name_of(digits: Any) -> str:
    """Say what digits are, without where they come from."""
    return digits.source.partition(" from ")[0].partition(", ")[0]


class _Flat(nn.Module):
    """Makes one row of each byte that is predicted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).flatten(0, 1)


def _mlp(features: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, networks.CLASSES)
    )


def _resnet(side: int) -> nn.Module:
    """Make a ResNet of three bottlenecks, whose channels double and pixels halve, for flat images of one colour."""
    shrink = nn.AvgPool2d(side // _PIXELS) if side >= 2 * _PIXELS else nn.Identity()
    width = 8
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [
        networks.Bottleneck(width, width, 1),
        networks.Bottleneck(4 * width, 2 * width, 2),
        networks.Bottleneck(8 * width, 4 * width, 2),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 * width, networks.CLASSES)]
    return nn.Sequential(nn.Unflatten(1, (1, side, side)), shrink, *stem, *blocks, *head)


def _mean(value: float) -> float:
    everyone = hvd.allgather(torch.tensor([value], dtype=torch.float64), name="benchmarks.accuracy")
    return float(everyone.mean())
