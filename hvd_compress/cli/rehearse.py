"""Short training steps on made-up gradients: where a step takes milliseconds, trying it tells more than a prediction.

What a prediction leaves out is the same for networks of all sizes: threads of ranks that share processors, and the
Python of hooks and exchanges. It matters where steps are short, and there a trial costs little.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress.cli.ranks import Ranks
from hvd_compress.compressors import Compressor
from hvd_compress.kernels.checksum import checksum

__all__ = ["Rehearsal"]

_WARM_UP = 3  # steps: kernels are compiled, Horovod's caches filled
_BLOCKS, _BLOCK_SECONDS = 5, 0.15
_LEAST_STEPS, _MOST_STEPS = 2, 30
_WORDS = 2**14  # 128 KiB: some microseconds a call, in the second-level cache
_RATE_SECONDS = 0.05
# of a training step; the rest is forward, see `hvd_compress.cli.advise`
_BACKWARD_SHARE = 2 / 3

_numbers = count()


class Rehearsal:
    """Makes steps of a network that is known by its shapes; all methods are collective calls.

    Forward and backward compute something that takes as long as the network's on all ranks at once, and leaves the same
    normal deviates as gradients in each step. Exchanges and optimizer are real, on the CPU.

    Args:
        ranks: all of them, on PyTorch.
        shapes: of the gradients, in the order of the forward pass.
        step: seconds of a step without communication; 0 if only exchanges are of interest.
    """

    def __init__(self, ranks: Ranks, shapes: Sequence[tuple[int, ...]], step: float) -> None:
        self._ranks = ranks
        self._step = step
        generator = torch.Generator().manual_seed(ranks.position)
        self._gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        self._computing = _Computing(ranks)
        self._seconds = step
        alone = self._seconds_of(self._steps(None))
        # copying gradients and the optimizer's step are a part of what is to be made up
        self._seconds = max(step - max(alone - step, 0.0), 0.0)
        self._alone = self._seconds_of(self._steps(None))

    def seconds(self, compressor: Compressor, exchange: str) -> float:
        """Seconds of a step whose gradients go this way; "dense" is Horovod's allreduce. Equal on all ranks."""
        communicating = self._seconds_of(self._steps((compressor, "auto" if exchange == "dense" else exchange)))
        return self._step + max(communicating - self._alone, 0.0)

    def _steps(self, way: tuple[Compressor, str] | None) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in self._gradients]
        optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
        if way is not None:
            number = next(_numbers)
            named = [(f"hvd_compress.rehearsal.{number}.{i}", p) for i, p in enumerate(parameters)]
            optimizer = hvd.DistributedOptimizer(optimizer, named, compression=way[0], exchange=way[1])
        whole = sum(gradient.numel() for gradient in self._gradients)
        shares = [gradient.numel() / max(whole, 1) for gradient in self._gradients]

        def step() -> None:
            optimizer.zero_grad()
            self._computing(self._seconds * (1 - _BACKWARD_SHARE))
            x = torch.zeros((), requires_grad=True)
            for parameter, gradient, share in zip(parameters, self._gradients, shares, strict=True):
                x = _Layer.apply(x, parameter, gradient, self._computing, self._seconds * _BACKWARD_SHARE * share)
            x.backward()
            optimizer.step()

        return step

    def _seconds_of(self, step: Any) -> float:
        """Of a step on the slowest rank: the median of blocks that all ranks begin together."""
        for _ in range(_WARM_UP):
            step()
        one = self._block(step, _LEAST_STEPS)
        steps = min(max(math.ceil(_BLOCK_SECONDS / one), _LEAST_STEPS), _MOST_STEPS)
        return median(self._block(step, steps) for _ in range(_BLOCKS))

    def _block(self, step: Any, steps: int) -> float:
        self._ranks.maximum([0.0])
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        (slowest,) = self._ranks.maximum([(time.perf_counter() - begin) / steps])
        return slowest


class _Computing:
    """Keeps a processor busy, without the GIL, with as much work as takes some seconds while all ranks do the same."""

    def __init__(self, ranks: Ranks) -> None:
        self._words = np.zeros(_WORDS, np.uint64)
        checksum(self._words, 0)  # compiled before it is timed
        ranks.maximum([0.0])
        begin = time.perf_counter()
        calls = 0
        while time.perf_counter() < begin + _RATE_SECONDS:
            checksum(self._words, 0)
            calls += 1
        # the work is the same on all ranks, as that of a network is
        (self._seconds,) = ranks.maximum([(time.perf_counter() - begin) / calls])

    def __call__(self, seconds: float) -> None:
        for _ in range(round(seconds / self._seconds)):
            checksum(self._words, 0)


class _Layer(torch.autograd.Function):
    """Backward computes for some seconds and yields a given gradient of the parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, *gradient_and_work: Any) -> torch.Tensor:
        ctx.gradient_and_work = gradient_and_work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *of_outputs: torch.Tensor) -> Any:
        gradient, compute, seconds = ctx.gradient_and_work
        compute(seconds)
        # the exchange spoils what it is given
        return of_outputs[0], gradient.clone(), None, None, None
