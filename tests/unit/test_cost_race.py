"""Races: turns typed by hand, and how often chance decides on a noisy machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvd_compress.cost import Race
from hvd_compress.cost.chance import _student

ALL = {"trials": 3, "most_trials": 25, "seconds": 1e9}


def race_of(*names: str, **settings: float) -> Race:
    """A race of which all names have been tried once and take the same."""
    race = Race(**{**ALL, **settings})  # type: ignore[arg-type]
    for name in names:
        race.add(name, 1.0, lasted=1.0)
    return race


def run(race: Race, seconds: Callable[[str], float]) -> list[str]:
    """Let it go on to its end; the names that were tried."""
    tried = []
    while (name := race.following()) is not None:
        race.add(name, seconds(name), lasted=1.0)
        tried.append(name)
        assert len(tried) < 1000
    return tried


@pytest.mark.parametrize(("slower", "turns"), [(4.5, 1), (3.9, 2), (1.3, 2), (1.15, 3), (1.1, 4), (1.05, 7)])
def test_the_less_one_is_slower_the_more_turns_it_stays(slower: float, turns: int) -> None:
    """In turns that agree, the mean of n logarithms exceeds t(0.98, n + 1) * sqrt(2 / (n + 1) / n) * 0.1."""
    race = Race(**ALL)
    truth = {"a": 1.0, "b": slower}
    for name, seconds in truth.items():
        race.add(name, seconds, lasted=1.0)
    assert run(race, truth.__getitem__) == ["a", "b"] * (turns - 1)
    assert race.measured == {"a": 1.0, "b": pytest.approx(slower)}


def test_what_turns_tell_differently_stays_longer() -> None:
    def turns(*ratios: float) -> int:
        race = Race(**ALL)
        for turn, ratio in enumerate(ratios, 1):
            race.add("a", 1.0, lasted=1.0)
            race.add("b", ratio, lasted=1.0)
            if race.following() is None:
                return turn
        return 0

    assert turns(1.3, 1.3) == 2
    # logarithms of mean 0.26 and deviation 0.34: 0.26 < 3.48 * sqrt((2 * 0.01 + 2 * 0.24**2) / 3 / 2); five of these do
    assert turns(1.65, 1.02) == 0
    assert turns(1.65, 1.02, 1.65, 1.02, 1.65) == 5
    # one disturbance decides nothing, however long it was
    assert turns(3.9, 0.9) == turns(3.9, 0.9, 0.9, 0.9, 0.9, 0.9) == 0


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(3, 3.482), (4, 2.999), (5, 2.757), (8, 2.449), (10, 2.359), (20, 2.197), (30, 2.147)]
)
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert _student(freedom) == pytest.approx(quantile, rel=0.01)


def test_one_that_leaves_does_not_end_the_race_of_the_others() -> None:
    race = race_of("a", "b", "c")
    rng = np.random.default_rng(0)
    tried = run(race, lambda name: 1.2 if name == "c" else rng.uniform(0.9, 1.1))
    # its first turn was as good as theirs
    assert tried.count("c") <= 6
    assert tried.count("a") > 10


def test_equals_race_as_long_as_they_may() -> None:
    assert run(race_of("a", "b"), lambda name: 1.0) == ["a", "b"] * 24
    # two trials have been there before, each trial lasts a second
    assert run(race_of("a", "b", seconds=20.0), lambda name: 1.0) == ["a", "b"] * 9
    # the least number of trials is not a matter of time
    assert run(race_of("a", "b", seconds=0.0), lambda name: 1.0) == ["a", "b"] * 2


def test_what_disturbs_a_turn_disturbs_all_and_does_not_count() -> None:
    race = Race(**ALL)
    levels = (1.0, 7.0, 3.0, 1.0, 0.5, 9.0, 2.0)
    for level in levels:
        race.add("a", 1.05 * level, lasted=1.0)
        race.add("b", level, lasted=1.0)
    assert race.measured == {"a": pytest.approx(1.05 * 2.0), "b": 2.0}


def test_the_slower_one_is_seldom_taken_on_a_noisy_machine() -> None:
    def wrong(slower: float, noise: float, **settings: float) -> float:
        found = []
        for seed in range(200):
            rng = np.random.default_rng(seed)
            race = Race(**{**ALL, **settings})  # type: ignore[arg-type]

            def seconds(name: str, rng: np.random.Generator = rng) -> float:
                return {"a": 1.0, "b": slower}[name] * float(rng.lognormal(0.0, noise))

            for name in "ab":
                race.add(name, seconds(name), lasted=1.0)
            run(race, seconds)
            found.append(min(race.measured, key=race.measured.__getitem__) == "b")
        return float(np.mean(found))

    assert wrong(1.1, 0.1) < 0.03
    assert wrong(1.1, 0.1, most_trials=5) > 0.06
    # a third slower, with turns that say so and turns that do not: two trials of each would be wrong in a fifth
    assert wrong(1.33, 0.3) < 0.03
    assert wrong(1.33, 0.3, trials=2, most_trials=2) > 0.15


@pytest.mark.parametrize(("trials", "most_trials"), [(0, 5), (5, 4)])
def test_settings_are_checked(trials: int, most_trials: int) -> None:
    with pytest.raises(ValueError, match=f"trials={trials}, most_trials={most_trials}"):
        Race(trials, most_trials, 1.0)
