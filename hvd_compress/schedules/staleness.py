"""Bound how far workers of an asynchronous parameter server may run ahead of each other.

A `BoundedStaleness` is a setting; the `WorkerClocks` that it starts are kept by the server. Sources: Ho et al., More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (NeurIPS 2013), section 3, for the bound;
Sievert (2017), section 3.2.2, for workers that do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple

from hvd_compress.compressors.settings import check_int, check_real

__all__ = ["Arrival", "BoundedStaleness", "WorkerClocks"]


class Arrival(NamedTuple):
    """Holds what the clocks say about a gradient that has come.

    Args:
        staleness: updates that were made since the parameters that it was computed from.
        is_accepted: whether it may be applied; False if it is too stale, which only happens after its worker was given
            up.
        returns: whether its worker had been given up.
    """

    staleness: int
    is_accepted: bool
    returns: bool


@dataclass(frozen=True)
class BoundedStaleness:
    """Lets workers be `limit` gradients ahead of the slowest; a worker that is silent for too long does not count.

    The clock of a worker is how many gradients of it have come. The answer to a gradient, the present parameters, is
    held back while its worker is too far ahead; a worker sends its next gradient only when it has been answered.
    Difference from Ho et al.: a worker waits for the server at one place, not for single parameters to be fresh enough.

    Args:
        limit: 0: each gradient is answered when all workers have sent as many, and its worker waits for that; 1: the
            same, but workers compute the next gradient meanwhile; larger: workers may be this many gradients apart.
        patience: seconds of silence after which a worker that others wait for is given up, until it speaks again.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> from hvd_compress.schedules import BoundedStaleness
        >>> clocks = BoundedStaleness(limit=2).clocks(workers=2)
        >>> clocks.arrive(0, computed_from=0, now=0.0), clocks.release(0.0)
        (Arrival(staleness=0, is_accepted=True, returns=False), [0])
        >>> clocks.count_update()
        >>> clocks.arrive(0, computed_from=0, now=0.1).staleness, clocks.release(0.1)  # two ahead of worker 1
        (1, [])
        >>> clocks.arrive(1, computed_from=0, now=0.2).staleness, clocks.release(0.2)
        (1, [0, 1])
    """

    limit: int = 4
    patience: float = 60.0

    _MOST: ClassVar[int] = 2**31 - 1

    def __post_init__(self) -> None:
        check_int(self, "limit", self.limit, 0, self._MOST)
        check_real(self, "patience", self.patience, above=0.0, most=float(self._MOST))

    @property
    def slack(self) -> int:
        """By how many gradients a worker may be ahead of the slowest and still be answered."""
        # a worker that does not wait for its answer has sent one more gradient by the time the answer is held back
        return max(0, self.limit - 1)

    def most_staleness(self, workers: int) -> int:
        """Compute the most updates between a gradient's parameters and its arrival, while no worker is given up."""
        # gradient c + 1 belongs to parameters that were answered to gradient c - 1, when the others had sent
        # c - 1 - slack or more; when it comes they have sent c + limit at most, and gradient c came in between. With
        # limit 0 the parameters were answered to gradient c, when all had sent that
        others = workers - 1
        return others if self.limit == 0 else 1 + 2 * self.limit * others

    def clocks(self, workers: int, now: float = 0.0) -> WorkerClocks:
        """Start the clocks of so many workers, before the first gradient."""
        return WorkerClocks(self, workers, now)

    def get_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict, which ranks compare."""
        return asdict(self)


class _State(Enum):
    LIVE = auto()
    GIVEN_UP = auto()
    FINISHED = auto()


class WorkerClocks:
    """Tracks the progress of the server's workers, which are numbers from 0.

    Args:
        rule: the settings.
        workers: how many.
        now: seconds of any clock.
    """

    def __init__(self, rule: BoundedStaleness, workers: int, now: float) -> None:
        self.rule = rule
        self.version = 0
        """The number of updates made so far."""
        self.clocks = [0] * workers
        self._states = [_State.LIVE] * workers
        self._is_unanswered = [False] * workers
        self._heard_at = [now] * workers
        self._most_staleness = rule.most_staleness(workers)

    def arrive(self, worker: int, computed_from: int, now: float) -> Arrival:
        """Count a gradient; it waits for its answer now.

        Args:
            worker: who sends it.
            computed_from: the version of the parameters that it belongs to.
            now: seconds of the clock.
        """
        staleness = self.version - computed_from
        returns = self._states[worker] is _State.GIVEN_UP
        self.clocks[worker] += 1
        if returns:
            # else it would be the slowest for long, though it is as fast as the others again
            self.clocks[worker] = max([self.clocks[worker], *self._slowest()])
            self._states[worker] = _State.LIVE
        self._is_unanswered[worker] = True
        self._heard_at[worker] = now
        # not only the first one may be too stale: the worker has computed another while this one was under way
        return Arrival(staleness, staleness <= self._most_staleness, returns)

    def count_update(self) -> None:
        """Count a gradient that was applied."""
        self.version += 1

    def finish(self, worker: int) -> None:
        """Note that a worker sends no more gradients; what it waits for is answered."""
        self._states[worker] = _State.FINISHED

    def release(self, now: float) -> list[int]:
        """Return the workers that are to be answered now."""
        released = self._where(lambda w: self._is_unanswered[w] and not self._is_held(w))
        for worker in released:
            self._is_unanswered[worker] = False
            # a worker that was kept waiting has not been silent
            self._heard_at[worker] = now
        return released

    def give_answers(self) -> list[int]:
        """Return all workers that wait for an answer, however far they are ahead: the training has ended."""
        waiting = self._where(lambda w: self._is_unanswered[w])
        self._is_unanswered = [False] * len(self.clocks)
        return waiting

    def excuse(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence of the workers: the server has not listened."""
        self._heard_at = [heard_at + seconds for heard_at in self._heard_at]

    def give_up(self, now: float) -> list[int]:
        """Give up workers that others have waited for too long; returns which.

        Others wait where an answer is held back because of a silent worker, or where a worker has finished and all that
        are left are silent. The only worker of a server may take as long as it likes.
        """
        live = self._where(lambda w: self._states[w] is _State.LIVE)
        silent = [w for w in live if not self._is_unanswered[w] and now - self._heard_at[w] > self.rule.patience]
        if len(silent) == len(live) < len(self._states):
            given_up = silent if _State.FINISHED in self._states else []
        else:
            held = [self.clocks[w] for w in live if self._is_unanswered[w] and self._is_held(w)]
            given_up = [w for w in silent if held and max(held) - self.clocks[w] > self.rule.slack]
        for worker in given_up:
            self._states[worker] = _State.GIVEN_UP
        return given_up

    @property
    def is_over(self) -> bool:
        """Whether all workers have finished, except those that were given up."""
        return _State.LIVE not in self._states

    def _is_held(self, worker: int) -> bool:
        if self._states[worker] is not _State.LIVE:
            return False
        return any(self.clocks[worker] - slowest > self.rule.slack for slowest in self._slowest())

    def _slowest(self) -> list[int]:
        """Return the clock of the slowest live worker, in a list; an empty one if there is none."""
        return sorted(self.clocks[w] for w in self._where(lambda w: self._states[w] is _State.LIVE))[:1]

    def _where(self, holds: Callable[[int], bool]) -> list[int]:
        return [w for w in range(len(self.clocks)) if holds(w)]
