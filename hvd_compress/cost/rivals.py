"""Find out whether a way that lost a search is faster after all, by turns beside the chosen one, now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from hvd_compress.cost.chance import is_slower

__all__ = ["Rivals"]

_MOST_TURNS = 25
# a turn counts as a loss of at least this share of itself: else equal ways would be compared all the time
_LEAST_LOSS = 0.1
_RECENT_TURNS = 5


class Rivals:
    """Says which other way is worth a turn beside the chosen one, and when it has proved to be faster.

    A search believes what chance or a busy machine shows it, and a wrong choice that costs less than a drift would
    stay. So turns go on, for as much as may be lost by them: a share of all steps' seconds is saved up for the rivals,
    for each in inverse proportion to the square root of what its turn loses. A way that is nearly as fast has many
    turns. One that is far slower has few, and cannot keep the others waiting. The last 25 turns count, those of the
    search among them.

    Args:
        share: of the seconds of all steps that turns of slower ways may cost; 0 for no turns.
        turn_steps: how many steps a turn has, given the seconds of a step.

    Raises:
        ValueError: a share below 0, or not below 1.

    Example:
        >>> from hvd_compress.cost import Rivals
        >>> rivals = Rivals(share=0.01, turn_steps=lambda seconds: 10)
        >>> rivals.begin("onebit", {"onebit": 0.100, "fp16": 0.101}, {"fp16": [0.99]})
        >>> # ten steps of fp16 may lose a tenth of a second
        >>> steps = next(step for step in range(200) if rivals.save(0.1) == "fp16")
        >>> round(steps, -1)
        100
        >>> rivals.add("fp16", 0.08, chosen=0.1, steps=10)  # one good turn is no proof
        False
    """

    def __init__(self, share: float, turn_steps: Callable[[float], int]) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"share={share!r}: must be at least 0 and below 1")
        self._share, self._turn_steps = share, turn_steps
        self._chosen = ""
        self._known: dict[str, float] = {}
        self._predicted: set[str] = set()
        self._ratios: dict[str, list[float]] = {}
        self._saved: dict[str, float] = {}
        self._recent: list[float] = []  # seconds of the chosen one
        # the price of a turn, and the weight of what is saved; kept, since every step asks and only turns change them
        self._prices: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    @property
    def known(self) -> dict[str, float]:
        """The seconds of a step by name, as the last turns compare with the chosen one, or predicted."""
        return dict(self._known)

    @property
    def measured(self) -> dict[str, float]:
        """The part of `known` that is not only predicted."""
        return {name: seconds for name, seconds in self._known.items() if name not in self._predicted}

    def begin(
        self,
        chosen: str,
        measured: Mapping[str, float],
        ratios: Mapping[str, Sequence[float]],
        predicted: Mapping[str, float] | None = None,
    ) -> None:
        """Begin with a way that has been chosen.

        Args:
            chosen: its name.
            measured: seconds of a step by name, for all ways that have been tried, and the chosen one.
            ratios: how many times as long the chosen one took as another, in each turn of both so far; may lack names.
            predicted: seconds of a step by name, for others.
        """
        self._chosen, self._known = chosen, {**(predicted or {}), **measured}
        self._predicted = self._known.keys() - measured.keys()
        self._ratios = {name: list(ratios.get(name, ()))[-_MOST_TURNS:] for name in self._known if name != chosen}
        self._saved = dict.fromkeys(self._ratios, 0.0)
        self._recent = [self._known[chosen]] * _RECENT_TURNS
        self._set_prices()

    def save(self, seconds: float) -> str | None:
        """Take the seconds of a step with the chosen one; returns which rival is to have a turn now, or None."""
        for name, weight in self._weights.items():
            self._saved[name] += weight * seconds
        due = [name for name, price in self._prices.items() if price < self._saved[name]]
        return max(due, key=lambda name: self._saved[name] / self._prices[name], default=None)

    def add(
        self,
        name: str,
        seconds: float,
        chosen: float,
        steps: int,
        changing: Sequence[float] = (),
        handicap: float = 1.0,
    ) -> bool:
        """Take a rival's turn; returns whether it has proved to be faster than the chosen one.

        Args:
            name: of the rival that has had a turn.
            seconds: of a step with the rival.
            chosen: seconds of a step with the chosen one, right before or after.
            steps: all steps of the rival's turn.
            changing: seconds of the steps after both changes of ways, which may be longer.
            handicap: what the seconds of the chosen one are multiplied with before they are compared.
        """
        self._predicted.discard(name)
        self._follow(chosen)
        ratios = self._ratios[name] = [*self._ratios[name], chosen / seconds][-_MOST_TURNS:]
        self._known[name] = self._known[self._chosen] / median(ratios)
        self._saved[name] -= self._spent(name, steps, changing)
        self._set_prices()
        # a single turn may have been disturbed
        return len(ratios) > 1 and is_slower([handicap * ratio for ratio in ratios])

    def change(self, name: str) -> None:
        """Choose a rival from now on; the others, which had no turns with it, keep what is known of them."""
        inverse = [1 / ratio for ratio in self._ratios[name]]
        measured = self.measured
        predicted = {other: self._known[other] for other in self._predicted}
        self.begin(name, measured, {self._chosen: inverse}, predicted)

    def _set_prices(self) -> None:
        seconds = {name: self._known[name] for name in self._ratios}
        self._prices = {name: self._turn_steps(s) * self._loss(s) for name, s in seconds.items()}
        roots = {name: 1 / math.sqrt(price) for name, price in self._prices.items()}
        self._weights = {name: self._share * root / sum(roots.values()) for name, root in roots.items()}

    def _loss(self, seconds: float) -> float:
        """Compute what a step of so many seconds loses against the chosen one."""
        usual = self._known[self._chosen]
        return max(seconds - usual, _LEAST_LOSS * usual)

    def _spent(self, name: str, steps: int, changing: Sequence[float]) -> float:
        """Compute the seconds that a turn has cost."""
        # what is known, not what the turn took: a pause in it must not keep the rival from its next turns for hours
        usual = max(self._known[name], self._known[self._chosen])
        return steps * self._loss(self._known[name]) + sum(max(0.0, min(s, steps * usual) - usual) for s in changing)

    def _follow(self, chosen: float) -> None:
        """Scale all known seconds, since steps of all ways may take longer or shorter than in the search."""
        self._recent = [*self._recent, chosen][-_RECENT_TURNS:]
        factor = median(self._recent) / self._known[self._chosen]
        self._known = {name: factor * seconds for name, seconds in self._known.items()}
