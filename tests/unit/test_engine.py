"""The ledger of one rank, with stages joined by hand: what is owed when the compressor changes, and what is refused."""

from __future__ import annotations

import itertools
import math
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
    Threshold,
    TopK,
)  # fmt: skip
from hvd_compress.compressors import Compressor
from hvd_compress.engine import (
    Ledger,
    Routing,
    Tensor,
    average_share,
    backward_buckets,
    check_settings,
    compressor_of_call,
    empty_state,
    exchange_of,
    exchanged,
    horovod_compressor,
    names_of_call,
    op_of_call,
    refuse_other_ops,
    refuse_residuals,
    resolved,
)
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import Bucket, checked_exchange, make_plan
from hvd_compress.fingerprint import agree
from tests.close import check_taken_back
from tests.stages import last_message

TENSORS = [
    Tensor("w", (40, 50)),
    Tensor("b", (50,)),
    Tensor("v", (30, 70)),
    Tensor("c", (7, 3)),
    Tensor("u", (3000,)),
    Tensor("s", ()),
]
SHAPES = {tensor.name: tensor.shape for tensor in TENSORS}
COMPRESSED = ("w", "v", "u")
RANKS = 2


def ledgers(
    compressor: Compressor | None,
    exchange: str = "two_phase",
    bucket_bytes: int = 0,
    min_numel: int = 100,
    tensors: list[Tensor] = TENSORS,
    groups: list[list[str]] | None = None,
    ranks: int = RANKS,
) -> list[Ledger[Bucket]]:
    routing = Routing(compressor, checked_exchange(exchange), min_numel, bucket_bytes)
    return [Ledger(routing, ranks, rank, tensors, Bucket, groups) for rank in range(ranks)]


def contents(ledger: Ledger[Bucket]) -> list[list[str]]:
    return [bucket.tensors for bucket in ledger.buckets]


def gradient(name: str, rank: int, step: int) -> np.ndarray:
    rng = np.random.default_rng([ord(name), rank, step])
    return rng.standard_normal(math.prod(SHAPES[name])).astype(np.float32)


def given(name: str, step: int, ranks: int = RANKS) -> np.ndarray:
    return np.sum([gradient(name, rank, step) for rank in range(ranks)], axis=0, dtype=np.float64)


def step(of_all: list[Ledger[Bucket]], number: int, keep: bool = True) -> dict[str, np.ndarray]:
    """One exchange of all that is exchanged: the sums, which are the same on all ranks."""
    sums: list[dict[str, np.ndarray]] = [{} for _ in of_all]
    for buckets in zip(*(ledger.buckets for ledger in of_all), strict=True):
        for rank, bucket in enumerate(buckets):
            done = [bucket.give(name, gradient(name, rank, number)) for name in bucket.tensors]
            assert done == [False] * (len(done) - 1) + [True]
        message = last_message(buckets)
        for bucket, results in zip(buckets, sums, strict=True):
            assert bucket.arrive(message)
            finished = bucket.finish(keep, 1.0)
            results |= {name: finished[name].copy() for name in bucket.accounts}
            results |= {name: bucket.pack.part(name).copy() for name in (bucket.pack.members if bucket.pack else ())}
    for ledger in of_all:
        ledger.count_step()
    for name, found in sums[0].items():
        assert all(found.tobytes() == of_rank[name].tobytes() for of_rank in sums), name
    return sums[0]


def owed(of_all: list[Ledger[Bucket]], name: str = "w") -> np.ndarray:
    total = np.zeros(math.prod(SHAPES[name]))
    for ledger in of_all:
        lane = ledger.accounts[name]
        if lane.residual is not None:
            total += lane.residual
        if lane.owner_residual is not None:
            start = lane.plan.bounds[lane.position]
            total[start : start + lane.owner_residual.size] += lane.owner_residual
    return total


# -- routes ------------------------------------------------------------------------------------------------------------


def test_routes_follow_the_size_of_a_tensor() -> None:
    ledger = ledgers(OneBit())[0]
    assert ledger.is_used
    assert [name for name in SHAPES if ledger.exchanges(name)] == list(COMPRESSED)
    assert sorted(ledger.dense) == ["b", "c", "s"]
    assert contents(ledger) == [["u"], ["v"], ["w"]]
    assert not ledgers(None)[0].is_used


