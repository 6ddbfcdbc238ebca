"""Simulate a training step: jobs on one core or two, and Horovod's one background thread."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_compress.cost.predict import Stage

__all__ = ["PlannedExchange", "step_seconds"]

# HOROVOD_FUSION_THRESHOLD: the most bytes of tensors that one allreduce joins
_FUSION_BYTES = 128 * 2**20

# the order of events at one moment: a gradient's hook encodes it and moves on others whose first collective has ended,
# only then backward goes on, and all that is issued at that moment can be fused
_HOOK, _MIDDLE, _BACKWARD, _ISSUE, _SEND = range(5)


@dataclass(frozen=True)
class PlannedExchange:
    """Describes one exchange of a step.

    Args:
        stages: one after the other.
        backward: seconds of the backward pass between the gradient before and this one.
    """

    stages: tuple[Stage, ...]
    backward: float = 0.0


def step_seconds(jobs: Sequence[PlannedExchange], forward: float = 0.0, worker: bool = False) -> float:
    """Predict the seconds of a training step whose exchanges overlap with backward.

    The model: collectives run one after the other, in the order in which they are issued, and slow down what computes
    meanwhile. Dense ones that wait are fused. First and middle kernels run as soon as they can. Last kernels run when
    all collectives have ended, since a step is taken as a whole or not at all.

    Args:
        jobs: in the order in which backward makes their gradients.
        forward: seconds of all that is neither backward nor exchange.
        worker: whether kernels run on a core of their own, and not between the layers of backward.

    Example:
        >>> from hvd_compress.cost import PlannedExchange, Stage, step_seconds
        >>> job = PlannedExchange((Stage(1.0), Stage(3.0, "allgather"), Stage(2.0)), backward=4.0)
        >>> step_seconds([job])  # 4 backward, 1 encode, 3 send, 2 decode
        10.0
        >>> step_seconds([job, job])  # the first is sent while the second is made
        17.0
    """
    return forward + _Simulation(jobs, worker).run()


def _gathering(stage: Stage) -> float:
    """Return for how many seconds, once a dense collective has begun, others may still join it."""
    # most of what a collective costs besides its bytes is Horovod's wait for its next cycle; on average, half of that
    # has passed when a tensor comes
    return max(0.0, stage.seconds - stage.fusable_bytes * stage.per_byte) / 2


class _Simulation:
    """Runs events in the order of time; one whose core is busy comes again when the core is free."""

    def __init__(self, jobs: Sequence[PlannedExchange], worker: bool) -> None:
        self._jobs = jobs
        self._free = {"main": 0.0, "worker": 0.0, "network": 0.0}
        self._kernels = "worker" if worker else "main"
        self._events: list[tuple[float, int, int, int]] = []  # ready, kind, job, stage
        self._waiting: dict[str, list[tuple[int, int]]] = {}  # dense exchanges that may be fused, by collective
        self._last: list[float] = []
        self._sending: list[tuple[float, float, float]] = []  # from, to, share of a core

    def run(self) -> float:
        if self._jobs:
            self._push(0.0, _BACKWARD, 0, 0)
        while self._events:
            ready, kind, job, stage = heapq.heappop(self._events)
            core = "main" if kind == _BACKWARD else self._kernels
            if kind in (_HOOK, _MIDDLE, _BACKWARD) and self._free[core] > ready:
                self._push(self._free[core], kind, job, stage)
            elif kind == _BACKWARD:
                end = self._occupy("main", ready, self._jobs[job].backward)
                self._next(end, job, 0)
                if job + 1 < len(self._jobs):
                    self._push(end, _BACKWARD, job + 1, 0)
            elif kind in (_HOOK, _MIDDLE):
                end = self._occupy(core, ready, self._jobs[job].stages[stage].seconds)
                self._next(end, job, stage + 1)
            elif kind == _ISSUE:
                self._issue(ready, job, stage)
            else:
                self._send(ready, job, stage)
        return max(self._free.values()) + sum(self._last)

    def _next(self, ready: float, job: int, stage: int) -> None:
        stages = self._jobs[job].stages
        if stage >= len(stages):
            return
        if stages[stage].collective:
            self._push(ready, _ISSUE, job, stage)
        elif stage == len(stages) - 1:
            self._last.append(stages[stage].seconds)
        else:
            self._push(ready, _MIDDLE if stage else _HOOK, job, stage)

    def _issue(self, ready: float, job: int, stage: int) -> None:
        its = self._jobs[job].stages[stage]
        if not its.fusable_bytes:
            self._next(self._occupy("network", ready, its.seconds, its.core), job, stage + 1)
            return
        waiting = self._waiting.setdefault(its.collective, [])
        waiting.append((job, stage))
        if len(waiting) == 1:
            self._push(max(ready, self._free["network"]) + _gathering(its), _SEND, job, stage)

    def _send(self, ready: float, job: int, stage: int) -> None:
        first = self._jobs[job].stages[stage]
        earliest = self._free["network"] + _gathering(first)
        if earliest > ready:  # another one was issued first
            self._push(earliest, _SEND, job, stage)
            return
        waiting = self._waiting.pop(collective := first.collective)
        nbytes, fused = first.fusable_bytes, [(job, stage)]
        for i, other in enumerate(waiting[1:], 1):
            more = self._jobs[other[0]].stages[other[1]].fusable_bytes
            if nbytes + more > _FUSION_BYTES:
                self._waiting[collective] = waiting[i:]
                self._push(ready, _SEND, *other)
                break
            nbytes, fused = nbytes + more, [*fused, other]
        seconds = first.seconds + (nbytes - first.fusable_bytes) * first.per_byte
        if len(fused) > 1:
            seconds += nbytes * first.joined_per_byte
        end = self._occupy("network", ready - _gathering(first), seconds, first.core)
        for other in fused:
            self._next(end, other[0], other[1] + 1)

    def _occupy(self, resource: str, ready: float, seconds: float, core: float = 0.0) -> float:
        begin = max(ready, self._free[resource])
        end = begin + seconds
        if resource == "network":
            if core:
                # this holds up what computes already, and what begins to compute before the collective ends
                self._free["main"] += core * max(0.0, min(end, self._free["main"]) - begin)
                self._sending.append((begin, end, core))
        else:
            self._sending = [interval for interval in self._sending if interval[1] > begin]
            end += sum(share * max(0.0, min(end, to) - max(begin, since)) for since, to, share in self._sending)
        self._free[resource] = end
        return end

    def _push(self, ready: float, kind: int, job: int, stage: int) -> None:
        heapq.heappush(self._events, (ready, kind, job, stage))
