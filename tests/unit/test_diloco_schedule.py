"""When fragments are sent and arrive: against the table of the definition, and what is refused."""

from __future__ import annotations

import pytest

from hvd_compress.schedules import DiLoCoSchedule, Turn


def events(schedule, steps):
    return [(step, *schedule.turn(step)) for step in range(1, steps + 1) if schedule.turn(step) != Turn()]


def test_one_fragment_is_sent_and_arrives_every_time():
    assert events(DiLoCoSchedule(3), 7) == [(3, 0, 0), (6, 0, 0)]


def test_fragments_take_turns_at_equal_distances():
    assert events(DiLoCoSchedule(6, 3), 8) == [(2, 0, 0), (4, 1, 1), (6, 2, 2), (8, 0, 0)]


def test_a_delay_sends_before_the_step_of_arrival():
    expected = [(1, 0, None), (3, None, 0), (4, 1, None), (6, None, 1), (7, 0, None), (9, None, 0)]
    assert events(DiLoCoSchedule(6, 2, 2), 9) == expected


@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
@pytest.mark.parametrize("distance", [1, 2, 5])
def test_one_fragment_at_a_time_and_each_equally_often(fragments, distance):
    for delay in range(distance):
        schedule = DiLoCoSchedule(fragments * distance, fragments, delay)
        under_way, arrived = None, []
        for step in range(1, 4 * fragments * distance + 1):
            turn = schedule.turn(step)
            if turn.sends is not None:
                assert under_way is None
                under_way, sent_at = turn.sends, step
            if turn.arrives is not None:
                assert (turn.arrives, step) == (under_way, sent_at + delay)
                under_way = None
                arrived.append(turn.arrives)
        assert arrived == list(range(fragments)) * 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((0,), r"sync_every must be an integer from 1"),
        ((2.0,), r"sync_every must be an integer"),
        ((True,), r"sync_every must be an integer"),
        ((7, 2), r"sync_every=7 with 2 fragments: .* such as 8"),
        ((1, 2), r"must be a multiple of their number, such as 2"),
        ((6, 2, 3), r"delay=3 .* less than sync_every / fragments = 3"),
        ((6, 1, -1), r"delay must be an integer from 0"),
        ((6, 1, 1.5), r"delay must be an integer"),
        ((6, 0), r"fragments must be an integer from 1"),
    ],
)
def test_settings_out_of_range_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        DiLoCoSchedule(*given)
