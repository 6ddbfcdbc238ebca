"""Whether what lost a search is faster after all: other ways are compared with the chosen one again, now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hvd_compress.cost.chance import is_slower

__all__ = ["Rivals"]

_MOST_TURNS = 25
# a turn counts as a loss of so much of itself at least: equals would else be compared all the time
_LEAST_LOSS = 0.1


class Rivals:
    """Says which other way is worth a turn beside the chosen one, and when it has proved to be faster.

    A search takes what chance or a busy machine shows it, and a wrong choice that costs less than a drift would stay.
    So turns go on, for as much as may be lost by them: a share of all steps' seconds is saved up, and spent on the one
    on which least has been spent, its next turn included. What is nearly as fast costs little and has many turns; what
    is ten times as slow has one an hour. The last 25 turns count, those of the search among them.

    Args:
        share: of the seconds of all steps that turns of slower ways may cost; 0 for no turns.

    Raises:
        ValueError: a share below 0, or not below 1.

    Example:
        >>> from hvd_compress.cost import Rivals
        >>> rivals = Rivals(share=0.01)
        >>> rivals.begin("onebit", {"onebit": 0.100, "fp16": 0.101}, {"fp16": [0.99]})
        >>> turns = {"onebit": 10, "fp16": 10}  # steps; 10 of fp16 may lose a tenth of a second
        >>> for step in range(101):
        ...     rivals.save(0.1)
        >>> rivals.due(turns)
        'fp16'
        >>> rivals.add("fp16", 0.08, chosen=0.1, steps=10, lost=0.0)  # one good turn is no proof
        False
    """

    def __init__(self, share: float) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"share={share!r}: must be at least 0 and below 1")
        self._share = share
        self._chosen = ""
        self._known: dict[str, float] = {}
        self._ratios: dict[str, list[float]] = {}
        self._spent: dict[str, float] = {}
        self._saved = 0.0

    @property
    def known(self) -> dict[str, float]:
        """Seconds of a step by name, as the last turns compare with the chosen one."""
        return dict(self._known)

    def begin(self, chosen: str, known: Mapping[str, float], ratios: Mapping[str, Sequence[float]]) -> None:
        """One has been chosen.

        Args:
            chosen: its name.
            known: seconds of a step by name, of all that are to be compared, the chosen one included.
            ratios: how many times as long the chosen one took as another, in each turn of both so far; may lack names.
        """
        self._chosen, self._known = chosen, dict(known)
        self._ratios = {name: list(ratios.get(name, ()))[-_MOST_TURNS:] for name in known if name != chosen}
        self._spent = dict.fromkeys(self._ratios, 0.0)
        self._saved = 0.0

    def save(self, seconds: float) -> None:
        """A step with the chosen one has taken so long."""
        self._saved += self._share * seconds

    def due(self, steps: Mapping[str, int]) -> str | None:
        """Which one is to have a turn now; None while too little has been saved.

        Args:
            steps: of a turn, by name.
        """
        prices = {name: steps[name] * self._loss(self._known[name]) for name in self._spent}
        following = min(prices, key=lambda name: self._spent[name] + prices[name], default=None)
        return following if following is not None and prices[following] < self._saved else None

    def add(self, name: str, seconds: float, chosen: float, steps: int, lost: float) -> bool:
        """Take a turn; whether it has proved to be faster than the chosen one.

        Args:
            name: of what has had a turn.
            seconds: of a step with it.
            chosen: seconds of a step with the chosen one, right before or after.
            steps: of its turn.
            lost: seconds that both turns took longer than as many steps of the chosen one.
        """
        lost = max(lost, steps * _LEAST_LOSS * chosen)
        self._spent[name] += lost
        self._saved -= lost
        ratios = self._ratios[name] = [*self._ratios[name], chosen / seconds][-_MOST_TURNS:]
        self._known[name] = self._known[self._chosen] / median(ratios)
        return is_slower(ratios)

    def change(self, name: str) -> None:
        """It is the chosen one from now on; the others, with whom it has had no turns, keep what is known of them."""
        inverse = [1 / ratio for ratio in self._ratios[name]]
        self.begin(name, self._known, {self._chosen: inverse})

    def get_state(self) -> dict[str, Any]:
        """A JSON-able dict for `set_state`."""
        ratios = {name: list(of_name) for name, of_name in self._ratios.items()}
        return {
            "chosen": self._chosen,
            "known": dict(self._known),
            "ratios": ratios,
            "spent": dict(self._spent),
            "saved": self._saved,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `get_state`."""
        self._chosen, self._known = state["chosen"], dict(state["known"])
        self._ratios = {name: list(ratios) for name, ratios in state["ratios"].items()}
        self._spent, self._saved = dict(state["spent"]), float(state["saved"])

    def _loss(self, seconds: float) -> float:
        """Of a step."""
        usual = self._known[self._chosen]
        return max(seconds - usual, _LEAST_LOSS * usual)
