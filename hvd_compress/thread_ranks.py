"""Ranks that are threads of one process, for tests and for teaching; and what collectives bring, as plain functions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import HvdCompressError, MismatchError
from hvd_compress.ranks import Ranks
from hvd_compress.waiting import waiting

__all__ = ["ThreadRanks", "delivered"]

Array = npt.NDArray[Any]


def delivered(
    collective: str, arrays: Sequence[Array], sizes: Sequence[Sequence[int] | None], root: int = 0
) -> list[Array]:
    """Compute what a collective brings to each rank; see `Ranks.start`.

    Args:
        collective: its name.
        arrays: of all ranks; only read.
        sizes: of all ranks.
        root: of a broadcast.

    Returns:
        One array for each rank. Except for an alltoall, all ranks get the same array; for a broadcast it is the root's.
    """
    ranks = len(arrays)
    if collective == "broadcast":
        return [arrays[root]] * ranks
    if collective == "allgather":
        return [np.concatenate(arrays)] * ranks
    if collective == "allreduce":
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        return [total] * ranks
    parts = []
    for array, of_rank in zip(arrays, sizes, strict=True):
        bounds = np.cumsum((0, *((array.size // ranks,) * ranks if of_rank is None else of_rank)))
        parts.append([array[a:b] for a, b in pairwise(bounds)])
    return [np.concatenate(of_receiver) for of_receiver in zip(*parts, strict=True)]


class ThreadRanks(Ranks):
    """One of N ranks that are threads of one process; `ThreadRanks.run_all` makes them.

    Collectives check what Horovod checks, and their results have the same bits whichever rank comes first. No rank
    waits for a rank that has ended, or for longer than a limit.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import ThreadRanks
        >>> def program(ranks):
        ...     return ranks.run("allreduce", "sum", np.full(2, 1 + ranks.position, np.float32))
        >>> ThreadRanks.run_all(3, program)[0]
        array([6., 6.], dtype=float32)
    """

    def __init__(self, world: _World, members: tuple[int, ...], number: int) -> None:
        super().__init__(len(members), members.index(number), f"threads.{'.'.join(map(str, members))}")
        self._world = world
        self._members = members
        self._number = number
        # of this rank: those of the process would be counted by all of its threads
        self._counts = world.counts[number]

    @classmethod
    def run_all(cls, size: int, program: Callable[[ThreadRanks], Any], seconds: float = 60.0) -> list[Any]:
        """Run a program on ranks, each in a thread of its own; returns what it returned on each of them.

        Args:
            size: how many ranks.
            program: what a rank does, given its `ThreadRanks`.
            seconds: how long a rank waits for another one in a collective.

        Raises:
            ValueError: fewer than one rank.
            Exception: what the first rank that failed has raised.
        """
        if size < 1:
            raise ValueError(f"ThreadRanks.run_all(size={size!r}): must be at least 1")
        world = _World(size, seconds)

        def of_rank(number: int) -> Any:
            try:
                return program(cls(world, tuple(range(size)), number))
            except BaseException as error:
                world.failed(error)
                raise
            finally:
                world.end(number)

        with ThreadPoolExecutor(size, "hvd_compress.rank") as pool:
            futures = [pool.submit(of_rank, number) for number in range(size)]
        if world.failure is not None:
            raise world.failure
        return [future.result() for future in futures]

    def among(self, positions: Sequence[int]) -> ThreadRanks:
        """Return a group of the ranks at these positions, one of which is this rank.

        Raises:
            ValueError: this rank is not among them, or a position is there twice or does not exist.
        """
        if len({*positions}) < len(positions) or not {*positions} <= {*range(self.size)}:
            raise ValueError(f"among({list(positions)}): must be different positions from 0 to {self.size - 1}")
        if self.position not in positions:
            raise ValueError(f"among({list(positions)}): position {self.position}, which calls it, is not among them")
        return type(self)(self._world, tuple(self._members[p] for p in positions), self._number)

    def start(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        if _is_alltoall(collective) and array.ndim != 1:
            raise TypeError(f"{collective} {name!r} of an array of shape {array.shape}: give a flat one, of shape (n,)")
        kept = None if sizes is None else tuple(map(int, sizes))
        return self._world.give(self._members, self._number, name, _Given(collective, array, kept, root))

    def is_done(self, handle: Any) -> bool:
        return bool(handle.results or handle.refusal)

    def wait(self, handle: Any) -> Array:
        result = self._world.await_results(handle, self._number)[self.position]
        return result if handle.is_alltoall else result.copy()


class _Given(NamedTuple):
    """What one rank hands to a collective."""

    collective: str
    array: Array
    sizes: tuple[int, ...] | None
    root: int


class _Meeting:
    """One collective, from the first rank that starts it on."""

    def __init__(self, members: tuple[int, ...], name: str) -> None:
        self.members = members
        self.name = name
        self.given: dict[int, _Given] = {}
        self.results: list[Array] = []
        self.refusal = ""

    @property
    def is_alltoall(self) -> bool:
        return _is_alltoall(self.given[self.members[0]].collective)

    def complete(self) -> None:
        """Bring the results, now that all are here; arrays are read now, as those are that Horovod is given."""
        everyone = [self.given[number] for number in self.members]
        self.refusal = _difference(everyone)
        if not self.refusal:
            first = everyone[0]
            try:
                self.results = delivered(first.collective, [g.array for g in everyone], [g.sizes for g in everyone],
                                         first.root)  # fmt: skip
            except Exception as error:
                # all ranks are to hear of it, who wait
                shapes = [g.array.shape for g in everyone]
                self.refusal = f"{first.collective} of arrays of the shapes {shapes} is impossible: {error}"
                return
            if first.collective == "broadcast":
                # its owner may write to it as soon as it has waited
                self.results = [self.results[0].copy()] * len(everyone)


class _World:
    """Where the threads of one program meet.

    Args:
        size: how many there are.
        seconds: see `ThreadRanks.run_all`.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self.counts = [Counter[str]() for _ in range(size)]
        self.failure: BaseException | None = None
        self._seconds = seconds
        self._changed = threading.Condition()
        self._ended: set[int] = set()
        self._turns: Counter[Any] = Counter()
        self._meetings: dict[Any, _Meeting] = {}

    def failed(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error

    def end(self, number: int) -> None:
        with self._changed:
            self._ended.add(number)
            self._changed.notify_all()

    def give(self, members: tuple[int, ...], number: int, name: str, given: _Given) -> _Meeting:
        with self._changed:
            # a name is used again as soon as this rank has waited, perhaps before the others have
            turn = self._turns[number, members, name]
            self._turns[number, members, name] += 1
            key = members, name, turn
            meeting = self._meetings.setdefault(key, _Meeting(members, name))
            meeting.given[number] = given
            if len(meeting.given) == len(members):
                del self._meetings[key]
                meeting.complete()
                self._changed.notify_all()
            return meeting

    def await_results(self, meeting: _Meeting, number: int) -> list[Array]:
        deadline = time.monotonic() + self._seconds
        with waiting(f"for other threads in {meeting.name!r}"), self._changed:
            while not (meeting.results or meeting.refusal):
                missing = [m for m in meeting.members if m not in meeting.given]
                what = f"rank {number} waits in {meeting.name!r} for the ranks {missing}, which have not come"
                if self._ended.intersection(missing):
                    raise HvdCompressError(f"{what}: some have ended. All ranks must start the same collectives")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise HvdCompressError(f"{what} within {self._seconds:g} seconds. All ranks must start the same "
                                           "collectives; give run_all(seconds=...) if some need longer")  # fmt: skip
        if meeting.refusal:
            raise MismatchError(f"the ranks disagree on {meeting.name!r}: {meeting.refusal}")
        return meeting.results


def _is_alltoall(collective: str) -> bool:
    return collective not in ("allgather", "allreduce", "broadcast")


def _difference(everyone: Sequence[_Given]) -> str:
    """What does not fit in what ranks have given; "" if all does."""
    first = everyone[0]
    for position, given in enumerate(everyone):
        facts = {"collective": (first.collective, given.collective), "dtype": (first.array.dtype, given.array.dtype)}
        if first.collective in ("allreduce", "broadcast"):
            facts |= {"number of elements": (first.array.size, given.array.size), "root": (first.root, given.root)}
        for fact, (expected, found) in facts.items():
            if expected != found:
                return f"position 0 has the {fact} {expected}, position {position} has {found}"
        if _is_alltoall(first.collective) and not _fit(given.sizes, given.array.size, len(everyone)):
            return (
                f"position {position} gives sizes={given.sizes} for {given.array.size} elements: must be one for each "
                f"of the {len(everyone)} ranks, not more elements than there are, or None where they divide equally"
            )
    return ""


def _fit(sizes: Sequence[int] | None, numel: int, ranks: int) -> bool:
    if sizes is None:
        return numel % ranks == 0
    return len(sizes) == ranks and min(sizes) >= 0 and sum(sizes) <= numel
