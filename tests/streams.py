"""Streams of a device that there is not: what is copied to the host comes late, and who does not wait is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LateEvent:
    """The end of some copies, which are made when somebody waits for it, or has asked for it often enough."""

    def __init__(self, work: Callable[[], Any], questions: int) -> None:
        self._work: Callable[[], Any] | None = work
        self._questions = questions

    def query(self) -> bool:
        """Tell whether the copies are made."""
        self._questions -= 1
        if self._questions < 0:
            self.synchronize()
        return self._work is None

    def synchronize(self) -> None:
        """Make the copies."""
        if self._work is not None:
            self._work()
            self._work = None


class LateStreams:
    """Runs kernels at once, and copies to the host when their event is waited for.

    Args:
        questions: how often an event says that it has not come.
    """

    def __init__(self, questions: int = 2) -> None:
        self._questions = questions
        self.has_met = False
        """Whether kernels wait for what the caller has computed since results were given out."""
        self.has_parted = True
        """Whether the caller waits for all kernels."""

    def run(self, work: Callable[[], T]) -> T:
        """Run it."""
        self.has_parted = False
        return work()

    def fetch(self, work: Callable[[], Any]) -> LateEvent:
        """Run it late."""
        return LateEvent(work, self._questions)

    def meet(self, stream: Any) -> None:
        """Note it."""
        self.has_met = True

    def part(self) -> None:
        """Note it."""
        self.has_parted = True