def test_small_tensors_travel_beside_compressed_ones() -> None:
    ledger = ledgers(OneBit(), bucket_bytes=10**6)[0]
    assert contents(ledger) == [["u", "v", "w", "s", "c", "b"]]
    assert list(ledger.accounts) == ["u", "v", "w"]
    assert list(ledger.packs) == ["s", "c", "b"]
    assert not ledger.dense
    assert all(ledger.bucket_of(name) is ledger.buckets[0] for name in SHAPES)
    tensors = ledger.stats()["tensors"]
    assert tensors["w"]["exchange"] == "two_phase"
    assert tensors["b"]["exchange"] == "two_phase, uncompressed"


def test_small_tensors_that_fill_a_bucket_wait_for_one_with_a_compressed_tensor() -> None:
    names = [*"abcdef", "w", *"ghij"]
    tensors = [Tensor(name, (40, 50) if name == "w" else (25,)) for name in names]
    # as float32, two small tensors fill a bucket
    assert contents(ledgers(OneBit(), bucket_bytes=200, tensors=tensors)[0]) == [["w", *"jihgfedcba"]]
    tensors.append(Tensor("v", (40, 50)))
    assert contents(ledgers(OneBit(), bucket_bytes=200, tensors=tensors)[0]) == [["v"], ["w", *"jihgfedcba"]]


def test_where_nothing_is_compressed_all_go_dense() -> None:
    small = [Tensor("a", (25,)), Tensor("b", (25,))]
    for ledger in (ledgers(OneBit(), bucket_bytes=10**6, tensors=small)[0], ledgers(None, bucket_bytes=10**6)[0]):
        assert not ledger.is_used
        assert not ledger.accounts
        assert not ledger.packs
        assert ledger.dense


@pytest.mark.parametrize(
    "dense",
    [
        Tensor("x", (99,), "float64", 8),
        Tensor("x", (99,), "bfloat16", 2),
        Tensor("x", (0, 5)),
        Tensor("x", (9,), "int64", 8),
    ],
    ids=["float64", "bfloat16", "empty", "int64"],
)
def test_small_tensors_of_other_types_go_dense(dense: Tensor) -> None:
    ledger = ledgers(OneBit(), bucket_bytes=10**6, tensors=[*TENSORS, dense])[0]
    assert not ledger.exchanges("x")
    assert list(ledger.dense) == ["x"]


def test_what_compression_does_not_make_smaller_goes_dense() -> None:
    # Horovod sends bfloat16 as float32
    halves = [Tensor("w", (40, 50), "float16", 2), Tensor("v", (30, 70)), Tensor("u", (40, 60), "bfloat16", 2)]
    ledger = ledgers(BF16(), exchange="auto", bucket_bytes=10**6, tensors=halves, ranks=4)[0]
    assert sorted(ledger.accounts) == ["u", "v"]
    assert list(ledger.dense) == ["w"]


GREEDY = [
    TopK(1.0), TopK(0.9), TopK(k=10**6), TopK(k=100_000), Percentile(3.2), OneBit(group=1), OneBit(group=2),
    Adaptive(pi=2, group=1), Adaptive(pi=2, group=2), Adaptive(pi=2, group=10**6),
    Threshold(1e-9), Threshold(1e-9, coding="golomb"), QSGD(8, 8), QSGD(1, 8), QSGD(1, 8, coding="elias"),
    QSGD(8, 8, coding="elias"), TopK(1.0, coding="golomb"), Percentile(3.2, coding="golomb"), BF16(),
]  # fmt: skip


@pytest.mark.parametrize("exchange", ["auto", "two_phase", "allgather", "hierarchical"])
@pytest.mark.parametrize("compressor", GREEDY, ids=repr)
def test_nothing_sends_more_than_dense(compressor: Compressor, exchange: str) -> None:
    tensors = [Tensor("wide", (300, 500)), Tensor("long", (70_001,)), Tensor("tall", (20_000, 3)), Tensor("tiny", (9,))]
    for ranks in (2, 3, 8, 100):
        for tensor in tensors:
            routing = Routing(compressor, checked_exchange(exchange), min_numel=1)
            if routing.compresses(tensor, ranks):
                plan = make_plan(exchange, compressor, tensor.shape, ranks)
                dense = 2 * (ranks - 1) / ranks * 4 * plan.numel
                sent = (ranks - 1) * max(plan.slots) * (2 if plan.exchange.has_owners else 1)
                # headers of 40 bytes and up to 23 of padding aside; "auto" gives as many bytes for one collective less
                headers = 64 * 2 * ranks
                assert sent < dense + headers + (2**15 if exchange == "auto" else 0)
    # a root is sent what is there, in the place of more
    for tensor in tensors:
        payloads = Routing(compressor, ParameterServer(), min_numel=1).payloads_of(tensor)
        numel = payloads.body_bytes(math.prod(tensor.shape), payloads.group_numel(tensor.shape))
        assert numel <= 4 * math.prod(tensor.shape)


