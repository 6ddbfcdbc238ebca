"""Rivals: which one has a turn when, and what it takes to be chosen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_compress.cost import Rivals

STEPS = {"a": 10, "b": 10, "far": 10}


def rivals(share: float = 0.01) -> Rivals:
    it = Rivals(share)
    it.begin("a", {"a": 1.0, "b": 1.02, "far": 6.0}, {"b": [0.98], "far": [1 / 6]})
    return it


def saved(it: Rivals, steps: int) -> Rivals:
    for _ in range(steps):
        it.save(1.0)
    return it


@pytest.mark.parametrize(
    ("steps", "due"),
    # ten steps of a tenth of a second count as lost, and a hundredth of each step is saved
    [(99, None), (101, "b"), (4000, "b")],
)
def test_a_turn_is_due_when_its_price_has_been_saved(steps: int, due: str | None) -> None:
    assert saved(rivals(), steps).due(STEPS) == due


def test_nothing_is_due_without_a_share_or_a_rival() -> None:
    assert saved(rivals(share=0.0), 10000).due(STEPS) is None
    alone = Rivals(0.5)
    alone.begin("a", {"a": 1.0}, {})
    assert saved(alone, 10000).due({"a": 10}) is None


def test_far_ones_have_turns_as_their_price_allows() -> None:
    it = rivals()
    turns = []
    for _ in range(60000):
        it.save(1.0)
        name = it.due(STEPS)
        if name is not None:
            turns.append(name)
            seconds = {"b": 1.02, "far": 6.0}[name]
            it.add(name, seconds, chosen=1.0, steps=10, lost=10 * (seconds - 1.0))
    # 600 seconds have been saved, which both share: 1 a turn, though it loses a fifth of that, and 50
    assert turns.count("far") in (5, 6)
    assert 250 <= turns.count("b") <= 310


def test_what_a_turn_has_really_lost_is_spent() -> None:
    it = saved(rivals(), 150)
    it.add("b", 1.0, chosen=1.0, steps=10, lost=60.0)  # changing the way took long
    assert saved(it, 5800).due(STEPS) is None
    # at last the other one, on which less was spent, when its 50 seconds are there
    assert saved(it, 4900).due(STEPS) is None
    assert saved(it, 200).due(STEPS) == "far"


def test_it_takes_turns_that_agree() -> None:
    it = rivals()
    assert [it.add("b", 0.8, chosen=1.0, steps=10, lost=0.0) for _ in range(3)] == [False, False, True]
    assert it.known == {"a": 1.0, "b": pytest.approx(0.8), "far": 6.0}


def test_old_turns_are_forgotten() -> None:
    it = rivals()
    for _ in range(200):
        assert not it.add("b", 1.3, chosen=1.0, steps=10, lost=3.0)
    faster = [it.add("b", 0.8, chosen=1.0, steps=10, lost=0.0) for _ in range(25)]
    assert faster[-1]
    assert not faster[9]


def test_the_other_way_round_after_a_change() -> None:
    it = rivals()
    for _ in range(5):
        it.add("b", 0.8, chosen=1.0, steps=10, lost=0.0)
    it.change("b")
    state = it.get_state()
    assert state["ratios"] == {"a": [pytest.approx(r) for r in (1 / 0.98, *[0.8] * 5)], "far": []}
    assert state["saved"] == 0.0
    # slower than before once more; and a single turn is enough where it was a quarter as long
    assert not it.add("a", 1.0, chosen=0.8, steps=10, lost=2.0)
    assert it.add("far", 0.15, chosen=0.8, steps=10, lost=0.0)


def test_a_slower_one_seldom_passes() -> None:
    changes = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        it = Rivals(0.01)
        it.begin("a", {"a": 1.0, "b": 1.05}, {})
        changes += any(
            it.add("b", float(1.05 * rng.lognormal(0, 0.1)), chosen=1.0, steps=10, lost=0.0) for _ in range(200)
        )
    # a twentieth slower, in 200 turns, which is a quarter of an hour at least
    assert changes <= 2


def test_a_state_can_be_taken_up() -> None:
    it, rng = rivals(share=0.3), np.random.default_rng(0)
    for _ in range(50):
        it.save(1.0)
        name = it.due(STEPS)
        if name is not None:
            it.add(name, float(rng.uniform(0.9, 1.2)), chosen=1.0, steps=10, lost=1.0)
    other = Rivals(share=0.3)
    other.set_state(json.loads(json.dumps(it.get_state())))
    assert other.get_state() == it.get_state()
    assert other.known == it.known
    assert saved(other, 7).due(STEPS) == saved(it, 7).due(STEPS)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_the_share_is_checked(share: float) -> None:
    with pytest.raises(ValueError, match=f"share={share}"):
        Rivals(share)
