"""Rivals: which one has a turn when, and what it takes to be chosen."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.cost import Rivals

STEPS = 10  # of a turn


def rivals(share: float = 0.01) -> Rivals:
    it = Rivals(share, lambda seconds: STEPS)
    it.begin("a", {"a": 1.0, "b": 1.02}, {"b": [0.98]}, {"far": 6.0})
    return it


def steps_until(it: Rivals, name: str, most: int = 100_000) -> int:
    for step in range(1, most):
        if it.save(1.0) == name:
            return step
    return most


def test_a_turn_is_due_when_its_price_has_been_saved() -> None:
    # ten steps of a tenth of a second count as lost by it, and ten of five seconds by the other; a hundredth of each
    # step is saved, by the square root of fifty more for the one
    assert steps_until(rivals(), "b") == pytest.approx(100 * (1 + 50**-0.5), abs=2)


def test_nothing_is_due_without_a_share_or_a_rival() -> None:
    for name in ("b", "far"):
        assert steps_until(rivals(share=0.0), name, 10_000) == 10_000
    alone = Rivals(0.5, lambda seconds: STEPS)
    alone.begin("a", {"a": 1.0}, {})
    assert alone.save(1e9) is None


def test_far_ones_have_few_turns_and_keep_no_others_waiting() -> None:
    it = rivals()
    turns = []
    for step in range(400_000):
        name = it.save(1.0)
        if name is not None:
            turns.append((name, step))
            seconds = {"b": 1.02, "far": 6.0}[name]
            it.add(name, seconds, chosen=1.0, steps=10)
    steps = {n: [step for name, step in turns if name == n] for n in ("b", "far")}
    assert len(steps["far"]) == 400_000 // 40_355
    assert len(steps["b"]) == pytest.approx(400_000 / 114.1, rel=0.01)
    assert np.diff(steps["b"]).max() < 120


def test_changing_the_way_is_part_of_the_price() -> None:
    it = rivals()
    first = steps_until(it, "b")
    it.add("b", 1.0, chosen=1.0, steps=10, changing=[2.0, 1.0, 1.5, 0.5])
    # a second and a half in addition to the one that a turn counts as
    assert steps_until(it, "b") == pytest.approx(2.5 * first, rel=0.05)
    it.add("b", 1.0, chosen=1.0, steps=10, changing=[1.0, 3600.0, 1.0, 1.0])
    # a pause is no change, and counts as a turn at most
    assert steps_until(it, "b") == pytest.approx(10 * first, rel=0.1)


def test_what_was_only_predicted_is_told_apart() -> None:
    it = rivals()
    assert it.known == {"a": 1.0, "b": 1.02, "far": 6.0}
    assert it.measured == {"a": 1.0, "b": 1.02}
    it.add("far", 5.0, chosen=1.0, steps=10)
    assert it.measured == {"a": 1.0, "b": 1.02, "far": 5.0}


def test_what_steps_take_now_counts() -> None:
    it = rivals()
    for _ in range(5):
        it.add("far", 6.0, chosen=1.2, steps=10)
    # slower by a fifth than in the search, and so will be others
    assert it.known == {"a": pytest.approx(1.2), "b": pytest.approx(1.2 * 1.02), "far": pytest.approx(6.0)}


def test_it_takes_turns_that_agree() -> None:
    it = rivals()
    assert [it.add("b", 0.8, chosen=1.0, steps=10) for _ in range(3)] == [False, False, True]
    assert it.known == {"a": 1.0, "b": pytest.approx(0.8), "far": 6.0}


def test_old_turns_are_forgotten() -> None:
    it = rivals()
    for _ in range(200):
        assert not it.add("b", 1.3, chosen=1.0, steps=10)
    faster = [it.add("b", 0.8, chosen=1.0, steps=10) for _ in range(25)]
    assert faster[-1]
    assert not faster[9]


def test_one_turn_is_no_proof() -> None:
    it = rivals()
    assert not it.add("far", 0.1, chosen=1.0, steps=10)
    assert it.add("far", 0.1, chosen=1.0, steps=10)


def test_the_other_way_round_after_a_change() -> None:
    it = rivals()
    for _ in range(5):
        it.add("b", 0.8, chosen=1.0, steps=10)
    it.change("b")
    assert it.measured == {"a": 1.0, "b": pytest.approx(0.8)}


def test_a_handicap_is_to_be_made_up_for() -> None:
    def proved(handicap: float) -> bool:
        it = rivals()
        return [it.add("b", 1 / 1.02, chosen=1.0, steps=10, handicap=handicap) for _ in range(25)][-1]

    assert proved(1.0)
    assert not proved(0.98)
    assert proved(1 / 0.98)


def test_a_slower_one_seldom_passes() -> None:
    changes = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        it = Rivals(0.01, lambda seconds: STEPS)
        it.begin("a", {"a": 1.0, "b": 1.05}, {})
        changes += any(it.add("b", float(1.05 * rng.lognormal(0, 0.1)), chosen=1.0, steps=10) for _ in range(200))
    # a twentieth slower, in 200 turns, which is a quarter of an hour at least
    assert changes <= 2


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_the_share_is_checked(share: float) -> None:
    with pytest.raises(ValueError, match=f"share={share}"):
        Rivals(share, lambda seconds: STEPS)
