"""When DASO sends, waits and receives: against tables made in another way, and trajectories typed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hvd_compress import DasoSchedule
from hvd_compress.errors import StateError
from hvd_compress.schedules import COOLDOWN, CYCLING, WARMUP, Moment

GOLDEN = Path(__file__).parents[1] / "golden" / "daso.json"
PAIRS = [(b, s) for b in range(1, 9) for s in range(b + 1)]


def table(skips: int, wait: int, length: int, known: bool) -> dict[int, Moment]:
    """What is due after each batch of an epoch, from the list of all synchronizations."""
    due: dict[int, Moment] = {t: Moment() for t in range(1, length + 1)}
    for sent in range(skips, length + 1, skips):
        if wait == 0:
            due[sent] = Moment(blocks=True)
        elif sent + wait < length or not known:
            due[sent] = due[sent]._replace(sends=True)
            if sent + wait <= length:
                due[sent + wait] = due[sent + wait]._replace(arrives=wait)
    if known:
        due[length] = Moment(blocks=True)
    return due


@pytest.mark.parametrize(("skips", "wait"), PAIRS)
def test_arrivals_are_those_of_the_table(skips, wait):
    for length in range(1, 21):
        clock = DasoSchedule(skips, wait, steps_per_epoch=length).clock()
        for _ in range(3):
            seen = {t: clock.batch() for t in range(1, length + 1)}
            assert seen == table(skips, wait, length, known=True)
            assert clock.end_epoch(None) == Moment()


@pytest.mark.parametrize(("skips", "wait"), PAIRS)
def test_without_a_known_length_the_end_of_an_epoch_takes_what_is_under_way(skips, wait):
    for length in range(1, 21):
        clock = DasoSchedule(skips, wait).clock()
        for _ in range(2):
            due = table(skips, wait, length, known=False)
            assert {t: clock.batch() for t in range(1, length + 1)} == due
            under_way = [t for t, m in due.items() if m.sends and t + wait > length]
            expected = Moment(length - under_way[0] if under_way else None, blocks=True)
            assert clock.end_epoch(None) == (Moment() if due[length].blocks else expected)


@pytest.mark.parametrize(("skips", "wait"), PAIRS)
def test_without_epochs_the_cycle_goes_on(skips, wait):
    clock = DasoSchedule(skips, wait).clock()
    seen = [clock.batch() for _ in range(40)]
    sent = [t for t, m in enumerate(seen, 1) if m.sends or m.blocks]
    assert sent == list(range(skips, 41, skips))
    if wait:
        assert [t for t, m in enumerate(seen, 1) if m.arrives] == [t + wait for t in sent if t + wait <= 40]
        assert {m.arrives for m in seen} <= {None, wait}


def test_an_epoch_that_is_not_ended_ends_with_its_steps():
    clock = DasoSchedule(2, 1, steps_per_epoch=3).clock()
    seen = [clock.batch() for _ in range(7)]
    assert [m.blocks for m in seen] == [False, False, True, False, False, True, False]
    assert clock.epoch == 2


def test_an_epoch_with_more_batches_than_declared_is_told_of_where_it_is_ended():
    clock = DasoSchedule(2, 1, steps_per_epoch=3).clock()
    for _ in range(3):
        clock.batch()
    clock.end_epoch(None)
    for _ in range(3):
        clock.batch()
    with pytest.raises(ValueError, match="more batches than steps_per_epoch=3"):
        clock.batch()


def test_level_makes_ranks_equal_once():
    clock = DasoSchedule(2, 1).clock()
    assert [clock.batch() for _ in range(2)] == [Moment(), Moment(sends=True)]
    assert clock.level() == Moment(0, blocks=True)
    assert clock.level() == clock.end_epoch(None) == Moment()


def test_a_shorter_epoch_than_declared_ends_when_it_is_told():
    clock = DasoSchedule(2, 1, steps_per_epoch=10).clock()
    assert [clock.batch() for _ in range(2)] == [Moment(), Moment(sends=True)]
    assert clock.end_epoch(None) == Moment(0, blocks=True)
    assert clock.end_epoch(None) == Moment()


def trajectory(schedule: DasoSchedule, losses: list[float]) -> list[tuple[str, int, int]]:
    clock = schedule.clock()
    seen = []
    for loss in losses:
        seen.append((clock.phase, clock.skips, clock.wait))
        clock.batch()
        clock.end_epoch(loss)
    return seen


def word(moment: Moment) -> str:
    """What is due, as a golden trajectory writes it: what arrives, then what is done."""
    arrives = "" if moment.arrives is None else f"{moment.arrives}"
    return arrives + ("b" if moment.blocks else "s" if moment.sends else "") or "-"


def test_golden_trajectories():
    """Frozen: a saved schedule must go on as it began, with later versions of this package too."""
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) >= 6
    for trajectory in golden:
        clock = DasoSchedule(**trajectory["settings"]).clock()
        for epoch in trajectory["epochs"]:
            assert [clock.phase, clock.skips, clock.wait] == epoch["begins"]
            words = [word(clock.batch()) for _ in range(epoch["steps"])]
            assert " ".join(words) == epoch["batches"]
            assert word(clock.end_epoch(epoch["loss"])) == epoch["end"]


def test_phases_and_plateaus_of_a_whole_training():
    schedule = DasoSchedule(4, 2, total_epochs=16, warmup_epochs=2, cooldown_epochs=2, patience=0, stability=0.05)
    # progress in epochs 2 to 4, then none: B and S fall to 1 and begin anew
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.9, 4.9, 4.9, 4.0, 3.9, 3.9, 3.9, 3.9, 3.9, 3.9, 3.9]
    expected = [(WARMUP, 4, 2)] * 2
    expected += [(CYCLING, 4, 2)] * 4 + [(CYCLING, 2, 1), (CYCLING, 1, 1), (CYCLING, 4, 2), (CYCLING, 4, 2)]
    expected += [(CYCLING, 2, 1), (CYCLING, 1, 1), (CYCLING, 4, 2), (CYCLING, 2, 1)]
    expected += [(COOLDOWN, 1, 1)] * 2
    assert trajectory(schedule, losses) == expected


@pytest.mark.parametrize(
    ("skips", "wait", "falls"),
    [
        (8, 8, [(8, 8), (4, 4), (2, 2), (1, 1), (8, 8)]),
        (8, 3, [(8, 3), (4, 1), (2, 1), (1, 1), (8, 3)]),
        (6, 0, [(6, 0), (3, 0), (1, 0), (6, 0)]),
        (1, 1, [(1, 1), (1, 1)]),
    ],
)
def test_b_and_s_halve_and_begin_anew(skips, wait, falls):
    seen = trajectory(DasoSchedule(skips, wait, patience=0), [1.0] * (len(falls) + 1))
    assert [pair[1:] for pair in seen[1:]] == falls


def test_patience_counts_epochs_in_a_row():
    seen = trajectory(DasoSchedule(4, 1, patience=2), [5.0, 5.0, 5.0, 4.0, 4.0, 3.9, 4.0, 4.0])
    assert [skips for _, skips, _ in seen] == [4] * 7 + [2]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_progress_and_no_best(odd):
    seen = trajectory(DasoSchedule(4, 1, patience=0), [odd, 1.0, odd, 0.5, 0.5])
    assert [skips for _, skips, _ in seen] == [4, 2, 2, 1, 1]


def test_a_negative_loss_can_make_progress():
    seen = trajectory(DasoSchedule(4, 1, patience=0), [-1.0, -1.2, -1.21, -1.4])
    assert [skips for _, skips, _ in seen] == [4, 4, 4, 2]


def test_fixed_settings_stay():
    assert {pair[1:] for pair in trajectory(DasoSchedule(4, 1, patience=None), [1.0] * 20)} == {(4, 1)}


@pytest.mark.parametrize("after", range(1, 25))
def test_a_state_goes_on_exactly(after):
    schedule = DasoSchedule(3, 2, total_epochs=6, warmup_epochs=1, cooldown_epochs=1, patience=0, steps_per_epoch=5)

    def run(clock, begin, end):
        seen = []
        for t in range(begin, end):
            seen.append((clock.batch(), clock.phase))
            if (t + 1) % 5 == 0:
                clock.end_epoch(1.0)
        return seen

    whole = run(schedule.clock(), 0, 30)
    first = schedule.clock()
    seen = run(first, 0, after)
    second = schedule.clock()
    second.load_state_dict(first.state_dict())
    assert seen + run(second, after, 30) == whole


def test_a_state_of_another_schedule_is_refused():
    with pytest.raises(StateError, match=r"global_skips=4, and that here has global_skips=8"):
        DasoSchedule(8, 1).clock().load_state_dict(DasoSchedule(4, 1).clock().state_dict())
    with pytest.raises(StateError, match=r"clock of a DASO state lacks .*skips"):
        DasoSchedule().clock().load_state_dict({"schedule": DasoSchedule().get_config()})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"global_skips": 0}, "global_skips must be an integer from 1"),
        ({"global_skips": 2, "batches_to_wait": 3}, "batches_to_wait must be an integer from 0 to 2"),
        ({"batches_to_wait": -1}, "batches_to_wait must be"),
        ({"cooldown_epochs": 2}, "without total_epochs"),
        ({"total_epochs": 3, "warmup_epochs": 2, "cooldown_epochs": 2}, "are more than total_epochs=3"),
        ({"stability": 0.0}, "stability must be"),
        ({"patience": 1.5}, "patience must be"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        DasoSchedule(**settings)
