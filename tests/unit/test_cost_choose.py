"""Decisions: which candidate, which configurations, and what measured seconds teach."""

from __future__ import annotations

import pytest

from hvd_compress.cost import Corrector, Stage, configurations, pick


def candidates(**seconds: float) -> dict[str, tuple[Stage, ...]]:
    return {name: (Stage(s, "allgather"),) for name, s in seconds.items()}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"none": 1.0, "a": 0.9, "b": 0.8}, "b"),
        ({"none": 1.0, "a": 0.96}, "none"),
        ({"none": 1.0, "a": 0.94}, "a"),
        ({"a": 0.5, "none": 1.0, "b": 0.5}, "a"),
        ({"none": 0.0, "a": 0.0}, "none"),
    ],
)
def test_pick(seconds: dict, expected: str) -> None:
    assert pick(seconds, "none") == expected


def test_pick_needs_dense() -> None:
    with pytest.raises(ValueError, match="'none'"):
        pick({"a": 1.0}, "none")


def test_configurations() -> None:
    buckets = [candidates(none=1, a=0.5, b=2), candidates(none=1, a=2, b=0.25), candidates(none=1, a=0.99, b=3)]
    found = {c.name: (c.labels, c.seconds) for c in configurations(buckets, "none", forward=10)}
    assert found == {
        "mixed": (("a", "b", "none"), 10 + 0.5 + 0.25 + 1),
        "b": (("none", "b", "none"), 10 + 1 + 0.25 + 1),
        "a": (("a", "none", "none"), 10 + 0.5 + 1 + 1),
        "none": (("none", "none", "none"), 10 + 3),
    }


def test_the_shortest_step_comes_first_and_none_comes_twice() -> None:
    # every bucket would take a: "mixed" is no configuration of its own, and neither is b, which no bucket gains by
    found = configurations([candidates(none=1, a=0.5, b=5)] * 2, "none")
    assert [c.name for c in found] == ["a", "none"]


def test_what_may_gain_though_it_is_not_predicted_to_is_a_configuration() -> None:
    buckets = [candidates(none=1, a=1.5, b=1.6), candidates(none=1, a=1.6, b=1.6)]
    found = {c.name: c.labels for c in configurations(buckets, "none")}
    assert found == {"none": ("none", "none"), "a": ("a", "none")}
    # of a label that gains somewhere it is known where to use it
    found = {c.name: c.labels for c in configurations([candidates(none=1, a=0.5), *buckets[:1]], "none")}
    assert found == {"none": ("none", "none"), "a": ("a", "none")}


def test_what_hides_behind_backward_is_predicted_so() -> None:
    bucket = {"none": (Stage(3, "allreduce", 8, 0.1),), "a": (Stage(1), Stage(1, "allgather"), Stage(0.5))}
    found = {c.name: c.seconds for c in configurations([bucket] * 2, "none", backward=[4, 4])}
    # dense: 8 backward, 3 for the last one. a: 8 backward, 2 encode, 1 send, 1 decode
    assert found == {"none": 11, "a": 12}


def test_each_bucket_has_its_backward() -> None:
    with pytest.raises(ValueError, match="1 backward times for 2 buckets"):
        configurations([candidates(none=1)] * 2, "none", backward=[1.0])


def test_factors_are_medians_of_the_last_ratios() -> None:
    corrector = Corrector(window=3)
    assert corrector.factor("a") == 1.0
    for measured in (100.0, 2.0, 3.0, 50.0):
        corrector.observe("a", predicted=1.0, measured=measured)
    assert corrector.factor("a") == 3.0
    corrector.observe("b", predicted=2.0, measured=2.0)
    assert corrector.factor("b") == 1.0
    assert corrector.factor("never seen") == 1.0


@pytest.mark.parametrize(("predicted", "measured"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_seconds_are_above_zero(predicted: float, measured: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Corrector().observe("a", predicted, measured)
