"""When a tensor is sent, against loops typed from the paper and from its authors' code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import ConstantThreshold, SlopeThreshold
from hvd_compress.errors import StateError

GOLDEN = Path(__file__).parents[1] / "golden" / "eventgrad.json"


def run(trigger, norms):
    """(sent, threshold compared with) of one tensor in each pass."""
    watch = trigger.watch(1)
    return [(bool(watch.decide(np.array([norm]))[0]), float(watch.compared[0])) for norm in norms]


def authors_code(norms, *, decay, history, initial, constant=None):
    """dmnist/event/event.cpp, l. 316-378, for one tensor; without its zeros before there are slopes, and its `>=` 0."""
    last_norm, last_pass, slopes, threshold, sent = 0.0, 0, [], 0.0, []
    for number, norm in enumerate(norms, 1):
        threshold = constant if constant is not None else threshold * decay
        change = abs(norm - last_norm)
        event = number <= initial or (change >= threshold and (change > 0 or constant == 0))
        sent.append((event, threshold))
        if event:
            if constant is None and last_pass:
                slopes = [*slopes, change / (number - last_pass)][-history:]
                threshold = sum(slopes) / len(slopes)
            last_norm, last_pass = norm, number
    return sent


norms_of_a_run = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=60)


@given(norms_of_a_run, st.sampled_from([0.9, 1.0, 1.05]), st.integers(1, 4), st.sampled_from([1, 2, 29]))
def test_slope_threshold_is_that_of_the_authors_code(norms, decay, history, initial):
    trigger = SlopeThreshold(history=history, decay=decay, initial_passes=initial)
    ours = run(trigger, norms)
    theirs = authors_code(norms, decay=decay, history=history, initial=initial)
    assert [sent for sent, _ in ours] == [sent for sent, _ in theirs]
    assert np.allclose([t for _, t in ours], [t for _, t in theirs], rtol=1e-12)


@given(norms_of_a_run, st.sampled_from([0.0, 0.1, 5.0]))
def test_constant_threshold_is_that_of_the_authors_code(norms, delta):
    assert run(ConstantThreshold(delta), norms) == authors_code(norms, decay=1, history=1, initial=1, constant=delta)


def test_golden_trajectories():
    golden = json.loads(GOLDEN.read_text())
    for trajectory in golden["trajectories"]:
        kind = {"slope": SlopeThreshold, "constant": ConstantThreshold}[trajectory["trigger"].pop("id")]
        found = run(kind(**trajectory["trigger"]), golden["norms"])
        assert [int(sent) for sent, _ in found] == trajectory["sent"]
        assert np.allclose([t for _, t in found], trajectory["thresholds"], rtol=1e-9)


def test_horizon_multiplies_the_threshold_and_decay_changes_it_in_every_pass():
    norms = [1.0, 2.0, *[2.0] * 5]
    assert [t for _, t in run(SlopeThreshold(horizon=3.0), norms)] == [0, 0, 3, 3, 3, 3, 3]
    assert [t for _, t in run(SlopeThreshold(decay=0.5), norms)] == [0, 0, 0.5, 0.25, 0.125, 0.0625, 0.03125]


@pytest.mark.parametrize("trigger", [SlopeThreshold(), ConstantThreshold(1e-9), SlopeThreshold(measure="change")])
def test_a_tensor_that_does_not_move_is_sent_once(trigger):
    watch = trigger.watch(1)
    sent = [bool(watch.decide(np.array([5.0]), _zero_change(trigger))[0]) for _ in range(50)]
    assert sent == [True, *[False] * 49]


def _zero_change(trigger):
    return np.zeros(1) if trigger.measure == "change" else None


def test_threshold_zero_sends_what_does_not_move_too():
    assert all(sent for sent, _ in run(ConstantThreshold(0), [5.0] * 10))


def test_initial_passes_are_forced():
    sent = [sent for sent, _ in run(ConstantThreshold(100.0, initial_passes=4), [1.0] * 6)]
    assert sent == [True, True, True, True, False, False]


def test_what_is_not_finite_is_sent_until_it_is_finite_again():
    sent = [sent for sent, _ in run(ConstantThreshold(100.0), [1.0, float("nan"), float("inf"), 1.0, 1.0])]
    assert sent == [True, True, True, True, False]


def test_a_rotation_is_seen_by_the_norm_of_the_change_only():
    norms, changes = np.array([5.0]), np.array([3.0])
    by_norm, by_change = ConstantThreshold(1.0).watch(1), ConstantThreshold(1.0, measure="change").watch(1)
    assert by_norm.decide(norms).all()
    assert by_change.decide(norms, changes).all()
    assert not by_norm.decide(norms).any()
    assert by_change.decide(norms, changes).all()


@pytest.mark.parametrize("trigger", [SlopeThreshold(history=3, decay=0.99), ConstantThreshold(0.3)])
def test_a_saved_watch_goes_on_as_if_it_had_not_stopped(trigger):
    norms = np.random.default_rng(0).normal(size=(40, 5)).cumsum(axis=0)
    through, first, second = trigger.watch(5), trigger.watch(5), trigger.watch(5)
    expected = [through.decide(n) for n in norms]
    for n in norms[:20]:
        first.decide(n)
    second.load_state_dict(first.state_dict())
    assert all((second.decide(n) == e).all() for n, e in zip(norms[20:], expected[20:], strict=True))


def test_a_saved_watch_of_other_tensors_is_refused():
    with pytest.raises(StateError, match=r"norms of the trigger in an event state has shape \(3,\): must be \(4,\)"):
        SlopeThreshold().watch(4).load_state_dict(SlopeThreshold().watch(3).state_dict())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ConstantThreshold(-1.0), "delta=-1.0"),
        (lambda: ConstantThreshold(float("nan")), "delta=nan"),
        (lambda: SlopeThreshold(horizon=-0.1), "horizon=-0.1"),
        (lambda: SlopeThreshold(history=0), "history=0"),
        (lambda: SlopeThreshold(decay=0), "decay=0"),
        (lambda: SlopeThreshold(initial_passes=0), "initial_passes=0"),
        (lambda: SlopeThreshold(measure="max"), "measure='max'"),
    ],
)
def test_settings_out_of_range_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("trigger", [SlopeThreshold(horizon=2.0, history=3), ConstantThreshold(0.5, measure="change")])
def test_repr_evaluates_and_config_tells_triggers_apart(trigger):
    assert eval(repr(trigger)) == trigger
    assert json.loads(json.dumps(trigger.get_config()))["id"] == trigger.id
