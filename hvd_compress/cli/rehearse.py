"""Try training steps on made-up gradients: trying one tells more than a prediction, where it does not take too long.

Where steps take milliseconds, a prediction leaves out the threads of ranks that share processors, and the Python of
hooks and exchanges. Where they take seconds, it does not know how far collectives of many megabytes fill the link.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from itertools import chain, count
from statistics import median, stdev
from typing import Any

import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress.cli.predict import BACKWARD_SHARE
from hvd_compress.compressors import Compressor
from hvd_compress.kernels.checksum import checksum
from hvd_compress.ranks import Ranks

__all__ = ["Rehearsal"]

_WARM_UP, _LONG_WARM_UP = 3, 2  # steps in which kernels are compiled and Horovod's caches filled
_LONG_SECONDS = 0.5
_TURN_UP = 2  # short steps after those of another optimizer, which have filled the processor's caches
# ranks that share processors sometimes take tens of milliseconds: short blocks would mostly leave that out
_MOST_STEPS, _BLOCK_SECONDS = 100, 0.5
_LEAST_BLOCKS, _MOST_BLOCKS, _TRIAL_SECONDS = 2, 5, 1.5
_CERTAIN = 0.05  # share of a step below which the standard error of the trials' mean is small enough
_SPARE, _SHIFT = 2**16, 4099  # spare deviates, and how far gradients move through them from step to step
_WORDS = 2**14  # 128 KiB: some microseconds a call, in the second-level cache
_RATE_SECONDS = 0.05

_numbers = count()


class Rehearsal:
    """Makes steps of a network that is known by its shapes; all methods are collective calls.

    Forward and backward compute something that takes as long as the network's on all ranks at once, and leaves normal
    deviates as gradients, others in each step: with equal ones, residuals would grow until many lie close below the
    threshold, and sparse compressors would search far longer than in training. Exchanges and optimizer are real, on
    the CPU.

    Args:
        ranks: all of them, on PyTorch.
        shapes: of the gradients, in the order of the forward pass.
        step: seconds of a step without communication; 0 if only exchanges are of interest.
    """

    def __init__(self, ranks: Ranks, shapes: Sequence[tuple[int, ...]], step: float) -> None:
        self._ranks = ranks
        self._step = step
        self._gradients = _Gradients(shapes, ranks.position)
        self._computing = _Computing(ranks)
        self._computed = step
        self._added: dict[tuple[Compressor, str], list[list[float]]] = {}  # by trials and blocks
        self._alone = self._steps(None)
        # copying gradients and the optimizer's step are a part of the step that is simulated
        steps = _steps_of_a_block(self._warmed_up(self._alone))
        alone = median(self._block(self._alone, steps) for _ in range(_MOST_BLOCKS))
        self._computed = max(2 * step - alone, 0.0)

    def seconds(self, compressor: Compressor, exchange: str) -> float:
        """Try a step whose gradients go this way; returns its seconds, with earlier trials, equal on all ranks.

        What else runs on the machines slows down all of a trial. Of three trials with others in between it spoils one.

        Args:
            compressor: of the gradients.
            exchange: "dense" for Horovod's allreduce.
        """
        communicating = self._steps((compressor, "auto" if exchange == "dense" else exchange))
        one = self._warmed_up(communicating)
        steps = _steps_of_a_block(one)
        blocks = math.ceil(_TRIAL_SECONDS / (steps * (one + self._step)))
        # in turns, since what else runs on the machines slows down both
        added = [
            self._block(communicating, steps) - self._block(self._alone, steps)
            for _ in range(min(max(blocks, _LEAST_BLOCKS), _MOST_BLOCKS))
        ]
        del communicating
        gc.collect()  # optimizers belong to cycles, and the next one may be as large
        trials = self._added.setdefault((compressor, exchange), [])
        trials.append(added)
        return self._so_far(trials)

    def is_certain(self, compressor: Compressor, exchange: str) -> bool:
        """Tell whether the trials of this way agree so well that another changes little; equal on all ranks."""
        trials = self._added.get((compressor, exchange), [])
        if len(trials) < 2:
            return False
        error = stdev(map(median, trials)) / math.sqrt(len(trials))
        (uncertain,) = self._ranks.maximum([float(error > _CERTAIN * self._so_far(trials))])
        return not uncertain

    def _so_far(self, trials: list[list[float]]) -> float:
        return self._step + max(median(chain.from_iterable(trials)), 0.0)

    def _steps(self, way: tuple[Compressor, str] | None) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in self._gradients.shapes]
        optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
        if way is not None:
            number = next(_numbers)
            named = [(f"hvd_compress.rehearsal.{number}.{i}", p) for i, p in enumerate(parameters)]
            optimizer = hvd.DistributedOptimizer(optimizer, named, compression=way[0], exchange=way[1])
        whole = sum(parameter.numel() for parameter in parameters)
        shares = [parameter.numel() / max(whole, 1) for parameter in parameters]

        def step() -> None:
            optimizer.zero_grad()
            self._computing(self._computed * (1 - BACKWARD_SHARE))
            x = torch.zeros((), requires_grad=True)
            for parameter, gradient, share in zip(parameters, self._gradients.of_next_step(), shares, strict=True):
                x = _Layer.apply(x, parameter, gradient, self._computing, self._computed * BACKWARD_SHARE * share)
            x.backward()
            optimizer.step()

        return step

    def _warmed_up(self, step: Any) -> float:
        """Make some steps that do not count; returns about the seconds of a step."""
        for number in range(_WARM_UP):
            seconds = self._seconds_of(step, 1)
            if seconds > _LONG_SECONDS and number + 1 >= _LONG_WARM_UP:
                break
        return seconds

    def _block(self, step: Any, steps: int) -> float:
        """Measure the seconds of a step in a row of them, on the slowest rank."""
        if steps > 1:
            self._seconds_of(step, _TURN_UP)
        return self._seconds_of(step, steps)

    def _seconds_of(self, step: Any, steps: int) -> float:
        """Measure the seconds of a step in so many that all ranks begin together."""
        self._ranks.maximum([0.0])
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        (slowest,) = self._ranks.maximum([(time.perf_counter() - begin) / steps])
        return slowest


def _steps_of_a_block(seconds: float) -> int:
    """Return how many steps of so many seconds a block has."""
    return min(max(math.ceil(_BLOCK_SECONDS / seconds), 1), _MOST_STEPS)


class _Gradients:
    """Makes normal deviates in given shapes, others in each step: the same ones, read from another place."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        self.shapes = list(shapes)
        self._sizes = [math.prod(shape) for shape in shapes]
        self._deviates = torch.randn(sum(self._sizes) + _SPARE, generator=torch.Generator().manual_seed(seed))
        self._start = 0

    def of_next_step(self) -> list[torch.Tensor]:
        """Return views, which must not be written to."""
        self._start = (self._start + _SHIFT) % _SPARE
        parts = self._deviates[self._start : self._start + sum(self._sizes)].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class _Computing:
    """Keeps a processor busy, without the GIL, with as much work as takes some seconds while all ranks do the same."""

    def __init__(self, ranks: Ranks) -> None:
        self._words = np.zeros(_WORDS, np.uint64)
        checksum(self._words, 0)  # compiles, before it is timed
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
    """Computes for some seconds in backward, and yields a given gradient of the parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, *gradient_and_work: Any) -> torch.Tensor:
        ctx.gradient_and_work = gradient_and_work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *of_outputs: torch.Tensor) -> Any:
        gradient, compute, seconds = ctx.gradient_and_work
        compute(seconds)
        # a clone: the exchange writes its result over the gradient
        return of_outputs[0], gradient.clone(), None, None, None
