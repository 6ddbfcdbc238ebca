"""Run kernels on a thread of their own where a rank has a core for it, while backward goes on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

__all__ = ["KernelThread", "has_cores"]

_VARIABLE = "HVD_COMPRESS_KERNEL_THREAD"
_CORES = 2  # with so many cores for each rank, one is to spare


def has_cores(local_ranks: int) -> bool:
    """Tell whether kernels get a thread of their own; HVD_COMPRESS_KERNEL_THREAD decides if it is set.

    They do if this process may use two cores for each rank of its host. Cores that ranks are bound to are counted as if
    all of these shared them, and quotas of containers are not seen: the variable is for those who know better.

    Args:
        local_ranks: on this host.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    said = os.environ.get(_VARIABLE)
    if said is None:
        # macOS binds no process to cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cores >= _CORES * local_ranks
    if said not in ("0", "1"):
        raise ValueError(f"{_VARIABLE}={said!r}: must be 1 for a thread of its own for the kernels, or 0 for none")
    return said == "1"


class KernelThread:
    """Runs calls one after the other in the order in which they are given.

    Args:
        threaded: on a thread that all of these objects in the process share; else each at once.

    Example:
        >>> from hvd_compress.engine import KernelThread
        >>> thread, seen = KernelThread(threaded=True), []
        >>> for number in range(3):
        ...     thread.run(lambda number=number: seen.append(number))
        >>> thread.drain()
        >>> seen
        [0, 1, 2]
    """

    def __init__(self, threaded: bool) -> None:
        self._threaded = threaded
        self._given: deque[Future[None]] = deque()

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run a call now, or as soon as earlier calls have ended; in that case `drain` raises its error."""
        if self._threaded:
            self._given.append(_thread().submit(call, *arguments))
        else:
            call(*arguments)

    def drain(self) -> None:
        """Wait until all calls have ended, and raise the error of the first that failed."""
        failure = self.forget()
        if failure is not None:
            raise failure

    def forget(self) -> BaseException | None:
        """Wait until all calls have ended; returns the error of the first that failed, if any did."""
        failure = None
        while self._given:
            # if an interrupt ends our waiting, the call that we waited for stays in the queue
            raised = self._given[0].exception()
            self._given.popleft()
            failure = failure or raised
        return failure


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hvd_compress")
