"""Says what this process waits for, when it has waited for as long as Horovod thinks is long.

Horovod's own warning comes on one rank, and knows collectives by name only. Ranks that run different programs, or make
different numbers of steps, wait for each other in collectives that never meet; a sentence of ours says what for. It
ends nothing: that is up to the user, or to HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["waiting"]

_log = logging.getLogger("hvd_compress")
_waits: dict[int, tuple[float, str]] = {}
_numbers = itertools.count()
_thread: threading.Thread | None = None


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Within this, the process waits for other ranks; after HOROVOD_STALL_CHECK_TIME_SECONDS (60) it logs a warning.

    Args:
        what: and whom for, as in "for the other ranks in epoch_end()".
    """
    number = next(_numbers)
    _waits[number] = time.monotonic(), what
    _watch()
    try:
        yield
    finally:
        _waits.pop(number, None)


def _watch() -> None:
    global _thread
    if _thread is None and os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") in ("", "0"):
        _thread = threading.Thread(target=_look, name="hvd_compress.waiting", daemon=True)
        _thread.start()


def _look() -> None:
    limit = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60)
    told: set[int] = set()
    while limit > 0:
        time.sleep(limit / 10)
        waits = dict(_waits)
        told &= waits.keys()
        for number, (since, what) in waits.items():
            seconds = time.monotonic() - since
            if seconds > limit and number not in told:
                told.add(number)
                _log.warning(
                    "this rank (%s) has waited for %.0f s %s. Some rank is elsewhere: it has ended, is slow, makes "
                    "another number of steps, or runs another program",
                    os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "of unknown number",
                    seconds,
                    what,
                )
