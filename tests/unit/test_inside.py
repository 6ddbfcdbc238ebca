"""Gradients that are compressed inside of hosts: nothing is lost, replicas stay equal, and each level has its bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import hvd_compress
from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    AdaGrad,
    Adaptive,
    Blockwise,
    EFSignSGD,
    Exchange,
    Hierarchical,
    NoCompression,
    OneBit,
    Policy,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    TwoPhase,
)
from hvd_compress.compressors import Compressor
from hvd_compress.cost import Line, LinkSpeed, Network, Speed, stages_of, work_of
from hvd_compress.errors import UnsupportedError, WireError
from hvd_compress.exchange import Account, Bucket, Hosts, account_of, make_plan, plan_together
from hvd_compress.loopback import Loopback
from hvd_compress.thread_ranks import delivered
from tests.close import check_taken_back
from tests.gradients import SHAPE, arrays

PLACES = [(2, 1), (2, 2), (4, 2), (6, 3), (6, 2)]
INSIDE = {
    "8 bits": Blockwise(bits=8),
    "4 bits, rotated": Blockwise(bits=4, hadamard=True),
    "onebit": OneBit(),
    "topk": TopK(ratio=0.1),
    "adaptive-golomb": Adaptive(pi=16, coding="golomb"),
    "randomk": RandomK(ratio=0.1),
    "efsignsgd": EFSignSGD(),
    "threshold": Threshold(0.5),
    "bf16": BF16(),
}
WITHOUT_FEEDBACK = {
    "qsgd": QSGD(bits=8, seed=3),
    "qsgd-elias": QSGD(bits=4, coding="elias"),
    "fp16": FP16(),
    "terngrad": TernGrad(),
}
every_inside = pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
every_place = pytest.mark.parametrize(("ranks", "per_host"), PLACES)


def hierarchy(
    ranks: int, per_host: int, inside: Any, compressor: Compressor | None = None, **settings: Any
) -> Loopback:
    compressor = Blockwise(bits=4) if compressor is None else compressor
    return Loopback(ranks, compressor, Hierarchical(inside), ranks_per_host=per_host, **settings)


def owed(loopback: Loopback, name: str = "w") -> np.ndarray:
    """What all ranks together have not sent yet, in units of the sum."""
    total = np.zeros(accounts(loopback, name)[0].plan.numel)
    for account in accounts(loopback, name):
        total += account.whole_residual()
        if account.owned is not None and account.owner_residual is not None:
            total[account.owned] += account.owner_residual
    return total


def accounts(loopback: Loopback, name: str = "w") -> list[Account]:
    return loopback._accounts[name]


def kept(loopback: Loopback, name: str = "w") -> list[list[np.ndarray | None]]:
    arrays = [(a.residual, a.owner_residual, a.pending) for a in accounts(loopback, name)]
    return [[None if x is None else x.copy() for x in of_rank] for of_rank in arrays]


@every_inside
@every_place
def test_nothing_is_lost(inside: Compressor, ranks: int, per_host: int) -> None:
    loopback = hierarchy(ranks, per_host, inside, op="sum")
    given, arrived = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(4):
        grads = arrays(ranks, step)
        given += np.sum(grads, axis=0, dtype=np.float64)
        results = loopback.allreduce(grads, name="w")
        assert len({result.tobytes() for result in results}) == 1
        arrived += results[0]
        np.testing.assert_allclose(arrived.reshape(-1) + owed(loopback), given.reshape(-1), atol=2e-4)
    assert all(loopback.pending("w", rank).any() == (per_host > 1) for rank in range(ranks))


@pytest.mark.parametrize("inside", WITHOUT_FEEDBACK.values(), ids=WITHOUT_FEEDBACK)
def test_without_feedback_replicas_are_equal_and_nothing_is_pending(inside: Compressor) -> None:
    loopback = hierarchy(4, 2, inside)
    for step in range(3):
        grads = [{"w": w, "v": v} for w, v in zip(arrays(4, step), arrays(4, step, (1000,)), strict=True)]
        results = loopback.grouped_allreduce(grads)
        for name in ("w", "v"):
            assert len({result[name].tobytes() for result in results}) == 1
            assert all(account.pending is None for account in accounts(loopback, name))
    mean = np.mean([of_rank["w"] for of_rank in grads], axis=0)
    assert np.corrcoef(results[0]["w"].reshape(-1), mean.reshape(-1))[0, 1] > 0.5


def test_only_the_shards_of_others_are_rounded() -> None:
    """Ranks of one host, and sums that are sent exactly: all rounding is that of `inside`, which is done by hand."""
    inside = Blockwise(bits=4)
    loopback = hierarchy(2, 2, inside, TopK(ratio=1.0), op="sum")
    residual = {(sender, owner): np.zeros(64, np.float32) for sender, owner in ((0, 1), (1, 0))}
    for step in range(3):
        grads = arrays(2, step, (128,))
        expected = []
        for owner, sender in ((0, 1), (1, 0)):
            part = slice(64 * owner, 64 * owner + 64)
            payload = inside.encode(grads[sender][part], residual[sender, owner])
            expected.append(grads[owner][part] + inside.decode(payload))
        np.testing.assert_array_equal(loopback.allreduce(grads, name="w")[0], np.concatenate(expected))
        for sender, owner in residual:
            pending = loopback.pending("w", sender)
            np.testing.assert_array_equal(pending[64 * owner : 64 * owner + 64], residual[sender, owner])
            assert not pending[64 * sender : 64 * sender + 64].any()


@every_inside
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 3736])
def test_a_bad_number_changes_nothing(inside: Compressor, bad: float, where: int) -> None:
    loopback = hierarchy(4, 2, inside)
    for step in range(2):
        loopback.allreduce(arrays(4, step), name="w")
    before = kept(loopback)
    grads = arrays(4, 2)
    grads[1].reshape(-1)[where] = bad
    for result in loopback.allreduce(grads, name="w"):
        assert not np.isfinite(result).all()
    check_taken_back(kept(loopback), before, largest=20.0)
    results = loopback.allreduce(arrays(4, 3), name="w")
    assert np.isfinite(results[0]).all()
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("inside", [Blockwise(), Adaptive(pi=16, coding="golomb"), QSGD(4), FP16()], ids=repr)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (9,), (5, 0, 2), (3, 5, 7)])
def test_awkward_shapes(inside: Compressor, shape: tuple[int, ...]) -> None:
    loopback = hierarchy(4, 2, inside)
    for step in range(2):
        results = loopback.allreduce(arrays(4, step, shape), name="w")
        assert all(result.shape == shape for result in results)
        assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("compressor", [OneBit(), OneBit(error_feedback="float8"), QSGD(8, norm="max")], ids=repr)
def test_types_and_tensors_may_be_mixed(compressor: Compressor) -> None:
    loopback = hierarchy(4, 2, Blockwise(), compressor, op="sum")
    kinds = {"d": ("float64", (301,)), "f": ("float32", (7, 11)), "h": ("float16", (33,))}
    given = {name: np.zeros(shape) for name, (_, shape) in kinds.items()}
    arrived = {name: np.zeros(shape) for name, (_, shape) in kinds.items()}
    for step in range(3):
        of_ranks = [{n: arrays(4, step, shape, kind)[rank] for n, (kind, shape) in kinds.items()} for rank in range(4)]
        results = loopback.grouped_allreduce(of_ranks)
        for name in given:
            given[name] += np.sum([of_rank[name].astype(float) for of_rank in of_ranks], axis=0)
            arrived[name] += results[3][name]
    for name, (kind, shape) in kinds.items():
        assert results[0][name].dtype == ("float64" if kind == "float64" else "float32")
        assert accounts(loopback, name)[0].pending is not None
        if compressor.feedback:
            off = np.abs(arrived[name] + owed(loopback, name).reshape(shape) - given[name])
            # residuals of 8 bits are rounded at random
            assert off.mean() < (0.15 if compressor.has_narrow_residuals else 1e-5), name


def test_what_is_owed_inside_is_kept_where_nothing_is_owed_between_hosts() -> None:
    loopback = hierarchy(4, 2, TopK(0.1), TopK(ratio=1.0, error_feedback=False), op="sum")
    given = np.zeros(SHAPE)
    for step in range(3):
        grads = arrays(4, step)
        given += np.sum(grads, axis=0, dtype=np.float64)
        given -= loopback.allreduce(grads, name="w")[0]
        np.testing.assert_allclose(owed(loopback), given.reshape(-1), atol=1e-4)
    assert all(account.residual is None for account in accounts(loopback))


def test_what_is_sent_as_it_is_between_hosts_is_so_inside() -> None:
    grads = arrays(4, 0)
    ours, theirs = (Loopback(4, NoCompression(), e, ranks_per_host=2) for e in (Hierarchical("onebit"), Hierarchical()))
    assert ours.allreduce(grads)[0].tobytes() == theirs.allreduce(grads)[0].tobytes()


@pytest.mark.parametrize("inside", [Blockwise(), QSGD(8, norm="max")], ids=repr)
def test_adagrad_gets_the_sums(inside: Compressor) -> None:
    loopback = hierarchy(4, 2, inside, TopK(ratio=1.0), adagrad=AdaGrad())
    plain = Loopback(4, TopK(ratio=1.0), ranks_per_host=2, exchange="hierarchical", adagrad=AdaGrad())
    for step in range(3):
        results, expected = loopback.allreduce(arrays(4, step)), plain.allreduce(arrays(4, step))
        assert len({result.tobytes() for result in results}) == 1
        assert np.corrcoef(results[0].reshape(-1), expected[0].reshape(-1))[0, 1] > 0.99


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "most_inside"), [(None, 2.258), (Blockwise(bits=8), 0.766), (Blockwise(bits=4), 0.516)], ids=str
)
def test_bytes_of_both_levels_are_counted(inside: Compressor | None, most_inside: float) -> None:
    numel = 2**20
    loopback = hierarchy(4, 2, inside)
    loopback.allreduce(arrays(4, 0, (numel,)), name="w")
    for rank, bucket in enumerate(loopback._buckets["w",]):
        bucket.settle_counts()
        counters = accounts(loopback)[rank].counters
        assert counters.bytes_sent_inside / numel == pytest.approx(most_inside, abs=1e-3)
        assert counters.bytes_sent / numel == pytest.approx(0.258, abs=1e-3)
        assert counters.bytes_sent_inside + counters.bytes_sent == loopback.bytes_sent[rank]


def test_predictions_know_both_widths() -> None:
    link = LinkSpeed(*[Line(0, 8e-9)] * 4)
    network = Network(4, link, ranks_per_host=2, between=link, inside=link)
    slow, none = Speed(*[Line(0, 1e-9)] * 3), Speed()

    def seconds(inside: Compressor | None, of_inside: Speed) -> float:
        plan = make_plan(Hierarchical(inside), Blockwise(bits=4), (2**22,), 4)
        return sum(stage.seconds for stage in stages_of(work_of([plan], ranks_per_host=2), none, network, of_inside))

    saved = seconds(None, none) - seconds(Blockwise(), none)
    # 2 bytes for each element go inside of hosts where nothing is compressed, and 1 1/64 / 2 here
    assert saved == pytest.approx((2 - 65 / 128) * 2**22 * 8 / 1e9, rel=0.01)
    # half of the elements are encoded, and half of them added
    assert seconds(Blockwise(), slow) - seconds(Blockwise(), none) == pytest.approx(2**22 * 1e-9, rel=0.01)


# -- buckets ---------------------------------------------------------------------------------------------------------

HOSTS = Hosts.of_names("aabb")
NUMEL = {"w": 2000, "v": 500}


def buckets(inside: Compressor) -> list[Bucket]:
    shapes = {name: ((numel,), OneBit()) for name, numel in NUMEL.items()}
    plans = plan_together(Hierarchical(inside), shapes, 4)
    return [
        Bucket({name: account_of(name, plan, OneBit(), rank, HOSTS) for name, plan in plans.items()})
        for rank in range(4)
    ]


def gradients(step: int, without: str = "") -> list[dict[str, Any]]:
    return [
        {
            name: None if name == without else arrays(4, 10 * step + numel, (numel,))[rank]
            for name, numel in NUMEL.items()
        }
        for rank in range(4)
    ]  # fmt: skip


def give(of_all: list[Bucket], grads: list[dict[str, Any]]) -> None:
    for bucket, of_rank in zip(of_all, grads, strict=True):
        for name, gradient in of_rank.items():
            bucket.give(name, gradient)


def carried(collective: str, of_all: list[Bucket]) -> list[np.ndarray]:
    parcels = [bucket.parcel() for bucket in of_all]
    return delivered(collective, [p.buffer for p in parcels], [p.sizes for p in parcels], 0)


def train(of_all: list[Bucket], grads: list[dict[str, Any]], keep: bool = True) -> list[dict[str, Any]]:
    give(of_all, grads)
    for collective in of_all[0].collectives[:-1]:
        for bucket, received in zip(of_all, carried(collective, of_all), strict=True):
            bucket.proceed(collective, received)
    for bucket, received in zip(of_all, carried(of_all[0].collectives[-1], of_all), strict=True):
        assert bucket.arrive(received)
    return [bucket.finish(keep, 1.0) for bucket in of_all]


def state(of_all: list[Bucket]) -> list[list[np.ndarray | None]]:
    arrays = [(a.residual, a.owner_residual, a.pending) for bucket in of_all for a in bucket.accounts.values()]
    return [[None if x is None else x.copy() for x in of_tensor] for of_tensor in arrays]


@pytest.mark.parametrize("inside", [Blockwise(), TopK(0.1), TopK(0.1, coding="golomb"), QSGD(8)], ids=repr)
def test_a_step_taken_back_or_given_up_changes_nothing(inside: Compressor) -> None:
    of_all = buckets(inside)
    for step in range(2):
        train(of_all, gradients(step))
    before = state(of_all)
    train(of_all, gradients(2), keep=False)
    check_taken_back(state(of_all), before, largest=20.0)
    for stages in range(3):
        before = state(of_all)
        give(of_all, gradients(3))
        for collective in of_all[0].collectives[:stages]:
            for bucket, received in zip(of_all, carried(collective, of_all), strict=True):
                bucket.proceed(collective, received)
        for bucket in of_all:
            bucket.abandon()
        check_taken_back(state(of_all), before, largest=20.0)


def test_a_tensor_that_is_left_out_keeps_what_it_owes() -> None:
    of_all = buckets(Blockwise())
    train(of_all, gradients(0))
    before = [bucket.accounts["w"].whole_residual().copy() for bucket in of_all]
    results = train(of_all, gradients(1, without="w"))
    assert all(result["w"] is None for result in results)
    assert len({result["v"].tobytes() for result in results}) == 1
    for bucket, owed in zip(of_all, before, strict=True):
        np.testing.assert_array_equal(bucket.accounts["w"].whole_residual(), owed)


def test_a_gradient_that_was_overwritten_stays_owed_to_others_of_the_host() -> None:
    of_all, grads = buckets(Blockwise()), gradients(0)
    given = grads[0]["w"].copy()
    give(of_all, grads)
    of_all[0].lose_gradient("w")
    for gradient in grads[0].values():
        gradient[:] = 1e9
    for bucket in of_all:
        bucket.abandon()
    account = of_all[0].accounts["w"]
    expected = given.copy()
    # the own shard was not touched
    expected[account.shard] = 0
    np.testing.assert_allclose(account.pending, expected, atol=1e-6)


def test_a_damaged_payload_is_told_and_changes_nothing() -> None:
    for damage, said in (
        (lambda bytes_: bytes_[:-8], "rank 0, from the other ranks of its host: received"),
        (lambda bytes_: np.concatenate([bytes_[:8] ^ 255, bytes_[8:]]), "exchange of 'w', received by rank 0: "),
    ):
        of_all = buckets(Blockwise())
        train(of_all, gradients(0))
        before = state(of_all)
        give(of_all, gradients(1))
        received = carried("scatter_inside", of_all)
        with pytest.raises(WireError, match=said):
            of_all[0].proceed("scatter_inside", damage(received[0]))
        for bucket in of_all:
            bucket.abandon()
        check_taken_back(state(of_all), before, largest=20.0)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [None, *INSIDE.values(), *WITHOUT_FEEDBACK.values()], ids=repr)
def test_settings_go_around(inside: Compressor | None) -> None:
    exchange = Hierarchical(inside=inside)
    config = json.loads(json.dumps(exchange.get_config()))
    assert Exchange.from_config(config) == Hierarchical.from_config(config) == exchange
    assert eval(repr(exchange), vars(hvd_compress)) == exchange
    assert hash(exchange) == hash(Hierarchical(inside))
    assert (exchange == Hierarchical()) == (inside is None)


def test_a_name_stands_for_a_compressor() -> None:
    assert Hierarchical("blockwise:4") == Hierarchical(Blockwise(bits=4))
    with pytest.raises(ValueError, match="names no compression"):
        Hierarchical("dense")


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (Blockwise, TypeError, r"no compressor.*such as Blockwise\(bits=8\)"),
        (8, TypeError, "no compressor"),
        (Policy([], default=OneBit()), TypeError, "no compressor"),
        (TwoPhase(), TypeError, "no compressor"),
        (NoCompression(), UnsupportedError, "or None for no compression"),
        (PowerSGD(), UnsupportedError, "factors are summed in two exchanges"),
        (SignSGD(), UnsupportedError, "signs without magnitudes"),
        (Blockwise(error_feedback="float8"), UnsupportedError, "error_feedback must be True or False"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_inside_is_refused(wrong: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=r"Hierarchical\(inside=.*" + said):
        Hierarchical(inside=wrong)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"id": "nowhere"}, "'allgather', .*'two_phase'"),
        ({}, "with one of these as id"),
        (None, "must be a dict"),
        ({"id": "hierarchical", "outside": None}, "outside"),
        ({"id": "hierarchical", "inside": {"id": "nothing"}}, "unknown compressor id 'nothing'"),
        ({"id": "parameter_server", "root": -1}, "root"),
    ],
    ids=str,
)  # fmt: skip
def test_configurations_of_no_exchange_are_told(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Exchange.from_config(config)
