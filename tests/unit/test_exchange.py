from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from hvd_compress import BF16, QSGD, Adaptive, NoCompression, OneBit, Percentile, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.errors import WireError
from hvd_compress.exchange import EXCHANGES, Account, Bucket, Plan, chunk_bounds, make_plan, plan_together
from tests.close import check_taken_back
from tests.stages import alltoall, sizes_of

COMPRESSORS = [OneBit(), Threshold(0.5), Adaptive(pi=16), QSGD(bits=4), TopK(ratio=0.05), TopK(k=7), BF16()]
COMPRESSORS += [
    Adaptive(pi=16, coding="golomb"),
    TopK(k=7, coding="golomb"),
    Percentile(90),
    QSGD(bits=1, coding="elias"),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 63, 64, 65, 1009, 4096, 100_003])
def test_chunks_cover_the_tensor_evenly(numel: int) -> None:
    for chunks, group in product(range(1, 18), [1, 3, 8, 512, 70_000]):
        bounds, case = chunk_bounds(numel, chunks, group), f"{chunks} chunks, groups of {group}"
        assert bounds[0] == 0, case
        assert bounds[-1] == numel, case
        assert len(bounds) == chunks + 1, case
        sizes = np.diff(bounds)
        assert (sizes >= 0).all(), case
        # to one group where there is one for each chunk, else to an octet, else to an element
        unit = group if numel >= group * chunks else 8 if numel >= 8 * chunks else 1
        assert sizes.max() <= math.ceil(math.ceil(numel / unit) / chunks) * unit, case
        assert all(bound % unit == 0 for bound in bounds[:-1]), case


# -- plans -----------------------------------------------------------------------------------------------------------


@every_compressor
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (64, 640), (31, 33, 3)])
def test_a_plan_has_a_slot_for_every_chunk(compressor: Compressor, ranks: int, shape: tuple[int, ...]) -> None:
    for exchange, chunks in (("two_phase", ranks), ("allgather", 1)):
        plan = make_plan(exchange, compressor, shape, ranks)
        assert (plan.exchange.id, plan.shape, plan.ranks) == (exchange, shape, ranks)
        assert len(plan.slots) == len(plan.chunk_compressors) == chunks
        assert plan.numel == math.prod(shape)
        assert all(slot % 8 == 0 for slot in plan.slots)
        # an empty chunk has no payload, but a tensor without elements has one, so that its exchange is not empty
        assert [slot > 0 for slot in plan.slots] == [size > 0 or plan.numel == 0 for size in np.diff(plan.bounds)]
        assert [number for number, _ in plan.chunks] == list(np.flatnonzero(plan.slots))
        assert len(plan.collectives) == {"two_phase": 2, "allgather": 1}[exchange]


def worst_bytes(compressor: Compressor, exchange: str, shape: tuple[int, ...], ranks: int) -> int:
    """What a rank sends at most: each of n ranks sends n - 1 chunks to their owners and then its own to n - 1 ranks."""
    plan = make_plan(exchange, compressor, shape, ranks)
    return (ranks - 1) * plan.slots[0] if exchange == "allgather" else 2 * (ranks - 1) * max(plan.slots)


@every_compressor
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("shape", [(3,), (40, 40), (256, 512), (1000, 1000)])
def test_auto_takes_what_costs_less(compressor: Compressor, ranks: int, shape: tuple[int, ...]) -> None:
    by_bytes = {e: worst_bytes(compressor, e, shape, ranks) for e in ("allgather", "two_phase")}
    dense = 2 * (ranks - 1) / ranks * 4 * math.prod(shape)
    plan = make_plan("auto", compressor, shape, ranks)
    if min(by_bytes.values()) >= dense:
        assert plan.exchange.id == "dense"
        assert plan.collectives == ()
    else:
        costs_more = by_bytes["allgather"] > by_bytes["two_phase"] + 32768
        assert plan.exchange.id == ("two_phase" if costs_more else "allgather")