def test_buckets_are_filled_in_the_order_of_the_backward_pass() -> None:
    assert contents(ledgers(OneBit(), bucket_bytes=4 * 5171)[0]) == [["u", "v", "s", "c"], ["w", "b"]]
    assert contents(ledgers(OneBit(), bucket_bytes=4 * 5172)[0]) == [["u", "v", "s", "c", "b"], ["w"]]
    assert contents(ledgers(OneBit(), bucket_bytes=4 * 5121)[0]) == [["u", "s", "c"], ["v", "w", "b"]]
    assert contents(ledgers(OneBit(), bucket_bytes=1)[0]) == [["u", "s"], ["v", "c"], ["w", "b"]]


def test_groups_go_together_in_their_own_order() -> None:
    ledger = ledgers(OneBit(), bucket_bytes=1, groups=[["w", "b", "u"]])[0]
    assert contents(ledger) == [["w", "u", "b"], ["v", "s", "c"]]
    ledger = ledgers(OneBit(), bucket_bytes=0, groups=[["w", "b", "u"]])[0]
    assert contents(ledger) == [["w", "u"], ["v"]]


def test_names_of_backward_buckets() -> None:
    shapes = {"a": (10,), "b": (0, 3), "c": (30,), "d": (), "e": (1000,), "f": (9,)}
    assert backward_buckets(shapes, 0) == [["f"], ["e"], ["d"], ["c"], ["b"], ["a"]]
    assert backward_buckets(shapes, 4 * 41) == [["f"], ["e"], ["d", "c", "b", "a"]]
    assert backward_buckets(shapes, 4 * 40) == [["f"], ["e"], ["d", "c", "b"], ["a"]]
    assert backward_buckets(shapes, 10**9) == [list("fedcba")]
    assert backward_buckets(shapes, 10**9, [["a", "z", "f"], ["z"]]) == [["a", "f"], list("edcb")]
    assert backward_buckets({}, 100) == []


# -- small tensors that travel together --------------------------------------------------------------------------------


def packed(of_all: list[Ledger[Bucket]], bad: dict[str, float], absent: tuple[str, ...] = ()) -> list[bool]:
    """Half a step: what all ranks are told, after which small tensors can be looked at."""
    (buckets,) = zip(*(ledger.buckets for ledger in of_all), strict=True)
    for rank, bucket in enumerate(buckets):
        for name in bucket.tensors:
            x = gradient(name, rank, 0)
            if rank == 1 and name in bad:
                x[-1] = bad[name]
            bucket.give(name, None if name in absent else x)
    message = last_message(buckets)
    return [bucket.arrive(message) for bucket in buckets]


@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_in_a_pack_stays_where_it_is(exchange: str, value: float) -> None:
    of_all = ledgers(OneBit(), exchange, 10**6)
    assert packed(of_all, {"c": value}) == [False, False]
    for ledger in of_all:
        (bucket,) = ledger.buckets
        results = bucket.finish(False, 0.5)
        assert all(np.isfinite(results[name]).all() for name in COMPRESSED)
        for name in ("b", "c", "s"):
            found, expected = bucket.pack.part(name), 0.5 * given(name, 0)
            if name == "c":
                np.testing.assert_equal(found[-1], np.float32(value))
                found, expected = found[:-1], expected[:-1]
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_sums_of_a_pack_that_overflow_are_not_finite() -> None:
    of_all = ledgers(OneBit(), bucket_bytes=10**6)
    (buckets,) = zip(*(ledger.buckets for ledger in of_all), strict=True)
    for bucket in buckets:
        for name in bucket.tensors:
            bucket.give(name, np.full(math.prod(SHAPES[name]), 3e38 if name == "c" else 1, np.float32))
    with np.errstate(over="ignore"):
        message = last_message(buckets)
        assert [bucket.arrive(message) for bucket in buckets] == [False, False]
    assert np.isinf(buckets[0].pack.part("c")).all()
    assert (buckets[0].pack.part("b") == 2).all()


