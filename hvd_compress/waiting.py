"""Says what this process waits for, when it has waited for as long as Horovod thinks is long, and may end the wait.

Horovod's own warning comes on one rank, knows collectives by name only, and does not come at all where ranks are
connected by Gloo. Ranks that run different programs, or make different numbers of steps, wait for each other in
collectives that never meet; a sentence of ours says what for. It ends the run only where users have asked for that by
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["add_note", "open_waits", "shut_down_by", "start_watching", "waiting"]

_log = logging.getLogger("hvd_compress")
_numbers = itertools.count()
_thread: threading.Thread | None = None
_shut_downs: dict[str, Callable[[], Any]] = {}

open_waits: dict[Any, tuple[float, Callable[[], str]]] = {}
"""By any key: since when this process waits, in seconds of `time.monotonic()`, and what says whom for.

`waiting` keeps it. Steps, in which each call of a function costs, put their own entry in and take it out again."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Within this, the process waits for other ranks; see `start_watching` for what happens when that takes long.

    An error that ends a long wait gets a note that says what was waited for.

    Args:
        what: and whom for, as in "for the other ranks in epoch_end()".
    """
    number, since = next(_numbers), time.monotonic()
    open_waits[number] = since, lambda: what
    start_watching()
    try:
        yield
    except Exception as error:
        add_note(error, since, what)
        raise
    finally:
        open_waits.pop(number, None)


def add_note(error: Exception, since: float, what: str) -> None:
    """Note what this process has waited for on the error that has ended the wait, if the wait was long."""
    seconds = time.monotonic() - since
    if seconds > _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0) > 0:
        error.add_note(_told(seconds, what))


def shut_down_by(name: str, shut_down: Callable[[], Any]) -> None:
    """Let waits that are too long be ended by `shut_down`, which makes collectives of all ranks fail.

    Args:
        name: of the framework whose collectives these are.
        shut_down: may be called by any thread.
    """
    _shut_downs[name] = shut_down


def start_watching() -> None:
    """Look after open waits on a thread, as Horovod does.

    After HOROVOD_STALL_CHECK_TIME_SECONDS (60) it logs a warning. After HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, if that is
    longer, it logs an error and shuts Horovod down.
    """
    global _thread
    if _thread is None and os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") in ("", "0"):
        _thread = threading.Thread(target=_look, name="hvd_compress.waiting", daemon=True)
        _thread.start()


def _look() -> None:
    limit = _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
    last = _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
    told: set[tuple[int, float]] = set()
    while limit > 0:
        time.sleep(limit / 10)
        # a function of its own, so that nothing keeps alive what waits while this sleeps
        if _look_once(limit, last, told):
            return


def _look_once(limit: float, last: float, told: set[tuple[int, float]]) -> bool:
    """Tell of long waits that are not among `told`; returns whether one was too long, and all were ended."""
    now = time.monotonic()
    waits = {(id(key), since): what for key, (since, what) in dict(open_waits).items()}
    told.intersection_update(waits)
    for wait, what in waits.items():
        seconds = now - wait[1]
        if seconds > limit and wait not in told:
            told.add(wait)
            _log.warning("%s", _told(seconds, what()))
        if seconds > last >= limit:
            _log.error("%s. Horovod is shut down after %.0f s", _told(seconds, what()), last)
            for shut_down in _shut_downs.values():
                shut_down()
            return True
    return False


def _told(seconds: float, what: str) -> str:
    rank = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "of unknown number"
    return (
        f"this rank ({rank}) has waited for {seconds:.0f} s {what}. Some rank is elsewhere: it has ended, is slow, "
        "makes another number of steps, or runs another program"
    )


def _seconds(variable: str, otherwise: float) -> float:
    return float(os.environ.get(variable) or otherwise)
