"""Predicted exchanges: every number typed out by hand."""

from __future__ import annotations

import math

import pytest

from hvd_compress import QSGD, OneBit, Threshold
from hvd_compress.cost import (
    Line,
    LinkSpeed,
    Network,
    Speed,
    Stage,
    Work,
    break_even_bandwidth,
    dense_work,
    exchange_seconds,
    stages_of,
    work_of,
)
from hvd_compress.exchange import AllGather, Dense, TwoPhase, make_plan, plan_together

# 1 s fixed and 1 ms per byte and so on: sums are easy to read
LINK = LinkSpeed(Line(1, 1e-3), Line(2, 2e-3), Line(3, 3e-3), Line(4, 4e-3))
SPEED = Speed(encode=Line(0.5, 10), decode=Line(0.25, 1), add=Line(0.125, 2))
NETWORK = Network(4, LINK, copying=1e-5)


def test_work_of_two_phases() -> None:
    plan = make_plan("two_phase", OneBit(), (64, 512), 4)
    # 16 rows of 512: 1024 bytes of bits, 128 of means, a header, in each of 4 slots
    (slot,) = set(plan.slots)
    assert slot > 1024 + 128
    assert work_of([plan]) == Work(TwoPhase(), 32768, (3 * slot, 3 * slot), pieces=4, groups=64)
    assert work_of([plan]).sent_bytes == 6 * slot


def test_work_of_tensors_that_go_together() -> None:
    plans = plan_together("two_phase", {"a": ((64, 512), OneBit()), "b": ((32, 512), OneBit())}, 4)
    slots = sum(sum(plan.slots) for plan in plans.values())
    # what a rank keeps of both hops is the chunk that it owns, a quarter on average
    assert work_of(list(plans.values())) == Work(TwoPhase(), 49152, (3 / 4 * slots, 3 / 4 * slots), pieces=5, groups=96)


def test_work_of_allgather() -> None:
    plan = make_plan("allgather", OneBit(), (64, 512), 4)
    assert work_of([plan]) == Work(AllGather(), 32768, (3 * plan.slots[0],), groups=64)


def test_dense_work() -> None:
    assert dense_work(10, 8, 4) == Work(Dense(), 10, (2 * 3 / 4 * 80,))
    assert dense_work(10, 4, 4, half=True) == Work(Dense(), 10, (2 * 3 / 4 * 20,), half=True)


def test_a_payload_of_changing_size_counts_by_what_was_measured() -> None:
    for exchange, share in (("allgather", 1), ("two_phase", 4)):
        plan = make_plan(exchange, Threshold(tau=1.0), (40_000,), 4)
        assert work_of([plan], bytes_per_element=0.5).hop_bytes[0] == 3 * 0.5 * 40_000 / share
        assert work_of([plan]).hop_bytes[0] == 3 * sum(plan.slots) / share
    fixed = make_plan("two_phase", QSGD(), (40_000,), 4)
    assert work_of([fixed], bytes_per_element=0.001) == work_of([fixed])


def joined() -> float:
    # 4 bytes an element are copied twice; of 4 ranks each sends 6/4 of them
    return 2 * NETWORK.copying / (6 / 4)


def test_dense_stages() -> None:
    sent = Stage(1.6, "allreduce", 600.0, 1e-3, joined())
    assert stages_of(Work(Dense(), 100, (600.0,)), SPEED, NETWORK) == (sent,)


def test_fp16_stages() -> None:
    stages = stages_of(Work(Dense(), 100, (300.0,), half=True), SPEED, NETWORK)
    assert stages == (Stage(1000.5), Stage(2.6, "allreduce_half", 300.0, 2e-3, joined()), Stage(100.25))


def test_two_phase_stages() -> None:
    stages = stages_of(Work(TwoPhase(), 100, (60.0, 50.0), pieces=4), SPEED, NETWORK)
    assert stages == (
        Stage(4 * (0.5 + 250)),  # four chunks of 25 elements
        Stage(3 + 0.18, "alltoall"),
        Stage((0.25 + 25) + 3 * (0.125 + 50) + (0.5 + 250)),
        Stage(4 + 0.2, "allgather"),
        Stage(4 * (0.25 + 25)),
    )
    several = stages_of(Work(TwoPhase(), 100, (60.0, 50.0), pieces=8), SPEED, NETWORK)
    # an owner has two of the eight
    assert several[0] == Stage(8 * 0.5 + 1000)
    assert several[2] == Stage((2 * 0.25 + 25) + 3 * (2 * 0.125 + 50) + (2 * 0.5 + 250))
    assert several[4] == Stage(8 * 0.25 + 100)
    work = Work(TwoPhase(), 100, (60.0, 50.0), pieces=4)
    assert exchange_seconds(work, SPEED, NETWORK) == sum(s.seconds for s in stages)


def test_allgather_stages() -> None:
    stages = stages_of(Work(AllGather(), 100, (120.0,)), SPEED, NETWORK)
    assert stages == (Stage(1000.5), Stage(4.48, "allgather"), Stage(100.25 + 3 * 200.125))


def test_hierarchical_stages() -> None:
    between = LINK.slowed(10)
    network = Network(8, LINK, ranks_per_host=4, between=between, inside=LINK, copying=1e-5)
    plan = make_plan("hierarchical", OneBit(), (64, 512), 8)
    work = work_of([plan], ranks_per_host=4)
    slots = sum(plan.slots)
    # three quarters go to the host's other ranks; its four ranks send half of all payloads to the other host, twice
    assert work.hop_bytes == (3 / 4 * 32768 * 4, slots / 2, slots / 2, 3 / 4 * slots)
    cut_up, encode, to_owner, reduce, to_all, passed_on, decode = stages_of(work, SPEED, network)
    assert cut_up == Stage(3 + 3e-3 * work.hop_bytes[0], "alltoall")
    # the shards of the host's three other ranks are added to this one's
    assert encode.seconds == pytest.approx(3 * 4 * 8192 * 1e-5 + 2 * 0.5 + 10 * 8192)
    assert to_owner == to_all == Stage(3 + 3e-2 * slots / 2, "alltoall")
    assert reduce == Stage((0.25 + 4096) + (0.125 + 2 * 4096) + (0.5 + 10 * 4096))
    assert passed_on == Stage(3 + 3e-3 * 3 / 4 * slots, "alltoall")
    assert decode == Stage(8 * 0.25 + 32768)


def test_hierarchical_needs_to_know_the_links() -> None:
    plan = make_plan("hierarchical", OneBit(), (64, 512), 8)
    with pytest.raises(ValueError, match="between"):
        stages_of(work_of([plan], ranks_per_host=4), SPEED, Network(8, LINK, ranks_per_host=4))


@pytest.mark.parametrize("fixed", [0.5, 1e-3, 2.0])
def test_break_even_bandwidth(fixed: float) -> None:
    # fixed + 1e6 / b = 1e9 / b
    found = break_even_bandwidth(lambda b: fixed + 1e6 / b, lambda b: 1e9 / b)
    assert found == pytest.approx((1e9 - 1e6) / fixed, rel=1e-3)


def test_break_even_at_the_ends() -> None:
    assert break_even_bandwidth(lambda b: 2.0, lambda b: 1.0) == 0
    assert break_even_bandwidth(lambda b: 1.0, lambda b: 2.0) == math.inf
