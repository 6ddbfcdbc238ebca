"""Tell when steps have been slower or faster for so long that a search for a better way is worth its costs."""

from __future__ import annotations

from statistics import quantiles

__all__ = ["DriftWatch"]

_LONGEST_PATIENCE = 64


class DriftWatch:
    """Tells a drift of step times that is worth another search from one that is not.

    A search loses time with the slower ways that it tries. So the next one begins only when a drift has made steps
    differ by as much, all together, as the last search has lost. Then neither a short drift nor a noisy machine costs
    more in searches than it does by itself. Besides, the windows until the next search double each time.

    Args:
        window: the least number of steps that are looked at together.
        drift: the relative change that counts if three quarters of them show it: a burst of other work on the machine
            is not another link.
        seconds: the least seconds that they last together: where steps are short, such a burst takes many of them.

    Raises:
        ValueError: a window of fewer than two steps, a drift that is not above 0, or seconds below 0.

    Example:
        >>> from hvd_compress.cost import DriftWatch
        >>> watch = DriftWatch(window=4, drift=0.3)
        >>> watch.begin(expected=0.1, lost=0.5)
        >>> [watch.observe(0.2) for step in range(8)]  # a tenth of a second more in each step
        [None, None, None, None, None, None, None, 0.2]
    """

    def __init__(self, window: int, drift: float, seconds: float = 0.0) -> None:
        if window < 2 or not drift > 0 or seconds < 0:
            raise ValueError(
                f"window={window!r}, drift={drift!r}, seconds={seconds!r}: must be at least 2 steps, above 0 and at "
                "least 0"
            )
        self._window, self._drift, self._least_seconds = window, drift, seconds
        self._seconds: list[float] = []
        self._patience, self._windows = 1, 0
        self._expected, self._lost, self._differs = 0.0, 0.0, 0.0

    def begin(self, expected: float, lost: float) -> None:
        """Note that a search has ended.

        Args:
            expected: seconds of a step from now on.
            lost: seconds that the search has taken beyond what as many steps of `expected` would have.
        """
        self.expect(expected)
        self._windows, self._lost = 0, lost

    def expect(self, seconds: float) -> None:
        """Expect steps to take so long from now on, with another way, for which nothing was lost."""
        self._seconds, self._expected, self._differs = [], seconds, 0.0

    def observe(self, seconds: float) -> float | None:
        """Take the seconds of a step; returns the present seconds of steps if another search is due, or None."""
        self._seconds.append(seconds)
        if len(self._seconds) < self._window or sum(self._seconds) < self._least_seconds:
            return None
        steps, (low, middle, high) = len(self._seconds), quantiles(self._seconds, n=4)
        self._seconds = []
        self._windows += 1
        is_drift = low > self._expected * (1 + self._drift) or high < self._expected * (1 - self._drift)
        if not is_drift:
            self._differs = 0.0
            return None
        self._differs += steps * abs(middle - self._expected)
        if self._windows < self._patience or self._differs < self._lost:
            return None
        self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        return middle