def test_auto_prefers_two_phases_for_many_ranks_and_one_for_two() -> None:
    assert make_plan("auto", OneBit(), (1024, 1024), 2).exchange.id == "allgather"
    assert make_plan("auto", OneBit(), (1024, 1024), 8).exchange.id == "two_phase"
    # few bytes are sent sooner than a second collective begins
    assert make_plan("auto", OneBit(), (64, 512), 8).exchange.id == "allgather"


def test_auto_compares_with_the_size_of_the_elements() -> None:
    assert make_plan("auto", BF16(), (1024, 1024), 4, 4).exchange.id == "two_phase"
    assert make_plan("auto", BF16(), (1024, 1024), 4, 2).exchange.id == "dense"
    assert make_plan("auto", NoCompression(), (1024, 1024), 4, 4).exchange.id == "dense"


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exchange='ring': must be one of 'auto', 'two_phase', 'allgather'"):
        make_plan("ring", OneBit(), (8,), 2)
    assert tuple(EXCHANGES) == ("auto", "two_phase", "allgather", "hierarchical", "parameter_server")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_k_is_shared_among_the_chunks(ranks: int) -> None:
    plan = make_plan("two_phase", TopK(k=100), (1000, 1000), ranks)
    kept = [c.k for c in plan.chunk_compressors if isinstance(c, TopK)]
    assert 100 <= sum(kept) < 100 + ranks
    assert make_plan("allgather", TopK(k=100), (1000, 1000), ranks).chunk_compressors == (TopK(k=100),)


@pytest.mark.parametrize(
    ("plain", "coded"),
    [
        (Threshold(0.5), Threshold(0.5, coding="golomb")),
        (Adaptive(), Adaptive(coding="golomb")),
        (TopK(), TopK(coding="golomb")),
        (QSGD(), QSGD(coding="elias")),
    ],
    ids=repr,
)
def test_coded_payloads_vary_in_size_within_the_slots_of_plain_ones(plain: Compressor, coded: Compressor) -> None:
    for exchange in ("two_phase", "allgather"):
        plan = make_plan(exchange, coded, (500, 600), 4)
        assert not plan.fixed_size
        assert plan.slots == make_plan(exchange, plain, (500, 600), 4).slots


def test_coded_levels_of_one_bit_have_small_slots_and_one_bucket_for_a_large_tensor() -> None:
    plan = make_plan("allgather", QSGD(bits=1, coding="elias", bucket_numel=2**30), (500, 600), 4)
    assert plan.slots[0] <= 40 + 8 + 500 * 600 / 4 + 24


# -- plans of several tensors ----------------------------------------------------------------------------------------

# of each compressor: long and short rows, one long row, fewer elements than ranks, an odd number of them
MIXED = {
    "rows": (60, 700),
    "row": (20_001,),
    "few": (3,),
    "conv": (6, 5, 3, 3),
    "0-d": (),
    "bias": (17,),
    "wide": (3, 9000),
}


def unit_of(plan: Plan) -> int:
    """What chunks are multiples of: groups where there are some, else octets."""
    return plan.group if plan.numel >= 2 * plan.group else 8


@every_compressor
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 16])
def test_chunks_of_tensors_that_go_together_cover_each_and_are_balanced(compressor: Compressor, ranks: int) -> None:
    other = NoCompression()
    tensors = {name: (shape, other if name == "bias" else compressor) for name, shape in MIXED.items()}
    plans = plan_together("two_phase", tensors, ranks)
    assert list(plans) == list(tensors)
    owned = {compressor: np.zeros(ranks, np.int64), other: np.zeros(ranks, np.int64)}
    for name, plan in plans.items():
        shape, its_compressor = tensors[name]
        assert (plan.exchange.id, plan.shape, plan.ranks) == ("two_phase", shape, ranks)
        assert len(plan.bounds) == ranks + 1
        assert (plan.bounds[0], plan.bounds[-1]) == (0, math.prod(shape))
        sizes = np.diff(plan.bounds)
        assert (sizes >= 0).all()
        assert [slot > 0 for slot in plan.slots] == [size > 0 for size in sizes]
        assert all(bound % unit_of(plan) == 0 for bound in plan.bounds if bound < plan.numel)
        owned[its_compressor] += sizes
    for its_compressor, of_rank in owned.items():
        units = [unit_of(plans[name]) for name in tensors if tensors[name][1] == its_compressor]
        # each of its two ends is at most half a unit off
        assert np.abs(of_rank - of_rank.sum() / ranks).max() <= max(units)


