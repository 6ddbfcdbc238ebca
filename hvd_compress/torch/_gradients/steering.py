"""`Auto` on PyTorch: times the steps of an optimizer and says when its tensors are to go another way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np

from hvd_compress.cost import network_of, slowest_speeds
from hvd_compress.engine import Pilot, Routing, Tensor
from hvd_compress.engine.pilot import timed_compressors
from hvd_compress.policy import Auto
from hvd_compress.ranks import Ranks
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["Steering", "left_out"]

_LEAST_SHARE = 0.5  # of a step whose rest was shorter than usual
_next_number = 0  # of a `Steering`


class _Span(NamedTuple):
    """Seconds from a step's first gradient until all are combined, and before that, from the end of the last step."""

    combining: float
    rest: float


class Steering:
    """A `Pilot` with the clock and the ranks that agree on what it is told.

    Measures the network and the kernels when it is made, which takes a few seconds: a collective call.

    Args:
        auto: what the user asked for.
        tensors: all that may come.
        routing: exchange and sizes.
        process_set: the ranks that take part.
    """

    def __init__(self, auto: Auto, tensors: Sequence[Tensor], routing: Routing, process_set: hvd.ProcessSet) -> None:
        self._ranks = TorchRanks(process_set)
        network = network_of(self._ranks, with_hosts=routing.exchange.uses_hosts)
        speeds = slowest_speeds(timed_compressors(auto, routing.exchange), self._ranks)
        self._name = f"hvd_compress.seconds.{_agreed_number(self._ranks)}"
        self._pilot = Pilot(auto, tensors, routing, network, speeds)
        self._wanted = self._pilot.seconds_wanted
        self._began: float | None = None
        self._ended: float | None = None
        self._spans: list[_Span] = []
        self._untold: list[float] = []  # seconds of steps, for all ranks to know
        self._gathering: int | None = None  # the handle of those on their way
        self._usual_rest: float | None = None
        self._beyond_usual = 0.0  # what the rest takes with the way that was chosen
        self._beyond_of: str | None = None

    @property
    def routing(self) -> Routing:
        """Which way tensors go now."""
        return self._pilot.routing()

    def begin(self) -> None:
        """Start the clock of a step, unless an earlier gradient has started it."""
        if self._began is not None:
            return
        self._began = time.perf_counter()
        seconds, self._untold = self._untold, []
        if seconds:
            # not when the last step ended: where that was the last one of all, a rank that is late would begin a
            # collective that others, which have shut down, take no part in
            self._begin_gathering(seconds)

    def end(self) -> bool:
        """A step's gradients are combined; whether `routing` is another one for the next. Now and then a collective."""
        if self._began is None:
            return False
        now = time.perf_counter()
        rest = 0.0 if self._ended is None else self._began - self._ended
        self._spans.append(_Span(now - self._began, rest))
        self._began, self._ended = None, now
        if self._gathering is None and len(self._spans) < self._wanted:
            return False
        changes = self._compare()
        self._ended = time.perf_counter()
        return changes

    def _compare(self) -> bool:
        """Let all ranks know the seconds of this one's steps, or have them known when the next step ends."""
        if self._gathering is None:
            seconds, self._spans = self._compared(self._spans), []
            if not self._pilot.trying:
                # the ranks need not wait for each other between two steps; of a trial, no more steps are to be made
                self._untold = seconds
                return False
            self._begin_gathering(seconds)
        handle, self._gathering = self._gathering, None
        everyone = self._ranks.wait(handle).reshape(self._ranks.size, -1)
        # not the largest: ranks end a step one after the other, and one that ends late has a shorter next step; the
        # more ranks compute after the last collective, the longer each step of the latest would look
        changes = self._pilot.observe(everyone.mean(axis=0).tolist())
        self._wanted = self._pilot.seconds_wanted
        if changes:
            # of the step that was made meanwhile
            self._spans = []
        return changes

    def _begin_gathering(self, seconds: list[float]) -> None:
        self._gathering = self._ranks.start("allgather", f"{self._name}.{len(seconds)}", np.array(seconds))

    def _compared(self, spans: Sequence[_Span]) -> list[float]:
        """Seconds of steps, by which ways are compared while they are tried, and watched afterwards.

        A way makes the rest of a step, the update and the forward pass, slower or faster, too, by what it leaves in the
        caches. What the rest usually takes, whatever the way, is no reason to call two ways equally fast. Of the one
        that was chosen only combining is watched, since a slower data loader is no other link; by the same clock, or
        its first seconds would look like a drift.
        """
        rest = median(span.rest for span in spans)
        if self._usual_rest is None:
            self._usual_rest = rest
        chosen = self._pilot.chosen
        if chosen is None:
            self._beyond_of = None
        if chosen is None or self._pilot.rival is not None:
            return [_clocked(span.combining, span.rest - self._usual_rest) for span in spans]
        # not after each turn of a rival: what the data loader does meanwhile would add up
        if chosen != self._beyond_of:
            self._beyond_usual, self._beyond_of = rest - self._usual_rest, chosen
        self._usual_rest = rest - self._beyond_usual
        return [_clocked(span.combining, self._beyond_usual) for span in spans]

    def abandon(self) -> None:
        """The step that has begun will not end, and says nothing about its way."""
        self._began = self._ended = None

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is done inside is no part of a step; for what takes longer with some ways, though training does not."""
        began = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - began
            self._began = None if self._began is None else self._began + taken
            # in the middle of combining, too, or it would be among the rest
            self._ended = None if self._ended is None else self._ended + taken

    def report(self) -> dict[str, Any]:
        """See `Pilot.report`."""
        return self._pilot.report()


def _agreed_number(ranks: Ranks) -> int:
    """Another one for each `Steering` of this rank, the same on all ranks of the process set; a collective call.

    Two optimizers may gather at once, so that their names have to differ. What ranks have counted may differ, since
    they are in different process sets, and these may be removed.
    """
    global _next_number
    number = int(ranks.maximum([float(_next_number)])[0])
    _next_number = number + 1
    return number


def _clocked(combining: float, beyond: float) -> float:
    return max(combining + beyond, _LEAST_SHARE * combining)


def left_out(steering: Steering | None) -> AbstractContextManager[None]:
    """See `Steering.left_out`; where nothing is steered nothing is timed."""
    return nullcontext() if steering is None else steering.left_out()
