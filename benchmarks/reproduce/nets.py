"""Make the networks of the papers that the other benchmarks do not have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["cuda_convnet", "from_seed", "quick"]

_CLASSES = 10


def cuda_convnet() -> nn.Module:
    """Make TensorFlow's cuda-convnet of 2017 for images of 32x32, which Lam et al. trained, without normalization.

    Two convolutions of 64 channels, layers of 384 and 192, 1.76 million parameters. In the authors' program there is
    local response normalization behind each convolution; PyTorch's takes a third of the step on a CPU.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(),
        nn.Linear(192, _CLASSES),
    )  # fmt: skip


def quick() -> nn.Module:
    """Make the quick network for CIFAR-10 of cuda-convnet and Caffe: three convolutions, 0.15 million parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, _CLASSES),
    )  # fmt: skip


def from_seed(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return what `make()` returns, with parameters that follow from the seed: the same on all ranks."""
    torch.manual_seed(seed)
    return make()