def test_owners_follow_the_order_of_the_tensors() -> None:
    tensors = {name: ((1024,), OneBit()) for name in "abcd"}
    plans = plan_together("two_phase", tensors, 4)
    assert [plan.slots.index(max(plan.slots)) for plan in plans.values()] == [0, 1, 2, 3]
    assert [len(plan.chunks) for plan in plans.values()] == [1, 1, 1, 1]


@every_compressor
@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_a_tensor_alone_has_the_plan_that_it_has_by_itself(compressor: Compressor, exchange: str) -> None:
    alone = make_plan(exchange, compressor, (33, 640), 3)
    assert plan_together(exchange, {"w": ((33, 640), compressor)}, 3) == {"w": alone}
    # small tensors beside it, which have another compressor, change nothing
    assert plan_together(exchange, {"w": ((33, 640), compressor), "pack": ((99,), NoCompression())}, 3)["w"] == alone


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("small", [0, 100, 40_000])
@every_compressor
def test_auto_takes_what_costs_less_for_all_together(compressor: Compressor, small: int, ranks: int) -> None:
    tensors = {"v": ((300, 400), compressor), "w": ((50, 900), compressor)}
    if small:
        tensors["pack"] = ((small,), NoCompression())
    of_each = {e: plan_together(e, tensors, ranks).values() for e in ("allgather", "two_phase")}
    # n - 1 others get all of an allgather; in two phases the largest owner sends its chunks' worth to each of them,
    # before and after the sum
    by_bytes = {
        "allgather": (ranks - 1) * sum(plan.slots[0] for plan in of_each["allgather"]),
        "two_phase": 2 * (ranks - 1) * max(np.sum([plan.slots for plan in of_each["two_phase"]], axis=0)),
    }
    (chosen,) = {plan.exchange.id for plan in plan_together("auto", tensors, ranks).values()}
    assert chosen == ("two_phase" if by_bytes["allgather"] > by_bytes["two_phase"] + 32768 else "allgather")


def test_k_of_a_tensor_is_shared_among_the_owners_of_its_part_only() -> None:
    shapes = {"a": (1000, 100), "b": (2000, 100)}
    plans = plan_together("two_phase", {name: (shape, TopK(k=90)) for name, shape in shapes.items()}, 3)
    kept = {
        name: [c.k for (number, _) in plan.chunks if isinstance(c := plan.chunk_compressors[number], TopK)]
        for name, plan in plans.items()
    }
    assert kept["a"] == [90]
    assert len(kept["b"]) == 2
    assert 90 <= sum(kept["b"]) <= 91


def test_an_unknown_exchange_is_refused_for_several_tensors_too() -> None:
    with pytest.raises(ValueError, match=r"exchange='ring': must be one of 'auto', 'two_phase', 'allgather'"):
        plan_together("ring", {"w": ((8,), OneBit())}, 2)


# -- one tensor's way ------------------------------------------------------------------------------------------------


def buckets(exchange: str, compressor: Compressor, shape: tuple[int, ...], ranks: int) -> list[Bucket]:
    """Of each rank, with one tensor."""
    plan = make_plan(exchange, compressor, shape, ranks)
    return [Bucket({"w": Account("w", plan, compressor, rank)}) for rank in range(ranks)]


def one_rank(compressor: Compressor, exchange: str, numel: int = 4000) -> tuple[Bucket, np.ndarray]:
    """A bucket of one rank, encoded, and what its last collective brings."""
    (bucket,) = buckets(exchange, compressor, (numel,), 1)
    bucket.give("w", np.random.default_rng(0).standard_normal(numel).astype(np.float32))
    parcel = bucket.parcel()
    if exchange == "two_phase":
        parcel = bucket.advance("alltoall", alltoall([parcel])[0])
    return bucket, parcel.buffer.copy()


