"""Waiting for several things at once: exchanges that go on while others wait for ranks that are late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Wait", "run_together"]

_NAP_SECONDS = 0.0002


class Wait(NamedTuple):
    """What must be over before the next part of some work.

    Args:
        is_over: whether it is; never waits.
    """

    is_over: Callable[[], bool]


def run_together(works: Sequence[Iterator[Wait]]) -> None:
    """Run works to their ends, each of which yields what it is about to wait for.

    One alone is not asked: it waits by itself. Of several, whichever can go on does. One after the other they would
    wait for ever where another rank, which is ready with the second one only, waits for this one to come to it.
    """
    if len(works) == 1:
        for _ in works[0]:
            pass
        return
    waits = {i: wait for i, work in enumerate(works) if (wait := next(work, None))}
    while waits:
        ready = [i for i, wait in waits.items() if wait.is_over()]
        if not ready:
            time.sleep(_NAP_SECONDS)
        for i in ready:
            following = next(works[i], None)
            if following is None:
                del waits[i]
            else:
                waits[i] = following
