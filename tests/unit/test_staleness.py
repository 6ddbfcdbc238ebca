"""Who may run ahead of whom: golden trajectories, and what must hold whatever the order of arrival."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.schedules import BoundedStaleness

GOLDEN = Path(__file__).parents[1] / "golden" / "async_server.json"


@pytest.mark.parametrize(
    "trajectory", json.loads(GOLDEN.read_text())["trajectories"], ids=lambda t: str(t["events"][0])
)
def test_golden_trajectories(trajectory):
    clocks = BoundedStaleness(trajectory["limit"], trajectory.get("patience", 60)).clocks(trajectory["workers"])
    for event in trajectory["events"]:
        now = event.get("at", 0)
        if "gradient" in event:
            worker, computed_from = event["gradient"]
            arrival = clocks.arrive(worker, computed_from, now)
            assert list(arrival) == event["arrival"], event
            if arrival.is_accepted:
                clocks.count_update()
        elif "finish" in event:
            clocks.finish(event["finish"])
        else:
            assert clocks.give_up(now) == event["given_up"], event
        assert clocks.release(now) == event["answered"], event
        assert clocks.is_over == event.get("over", False), event


class Run:
    """Workers as the protocol has them: one gradient under way, the next one computed from what was there before."""

    def __init__(self, limit, workers):
        self.clocks = BoundedStaleness(limit).clocks(workers)
        self.limit = limit
        self.computes_from = [0] * workers  # of the gradient that is being computed
        self.answered = [0] * workers  # the version of the last answer
        self.waits = [False] * workers
        self.left = [False] * workers

    def send(self, worker):
        arrival = self.clocks.arrive(worker, self.computes_from[worker], 0.0)
        self.clocks.count_update()
        # with limit 0 nothing is computed before the answer is there
        self.computes_from[worker] = self.answered[worker]
        self.waits[worker] = True
        return arrival

    def release(self):
        for worker in self.clocks.release(0.0):
            self.waits[worker] = False
            self.answered[worker] = self.clocks.version
            if self.limit == 0:
                self.computes_from[worker] = self.clocks.version


@given(st.integers(0, 5), st.integers(1, 5), st.lists(st.integers(0, 2**20), max_size=120))
def test_nobody_is_too_far_ahead_and_somebody_always_goes_on(limit, workers, order):
    run = Run(limit, workers)
    for choice in order:
        ready = [w for w in range(workers) if not run.waits[w] and not run.left[w]]
        if not ready:
            assert all(run.left)
            return
        worker = ready[choice % len(ready)]
        if choice % 50 == 49:
            run.left[worker] = True
            run.clocks.finish(worker)
        else:
            arrival = run.send(worker)
            assert arrival.is_accepted
            assert arrival.staleness <= BoundedStaleness(limit).most_staleness(workers)
        run.release()
        live = [w for w in range(workers) if not run.left[w]]
        if live:
            clocks = [run.clocks.clocks[w] for w in live]
            assert max(clocks) - min(clocks) <= max(1, limit)
            slowest = [w for w in live if run.clocks.clocks[w] == min(clocks)]
            assert not any(run.waits[w] for w in slowest)


def test_the_bound_of_staleness_is_reached():
    """Two workers: 0 sends one gradient, then 1 runs ahead as far as it may before 0's next ones come."""
    limit, run = 3, Run(3, 2)
    for worker in [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]:
        if not run.waits[worker]:
            arrival = run.send(worker)
            run.release()
    assert arrival.staleness == 1 + 2 * limit == BoundedStaleness(limit).most_staleness(2)


def test_answers_are_given_to_all_at_the_end():
    clocks = BoundedStaleness(1).clocks(3)
    clocks.arrive(2, 0, 0.0)
    assert clocks.release(0.0) == []
    assert clocks.give_answers() == [2]
    assert clocks.give_answers() == []


@pytest.mark.parametrize("settings", [{"limit": -1}, {"limit": 1.5}, {"patience": 0}, {"patience": float("inf")}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        BoundedStaleness(**settings)
