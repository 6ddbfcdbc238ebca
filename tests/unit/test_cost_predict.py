"""Predicted exchanges: every number typed out by hand."""

from __future__ import annotations

import math

import pytest

from hvd_compress import QSGD, OneBit, Threshold
from hvd_compress.cost import (
    Line,
    Link,
    Network,
    Speed,
    Stage,
    Work,
    break_even_bandwidth,
    dense_work,
    exchange_seconds,
    hierarchical_work,
    stages_of,
    work_of,
)
from hvd_compress.exchange import make_plan

# 1 s fixed and 1 ms per byte and so on: sums are easy to read
LINK = Link(Line(1, 1e-3), Line(2, 2e-3), Line(3, 3e-3), Line(4, 4e-3))
SPEED = Speed(encode=Line(0.5, 10), decode=Line(0.25, 1), add=Line(0.125, 2))
NETWORK = Network(4, LINK)


def test_work_of_two_phases() -> None:
    plan = make_plan("two_phase", OneBit(), (64, 512), 4)
    # 16 rows of 512: 1024 bytes of bits, 128 of means, a header, in each of 4 slots
    assert plan.slot == plan.slots[0] > 1024 + 128
    assert work_of(plan) == Work("two_phase", 32768, (3 * plan.slot, 3 * plan.slot))
    assert work_of(plan).sent_bytes == 6 * plan.slot


def test_work_of_allgather() -> None:
    plan = make_plan("allgather", OneBit(), (64, 512), 4)
    assert work_of(plan) == Work("allgather", 32768, (3 * plan.slot,))


def test_work_of_a_dense_plan() -> None:
    assert work_of(make_plan("auto", OneBit(), (10,), 4), itemsize=8) == Work("dense", 10, (2 * 3 / 4 * 80,))
    assert dense_work(10, 4, 4, half=True) == Work("fp16", 10, (2 * 3 / 4 * 20,))


def test_a_payload_of_changing_size_counts_by_what_was_measured() -> None:
    for exchange, share in (("allgather", 1), ("two_phase", 4)):
        plan = make_plan(exchange, Threshold(tau=1.0), (40_000,), 4)
        assert work_of(plan, 4, bytes_per_element=0.5).hop_bytes[0] == 3 * 0.5 * 40_000 / share
        assert work_of(plan).hop_bytes[0] == 3 * plan.slot
    fixed = make_plan("two_phase", QSGD(), (40_000,), 4)
    assert work_of(fixed, 4, bytes_per_element=0.001) == work_of(fixed)


def test_dense_stages() -> None:
    assert stages_of(Work("dense", 100, (600.0,)), SPEED, NETWORK) == (Stage(1.6, "allreduce", 600.0, 1e-3),)


def test_fp16_stages() -> None:
    stages = stages_of(Work("fp16", 100, (300.0,)), SPEED, NETWORK)
    assert stages == (Stage(1000.5), Stage(2.6, "allreduce_half", 300.0, 2e-3), Stage(100.25))


def test_two_phase_stages() -> None:
    stages = stages_of(Work("two_phase", 100, (60.0, 50.0)), SPEED, NETWORK)
    assert stages == (
        Stage(4 * (0.5 + 250)),  # four chunks of 25 elements
        Stage(3 + 0.18, "alltoall"),
        Stage((0.25 + 25) + 3 * (0.125 + 50) + (0.5 + 250)),
        Stage(4 + 0.2, "allgather"),
        Stage(4 * (0.25 + 25)),
    )
    assert exchange_seconds(Work("two_phase", 100, (60.0, 50.0)), SPEED, NETWORK) == sum(s.seconds for s in stages)


def test_allgather_stages() -> None:
    stages = stages_of(Work("allgather", 100, (120.0,)), SPEED, NETWORK)
    assert stages == (Stage(1000.5), Stage(4.48, "allgather"), Stage(100.25 + 3 * 200.125))


def test_hierarchical_stages() -> None:
    between = LINK.slowed(10)
    network = Network(8, LINK, ranks_per_host=4, between=between, inside=LINK)
    plan = make_plan("two_phase", OneBit(), (64, 512), 2)
    work = hierarchical_work(plan, 4, ranks_per_host=4)
    whole = 32768 * 4
    assert work.hop_bytes == (2 * 3 / 4 * whole, plan.slot, plan.slot, whole)
    first, *middle, last = stages_of(work, SPEED, network)
    assert first == Stage(1 + 1e-3 * 1.5 * whole, "allreduce")
    assert tuple(middle) == stages_of(work_of(plan), SPEED, Network(2, between))
    assert last == Stage(4 + 4e-3 * whole, "broadcast")


def test_hierarchical_needs_to_know_the_links() -> None:
    plan = make_plan("two_phase", OneBit(), (64, 512), 2)
    with pytest.raises(ValueError, match="between"):
        stages_of(hierarchical_work(plan, 4, 4), SPEED, Network(8, LINK, ranks_per_host=4))


@pytest.mark.parametrize("fixed", [0.5, 1e-3, 2.0])
def test_break_even_bandwidth(fixed: float) -> None:
    # fixed + 1e6 / b = 1e9 / b
    found = break_even_bandwidth(lambda b: fixed + 1e6 / b, lambda b: 1e9 / b)
    assert found == pytest.approx((1e9 - 1e6) / fixed, rel=1e-3)


def test_break_even_at_the_ends() -> None:
    assert break_even_bandwidth(lambda b: 2.0, lambda b: 1.0) == 0
    assert break_even_bandwidth(lambda b: 1.0, lambda b: 2.0) == math.inf
