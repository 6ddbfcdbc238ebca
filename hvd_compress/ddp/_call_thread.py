"""A thread that makes calls one after the other, in the order in which they are given."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["CallThread"]

_Call = tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]

_PATIENCE_SECONDS = 1.0
_running: dict[threading.Thread, SimpleQueue[_Call | None]] = {}
"""All threads, and their calls."""


class CallThread:
    """Runs calls on a thread of its own.

    A process that ends waits a second for it, and no longer: a call may wait for a rank that never answers.

    Args:
        name: of the thread.

    Example:
        >>> from hvd_compress.ddp._call_thread import CallThread
        >>> thread, seen = CallThread("example"), []
        >>> ends = [thread.submit(seen.append, number) for number in range(3)]
        >>> [end.result() for end in ends], seen
        ([None, None, None], [0, 1, 2])
        >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # it refers to the queue alone, so that whoever owns this can be forgotten while the thread waits
        thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        _running[thread] = self._calls
        thread.start()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a call after all those before; returns its end."""
        end: Future[Any] = Future()
        self._calls.put((call, arguments, end))
        return end

    def close(self) -> None:
        """Let the thread end after the calls that were given."""
        self._calls.put(None)


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (given := calls.get()) is not None:
        _run(*given)
        # not kept alive until the next call comes
        del given
    _running.pop(threading.current_thread(), None)


@atexit.register
def _end_all() -> None:
    """End the threads that are idle.

    One that comes back from torch, or frees a tensor of its, while the interpreter ends would abort the process.
    """
    running = dict(_running)
    for calls in running.values():
        calls.put(None)
    limit = time.monotonic() + _PATIENCE_SECONDS
    for thread in running:
        thread.join(max(0.0, limit - time.monotonic()))


def _run(call: Callable[..., Any], arguments: tuple[Any, ...], end: Future[Any]) -> None:
    try:
        end.set_result(call(*arguments))
    except BaseException as error:
        end.set_exception(error)
