from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_compress import BF16, QSGD, Adaptive, Key, NoCompression, OneBit, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.errors import WireError
from hvd_compress.exchange import EXCHANGES, Transfer, chunk_bounds, make_plan

COMPRESSORS = [OneBit(), Threshold(0.5), Adaptive(pi=16), QSGD(bits=4), TopK(ratio=0.05), TopK(k=7), BF16()]
COMPRESSORS += [Adaptive(pi=16, coding="golomb"), TopK(k=7, coding="golomb"), QSGD(bits=1, coding="elias")]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 63, 64, 65, 1009, 4096, 100_003])
@pytest.mark.parametrize("chunks", range(1, 18))
@pytest.mark.parametrize("group", [1, 3, 8, 512, 70_000])
def test_chunks_cover_the_tensor_evenly(numel: int, chunks: int, group: int) -> None:
    bounds = chunk_bounds(numel, chunks, group)
    assert bounds[0] == 0
    assert bounds[-1] == numel
    assert len(bounds) == chunks + 1
    sizes = np.diff(bounds)
    assert (sizes >= 0).all()
    # to one group where there is one for each chunk, else to an octet, else to an element
    unit = group if numel >= group * chunks else 8 if numel >= 8 * chunks else 1
    assert sizes.max() <= math.ceil(math.ceil(numel / unit) / chunks) * unit
    assert all(bound % unit == 0 for bound in bounds[:-1])


# -- plans -----------------------------------------------------------------------------------------------------------


@every_compressor
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (64, 640), (31, 33, 3)])
def test_a_plan_has_a_slot_for_every_chunk(compressor: Compressor, ranks: int, shape: tuple[int, ...]) -> None:
    for exchange, chunks in (("two_phase", ranks), ("allgather", 1)):
        plan = make_plan(exchange, compressor, shape, ranks)
        assert (plan.exchange, plan.shape, plan.ranks) == (exchange, shape, ranks)
        assert len(plan.slots) == len(plan.chunk_compressors) == chunks
        assert plan.numel == math.prod(shape)
        assert plan.slot == max(plan.slots)
        assert all(slot % 8 == 0 for slot in plan.slots)
        assert len(plan.collectives) == {"two_phase": 2, "allgather": 1}[exchange]


def worst_bytes(compressor: Compressor, exchange: str, shape: tuple[int, ...], ranks: int) -> int:
    """What a rank sends at most: each of n ranks sends n - 1 chunks to their owners and then its own to n - 1 ranks."""
    plan = make_plan(exchange, compressor, shape, ranks)
    return (ranks - 1) * plan.slots[0] if exchange == "allgather" else 2 * (ranks - 1) * max(plan.slots)


@every_compressor
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("shape", [(3,), (40, 40), (256, 512), (1000, 1000)])
def test_auto_takes_what_sends_fewer_bytes(compressor: Compressor, ranks: int, shape: tuple[int, ...]) -> None:
    by_bytes = {e: worst_bytes(compressor, e, shape, ranks) for e in ("allgather", "two_phase")}
    dense = 2 * (ranks - 1) / ranks * 4 * math.prod(shape)
    plan = make_plan("auto", compressor, shape, ranks)
    if min(by_bytes.values()) >= dense:
        assert plan.exchange == "dense"
        assert plan.collectives == ()
    else:
        assert by_bytes[plan.exchange] == min(by_bytes.values())
        if by_bytes["allgather"] == by_bytes["two_phase"]:
            assert plan.exchange == "allgather"


def test_auto_prefers_two_phases_for_many_ranks_and_one_for_two() -> None:
    assert make_plan("auto", OneBit(), (1024, 1024), 2).exchange == "allgather"
    assert make_plan("auto", OneBit(), (1024, 1024), 8).exchange == "two_phase"


def test_auto_compares_with_the_size_of_the_elements() -> None:
    assert make_plan("auto", BF16(), (1024, 1024), 4, 4).exchange == "two_phase"
    assert make_plan("auto", BF16(), (1024, 1024), 4, 2).exchange == "dense"
    assert make_plan("auto", NoCompression(), (1024, 1024), 4, 4).exchange == "dense"


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exchange='ring': must be one of 'auto', 'two_phase', 'allgather'"):
        make_plan("ring", OneBit(), (8,), 2)
    assert EXCHANGES == ("auto", "two_phase", "allgather")


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


# -- one tensor's way ------------------------------------------------------------------------------------------------


def transfers(exchange: str, compressor: Compressor, shape: tuple[int, ...], ranks: int) -> list[Transfer]:
    plan = make_plan(exchange, compressor, shape, ranks)
    return [Transfer(plan, rank, Key(name="w", rank=rank)) for rank in range(ranks)]


