"""Tensors that share an exchange, among ranks in one process whose collectives are list operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from hvd_compress import BF16, QSGD, Adaptive, NoCompression, OneBit, Threshold, TopK, wire
from hvd_compress.compressors import Compressor
from hvd_compress.errors import WireError
from hvd_compress.exchange import Account, Bucket, make_plan, plan_together
from tests.close import check_taken_back
from tests.forge import forge
from tests.stages import allgather, alltoall, last_message, sizes_of

RANKS = 3
Tensors = Mapping[str, tuple[tuple[int, ...], Compressor]]
FIXED: Tensors = {
    "w": ((37, 640), OneBit()),
    "few": ((2,), OneBit()),
    "v": ((5, 700), TopK(ratio=0.05)),
    "plain": ((50,), NoCompression()),
    "u": ((37, 640), OneBit()),
}
VARIABLE: Tensors = {**FIXED, "t": ((3000,), Threshold(0.5)), "s": ((4000,), TopK(0.01, coding="golomb"))}
each_kind = pytest.mark.parametrize("tensors", [FIXED, VARIABLE], ids=["fixed", "variable"])
each_exchange = pytest.mark.parametrize("exchange", ["two_phase", "allgather"])


def made(tensors: Tensors, exchange: str, ranks: int = RANKS) -> list[Bucket]:
    plans = plan_together(exchange, tensors, ranks)
    return [
        Bucket({name: Account(name, plans[name], compressor, rank) for name, (_, compressor) in tensors.items()})
        for rank in range(ranks)
    ]


def gradient(tensors: Tensors, name: str, rank: int, step: int) -> np.ndarray:
    numel = int(np.prod(tensors[name][0]))
    return np.random.default_rng([len(name), ord(name[0]), rank, step]).standard_normal(numel).astype(np.float32)


def encode(buckets: list[Bucket], tensors: Tensors, step: int) -> None:
    for rank, bucket in enumerate(buckets):
        for name in tensors:
            bucket.give(name, gradient(tensors, name, rank, step))


def run(buckets: list[Bucket], tensors: Tensors, step: int, keep: bool = True) -> list[dict[str, np.ndarray]]:
    """A whole step: copies of the sums on each rank."""
    encode(buckets, tensors, step)
    message = last_message(buckets)
    assert all(bucket.arrive(message) for bucket in buckets)
    return [{n: x.copy() for n, x in bucket.finish(keep, 1.0).items() if x is not None} for bucket in buckets]


def owed(buckets: list[Bucket], name: str) -> np.ndarray:
    """What all ranks together still owe of a tensor."""
    total = np.zeros(buckets[0].accounts[name].plan.numel)
    for rank, bucket in enumerate(buckets):
        transfer = bucket.accounts[name]
        if transfer.residual is not None:
            total += transfer.residual
        if transfer.owner_residual is not None:
            start = transfer.plan.bounds[rank]
            total[start : start + transfer.owner_residual.size] += transfer.owner_residual
    return total


LARGEST = 20.0
"""Sums of three normal gradients, and what is owed of them, are smaller."""


def residuals(bucket: Bucket) -> list[np.ndarray | None]:
    return [None if r is None else r.copy() for t in bucket.accounts.values() for r in (t.residual, t.owner_residual)]


# -- results ---------------------------------------------------------------------------------------------------------


@each_kind
@each_exchange
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_nothing_is_lost_and_all_ranks_get_the_same(tensors: Tensors, exchange: str, ranks: int) -> None:
    buckets = made(tensors, exchange, ranks)
    arrived = {name: np.zeros(int(np.prod(shape))) for name, (shape, _) in tensors.items()}
    given = {name: np.zeros_like(x) for name, x in arrived.items()}
    for step in range(4):
        results = run(buckets, tensors, step)
        for name in tensors:
            assert len({of_rank[name].tobytes() for of_rank in results}) == 1
            arrived[name] += results[0][name]
            given[name] += sum(gradient(tensors, name, rank, step).astype(np.float64) for rank in range(ranks))
            np.testing.assert_allclose(arrived[name] + owed(buckets, name), given[name], atol=1e-4)
    assert np.abs(owed(buckets, "w")).max() > 1e-4, "nothing is owed, so nothing is tested"


@each_exchange
@pytest.mark.parametrize("compressor", [OneBit(), Threshold(0.5), Adaptive(pi=8), BF16(), NoCompression()], ids=repr)
def test_a_tensor_gets_what_it_gets_alone(compressor: Compressor, exchange: str) -> None:
    """For compressors whose result does not depend on where chunks begin, or only on groups' boundaries."""
    shapes = {"w": (37, 512), "v": (4, 5, 3, 3), "u": (3, 4000)}
    tensors = {name: (shape, compressor) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if compressor.group_numel(shape) > 1 and name == "v":
            continue  # its one short group is cut in two if it goes alone
        alone = made({name: (shape, compressor)}, exchange)
        together = made(tensors, exchange)
        for step in range(3):
            expected = run(alone, {name: tensors[name]}, step)[0][name]
            assert run(together, tensors, step)[0][name].tobytes() == expected.tobytes(), (name, step)


@each_kind
@each_exchange
def test_the_order_of_encoding_does_not_matter(tensors: Tensors, exchange: str) -> None:
    sent = set()
    for order in itertools.islice(itertools.permutations(tensors), 0, 120, 17):
        _, bucket, _ = made(tensors, exchange)
        for name in order[:-1]:
            assert not bucket.give(name, gradient(tensors, name, 1, 0))
        assert bucket.give(order[-1], gradient(tensors, order[-1], 1, 0))
        parcel = bucket.parcel()
        sent.add((parcel.buffer[: sum(sizes_of(parcel, RANKS))].tobytes(), parcel.sizes))
    assert len(sent) == 1


@each_exchange
def test_messages_of_changing_size_hold_payloads_without_gaps(exchange: str) -> None:
    _, bucket, _ = made(VARIABLE, exchange)
    for name in VARIABLE:
        bucket.give(name, gradient(VARIABLE, name, 1, 0))
    parcel = bucket.parcel()
    plans = {name: transfer.plan for name, transfer in bucket.accounts.items()}
    receivers = range(RANKS) if exchange == "two_phase" else range(1)
    sizes = parcel.sizes if exchange == "two_phase" else (parcel.buffer.size,)
    assert sizes is not None
    at = 0
    for receiver, size in zip(receivers, sizes, strict=True):
        expected = [plan.bounds[receiver + 1] - plan.bounds[receiver] for plan in plans.values()]
        begin = at
        for numel in filter(None, expected):
            header, _ = wire.open_payload(parcel.buffer[at:])
            assert header.numel == numel
            at += header.nbytes
        assert at - begin == size
    # of Threshold's slot, which is for all its elements, only what exceeds tau is sent
    assert at < sum(sum(plan.slots) for plan in plans.values())


@each_exchange
def test_a_step_that_is_taken_back_leaves_both_residuals_of_all(exchange: str) -> None:
    buckets = made(FIXED, exchange)
    run(buckets, FIXED, 0)
    before = [residuals(bucket) for bucket in buckets]
    run(buckets, FIXED, 1, keep=False)
    check_taken_back([residuals(bucket) for bucket in buckets], before, LARGEST)


@each_exchange
@pytest.mark.parametrize("bad", ["w", "few", "v", "u"])
def test_a_value_that_is_not_finite_in_one_tensor_is_told_of_all(exchange: str, bad: str) -> None:
    buckets = made(FIXED, exchange)
    for rank, bucket in enumerate(buckets):
        for name in FIXED:
            x = gradient(FIXED, name, rank, 0)
            if rank == 1 and name == bad:
                x[-1] = np.inf
            bucket.give(name, x)
    message = last_message(buckets)
    assert [bucket.arrive(message) for bucket in buckets] == [False] * RANKS
    for bucket in buckets:
        results = bucket.finish(keep=False, scale=1.0)
        assert [name for name, x in results.items() if not np.isfinite(x).all()] == [bad]


# -- tensors that are left out ---------------------------------------------------------------------------------------


@each_kind
@each_exchange
@pytest.mark.parametrize("left_out", [("w",), ("few", "plain"), ("v", "u", "few", "plain")])
def test_a_tensor_that_is_left_out_keeps_what_it_owes(tensors: Tensors, exchange: str, left_out: tuple[str]) -> None:
    buckets, twins = made(tensors, exchange), made(tensors, exchange)
    run(buckets, tensors, 0)
    run(twins, tensors, 0)
    before = {name: owed(buckets, name) for name in left_out}
    for rank, bucket in enumerate(buckets):
        done = []
        for name in tensors:
            step = bucket.give(name, None) if name in left_out else bucket.give(name, gradient(tensors, name, rank, 1))
            done.append(step)
        assert done == [False] * (len(tensors) - 1) + [True]
    message = last_message(buckets)
    assert all(bucket.arrive(message) for bucket in buckets)
    results = [bucket.finish(keep=True, scale=1.0) for bucket in buckets]
    expected = run(twins, tensors, 1)[0]
    for of_rank in results:
        assert of_rank.keys() == expected.keys()
        for name in tensors:
            if name in left_out:
                assert of_rank[name] is None
            else:
                assert of_rank[name].tobytes() == expected[name].tobytes()
    for name in left_out:
        assert owed(buckets, name).tobytes() == before[name].tobytes()
    assert not any(bucket.busy for bucket in buckets)
    # and goes on with it
    results = run(buckets, tensors, 2)
    for name in left_out:
        given = sum(gradient(tensors, name, rank, 2).astype(np.float64) for rank in range(RANKS))
        np.testing.assert_allclose(results[0][name] + owed(buckets, name), before[name] + given, atol=1e-4)


@each_kind
@each_exchange
def test_where_all_are_left_out_nothing_is_sent(tensors: Tensors, exchange: str) -> None:
    buckets = made(tensors, exchange)
    run(buckets, tensors, 0)
    before = [residuals(bucket) for bucket in buckets]
    for bucket in buckets:
        assert [bucket.give(name, None) for name in tensors] == [False] * len(tensors)
        assert not bucket.busy
    check_taken_back([residuals(bucket) for bucket in buckets], before, largest=0.0)
    run(buckets, tensors, 1)


# -- messages are not trusted ----------------------------------------------------------------------------------------


def damage(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy with one wrong bit in the header or the body of one of its payloads."""
    starts = [i for i in range(0, message.size - 40, 8) if message[i : i + 4].tobytes() == b"hvdc"]
    at = int(rng.choice(starts))
    nbytes = int(message[at + 16 : at + 24].view("<u8")[0])
    changed = message.copy()
    changed[at + rng.integers(nbytes)] ^= np.uint8(1 << rng.integers(8))
    return changed


def cut_short(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return message[: rng.integers(message.size)].copy()


def too_long(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([message, message[:48]])


def of_others(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, message.size, np.uint8)


def zeros(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.zeros_like(message)


def another_codec(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Its first payload says, with the right checksum, that another compressor has made it."""
    nbytes = int(message[16:24].view("<u8")[0])
    changed = message.copy()
    changed[:nbytes] = forge(message[:nbytes], codec=7)
    return changed


def another_size(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    nbytes = int(message[16:24].view("<u8")[0])
    changed = message.copy()
    changed[:nbytes] = forge(message[:nbytes], numel=int(message[8:16].view("<u8")[0]) - 1)
    return changed


each_damage = pytest.mark.parametrize(
    "change", [damage, cut_short, too_long, of_others, zeros, another_codec, another_size]
)
Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


@each_kind
@each_exchange
@each_damage
def test_a_wrong_last_message_is_refused_before_anything_is_final(
    tensors: Tensors, exchange: str, change: Change
) -> None:
    buckets, twins = made(tensors, exchange), made(tensors, exchange)
    run(buckets, tensors, 0)
    run(twins, tensors, 0)
    rng = np.random.default_rng(0)
    before = [residuals(bucket) for bucket in buckets]
    for times in range(1, 6):
        encode(buckets, tensors, 1)
        message = last_message(buckets)
        for bucket in buckets:
            with pytest.raises(WireError):
                bucket.arrive(change(message, rng))
            bucket.abandon()
        check_taken_back([residuals(bucket) for bucket in buckets], before, LARGEST, times)
    # the step can be done again
    for again, straight in zip(run(buckets, tensors, 1), run(twins, tensors, 1), strict=True):
        for name in tensors:
            np.testing.assert_allclose(again[name], straight[name], rtol=1e-5, atol=1e-5)


@each_kind
@each_damage
def test_a_wrong_message_to_an_owner_is_refused_before_anything_is_final(tensors: Tensors, change: Change) -> None:
    buckets = made(tensors, "two_phase")
    run(buckets, tensors, 0)
    rng = np.random.default_rng(0)
    before = [residuals(bucket) for bucket in buckets]
    for times in range(1, 6):
        encode(buckets, tensors, 1)
        received = alltoall([bucket.parcel() for bucket in buckets])
        for bucket, message in zip(buckets, received, strict=True):
            with pytest.raises(WireError):
                bucket.advance("alltoall", change(message, rng))
            bucket.abandon()
        check_taken_back([residuals(bucket) for bucket in buckets], before, LARGEST, times)


@each_exchange
def test_a_message_of_other_tensors_is_refused(exchange: str) -> None:
    buckets = made(FIXED, exchange)
    others = made({name: FIXED[name] for name in reversed(list(FIXED))}, exchange)
    encode(buckets, FIXED, 0)
    encode(others, FIXED, 0)
    message, foreign = last_message(buckets), last_message(others)
    assert foreign.size == message.size or exchange == "two_phase"
    for bucket in buckets:
        with pytest.raises(WireError):
            bucket.arrive(foreign)


@each_exchange
def test_a_message_of_fewer_ranks_is_refused(exchange: str) -> None:
    buckets, fewer = made(VARIABLE, exchange), made(VARIABLE, exchange, RANKS - 1)
    encode(buckets, VARIABLE, 0)
    last_message(buckets)
    encode(fewer, VARIABLE, 0)
    message = last_message(fewer)
    for bucket in buckets:
        with pytest.raises(WireError):
            bucket.arrive(message)


# -- shapes ----------------------------------------------------------------------------------------------------------


@each_exchange
@pytest.mark.parametrize("numel", [1, 2, 5])
def test_ranks_that_own_nothing_take_part(exchange: str, numel: int) -> None:
    tensors = {"a": ((numel,), TopK(k=1)), "b": ((1,), OneBit())}
    buckets = made(tensors, exchange, 7)
    encode(buckets, tensors, 0)
    if exchange == "two_phase":
        assert 0 in buckets[0].parcel().sizes
        parcels = [
            b.advance("alltoall", m) for b, m in zip(buckets, alltoall([b.parcel() for b in buckets]), strict=True)
        ]
        assert 0 in [parcel.buffer.size for parcel in parcels]
        message = allgather(parcels)
    else:
        message = last_message(buckets)
    assert all(bucket.arrive(message) for bucket in buckets)
    expected = np.sum([gradient(tensors, "b", rank, 0) for rank in range(7)], axis=0)
    np.testing.assert_allclose(buckets[3].finish(keep=True, scale=1.0)["b"], expected, rtol=1e-5)


def test_no_rank_reduces_what_it_does_not_own() -> None:
    tensors = {"a": ((4096,), OneBit()), "b": ((4096,), OneBit())}
    first, second = made(tensors, "two_phase", 2)
    assert (first.accounts["a"].owned, first.accounts["b"].owned) == (slice(0, 4096), None)
    assert (second.accounts["a"].owned, second.accounts["b"].owned) == (None, slice(0, 4096))
    encode([first, second], tensors, 0)
    sums = [
        b.advance("alltoall", m).buffer
        for b, m in zip((first, second), alltoall([first.parcel(), second.parcel()]), strict=True)
    ]
    assert [wire.open_payload(of_rank)[0].nbytes for of_rank in sums] == [of_rank.size for of_rank in sums]


def test_randomness_differs_between_the_tensors_of_a_bucket() -> None:
    tensors = {"a": ((2000,), QSGD(bits=1)), "b": ((2000,), QSGD(bits=1))}
    plan = make_plan("allgather", QSGD(bits=1), (2000,), 1)
    (bucket,) = made(tensors, "allgather", 1)
    x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    for name in tensors:
        bucket.give(name, x.copy())
    bucket.arrive(bucket.parcel().buffer)
    results = bucket.finish(keep=True, scale=1.0)
    assert results["a"].tobytes() != results["b"].tobytes()
    alone = Bucket({"b": Account("b", plan, QSGD(bits=1), 0)})
    alone.give("b", x.copy())
    alone.arrive(alone.parcel().buffer)
    assert alone.finish(keep=True, scale=1.0)["b"].tobytes() == results["b"].tobytes()


def test_a_payload_that_is_longer_than_its_tensor_takes_is_refused() -> None:
    # both payloads have room in the message, but not each of them in its slot
    plans = plan_together("allgather", {n: ((9,), Threshold(0.5)) for n in "ab"}, 1)
    bucket = Bucket({n: Account(n, plans[n], Threshold(0.5), 0) for n in "ab"})
    for name in "ab":
        bucket.give(name, np.zeros(9, np.float32))
    first, second = (p.copy() for p in wire.frames(bucket.parcel().buffer.copy(), 2))
    slot = plans["a"].slots[0]
    longer = np.zeros(slot + 8, np.uint8)
    longer[: first.size] = first
    longer[16:24].view(np.int64)[0] = longer.size
    with pytest.raises(WireError, match=rf"payload 0 of 2 has {slot + 8} bytes, and its tensor takes {slot} at most"):
        bucket.arrive(np.concatenate([longer, second]))
