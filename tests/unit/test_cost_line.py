"""A line through measured seconds: an oracle by brute force, and what noise does to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.cost import Line, fit_line


@given(st.floats(1e-6, 1e-1), st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(fixed: float, per_unit: float) -> None:
    line = fit_line([(size, fixed + per_unit * size) for size in (1e3, 1e5, 1e7)])
    for size in (1e3, 1e5, 1e7):
        assert line(size) == pytest.approx(fixed + per_unit * size, rel=1e-6)


def test_disturbed_repeats_do_not_matter() -> None:
    points = [(size, 0.001 + 1e-8 * size) for size in (1e4, 1e6) for _ in range(5)]
    disturbed = [(size, seconds * (30 if i % 5 < 2 else 1)) for i, (size, seconds) in enumerate(points)]
    found, expected = fit_line(disturbed), fit_line(points)
    assert (found.fixed, found.per_unit) == pytest.approx((expected.fixed, expected.per_unit))


def test_a_link_of_two_speeds_counts_as_both() -> None:
    # the ring of large buffers takes 1 or 1.5 times as long, and nobody knows which it will be
    points = [(size, 1e-8 * size * factor) for size in (1e4, 1e6) for factor in (1.0, 1.5, 1.5, 1.0)]
    assert fit_line(points).per_unit == pytest.approx(1.25e-8)


@pytest.mark.parametrize(
    ("points", "fixed_is_zero", "per_unit_is_zero"),
    [([(1, 0.1), (10, 5.0), (100, 60.0)], True, False), ([(1, 5.0), (10, 4.0), (100, 3.0)], False, True)],
)
def test_neither_part_is_negative(points: list, fixed_is_zero: bool, per_unit_is_zero: bool) -> None:
    line = fit_line(points)
    assert (line.fixed == 0, line.per_unit == 0) == (fixed_is_zero, per_unit_is_zero)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_line_has_less_relative_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = [(size, (2 + 0.5 * size) * rng.uniform(0.7, 1.4)) for size in (1.0, 4.0, 9.0, 30.0)]
    line = fit_line(points)

    def error(fixed: float, per_unit: float) -> float:
        return sum(((fixed + per_unit * size) / seconds - 1) ** 2 for size, seconds in points)

    grid = [error(f, p) for f in np.linspace(0, 6, 121) for p in np.linspace(0, 2, 121)]
    assert error(line.fixed, line.per_unit) <= min(grid)


@pytest.mark.parametrize("points", [[], [(5, 1.0), (5, 1.1)]])
def test_one_size_is_no_line(points: list) -> None:
    with pytest.raises(ValueError, match="two different"):
        fit_line(points)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_seconds_are_above_zero(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_line([(1, 1.0), (2, seconds)])


@pytest.mark.parametrize("settings", [{"fixed": -1.0}, {"per_unit": math.nan}, {"fixed": math.inf}])
def test_a_line_that_no_clock_shows_is_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Line(**settings)
