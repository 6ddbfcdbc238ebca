"""Races: turns typed by hand, and how often chance decides on a noisy machine."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from hvd_compress.cost import Race

ALL = {"doubt": 0.25, "trials": 5, "most_trials": 25, "seconds": 1e9}


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


def test_what_is_slower_in_six_turns_of_six_leaves() -> None:
    race = Race(**ALL)
    truth = {"a": 1.0, "b": 1.1}
    for name, seconds in truth.items():
        race.add(name, seconds, lasted=1.0)
    # 2**-5 of all cases would be more than 2 %, 2**-6 is less
    assert run(race, truth.__getitem__) == ["a", "b"] * 5
    assert race.measured == {"a": 1.0, "b": pytest.approx(1.1)}


def test_one_that_leaves_does_not_end_the_race_of_the_others() -> None:
    race = race_of("a", "b", "c")
    rng = np.random.default_rng(0)
    tried = run(race, lambda name: 1.2 if name == "c" else rng.uniform(0.9, 1.1))
    # its first turn was as good as theirs: seven of eight and more are beyond 2 % from the ninth turn on
    assert tried.count("c") <= 10
    assert tried.count("a") > 10


def test_equals_race_as_long_as_they_may() -> None:
    assert run(race_of("a", "b"), lambda name: 1.0) == ["a", "b"] * 24
    # two trials have been there before, each trial lasts a second
    assert run(race_of("a", "b", seconds=20.0), lambda name: 1.0) == ["a", "b"] * 9
    # the least number of trials is not a matter of time
    assert run(race_of("a", "b", seconds=0.0), lambda name: 1.0) == ["a", "b"] * 4


def test_what_is_beyond_doubt_is_tried_once_more_only() -> None:
    race = race_of("a")
    race.add("b", 1.5, lasted=1.0)
    race.add("c", 4.5, lasted=1.0)
    assert run(race, {"a": 1.0, "b": 1.5}.__getitem__) == ["a", "b"]
    assert race.measured == {"a": 1.0, "b": 1.5, "c": 4.5}


def test_what_disturbs_a_turn_disturbs_all_and_does_not_count() -> None:
    race = Race(**ALL)
    levels = (1.0, 7.0, 3.0, 1.0, 0.5, 9.0, 2.0)
    for level in levels:
        race.add("a", 1.05 * level, lasted=1.0)
        race.add("b", level, lasted=1.0)
    assert race.measured == {"a": pytest.approx(1.05 * 2.0), "b": 2.0}


def test_the_slower_one_is_seldom_taken_on_a_noisy_machine() -> None:
    def wrong(**settings: float) -> float:
        found = []
        for seed in range(200):
            rng = np.random.default_rng(seed)
            race = Race(**{**ALL, **settings})  # type: ignore[arg-type]

            def seconds(name: str, rng: np.random.Generator = rng) -> float:
                return {"a": 1.0, "b": 1.1}[name] * float(rng.lognormal(0.0, 0.1))

            for name in "ab":
                race.add(name, seconds(name), lasted=1.0)
            run(race, seconds)
            found.append(min(race.measured, key=race.measured.__getitem__) == "b")
        return float(np.mean(found))

    assert wrong() < 0.03
    assert wrong(most_trials=5) > 0.06


def test_a_state_can_be_taken_up_at_any_turn() -> None:
    rng = np.random.default_rng(3)
    first, second = race_of("a", "b", "c"), race_of("a", "b", "c")
    while (name := first.following()) is not None:
        assert second.following() == name
        seconds = float(rng.lognormal(0.05 * (name == "c"), 0.05))
        first.add(name, seconds, lasted=1.0)
        second.add(name, seconds, lasted=1.0)
        state = json.loads(json.dumps(second.get_state()))
        second = Race(**ALL)
        second.set_state(state)
    assert second.following() is None
    assert first.get_state() == second.get_state()


@pytest.mark.parametrize(("trials", "most_trials"), [(0, 5), (5, 4)])
def test_settings_are_checked(trials: int, most_trials: int) -> None:
    with pytest.raises(ValueError, match=f"trials={trials}, most_trials={most_trials}"):
        Race(0.25, trials, most_trials, 1.0)
