"""A step as a schedule: each case drawn by hand, and bounds that hold of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.cost import PlannedExchange, Stage, step_seconds

MIB = 2**20


def two_phase(encode: float, alltoall: float, reduce: float, allgather: float, decode: float) -> tuple[Stage, ...]:
    return (
        Stage(encode), Stage(alltoall, "alltoall"), Stage(reduce), Stage(allgather, "allgather"), Stage(decode),
    )  # fmt: skip


def dense(seconds: float, nbytes: float, fixed: float = 1.0) -> tuple[Stage, ...]:
    return (Stage(seconds, "allreduce", nbytes, (seconds - fixed) / nbytes),)


def test_no_exchange() -> None:
    assert step_seconds([], forward=3.0) == 3.0


def test_one_exchange_is_the_sum_of_its_stages() -> None:
    assert step_seconds([PlannedExchange(two_phase(1, 2, 3, 4, 5), backward=10)], forward=100) == 125


def test_sending_overlaps_with_backward() -> None:
    # 0-10 backward, 10-11 encode, 11-13 send; 11-21 backward, 21-22 encode, 22-24 send; then reductions and the rest:
    # the first reduction is ready at 13 and waits for the next hook: 22-25, its allgather 25-29; the second is ready
    # at 24: 25-28, its allgather 29-33; decoding 33-43
    job = PlannedExchange(two_phase(1, 2, 3, 4, 5), backward=10)
    assert step_seconds([job, job]) == 43


def test_a_worker_leaves_backward_alone() -> None:
    # backward 0-10-20; worker: encode 10-11, reduce 13-16, encode 20-21; network 11-13, 16-20, 21-23; reduce 23-26,
    # network 26-30, decoding 30-40
    job = PlannedExchange(two_phase(1, 2, 3, 4, 5), backward=10)
    assert step_seconds([job, job], worker=True) == 40


def test_collectives_run_one_after_the_other() -> None:
    job = PlannedExchange((Stage(0), Stage(7, "allgather"), Stage(1)))
    assert step_seconds([job] * 3) == 3 * 7 + 3 * 1


def test_dense_tensors_that_wait_are_fused() -> None:
    # all there at once: one fixed second and three for their bytes
    assert step_seconds([PlannedExchange(dense(2, 100))] * 3) == 1 + 3
    # the first is sent at once; what becomes ready meanwhile goes together
    jobs = [PlannedExchange(dense(2, 100), backward=0.6) for _ in range(3)]
    assert step_seconds(jobs) == pytest.approx(0.6 + 2 + (1 + 2))


def test_dense_tensors_join_one_that_waits_for_the_next_cycle() -> None:
    # half of the fixed second has passed when the second comes, not yet when the third does
    jobs = [
        PlannedExchange(dense(2, 100), backward=1.0),
        PlannedExchange(dense(2, 100), backward=0.4),
        PlannedExchange(dense(2, 100), backward=0.4),
    ]
    assert step_seconds(jobs) == pytest.approx(1 + (1 + 2) + 2)


def test_joined_tensors_are_copied_together() -> None:
    stages = (replace(dense(2, 100)[0], joined_per_byte=0.01),)
    assert step_seconds([PlannedExchange(stages)]) == 2
    assert step_seconds([PlannedExchange(stages)] * 3) == 1 + 3 + 3 * 100 * 0.01


def test_collectives_slow_down_what_computes_meanwhile() -> None:
    # sent from 1 to 5 while backward computes from 1 on: a quarter of these 4 seconds is lost to it
    first = PlannedExchange((Stage(0), Stage(4, "allgather", core=0.25), Stage(0)), backward=1)
    assert step_seconds([first, PlannedExchange((), backward=10)]) == 1 + 10 + 1
    # what comes after is not slowed down
    assert step_seconds([first, PlannedExchange((), backward=1)]) == max(5, 1 + 1 + 0.25)


def test_what_does_not_fit_into_a_fusion_buffer_goes_on_its_own() -> None:
    assert step_seconds([PlannedExchange(dense(2, 100 * MIB))] * 3) == 3 * 2
    assert step_seconds([PlannedExchange(dense(2, 60 * MIB))] * 3) == (1 + 2) + 2


def test_halves_and_floats_are_not_fused_with_each_other() -> None:
    half = (Stage(0), Stage(2, "allreduce_half", 100, 0.01), Stage(0))
    assert step_seconds([PlannedExchange(dense(2, 100)), PlannedExchange(half)]) == 4


def test_dense_ones_wait_for_a_compressed_one_that_was_issued_first() -> None:
    compressed = (Stage(0), Stage(10, "allgather"), Stage(0))
    jobs = [
        PlannedExchange(compressed, backward=1),
        PlannedExchange(dense(2, 100), backward=1),
        PlannedExchange(dense(2, 100), backward=1),
    ]
    assert step_seconds(jobs) == 1 + 10 + (1 + 2)


def test_an_exchange_may_begin_and_end_on_the_network() -> None:
    hierarchical = (Stage(1, "allreduce"), *two_phase(1, 1, 1, 1, 1), Stage(1, "broadcast"))
    assert step_seconds([PlannedExchange(hierarchical)]) == 7


stages = st.lists(st.floats(0, 10), min_size=5, max_size=5).map(lambda s: two_phase(*s))
dense_stages = st.floats(1, 1e8).map(lambda nbytes: dense(1 + 1e-7 * nbytes, nbytes))
jobs = st.lists(st.builds(PlannedExchange, st.one_of(stages, dense_stages), st.floats(0, 10)), max_size=8)


@given(jobs, st.booleans())
def test_bounds(jobs: list[PlannedExchange], worker: bool) -> None:
    step = step_seconds(jobs, worker=worker)
    kernels = sum(s.seconds for j in jobs for s in j.stages if not s.collective)
    fixed = sum(s.seconds for j in jobs for s in j.stages if s.collective and not s.fusable_bytes)
    backward = sum(j.backward for j in jobs)
    everything = backward + sum(s.seconds for j in jobs for s in j.stages)
    assert step <= everything * (1 + 1e-9)
    assert step >= max(kernels, backward, fixed) * (1 - 1e-9)
    if not worker:
        assert step >= (kernels + backward) * (1 - 1e-9)


def test_the_order_of_jobs_is_that_of_backward() -> None:
    slow_first = [
        PlannedExchange((Stage(0), Stage(10, "allgather"), Stage(0)), backward=1),
        PlannedExchange((), backward=10),
    ]
    slow_last = [
        PlannedExchange((), backward=10),
        PlannedExchange((Stage(0), Stage(10, "allgather"), Stage(0)), backward=1),
    ]
    assert step_seconds(slow_first) == 11
    assert step_seconds(slow_last) == pytest.approx(21)
