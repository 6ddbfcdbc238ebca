"""Find the fastest of several ways by trying them in turns for as long as chance may still decide."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median, median_low

from hvd_compress.cost.chance import is_slower

__all__ = ["Race"]


class Race:
    """Says what is to be tried next, from the seconds of what was tried before.

    All ways are tried in turns. A way leaves when, in the turns that it shared with the fastest, it was slower by more
    than chance explains in 2 % of cases: Student's t of the logarithms of their ratios, one-sided. So a way that is far
    slower leaves after two turns where turns agree, and stays for more where other programs disturb the machine. What
    disturbs both ways of a turn alike does not count. A single turn may have been disturbed: after it, a way leaves
    only if it took more than four times as long.

    Args:
        trials: the least trials of each way that has not left.
        most_trials: the most trials of each way.
        seconds: of all trials together, after which no way has more than `trials`.

    Raises:
        ValueError: fewer than one trial, or fewer at most than at least.

    Example:
        >>> from hvd_compress.cost import Race
        >>> race = Race(trials=1, most_trials=20, seconds=10.0)
        >>> race.add("fp16", 0.012, lasted=0.1)
        >>> race.add("onebit", 0.010, lasted=0.1)
        >>> while (name := race.following()) is not None:
        ...     race.add(name, {"fp16": 0.012, "onebit": 0.010}[name], lasted=0.1)
        >>> race.measured
        {'fp16': 0.012, 'onebit': 0.01}
    """

    def __init__(self, trials: int, most_trials: int, seconds: float) -> None:
        if not 1 <= trials <= most_trials:
            raise ValueError(
                f"trials={trials!r}, most_trials={most_trials!r}: give 1 or more, and most_trials not below trials"
            )
        self._least, self._most, self._seconds = trials, most_trials, seconds
        self._trials: dict[str, list[float]] = {}
        self._lost: set[str] = set()
        self._lasted = 0.0

    @property
    def measured(self) -> dict[str, float]:
        """The seconds by name: the median of the trials, the lower one of two; from three on, as the turns compare."""
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
        """Return the way to try next; None when the fastest is known, or is not worth more trials."""
        self._drop()
        left = [name for name in self._trials if name not in self._lost]
        name = min(left, key=lambda name: len(self._trials[name]))
        trials = len(self._trials[name])
        if len(left) < 2 or trials >= self._most or (trials >= self._least and self._lasted >= self._seconds):
            return None
        return name

    def ratios(self, name: str, other: str) -> list[float]:
        """Return how many times as long the first took as the other, in each turn of both."""
        return [a / b for a, b in zip(self._trials[name], self._trials[other], strict=False)]

    def _compared(self, name: str, fastest: str, alone: Mapping[str, float]) -> float:
        """Compute a name's seconds from those of the fastest: what disturbs both of a turn alike does not count."""
        ratios = self.ratios(name, fastest)
        return alone[name] if len(ratios) < 3 else alone[fastest] * median(ratios)

    def _drop(self) -> None:
        measured = self.measured
        fastest = min(measured, key=measured.__getitem__)
        # what has lost once stays out: to look again after each turn would bring chance back in
        self._lost |= {name for name in measured if name != fastest and is_slower(self.ratios(name, fastest))}
        self._lost.discard(fastest)
