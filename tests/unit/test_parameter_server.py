"""`ParameterServer`: its settings, its plans, and in one process what must hold of every exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    AdaGrad,
    Adaptive,
    Auto,
    NoCompression,
    OneBit,
    ParameterServer,
    Percentile,
    Policy,
    Threshold,
    TopK,
)
from hvd_compress.compressors import Compressor
from hvd_compress.engine import Ledger, Routing, Tensor, check_settings, description, exchanged, resolved
from hvd_compress.errors import StateError, UnsupportedError, WireError
from hvd_compress.exchange import Bucket, checked_exchange, make_plan, plan_together
from hvd_compress.loopback import Loopback
from tests.close import check_taken_back
from tests.gradients import SHAPE, arrays
from tests.stages import last_message

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
PERCENTILE = Percentile(90, error_feedback=True)
WITH_FEEDBACK = [OneBit(), Threshold(0.5), Adaptive(pi=16), TopK(k=40), BF16(), TopK(0.05, coding="golomb"), PERCENTILE]
WITHOUT = [QSGD(bits=1), QSGD(bits=4), QSGD(bits=1, coding="elias"), Percentile(90), NoCompression(), FP16()]
every_answer = pytest.mark.parametrize("answer", ["compressed", "dense"])
every_root = pytest.mark.parametrize("root", [0, 1, "round_robin"])
feedback = pytest.mark.parametrize("compressor", WITH_FEEDBACK, ids=repr)
every_compressor = pytest.mark.parametrize("compressor", WITH_FEEDBACK + WITHOUT, ids=repr)


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_checked() -> None:
    assert ParameterServer() == ParameterServer(root=0, answer="compressed", transport="horovod")
    assert eval(repr(ParameterServer("round_robin", "dense", "mpi"))) == ParameterServer("round_robin", "dense", "mpi")
    assert ParameterServer(np.int64(2)).get_config() == {
        "id": "parameter_server", "root": 2, "answer": "compressed", "transport": "horovod",
    }  # fmt: skip
    for wrong in ({"root": -1}, {"root": "first"}, {"root": True}, {"root": 1.0}, {"answer": "none"}, {"transport": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ParameterServer(**wrong)


def test_the_string_stands_for_the_defaults() -> None:
    assert make_plan("parameter_server", OneBit(), SHAPE, 4) == make_plan(ParameterServer(), OneBit(), SHAPE, 4)
    with pytest.raises(ValueError, match="ParameterServer"):
        make_plan("server", OneBit(), SHAPE, 4)


def test_a_root_that_is_no_rank_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="from 0 to 2"):
        make_plan(ParameterServer(root=3), OneBit(), SHAPE, 3)


def checked(compression: Any, exchange: Any) -> None:
    check_settings(compression, exchange, 0, 0, True, 1.0, 1, None, False)


def test_auto_is_refused() -> None:
    for exchange in ("parameter_server", ParameterServer(1)):
        with pytest.raises(UnsupportedError, match="leave the exchange to it"):
            checked(Auto(), exchange)
        checked(OneBit(), exchange)


def test_uncompressed_gradients_take_the_same_way() -> None:
    none = type("NoneCompressor", (), {"__module__": "horovod.torch.compression"})
    for given, said in ((none, NoCompression()), (NoCompression(), NoCompression()), (FP16(), FP16())):
        ours = exchanged(resolved(given, "parameter_server"))
        assert ours is not None
        assert repr(ours) == repr(said)
        assert exchanged(resolved(given, "two_phase")) is None or isinstance(given, type)
    policy = Policy([("*", OneBit())])
    assert resolved(policy, ParameterServer()) is policy
    of_the_user = type("NoneCompressor", (), {"__module__": "train"})
    for unknown in (object(), of_the_user):
        with pytest.raises(TypeError, match="a compressor of hvd_compress"):
            resolved(unknown, ParameterServer())


def test_ranks_compare_all_settings() -> None:
    def said(**settings: Any) -> dict[str, Any]:
        return description(OneBit(), "op", [], exchange=ParameterServer(**settings))

    assert said() == said()
    for other in ({"root": 1}, {"answer": "dense"}, {"transport": "mpi"}):
        assert said() != said(**other)


# -- plans -----------------------------------------------------------------------------------------------------------


@every_compressor
@every_answer
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (64, 640)])
def test_the_root_owns_everything(compressor: Compressor, answer: str, root: int, shape: tuple[int, ...]) -> None:
    plan = make_plan(ParameterServer(root, answer), compressor, shape, 3)
    (chunk,) = plan.chunks
    assert chunk == (root, slice(0, plan.numel))
    assert plan.root == root
    assert np.flatnonzero(plan.slots).tolist() == np.flatnonzero(plan.answer_slots).tolist() == [root]
    if answer == "dense":
        assert plan.fixed_answers
        assert 4 * plan.numel <= plan.answer_slots[root] < 4 * plan.numel + 64
    else:
        assert plan.answer_slots == plan.slots


@every_answer
def test_collectives_are_two_and_a_broadcast_where_its_size_is_known(answer: str) -> None:
    tensors = [Tensor("w", SHAPE), Tensor("b", (5,))]
    for compressor, last in ((OneBit(), "broadcast"), (Threshold(0.5), None)):
        ledger = Ledger(Routing(compressor, ParameterServer(1, answer), 100), 3, 0, tensors, Bucket)
        (bucket,) = ledger.buckets
        known = "broadcast" if answer == "dense" else "allgather"
        assert bucket.collectives == ("alltoall", last or known)


def test_roots_go_round_from_bucket_to_bucket() -> None:
    tensors = [Tensor(f"w{i}", (50, 50)) for i in range(5)]
    ledger = Ledger(Routing(OneBit(), ParameterServer("round_robin"), 100, 0), 3, 0, tensors, Bucket)
    assert [bucket.root for bucket in ledger.buckets] == [0, 1, 2, 0, 1]
    alone = Ledger(Routing(OneBit(), ParameterServer(2), 100, 0), 3, 0, tensors, Bucket)
    assert [bucket.root for bucket in alone.buckets] == [2] * 5


# -- exchanges -------------------------------------------------------------------------------------------------------


@feedback
@every_answer
@every_root
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_lost(compressor: Compressor, answer: str, root: int | str, dtype: str) -> None:
    ranks = Loopback(3, compressor, ParameterServer(root, answer), op="sum")
    received, given = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(5):
        mine = arrays(3, step, dtype=dtype)
        results = ranks.allreduce(mine, "w")
        assert len({result.tobytes() for result in results}) == 1
        received += results[0]
        given += np.sum(mine, axis=0, dtype=np.float64)
    owed = sum(ranks.residual("w", rank).astype(np.float64) for rank in range(3))
    of_root = [ranks.owner_residual("w", rank) for rank in range(3)]
    assert [values.size > 0 for values in of_root] == [
        answer == "compressed" and rank == (0 if root == "round_robin" else root) for rank in range(3)
    ]
    owed += sum(values for values in of_root if values.size)
    np.testing.assert_allclose(received + owed.reshape(SHAPE), given, rtol=0, atol=5e-6)


@every_compressor
@every_root
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_dense_answer_is_the_sum_of_what_was_sent(compressor: Compressor, root: int | str, ranks: int) -> None:
    if isinstance(root, int) and root >= ranks:
        root = ranks - 1
    together = Loopback(ranks, compressor, ParameterServer(root, "dense"), op="sum")
    apart = [Loopback(1, compressor, ParameterServer(answer="dense")) for _ in range(ranks)]
    for step in range(3):
        mine = arrays(ranks, step)
        found = together.allreduce(mine, "w")[0]
        if compressor.feedback or isinstance(compressor, NoCompression | FP16):
            # what one rank alone gets back is what it has sent; randomness would be that of rank 0
            sent = [rank.allreduce([x], "w")[0] for rank, x in zip(apart, mine, strict=True)]
            expected = sent[0]
            for x in sent[1:]:
                expected = expected + x
            assert found.tobytes() == expected.tobytes()
        else:
            errors = found - np.sum(mine, axis=0)
            assert np.isfinite(found).all()
            assert abs(errors.mean()) < 6 * errors.std() / errors.size**0.5


@every_answer
def test_without_compression_float64_stays_what_it_is(answer: str) -> None:
    mine = [np.random.default_rng(rank).standard_normal(SHAPE) * 1e300 for rank in range(3)]
    found = Loopback(3, NoCompression(), ParameterServer(1, answer), op="sum").allreduce(mine)[0]
    assert found.dtype == np.float64
    assert found.tobytes() == (mine[0] + mine[1] + mine[2]).tobytes()


def test_small_tensors_go_uncompressed_to_the_root_as_well() -> None:
    tensors = [Tensor("w", (20, 20)), Tensor("b", (20,)), Tensor("d", (5,), "float64", 8)]
    for given in (NoCompression(), FP16()):
        ledger = Ledger(Routing(resolved(given, ParameterServer()), ParameterServer()), 2, 0, tensors, Bucket)
        assert set(ledger.accounts) == {"w", "b", "d"}
    # and those that a compressor leaves out do so beside others only
    ledger = Ledger(Routing(OneBit(), ParameterServer()), 2, 0, tensors, Bucket)
    assert not ledger.buckets
    with pytest.raises(UnsupportedError, match="from 0 to 1"):
        Ledger(Routing(OneBit(), ParameterServer(7)), 2, 0, tensors, Bucket)


@every_answer
def test_without_compression_results_are_sums(answer: str) -> None:
    mine = arrays(3, 0)
    found = Loopback(3, NoCompression(), ParameterServer(1, answer), op="sum").allreduce(mine)[0]
    assert found.tobytes() == (mine[0] + mine[1] + mine[2]).tobytes()
    halves = [x.astype(np.float16).astype(np.float32) for x in mine]
    found = Loopback(3, FP16(), ParameterServer(1, "dense"), op="sum").allreduce(mine)[0]
    assert found.tobytes() == (halves[0] + halves[1] + halves[2]).tobytes()


EXACT = [TopK(k=40), BF16(), NoCompression(), FP16()]
SPOILED = [(c, value) for c in WITH_FEEDBACK + WITHOUT for value in (np.nan, np.inf)]
# each is finite, and their sum is not
SPOILED += [(c, LARGEST_FLOAT32) for c in EXACT]


@pytest.mark.parametrize(("compressor", "value"), SPOILED, ids=repr)
@every_answer
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_finite_reaches_all_and_spoils_nothing(
    compressor: Compressor, value: float, answer: str, rank: int
) -> None:
    loopback = Loopback(2, compressor, ParameterServer(1, answer))
    for step in range(2):
        loopback.allreduce(arrays(2, step), "w")

    def owed() -> list[np.ndarray]:
        return [of("w", r) for r in range(2) for of in (loopback.residual, loopback.owner_residual)]

    before = owed()
    spoiled = arrays(2, 2)
    spoiled[rank][3, 5] = value
    if value == LARGEST_FLOAT32:
        spoiled[1 - rank][3, 5] = value
    results = loopback.allreduce(spoiled, "w")
    assert not any(np.isfinite(result).all() for result in results)
    after = owed()
    if value == LARGEST_FLOAT32:
        # what is owed of an element whose gradient is so large cannot be told from its rounding
        for now, was in zip(after, before, strict=True):
            at = 3 * arrays(2, 0)[0].shape[1] + 5
            if not now.size:
                continue
            assert now[at] in (0, was[at])
            now[at] = was[at]
    check_taken_back(after, before, largest=20.0)
    assert all(np.isfinite(result).all() for result in loopback.allreduce(arrays(2, 3), "w"))


@every_answer
def test_updates_of_adagrad_are_made_by_the_root(answer: str) -> None:
    ranks = Loopback(3, TopK(ratio=1.0), ParameterServer(2, answer), adagrad=AdaGrad(1e-6))
    squares = np.zeros(SHAPE)
    for step in range(4):
        average = np.mean(arrays(3, step), axis=0, dtype=np.float64)
        squares += average**2
        found = ranks.allreduce(arrays(3, step), "w")[0]
        np.testing.assert_allclose(found, average / (np.sqrt(squares) + 1e-6), rtol=1e-3, atol=1e-3)
    assert [ranks.accumulator("w", rank).size for rank in range(3)] == [0, 0, 37 * 101]


def test_tensors_of_several_compressors_share_a_root() -> None:
    kinds: dict[str, Compressor] = {"a": OneBit(), "b": Threshold(0.5), "c": QSGD(bits=4)}
    for answer in ("compressed", "dense"):
        plans = plan_together(ParameterServer(1, answer), {n: (SHAPE, c) for n, c in kinds.items()}, 3)
        assert {plan.root for plan in plans.values()} == {1}
        assert {plan.exchange.id for plan in plans.values()} == {"parameter_server"}


@every_answer
def test_bytes_are_those_of_gather_and_broadcast(answer: str) -> None:
    ranks = Loopback(4, OneBit(), ParameterServer(2, answer))
    ranks.allreduce(arrays(4, 0), "w")
    plan = make_plan(ParameterServer(2, answer), OneBit(), SHAPE, 4)
    assert ranks.bytes_sent == [plan.slots[2], plan.slots[2], 3 * plan.answer_slots[2], plan.slots[2]]


# -- a ledger of it ----------------------------------------------------------------------------------------------------


def ledgers(exchange: Any, compressor: Compressor) -> list[Ledger[Bucket]]:
    tensors = [Tensor("w", SHAPE), Tensor("v", (50, 50))]
    return [Ledger(Routing(compressor, checked_exchange(exchange), 100), 2, rank, tensors, Bucket) for rank in range(2)]


def step(of: list[Ledger[Bucket]], number: int) -> dict[str, np.ndarray]:
    buckets = [ledger.buckets[0] for ledger in of]
    for rank, bucket in enumerate(buckets):
        for name in bucket.tensors:
            rng = np.random.default_rng([rank, number, bucket.shape_of(name)[0]])
            bucket.give(name, rng.standard_normal(bucket.shape_of(name)).astype(np.float32).reshape(-1))
    message = last_message(buckets)
    assert [bucket.arrive(message.copy()) for bucket in buckets] == [True, True]
    results = [bucket.finish(keep=True, scale=0.5) for bucket in buckets]
    for ledger in of:
        ledger.count_step()
    assert all(results[0][n].tobytes() == results[1][n].tobytes() for n in results[0])
    return {name: value.copy() for name, value in results[0].items() if value is not None}


@feedback
@every_answer
def test_a_state_resumes_exactly(compressor: Compressor, answer: str) -> None:
    exchange = ParameterServer(1, answer)
    straight, resumed = ledgers(exchange, compressor), ledgers(exchange, compressor)
    for number in range(3):
        step(straight, number)
    for old, new in zip(straight, resumed, strict=True):
        new.load_state_dict(old.state_dict())
    for number in range(3, 6):
        expected, found = step(straight, number), step(resumed, number)
        assert {name: value.tobytes() for name, value in found.items()} == {
            name: value.tobytes() for name, value in expected.items()
        }


@pytest.mark.parametrize("answer", ["compressed", "dense"])
@pytest.mark.parametrize("back", [False, True])
def test_what_is_owed_moves_to_another_exchange(answer: str, back: bool) -> None:
    ways = ["two_phase", ParameterServer(1, answer)]
    old, new = (ledgers(way, TopK(0.05)) for way in (reversed(ways) if back else ways))
    given = {"w": np.zeros(37 * 101), "v": np.zeros(2500)}
    received = {"w": np.zeros(37 * 101), "v": np.zeros(2500)}
    for number in range(6):
        if number == 3:
            for a, b in zip(old, new, strict=True):
                b.load_state_dict(a.state_dict())
        for name, value in step(old if number < 3 else new, number).items():
            received[name] += 2 * value
            size = {"w": 37, "v": 50}[name]
            given[name] += sum(
                np.random.default_rng([r, number, size]).standard_normal(given[name].size).astype(np.float32)
                for r in range(2)
            )
    for name in given:
        owed = sum(ledger.accounts[name].whole_residual().astype(np.float64) for ledger in new)
        for ledger in new:
            lane = ledger.accounts[name]
            if lane.owner_residual is not None and lane.owned is not None:
                owed[lane.owned] += lane.owner_residual
        np.testing.assert_allclose(received[name] + owed, given[name], atol=2e-5)


def test_a_state_of_other_ranks_is_refused() -> None:
    (mine, other) = ledgers(ParameterServer(), OneBit())
    with pytest.raises(StateError, match="rank 1"):
        mine.load_state_dict(other.state_dict())


@every_answer
def test_a_damaged_answer_is_told(answer: str) -> None:
    (root, _) = ledgers(ParameterServer(0, answer), TopK(0.05))
    bucket = root.buckets[0]
    for name in bucket.tensors:
        bucket.give(name, np.ones(int(np.prod(bucket.shape_of(name))), np.float32))
    parcel = bucket.parcel()
    used = parcel.buffer if parcel.sizes is None else parcel.buffer[: parcel.sizes[0]]
    message = bucket.advance("alltoall", np.concatenate([used, used])).buffer.copy()
    for damaged in (message[:-8], np.concatenate([message, message[:8]])):
        with pytest.raises(WireError):
            bucket.arrive(damaged)
    message[60] ^= 1
    with pytest.raises(WireError, match="checksum"):
        bucket.arrive(message)
