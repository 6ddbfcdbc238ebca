"""Which of several ways is the fastest, found by trying them in turns for as long as chance may still decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import median, median_low
from typing import Any

__all__ = ["Race"]

_ONCE_MORE, _TWICE = 4.0, 2
_CHANCE = 0.02


class Race:
    """Says what is to be tried next, from the seconds of what was tried before.

    Those that are about as fast as the fastest are tried in turns. One leaves when it was slower than the fastest in so
    many of their common turns that chance would make it so in at most 2 % of cases (sign test, one-sided). Others on
    the machine disturb both of a turn alike, and a disturbance of one counts as one turn, however long it was.

    Args:
        doubt: what takes at most this share longer than the fastest is about as fast. What takes at most four times as
            long is tried once more, and the better of two counts: all may have been disturbed once.
        trials: of each that is about as fast, at least.
        most_trials: of each, at most.
        seconds: that all trials last together; after that, there are `trials` of each and no more.

    Raises:
        ValueError: fewer than one trial, or fewer at most than at least.

    Example:
        >>> from hvd_compress.cost import Race
        >>> race = Race(doubt=0.25, trials=1, most_trials=20, seconds=10.0)
        >>> race.add("fp16", 0.012, lasted=0.1)
        >>> for trial in range(6):
        ...     race.add("fp16" if trial % 2 else "onebit", 0.010 + 0.002 * (trial % 2), lasted=0.1)
        >>> race.following(), race.measured
        ('onebit', {'fp16': 0.012, 'onebit': 0.01})
    """

    def __init__(self, doubt: float, trials: int, most_trials: int, seconds: float) -> None:
        if not 1 <= trials <= most_trials:
            raise ValueError(f"trials={trials!r}, most_trials={most_trials!r}: give 1 or more, and not less at most")
        self._doubt, self._least, self._most, self._seconds = doubt, trials, most_trials, seconds
        self._trials: dict[str, list[float]] = {}
        self._lost: set[str] = set()
        self._lasted = 0.0

    @property
    def measured(self) -> dict[str, float]:
        """Seconds by name: the median of the trials, the lower one of two; from three on, as the turns compare."""
        alone = {name: median_low(seconds) for name, seconds in self._trials.items()}
        if not alone:
            return {}
        fastest = min(alone, key=alone.__getitem__)
        return {name: self._compared(name, fastest, alone) for name in alone}

    def add(self, name: str, seconds: float, lasted: float) -> None:
        """Take a trial of a name: the seconds of a step, and how long the trial lasted."""
        self._trials.setdefault(name, []).append(seconds)
        self._lasted += lasted

    def following(self) -> str | None:
        """What is to be tried again; None when the fastest is known, or is not worth more trials."""
        for limit, trials in ((_ONCE_MORE, min(_TWICE, self._least)), (1 + self._doubt, self._least)):
            close = self._close(limit)
            name = self._least_tried(close)
            if len(close) > 1 and len(self._trials[name]) < trials:
                return name
        self._drop()
        left = [name for name in self._close(1 + self._doubt) if name not in self._lost]
        name = self._least_tried(left)
        if len(left) < 2 or self._lasted >= self._seconds or len(self._trials[name]) >= self._most:
            return None
        return name

    def get_state(self) -> dict[str, Any]:
        """A JSON-able dict for `set_state`."""
        trials = {name: list(seconds) for name, seconds in self._trials.items()}
        return {"trials": trials, "lost": sorted(self._lost), "lasted": self._lasted}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `get_state`."""
        self._trials = {name: list(seconds) for name, seconds in state["trials"].items()}
        self._lost, self._lasted = set(state["lost"]), float(state["lasted"])

    def _close(self, limit: float) -> list[str]:
        measured = self.measured
        least = min(measured.values())
        return [name for name, seconds in measured.items() if seconds <= limit * least]

    def _least_tried(self, names: Sequence[str]) -> str:
        return min(names, key=lambda name: len(self._trials[name]))

    def _compared(self, name: str, fastest: str, alone: Mapping[str, float]) -> float:
        """Seconds of a name from those of the fastest: what disturbs both of a turn alike does not count."""
        ratios = [a / b for a, b in zip(self._trials[name], self._trials[fastest], strict=False)]
        return alone[name] if len(ratios) < 3 else alone[fastest] * median(ratios)

    def _drop(self) -> None:
        measured = self.measured
        fastest = min(measured, key=measured.__getitem__)
        # what has lost once stays out: to look again after each turn would bring chance back in
        self._lost |= {n for n in self._close(1 + self._doubt) if n != fastest and self._is_slower(n, fastest)}
        self._lost.discard(fastest)

    def _is_slower(self, name: str, other: str) -> bool:
        turns = [a > b for a, b in zip(self._trials[name], self._trials[other], strict=False)]
        as_many = sum(comb(len(turns), k) for k in range(sum(turns), len(turns) + 1))
        return as_many <= _CHANCE * 2 ** len(turns)