def one_rank(compressor: Compressor, exchange: str, numel: int = 4000) -> tuple[Transfer, np.ndarray]:
    """A transfer of one rank, encoded, and what its last collective brings."""
    (transfer,) = transfers(exchange, compressor, (numel,), 1)
    x = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    residual = np.zeros_like(x) if compressor.feedback else None
    parcel = transfer.encode(x, residual)
    if exchange == "two_phase":
        parcel = transfer.reduce(parcel.buffer[: parcel.own])
    return transfer, parcel.buffer.copy()


@every_compressor
@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_every_damage_to_an_arriving_payload_is_a_wire_error(compressor: Compressor, exchange: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(25):
        transfer, received = one_rank(compressor, exchange)
        # what follows the payload in its slot is nobody's
        payload = int(received[16:24].view("<u8")[0])
        received[rng.integers(payload)] ^= np.uint8(1 << rng.integers(8))
        with pytest.raises(WireError):
            transfer.arrive(received) and transfer.finish(keep=True, scale=1.0)


@every_compressor
@pytest.mark.parametrize("cut", [1, 8, 40, 100])
def test_every_truncation_is_a_wire_error(compressor: Compressor, cut: int) -> None:
    transfer, received = one_rank(compressor, "two_phase")
    with pytest.raises(WireError):
        transfer.arrive(received[:-cut])


@every_compressor
def test_damage_on_the_way_to_the_owner_is_a_wire_error(compressor: Compressor) -> None:
    a, b = transfers("two_phase", compressor, (4000,), 2)
    x = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    parcels = [t.encode(x.copy(), np.zeros_like(x) if compressor.feedback else None) for t in (a, b)]
    parts = []
    for parcel in parcels:
        first = parcel.sizes[0] if parcel.sizes else parcel.buffer.size // 2
        parts.append(parcel.buffer[:first].copy())
    good = np.concatenate(parts)
    a.reduce(good.copy())
    bad = good.copy()
    bad[parts[0].size + 60] ^= 1
    with pytest.raises(WireError):
        a.reduce(bad)


def test_a_payload_of_another_compressor_is_a_wire_error() -> None:
    transfer, _ = one_rank(QSGD(bits=4), "allgather")
    _, foreign = one_rank(Threshold(0.5), "allgather")
    with pytest.raises(WireError):
        transfer.arrive(foreign) and transfer.finish(keep=True, scale=1.0)


def test_finish_needs_encode() -> None:
    (transfer,) = transfers("allgather", OneBit(), (100,), 1)
    with pytest.raises(RuntimeError, match="encode"):
        transfer.finish(keep=True, scale=1.0)


@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_an_abandoned_step_leaves_both_residuals(exchange: str) -> None:
    (transfer,) = transfers(exchange, OneBit(), (1000,), 1)
    rng = np.random.default_rng(0)
    residual = np.zeros(1000, np.float32)
    for _ in range(2):
        x = rng.standard_normal(1000).astype(np.float32)
        parcel = transfer.encode(x, residual)
        parcel = transfer.reduce(parcel.buffer) if exchange == "two_phase" else parcel
        assert transfer.arrive(parcel.buffer)
        _, residual = transfer.finish(keep=True, scale=1.0)
    before = residual.copy(), None if transfer.owner_residual is None else transfer.owner_residual.copy()
    parcel = transfer.encode(rng.standard_normal(1000).astype(np.float32), residual)
    if exchange == "two_phase":
        transfer.reduce(parcel.buffer)
    transfer.abandon()
    np.testing.assert_array_equal(residual, before[0])
    if exchange == "two_phase":
        np.testing.assert_array_equal(transfer.owner_residual, before[1])


@pytest.mark.parametrize("numel", [1000, 100_003])
def test_payloads_of_fixed_size_have_equal_slots(numel: int) -> None:
    a, *_ = transfers("two_phase", OneBit(), (numel,), 3)
    parcel = a.encode(np.ones(numel, np.float32), np.zeros(numel, np.float32))
    assert parcel.sizes is None
    assert parcel.buffer.size == 3 * parcel.own


def test_payloads_of_changing_size_state_their_sizes_in_a_buffer_of_constant_shape() -> None:
    a, *_ = transfers("two_phase", Threshold(0.5), (30_000,), 3)
    rng = np.random.default_rng(0)
    residual = np.zeros(30_000, np.float32)
    first = a.encode(rng.standard_normal(30_000).astype(np.float32), residual)
    assert first.sizes is not None
    second = a.encode(np.zeros(30_000, np.float32), residual)
    assert first.buffer.shape == second.buffer.shape
    assert sum(second.sizes) < sum(first.sizes)