@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_sums_of_a_pack_are_exact_to_rounding_and_scaled(exchange: str) -> None:
    of_all = ledgers(OneBit(), exchange, 10**6, ranks=5)
    for number in range(2):
        found = step(of_all, number)
        for name in ("b", "c", "s"):
            expected = gradient(name, 0, number)
            for rank in range(1, 5):
                expected = expected + gradient(name, rank, number)
            assert found[name].tobytes() == expected.tobytes()


def test_an_absent_member_of_a_pack_counts_as_zeros() -> None:
    of_all = ledgers(OneBit(), bucket_bytes=10**6)
    step(of_all, 3)
    assert packed(of_all, {}, absent=("b", "u")) == [True, True]
    for ledger in of_all:
        (bucket,) = ledger.buckets
        assert bucket.finish(True, 1.0)["u"] is None
        assert not bucket.pack.part("b").any()
        np.testing.assert_allclose(bucket.pack.part("c"), given("c", 0), rtol=1e-6, atol=1e-7)


def test_all_members_are_awaited_in_every_step() -> None:
    ledger = ledgers(OneBit(), bucket_bytes=10**6)[0]
    (bucket,) = ledger.buckets
    for _ in range(2):
        assert not any(bucket.give(name, gradient(name, 0, 0)) for name in ("w", "b", "u", "b", "v", "c"))
        ledger.abandon()
        assert not bucket.busy
    order = ("b", "w", "s", "u", "c", "v")
    assert [bucket.give(name, gradient(name, 0, 0)) for name in order] == [False] * 5 + [True]


