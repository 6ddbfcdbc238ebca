"""`Auto` on PyTorch: times the steps of an optimizer and says when its tensors are to go another way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.compressors import FP16
from hvd_compress.cost import HorovodCollectives, network_of, slowest_speeds
from hvd_compress.engine import Pilot, Routing, Tensor
from hvd_compress.policy import Auto

__all__ = ["Steering"]


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
        self._collectives = HorovodCollectives(hvd, torch.from_numpy, process_set)
        # others for measuring: they keep their buffer, whose memory training may want
        measured = HorovodCollectives(hvd, torch.from_numpy, process_set)
        network = network_of(measured, with_hosts=routing.exchange == "hierarchical")
        speeds = slowest_speeds((FP16(), *auto.candidates), self._collectives)
        self._pilot = Pilot(auto, tensors, routing, network, speeds)
        self._is_due = False
        self._since: float | None = None
        self._seconds: list[float] = []

    @property
    def routing(self) -> Routing:
        """Which way tensors go now."""
        return self._pilot.routing()

    def begin(self) -> None:
        """The first gradient of a step is there, or one that is not the first."""
        self._is_due = True
        if self._since is None:
            self._since = time.perf_counter()

    def end(self) -> bool:
        """A step's gradients are combined; whether `routing` is another one for the next. Now and then a collective."""
        if self._since is None or not self._is_due:
            return False
        # From the end of one step to that of the next: a way makes forward pass and update slower or faster, too, by
        # what it leaves in the caches. Pauses between steps are in few of them, and medians count.
        now = time.perf_counter()
        self._seconds.append(now - self._since)
        self._since, self._is_due = now, False
        if len(self._seconds) < self._pilot.seconds_wanted:
            return False
        seconds, self._seconds = self._seconds, []
        changes = self._pilot.observe(self._collectives.maximum(seconds))
        self._since = time.perf_counter()
        return changes

    def report(self) -> dict[str, Any]:
        """See `Pilot.report`."""
        return self._pilot.report()
