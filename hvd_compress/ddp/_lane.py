"""A thread that makes calls one after the other, in the order in which they are given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["Lane"]

_Call = tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]


class Lane:
    """Runs calls on a thread of its own.

    A process ends without waiting for it: a call may wait for a rank that never answers.

    Args:
        name: of the thread.

    Example:
        >>> from hvd_compress.ddp._lane import Lane
        >>> lane, seen = Lane("example"), []
        >>> ends = [lane.submit(seen.append, number) for number in range(3)]
        >>> [end.result() for end in ends], seen
        ([None, None, None], [0, 1, 2])
        >>> lane.close()
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # it refers to the queue alone, so that whoever owns the lane can be forgotten while the thread waits
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

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


def _run(call: Callable[..., Any], arguments: tuple[Any, ...], end: Future[Any]) -> None:
    try:
        end.set_result(call(*arguments))
    except BaseException as error:
        end.set_exception(error)