def test_a_pack_sends_four_bytes_per_element_and_counts_them_for_its_members() -> None:
    small = {f"b{i}": (100 * (i + 1),) for i in range(4)}
    tensors = [Tensor("w", (40, 50)), *(Tensor(name, shape) for name, shape in small.items())]
    numels = {tensor.name: math.prod(tensor.shape) for tensor in tensors}
    of_all = ledgers(OneBit(), "two_phase", 10**6, 1000, tensors)
    (buckets,) = zip(*(ledger.buckets for ledger in of_all), strict=True)
    for _ in range(3):
        for bucket in buckets:
            for name in bucket.tensors:
                bucket.give(name, np.ones(numels[name], np.float32))
        message = last_message(buckets)
        for bucket in buckets:
            bucket.arrive(message)
            bucket.finish(True, 1.0)
    stats = of_all[0].stats()["tensors"]
    # 2 ranks: half of the elements to the other owner, and the sums of the own half; each payload has a header
    total = 3 * 2 * (40 + 4 * 1000 // 2)
    for name, shape in small.items():
        assert stats[name]["bytes_sent"] == stats[name]["bytes_received"] == round(total * shape[0] / 1000)
        assert stats[name]["dense_bytes"] == 3 * 4 * shape[0]
        assert stats[name]["steps"] == 3
    assert stats["w"]["bytes_sent"] < stats["w"]["dense_bytes"] / 8


# -- what is owed when the compressor changes --------------------------------------------------------------------------


@pytest.mark.parametrize("after", [Adaptive(pi=4), TopK(0.1), OneBit(group="tensor")])
@pytest.mark.parametrize("bucket_bytes", [0, 10**6])
def test_another_compressor_inherits_what_is_owed(after: Compressor, bucket_bytes: int) -> None:
    before, now = (ledgers(c, bucket_bytes=bucket_bytes) for c in (OneBit(), after))
    check_inherits(before, now)


WAYS = {
    "alone": ("two_phase", 0),
    "few": ("two_phase", 4 * 5100),
    "all": ("two_phase", 10**6),
    "alone-allgather": ("allgather", 0),
    "all-allgather": ("allgather", 10**6),
}
ways = pytest.mark.parametrize(("before", "after"), list(itertools.permutations(WAYS, 2)), ids="-to-".join)


@ways
def test_other_buckets_inherit_what_is_owed(before: str, after: str) -> None:
    check_inherits(ledgers(TopK(0.1), *WAYS[before], ranks=3), ledgers(TopK(0.1), *WAYS[after], ranks=3))


def check_inherits(before: list[Ledger[Bucket]], now: list[Ledger[Bucket]]) -> None:
    for number in range(3):
        step(before, number)
    costs = before[0].stats()["tensors"]
    debt = {name: owed(before, name) for name in COMPRESSED}
    for old, new in zip(before, now, strict=True):
        new.inherit(old)
    for name in COMPRESSED:
        np.testing.assert_allclose(owed(now, name), debt[name], atol=1e-4)
    assert now[0].stats()["tensors"]["w"]["bytes_sent"] == costs["w"]["bytes_sent"]
    # nothing is lost in the next step either: gradients + debt = results + debt
    results = step(now, 3)
    for name in COMPRESSED:
        expected = given(name, 3, len(now)) + debt[name]
        np.testing.assert_allclose(results[name] + owed(now, name), expected, atol=1e-3)
    assert now[0].stats()["total"]["steps"] == 4
    tensors = now[0].stats()["tensors"]
    assert tensors["w"]["steps"] == 4
    for name in ("b", "c", "s"):
        assert tensors[name]["steps"] == (3 if name in before[0].packs else 0) + (1 if name in now[0].packs else 0)
        assert tensors[name]["bytes_sent"] >= costs[name]["bytes_sent"]


@ways
def test_a_state_is_taken_over_by_other_buckets(before: str, after: str) -> None:
    then, now = (ledgers(TopK(0.1), *WAYS[way], ranks=3) for way in (before, after))
    for number in range(3):
        step(then, number)
    for old, new in zip(then, now, strict=True):
        new.load_state_dict(old.state_dict())
    for name in COMPRESSED:
        np.testing.assert_allclose(owed(now, name), owed(then, name), atol=1e-4)
        assert np.abs(owed(now, name)).max() > 0.1
    debt = {name: owed(now, name) for name in COMPRESSED}
    results = step(now, 3)
    for name in COMPRESSED:
        np.testing.assert_allclose(results[name] + owed(now, name), given(name, 3, 3) + debt[name], atol=1e-3)


@pytest.mark.parametrize("after", [None, TopK(0.1, error_feedback=False)])
def test_what_is_owed_is_not_dropped(after: Compressor | None) -> None:
    before, now = ledgers(OneBit()), ledgers(after)
    step(before, 0)
    with pytest.raises(UnsupportedError, match=r"of 'u', of which .* is still owed"):
        now[0].inherit(before[0])


def test_from_dense_to_compressed_keeps_the_counters() -> None:
    for bucket_bytes in (0, 10**6):
        before, now = ledgers(None)[0], ledgers(OneBit(), bucket_bytes=bucket_bytes)[0]
        before.count_dense("w", 8000, 8000)
        before.count_dense("b", 200, 200)
        before.count_step()
        now.inherit(before)
        assert now.stats()["tensors"]["w"]["bytes_sent"] == 8000
        assert now.stats()["tensors"]["b"]["bytes_sent"] == 200
        assert now.stats()["tensors"]["b"]["steps"] == 1
        assert now.stats()["total"]["steps"] == 1
        back = ledgers(NoCompression())[0]
        back.inherit(now)
        assert back.stats()["tensors"]["b"]["bytes_sent"] == 200


@pytest.mark.parametrize("bucket_bytes", [0, 10**6])
def test_a_step_that_is_taken_back_leaves_no_trace_in_the_residuals(bucket_bytes: int) -> None:
    of_all = ledgers(OneBit(), bucket_bytes=bucket_bytes)
    step(of_all, 0)
    debt = owed(of_all)
    step(of_all, 1, keep=False)
    check_taken_back(owed(of_all), debt, largest=20.0)


def test_a_changed_loss_scale_converts_the_residuals() -> None:
    of_all = ledgers(OneBit(), bucket_bytes=10**6)
    step(of_all, 0)
    debt = owed(of_all)
    for ledger in of_all:
        ledger.set_loss_scale(4.0)
        ledger.set_loss_scale(4.0)
    np.testing.assert_array_equal(owed(of_all), 4 * debt)


def test_state_of_one_rank_is_for_that_rank() -> None:
    of_all = ledgers(OneBit())
    step(of_all, 0)
    state = of_all[0].state_dict()
    again = ledgers(OneBit())
    again[0].load_state_dict(state)
    assert again[0].accounts["w"].residual.tobytes() == of_all[0].accounts["w"].residual.tobytes()
    with pytest.raises(StateError, match="this is rank 1"):
        again[1].load_state_dict(state)
    with pytest.raises(StateError, match="keeps none"):
        ledgers(TopK(0.1, error_feedback=False))[0].load_state_dict(state)
    with pytest.raises(StateError, match="nothing is exchanged here"):
        refuse_residuals(state)
    refuse_residuals(empty_state())


# -- choices -----------------------------------------------------------------------------------------------------------


class Foreign:
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor


def test_which_compressor_horovod_gets() -> None:
    assert horovod_compressor(NoCompression(), "none", "dense") == "none"
    assert horovod_compressor(OneBit(), "none", "dense") == "dense"
    assert horovod_compressor(Foreign, "none", "dense") is Foreign
    fp16 = FP16()
    assert horovod_compressor(fp16, "none", "dense") is fp16
    assert exchanged(fp16) is None
    assert exchanged(OneBit()) == OneBit()
    with pytest.raises(TypeError, match="is a class"):
        horovod_compressor(OneBit, "none", "dense")
    with pytest.raises(TypeError, match="give a compressor"):
        horovod_compressor(3, "none", "dense")
    assert horovod_compressor("onebit", "none", "dense") == "dense"
    assert horovod_compressor("none", "none", "dense") == "none"
    assert horovod_compressor("fp16", "none", "dense") == FP16()
    with pytest.raises(ValueError, match="did you mean 'onebit'"):
        horovod_compressor("onebut", "none", "dense")


def test_settings_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {
        "compression": OneBit(), "exchange": "auto", "min_numel": 0, "bucket_bytes": 0,
        "averages": True, "gradient_predivide_factor": 1.0, "backward_passes_per_step": 1, "groups": None,
        "rocm": False,
    }  # fmt: skip
    check_settings(**good)
    for wrong in (
        {"exchange": "ring"},
        {"min_numel": -1},
        {"min_numel": 1.5},
        {"bucket_bytes": -1},
        {"bucket_bytes": 1e6},
        {"gradient_predivide_factor": 2.0, "averages": False},
        {"gradient_predivide_factor": 2.0, "rocm": True},
        {"gradient_predivide_factor": 0.0},
        {"gradient_predivide_factor": -1.0},
        {"gradient_predivide_factor": float("nan")},
        {"gradient_predivide_factor": float("inf")},
        {"gradient_predivide_factor": "2"},
        {"backward_passes_per_step": 0},
        {"backward_passes_per_step": 1.5},
        {"backward_passes_per_step": True},
        {"backward_passes_per_step": "2"},
        {"groups": -1},
        {"groups": 1.5},
        {"groups": "x"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            check_settings(**{**good, **wrong})
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    check_settings(**{**good, "compression": NoCompression()})
    with pytest.raises(UnsupportedError, match="elastic"):
        check_settings(**good)
    for refused in (
        lambda: compressor_of_call(OneBit()),
        lambda: exchange_of(AdaGrad(), "two_phase", NoCompression()),
        lambda: check_settings(**{**good, "compression": Auto()}),
        lambda: check_settings(**{**good, "compression": resolved(NoCompression(), "parameter_server")}),
    ):
        with pytest.raises(UnsupportedError, match="elastic"):
            refused()
    server = {"compression": resolved(NoCompression(), "parameter_server"), "exchange": "parameter_server"}
    with pytest.raises(UnsupportedError, match=r"parameter_server.*the exchange that is the default"):
        check_settings(**{**good, **server})
    assert compressor_of_call(NoCompression()) is None
    # nothing is compared either: the gather would wait for ranks that train
    agree({"seed": 1}, lambda *_: pytest.fail("a collective"), "test")


def test_ops() -> None:
    assert op_of_call(None, None, "avg", "sum") == op_of_call(True, None, "avg", "sum") == "avg"
    assert op_of_call(False, None, "avg", "sum") == op_of_call(None, "sum", "avg", "sum") == "sum"
    with pytest.raises(ValueError, match="not both"):
        op_of_call(True, "sum", "avg", "sum")
    assert average_share(OneBit(), "avg", "avg", "sum", 4) == 0.25
    assert average_share(OneBit(), "sum", "avg", "sum", 4) == 1.0
    with pytest.raises(UnsupportedError, match="op=max"):
        average_share(OneBit(), "max", "avg", "sum", 4)
    with pytest.raises(UnsupportedError, match="op=max"):
        refuse_other_ops("max", "avg", "sum")
    with pytest.raises(UnsupportedError, match="op=Product"):
        refuse_other_ops(5, 0, 1)


def test_names_of_a_call() -> None:
    assert names_of_call("g", 1) == ["g"]
    assert names_of_call("g", 2) == ["g.0", "g.1"]
    first, second = names_of_call(None, 1) + names_of_call(None, 1)
    assert first != second
