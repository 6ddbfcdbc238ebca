"""When another search is worth what it takes: typed by hand, and bounded for any steps."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.cost import DriftWatch


def begun(expected: float = 1.0, lost: float = 0.0, **settings: float) -> DriftWatch:
    watch = DriftWatch(**{"window": 4, "drift": 0.3, **settings})  # type: ignore[arg-type]
    watch.begin(expected, lost)
    return watch


def due(watch: DriftWatch, steps: list[float]) -> list[int]:
    """After how many steps another search is due, each beginning and ending at once."""
    found = []
    for number, seconds in enumerate(steps, 1):
        if (now := watch.observe(seconds)) is not None:
            found.append(number)
            watch.begin(now, lost=0.0)
    return found


@pytest.mark.parametrize("seconds", [2.0, 0.5])
def test_a_drift_is_due_when_it_has_made_as_much_difference_as_the_last_search(seconds: float) -> None:
    # a window of four steps differs by 4 s, or 2 s
    steps = 4 * int(np.ceil(7.0 / (4 * abs(seconds - 1.0))))
    assert due(begun(lost=7.0), [seconds] * 20) == [steps]
    assert due(begun(lost=0.0), [seconds] * 20) == [4]


def test_what_has_ended_does_not_count() -> None:
    assert due(begun(lost=10.0), ([2.0] * 8 + [1.0] * 4) * 10) == []


@pytest.mark.parametrize("seconds", [1.29, 0.71])
def test_small_changes_do_not_count_however_long(seconds: float) -> None:
    assert due(begun(), [seconds] * 1000) == []


def test_a_burst_does_not_count() -> None:
    assert due(begun(), [1.0, 1.0, 50.0, 50.0] * 10) == []
    # a thousand short steps of a window of ten seconds are a burst, too
    assert due(begun(0.001, seconds=10.0), ([0.01] * 250 + [0.001] * 7500) * 10) == []
    assert due(begun(0.001, seconds=0.0), ([0.01] * 250 + [0.001] * 7500) * 10) != []


def test_each_search_makes_the_next_one_rarer() -> None:
    # each window differs from the one before, so that each would be a reason
    found = due(begun(), ([2.0] * 4 + [1.0] * 4) * 200)
    gaps = np.diff(found)
    assert found[0] == 4
    assert (gaps[1:] >= gaps[:-1]).all()
    assert 4 * 64 <= gaps[-1] <= 4 * 65  # the next window that differs


def test_searches_lose_no_more_than_the_drifts_that_they_answer() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        watch, expected, differed, lost = begun(lost=5.0), 1.0, 0.0, [5.0]
        for level in np.repeat(rng.uniform(0.2, 5.0, 300), rng.integers(1, 40, 300)):
            differed += abs(level - expected)
            now = watch.observe(float(level * rng.uniform(0.95, 1.05)))
            if now is not None:
                expected = now
                lost.append(float(rng.uniform(1.0, 50.0)))
                watch.begin(expected, lost[-1])
        assert len(lost) > 2
        assert sum(lost[:-1]) < 1.1 * differed


@pytest.mark.parametrize("settings", [{"window": 1}, {"drift": 0.0}, {"drift": float("nan")}, {"seconds": -1.0}])
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        begun(**settings)