@every_compressor
@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_every_damage_to_an_arriving_payload_is_a_wire_error(compressor: Compressor, exchange: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(25):
        bucket, received = one_rank(compressor, exchange)
        # what follows the payload in its slot is nobody's
        payload = int(received[16:24].view("<u8")[0])
        received[rng.integers(payload)] ^= np.uint8(1 << rng.integers(8))
        with pytest.raises(WireError):
            bucket.arrive(received)


@every_compressor
@pytest.mark.parametrize("cut", [1, 8, 40, 100])
def test_every_truncation_is_a_wire_error(compressor: Compressor, cut: int) -> None:
    bucket, received = one_rank(compressor, "two_phase")
    with pytest.raises(WireError):
        bucket.arrive(received[:-cut])


@every_compressor
def test_damage_on_the_way_to_the_owner_is_a_wire_error(compressor: Compressor) -> None:
    both = buckets("two_phase", compressor, (4000,), 2)
    x = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    for bucket in both:
        assert bucket.give("w", x.copy())
    parcels = [bucket.parcel() for bucket in both]
    good, _ = alltoall(parcels)
    both[0].advance("alltoall", good.copy())
    bad = good.copy()
    bad[sizes_of(parcels[0], 2)[0] + 60] ^= 1
    with pytest.raises(WireError):
        both[0].advance("alltoall", bad)


def test_a_payload_of_another_compressor_is_a_wire_error() -> None:
    bucket, _ = one_rank(QSGD(bits=4), "allgather")
    _, foreign = one_rank(Threshold(0.5), "allgather")
    with pytest.raises(WireError):
        bucket.arrive(foreign)


def test_finish_needs_arrive() -> None:
    (bucket,) = buckets("allgather", OneBit(), (100,), 1)
    bucket.give("w", np.ones(100, np.float32))
    with pytest.raises(RuntimeError, match=r"'w' before arrive"):
        bucket.finish(keep=True, scale=1.0)


@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_an_abandoned_step_leaves_both_residuals(exchange: str) -> None:
    (bucket,) = buckets(exchange, OneBit(), (1000,), 1)
    transfer = bucket.accounts["w"]
    rng = np.random.default_rng(0)
    for _ in range(2):
        bucket.give("w", rng.standard_normal(1000).astype(np.float32))
        parcel = bucket.parcel()
        parcel = bucket.advance("alltoall", parcel.buffer) if exchange == "two_phase" else parcel
        assert bucket.arrive(parcel.buffer)
        bucket.finish(keep=True, scale=1.0)
    before = transfer.residual.copy(), None if exchange == "allgather" else transfer.owner_residual.copy()
    bucket.give("w", rng.standard_normal(1000).astype(np.float32))
    if exchange == "two_phase":
        bucket.advance("alltoall", bucket.parcel().buffer)
    assert bucket.busy
    bucket.abandon()
    assert not bucket.busy
    check_taken_back((transfer.residual, transfer.owner_residual), before, largest=8.0)


@pytest.mark.parametrize("numel", [1000, 98_304, 100_003])
def test_payloads_of_fixed_size_have_messages_of_the_same_size_in_every_step(numel: int) -> None:
    bucket, *_ = buckets("two_phase", OneBit(), (numel,), 3)
    slots = bucket.accounts["w"].plan.slots
    for x in (np.ones(numel, np.float32), np.zeros(numel, np.float32), np.full(numel, np.nan, np.float32)):
        bucket.give("w", x)
        parcel = bucket.parcel()
        assert sizes_of(parcel, 3) == slots
        assert parcel.buffer.size == sum(slots)
        assert (parcel.sizes is None) == (len(set(slots)) == 1)
        bucket.abandon()


def test_payloads_of_changing_size_state_their_sizes_in_a_buffer_of_constant_shape() -> None:
    bucket, *_ = buckets("two_phase", Threshold(0.5), (30_000,), 3)
    bucket.give("w", np.random.default_rng(0).standard_normal(30_000).astype(np.float32))
    first = bucket.parcel()
    assert first.sizes is not None
    bucket.abandon()
    bucket.give("w", np.zeros(30_000, np.float32))
    second = bucket.parcel()
    assert first.buffer.shape == second.buffer.shape
    assert sum(second.sizes) < sum(first.sizes)
