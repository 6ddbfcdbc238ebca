"""A thread of its own for kernels, where a rank has a core for it: backward goes on meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

__all__ = ["Worker", "has_cores"]

_VARIABLE = "HVD_COMPRESS_WORKER"
_CORES = 2  # of a rank, from which on one is to spare


def has_cores(local_ranks: int) -> bool:
    """Whether kernels get a thread of their own: by the cores of this host for each of its ranks, unless the user says.

    Raises:
        ValueError: the variable HVD_COMPRESS_WORKER is neither 0 nor 1.
    """
    said = os.environ.get(_VARIABLE)
    if said is None:
        return len(os.sched_getaffinity(0)) >= _CORES * local_ranks
    if said not in ("0", "1"):
        raise ValueError(f"{_VARIABLE}={said!r}: must be 1 for a thread of its own for the kernels, or 0 for none")
    return said == "1"


class Worker:
    """Runs calls one after the other in the order in which they are given.

    Args:
        threaded: on a thread that all workers of the process share; else each at once.

    Example:
        >>> from hvd_compress.engine import Worker
        >>> worker, seen = Worker(threaded=True), []
        >>> for number in range(3):
        ...     worker.run(lambda number=number: seen.append(number))
        >>> worker.drain()
        >>> seen
        [0, 1, 2]
    """

    def __init__(self, threaded: bool) -> None:
        self._threaded = threaded
        self._given: list[Future[None]] = []

    def run(self, call: Callable[[], None]) -> None:
        """Run a call now, or as soon as those before it have ended; what it raises then, `drain` will."""
        if self._threaded:
            self._given.append(_thread().submit(call))
        else:
            call()

    def drain(self) -> None:
        """Wait until all calls have ended, and raise what the first of those that failed has raised."""
        given, self._given = self._given, []
        failures = [failure for failure in (future.exception() for future in given) if failure is not None]
        if failures:
            raise failures[0]

    def forget(self) -> None:
        """Wait until all calls have ended, however they did."""
        given, self._given = self._given, []
        for future in given:
            future.exception()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hvd_compress")
