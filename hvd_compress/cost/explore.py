"""Try the few configurations that are predicted to be fast, keep the fastest, and look again now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from hvd_compress.cost.choose import Configuration, Corrector, pick
from hvd_compress.cost.drift_watch import DriftWatch
from hvd_compress.cost.race import Race
from hvd_compress.cost.rivals import Rivals

__all__ = ["Explorer"]

_LONGEST_STEP = 3.0  # times the median: a longer step counts as so long
_MOST_STEPS = 5  # times the least number of steps in a trial


@dataclass(frozen=True)
class _Settings:
    """Says how long to look; see `Explorer`."""

    most: int
    within: float
    skip: int
    steps: int
    seconds: float
    drift: float
    margin: float
    trials: int
    most_trials: int
    race: float

    def trial_steps(self, seconds: float) -> int:
        """Return how many steps of so many seconds are measured in a trial."""
        return min(max(self.steps, math.ceil(self.seconds / seconds)), _MOST_STEPS * self.steps)

    def begin_race(self) -> Race:
        return Race(self.trials, self.most_trials, self.race)


@dataclass
class _Turn:
    """Holds the turn of a rival, and of the chosen one after it."""

    chosen: str
    rival: str
    changing: list[float] = field(default_factory=list)  # seconds of the steps that do not count
    seconds: float | None = None  # of a step of the rival, when its part has ended
    steps: int = 0  # of the rival, those that count


class Explorer:
    """Says which configuration the next step is to use, from the measured seconds of the steps before.

    Ranks that are given the same configurations and the same seconds agree at every step, so the seconds must be made
    equal first: `Auto` takes the mean of all ranks.

    Args:
        configurations: what `hvd_compress.cost.configurations` returns, the best prediction first.
        dense: the name of the configuration that loses nothing.
        most: the most configurations that a search tries, `dense` not counted.
        within: a configuration is tried if its prediction, corrected or not, is at most so many times the best known
            seconds.
        skip: steps after a change that do not count, since kernels are compiled and Horovod's caches filled.
        steps: the least number of steps in a trial. Their mean counts, in which no step is taken for longer than 3
            times the median: slow steps may belong to a way, but pauses do not.
        seconds: the least seconds of a trial, unless that takes more than 5 * `steps` steps: short steps vary more.
        drift: the relative change of step times that begins a new search, once it has lasted long enough to be worth
            one: see `DriftWatch`. Three quarters of 4 * `steps` steps that last 4 * `seconds` or longer must show it.
        margin: the share by which another configuration must be faster than `dense`.
        trials: the least trials of each, unless it is slower beyond chance before: see `Race`.
        most_trials: the most trials of each.
        race: seconds of all trials together, after which none has more than `trials`.
        share: the share of all steps' seconds that comparing the chosen one with others again may lose: see `Rivals`.

    Raises:
        ValueError: `dense` is not among the configurations, names repeat, or a setting is out of its range.

    Example:
        >>> from hvd_compress.cost import Configuration, Explorer
        >>> both = [Configuration("onebit", ("onebit",), 0.08), Configuration("none", ("none",), 0.1)]
        >>> explorer = Explorer(both, dense="none", skip=0, steps=1, trials=1, most_trials=1)
        >>> explorer.current.name
        'onebit'
        >>> explorer.observe(0.2)  # slower than predicted, so is probably the other one
        True
        >>> explorer.observe(0.1)
        False
        >>> explorer.current.name, explorer.committed
        ('none', True)
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        dense: str,
        most: int = 4,
        within: float = 1.5,
        skip: int = 2,
        steps: int = 5,
        seconds: float = 0.0,
        drift: float = 0.3,
        margin: float = 0.02,
        trials: int = 3,
        most_trials: int = 25,
        race: float = 20.0,
        share: float = 0.005,
    ) -> None:
        names = [c.name for c in configurations]
        if dense not in names or len(set(names)) < len(names):
            raise ValueError(f"configurations {names}: names must differ, and dense={dense!r} must be one of them")
        if most < 1 or steps < 1 or skip < 0 or within < 1 or drift <= 0 or seconds < 0:
            raise ValueError(
                f"most={most!r}, steps={steps!r}, skip={skip!r}, within={within!r}, drift={drift!r}, "
                f"seconds={seconds!r}: must be at least 1, 1, 0, 1, above 0 and at least 0"
            )
        self.configurations = tuple(configurations)
        self._by_name = {c.name: c for c in configurations}
        self.corrector = Corrector()
        self._dense = dense
        self._settings = _Settings(most, within, skip, steps, seconds, drift, margin, trials, most_trials, race)
        self._race = self._settings.begin_race()
        self._rivals = Rivals(share, lambda seconds: skip + self._settings.trial_steps(seconds))
        self._turn: _Turn | None = None
        self._seconds: list[float] = []
        self._skipped = 0
        self._watch = DriftWatch(4 * steps, drift, 4 * seconds)
        self._search_seconds, self._search_steps = 0.0, 0
        self._expected: float | None = None
        self._dense_is_due = False
        self._current = self._by_name[pick({c.name: c.seconds for c in configurations}, dense, margin=margin)]

    @property
    def current(self) -> Configuration:
        """The configuration that the next step is to use."""
        return self._current

    @property
    def committed(self) -> bool:
        """Whether the search has ended."""
        return self._expected is not None

    @property
    def trying(self) -> bool:
        """Whether the next steps are a trial, in a search or of a rival."""
        return not self.committed or self._turn is not None

    @property
    def chosen(self) -> Configuration:
        """The configuration that is thought to be the fastest: `current`, unless a rival has its turn."""
        return self.current if self._turn is None else self._by_name[self._turn.chosen]

    @property
    def rival(self) -> str | None:
        """The name of the rival that has its turn beside `chosen`; None if there is none."""
        return self._turn.rival if self._turn is not None and self._turn.seconds is None else None

    @property
    def expected(self) -> float:
        """The seconds of a step with `chosen`: as measured when it was chosen, or predicted."""
        return self._expected or self.current.seconds

    @property
    def measured(self) -> dict[str, float]:
        """The seconds of a step by name, of the configurations that have been tried this time."""
        return self._rivals.measured if self.committed else self._race.measured

    @property
    def missing(self) -> int:
        """The number of steps until the present trial is probably over; 0 if there is none."""
        if not self.trying:
            return 0
        taken, least, skipped = len(self._seconds), self._settings.steps, self._settings.skip - self._skipped
        if taken < least:
            return skipped + least - taken
        return max(1, self._settings.trial_steps(fmean(self._seconds)) - taken)

    def observe(self, seconds: float) -> bool:
        """Take the seconds of a step with `current`; returns whether `current` is another one from now on.

        Raises:
            ValueError: seconds that are not above 0.
        """
        if not seconds > 0:
            raise ValueError(f"a step of {seconds!r} seconds: must be above 0")
        before = self._current
        if self._skipped < self._settings.skip:
            self._skipped += 1
            if self._turn is not None:
                self._turn.changing.append(seconds)
            return False
        if self.trying:
            self._seconds.append(seconds)
            if self._is_enough():
                self._end_trial()
        else:
            self._go_on(seconds)
        changes = self._current is not before
        if changes:
            self._skipped = 0
        return changes

    def _is_enough(self) -> bool:
        taken, least = len(self._seconds), self._settings.steps
        return taken >= _MOST_STEPS * least or (taken >= least and sum(self._seconds) >= self._settings.seconds)

    def _end_trial(self) -> None:
        seconds, steps = _lasting(self._seconds), len(self._seconds)
        self._seconds = []
        if self._turn is None:
            self._go_on_searching(seconds, steps)
        elif self._turn.seconds is None:
            # the chosen one has its turn next, so that both come after a change
            self._turn.seconds, self._turn.steps = seconds, steps
            self._use(self._turn.chosen)
        else:
            self._end_turn(self._turn, self._turn.seconds, seconds)

    def _go_on_searching(self, seconds: float, steps: int) -> None:
        # not their sum: a pause in the training is not time that was spent on the race
        self._race.add(self.current.name, seconds, lasted=seconds * steps)
        self._search_seconds += seconds * steps
        self._search_steps += steps
        self._learn(seconds)
        following = self._worth_a_trial()
        if following is None:
            following = self._race.following()
        if following is None:
            known = self._known()
            following = pick(known, self._dense, margin=self._settings.margin)
            self._commit(following, known[following])
        self._use(following)

    def _go_on(self, seconds: float) -> None:
        """Take a step with the chosen configuration; look again, or give a rival its turn, if that is due."""
        drifted = self._watch.observe(seconds)
        if drifted is not None:
            self._look_again(drifted)
            return
        # not `seconds`: a pause must not be a reason to lose more
        rival = self._rivals.save(self.expected)
        if rival is not None:
            self._turn = _Turn(self.current.name, rival)
            self._use(rival)

    def _end_turn(self, turn: _Turn, rival: float, chosen: float) -> None:
        self._turn = None
        steps = self._settings.skip + turn.steps
        if self._rivals.add(turn.rival, rival, chosen, steps, turn.changing, self._handicap(turn)):
            self._rivals.change(turn.rival)
            self._expected = self._rivals.known[turn.rival]
            self._watch.expect(self._expected)
            self._use(turn.rival)

    def _handicap(self, turn: _Turn) -> float:
        """Return the factor by which dense is preferred where another one gains less than the margin."""
        left = 1 - self._settings.margin
        return left if turn.chosen == self._dense else 1 / left if turn.rival == self._dense else 1.0

    def _use(self, name: str) -> None:
        self._current = self._by_name[name]

    def _learn(self, seconds: float) -> None:
        if self.current.seconds > 0:
            self.corrector.observe(self.current.name, self.current.seconds, seconds)

    def _known(self) -> dict[str, float]:
        """Return the measured seconds by name, with dense predicted if it was not measured."""
        known = self.measured
        if self._dense not in known:
            known[self._dense] = self._corrected(self._by_name[self._dense])
        return known

    def _worth_a_trial(self) -> str | None:
        measured = self.measured
        limit = self._settings.within * min(measured.values())
        full = len(measured.keys() - {self._dense}) >= self._settings.most
        left = {}
        for c in self.configurations:
            # dense may lose to a measured time, but must not lose to a wrong prediction
            is_dense = c.name == self._dense
            # the factor may hold only for the way that it was learnt from: the prediction as it stands counts too
            worth = min(c.seconds, self._corrected(c)) <= limit or (is_dense and self._dense_is_due)
            if c.name not in measured and worth and (is_dense or not full):
                left[c.name] = self._corrected(c)
        return min(left, key=left.__getitem__, default=None)

    def _corrected(self, configuration: Configuration) -> float:
        return configuration.seconds * self.corrector.factor(configuration.name)

    def _commit(self, name: str, expected: float) -> None:
        tried = self._race.measured
        ratios = {other: self._race.ratios(name, other) for other in tried} if name in tried else {}
        predicted = {c.name: self._corrected(c) for c in self.configurations if c.seconds > 0}
        self._rivals.begin(name, {**tried, name: expected}, ratios, predicted)
        self._expected = expected
        self._watch.begin(expected, lost=max(0.0, self._search_seconds - self._search_steps * expected))
        self._search_seconds, self._search_steps = 0.0, 0

    def _look_again(self, seconds: float) -> None:
        # on a faster link dense gains most, more than the factor of a compressed way tells
        self._dense_is_due = seconds < self.expected
        self._expected, self._race = None, self._settings.begin_race()
        self._race.add(self.current.name, seconds, lasted=0.0)
        # what is known of the others was measured on another link
        self.corrector = Corrector()
        self._learn(seconds)
        following = self._worth_a_trial()
        if following is None:
            self._commit(self.current.name, seconds)
        else:
            self._use(following)


def _lasting(seconds: Sequence[float]) -> float:
    most = _LONGEST_STEP * median(seconds)
    return fmean(min(s, most) for s in seconds)
