"""PowerSGD: what the paper says, what must hold of every exchange, and what other implementations get wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvd_compress import AdaGrad, Auto, OneBit, Policy, PowerSGD, from_config
from hvd_compress.compressors import named
from hvd_compress.engine import Ledger, Routing, Tensor, check_settings, exchange_of
from hvd_compress.errors import MismatchError, StateError, UnsupportedError, WireError
from hvd_compress.exchange import Bucket, bucket_of, checked_exchange, ring_bytes
from hvd_compress.feedback import read_state, redistribute, write_state
from hvd_compress.loopback import Loopback
from hvd_compress.policy import given_compression
from hvd_compress.thread_ranks import delivered

every_exchange = pytest.mark.parametrize("exchange", ["auto", "two_phase", "allgather"])
Arrays = dict[str, np.ndarray]

TENSORS = [
    Tensor("a", (40, 50)), Tensor("a.bias", (40,)), Tensor("conv", (16, 8, 3, 3)), Tensor("b", (33, 61)),
    Tensor("b.bias", (61,)), Tensor("long", (1500,)),
]  # fmt: skip
SHAPES = {tensor.name: tensor.shape for tensor in TENSORS}


def drawn(shape: tuple[int, ...], *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gradients(ranks: int, step: int) -> list[Arrays]:
    return [{name: drawn(s, i, rank, step) for i, (name, s) in enumerate(SHAPES.items())} for rank in range(ranks)]


# -- ranks of ledgers, as edges have them ----------------------------------------------------------------------------


def ledgers(ranks: int, compressor: Any, exchange: str = "auto", bucket_bytes: int = 2**20) -> list[Ledger[Bucket]]:
    routing = Routing(compressor, checked_exchange(exchange), min_numel=100, bucket_bytes=bucket_bytes)
    return [Ledger(routing, ranks, rank, TENSORS, bucket_of, pays_debts=True) for rank in range(ranks)]


def run(collective: str, buckets: Sequence[Bucket]) -> list[np.ndarray]:
    parcels = [bucket.parcel() for bucket in buckets]
    return delivered(collective, [parcel.buffer for parcel in parcels], [parcel.sizes for parcel in parcels], 0)


def give(buckets: Sequence[Bucket], grads: Sequence[Arrays], without: str = "") -> None:
    for bucket, of_rank in zip(buckets, grads, strict=True):
        for name in bucket.tensors:
            bucket.give(name, None if name == without else of_rank[name].reshape(-1))


def arrive(buckets: Sequence[Bucket]) -> bool:
    *earlier, last = buckets[0].collectives
    for collective in earlier:
        for bucket, received in zip(buckets, run(collective, buckets), strict=True):
            bucket.proceed(collective, received)
    verdicts = [b.arrive(r) for b, r in zip(buckets, run(last, buckets), strict=True)]
    assert len(set(verdicts)) == 1
    return verdicts[0]


def step(of_all: Sequence[Ledger[Bucket]], grads: Sequence[Arrays], without: str = "", keep: bool = True) -> Arrays:
    """One step of all ranks: the sums, which are the same bytes on all of them."""
    sums: Arrays = {}
    grads = copy.deepcopy(list(grads))
    for buckets in zip(*(ledger.buckets for ledger in of_all), strict=True):
        give(buckets, grads, without)
        is_finite = arrive(buckets)
        results = []
        for bucket in buckets:
            found = bucket.finish(keep and is_finite, 1.0)
            small = {} if bucket.pack is None else {name: bucket.pack.part(name).copy() for name in bucket.pack.members}
            results.append({**{n: r for n, r in found.items() if r is not None}, **small})
        for name in results[0]:
            assert len({of_rank[name].tobytes() for of_rank in results}) == 1, f"replicas differ in {name}"
        sums |= results[0]
    for ledger in of_all:
        ledger.count_step()
    return {name: total.reshape(SHAPES[name]) for name, total in sums.items()}


def residuals(of_all: Sequence[Ledger[Bucket]], name: str) -> list[np.ndarray]:
    return [ledger.accounts[name].whole_residual().copy() for ledger in of_all]


# -- the paper -------------------------------------------------------------------------------------------------------


def of_the_paper(m: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 for matrices of all ranks (N, n, m) and Q (m, r): what they become, and Q of the next step."""
    p = np.mean([of_rank @ q for of_rank in m], axis=0)
    for k in range(p.shape[1]):
        for j in range(k):
            p[:, k] -= (p[:, j] @ p[:, k]) * p[:, j]
        p[:, k] /= np.linalg.norm(p[:, k])
    q = np.mean([of_rank.T @ p for of_rank in m], axis=0)
    return p @ q.T, q


@every_exchange
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_several_steps_are_those_of_the_paper(exchange: str, rank: int) -> None:
    """Algorithm 2 without its momentum: errors are what the mean leaves out, in float64 and with Q as it comes."""
    ranks, shape = 3, (24, 4, 5)
    compressor = PowerSGD(rank)
    loopback = Loopback(ranks, compressor, exchange)
    q = compressor.first_q(shape, "w", 0).T.astype(np.float64)
    errors = np.zeros((ranks, 24, 20))
    for number in range(6):
        grads = [drawn(shape, of_rank, number) for of_rank in range(ranks)]
        m = np.array(grads, np.float64).reshape(ranks, 24, 20) + errors
        expected, q = of_the_paper(m, q)
        errors = m - expected
        result = loopback.allreduce(grads, name="w")[0]
        np.testing.assert_allclose(result.reshape(24, 20), expected, atol=2e-5)
        owed = np.sum([loopback.residual("w", of_rank) for of_rank in range(ranks)], axis=0)
        np.testing.assert_allclose(owed.reshape(24, 20), errors.sum(axis=0), atol=1e-4)


def test_residuals_of_ranks_do_not_drift_apart() -> None:
    """The paper's differ by all that has ever differed between the ranks' gradients."""
    shape = (12, 9)
    loopback, difference = Loopback(2, PowerSGD(4)), np.zeros(shape)
    size, of_paper = [], []
    for number in range(400):
        grads = [drawn(shape, of_rank, number) for of_rank in range(2)]
        loopback.allreduce(grads, name="w")
        difference += grads[0] - grads[1]
        of_paper.append(float(np.linalg.norm(difference)))
        size.append(float(np.linalg.norm(loopback.residual("w", 0) - loopback.residual("w", 1))))
    assert max(size[200:]) < 1.5 * max(size[:200])
    assert of_paper[-1] > 3 * size[-1]


# -- what must hold --------------------------------------------------------------------------------------------------


@every_exchange
@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("compressor", [PowerSGD(1), PowerSGD(2, warm_start=False), PowerSGD(3, seed=5)], ids=repr)
def test_conservation_and_equal_replicas(compressor: PowerSGD, exchange: str, ranks: int) -> None:
    of_all = ledgers(ranks, compressor, exchange)
    assert set(of_all[0].accounts) == {"a", "conv", "b"}
    assert set(of_all[0].packs) == {"a.bias", "b.bias"}
    assert "long" in of_all[0].dense
    given, arrived = {n: np.zeros(s) for n, s in SHAPES.items()}, {n: np.zeros(s) for n, s in SHAPES.items()}
    for number in range(4):
        grads = gradients(ranks, number)
        for name, total in step(of_all, grads).items():
            given[name] += np.sum([g[name] for g in grads], axis=0, dtype=np.float64)
            arrived[name] += total
    for name in ("a.bias", "b.bias"):
        np.testing.assert_allclose(arrived[name], given[name], atol=1e-4)
    for name in ("a", "conv", "b"):
        owed = np.sum(residuals(of_all, name), axis=0).reshape(SHAPES[name])
        assert np.abs(owed).max() > 0.1, "nothing is owed, so nothing is tested"
        np.testing.assert_allclose(arrived[name] + owed, given[name], atol=1e-4)


SHAPES_OF_ALL_KINDS = [(), (1,), (7,), (1, 9), (9, 1), (5, 5), (3, 100), (100, 3), (6, 2, 3, 3), (4, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_KINDS, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 200])
def test_tensors_of_any_shape_and_a_rank_beyond_it(shape: tuple[int, ...], rank: int) -> None:
    loopback = Loopback(2, PowerSGD(rank), op="sum")
    given, arrived = np.zeros(shape), np.zeros(shape)
    for number in range(3):
        grads = [drawn(shape, of_rank, number) for of_rank in range(2)]
        given += np.sum(grads, axis=0)
        result = loopback.allreduce(grads, name="w")[0]
        assert result.shape == shape
        assert np.isfinite(result).all()
        arrived += result
    owed = (loopback.residual("w", 0) + loopback.residual("w", 1)).reshape(shape)
    np.testing.assert_allclose(arrived + owed, given, atol=1e-4)
    if rank == 200 or len(shape) < 2 or 1 in (shape[0], given.size // shape[0]):
        np.testing.assert_allclose(arrived, given, atol=1e-4, err_msg="with all ranks nothing is left out")


@pytest.mark.parametrize("rank", [1, 2, 3, 8])
@pytest.mark.parametrize("true_rank", [0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e17])
def test_matrices_of_lower_rank_and_zeros(rank: int, true_rank: int, scale: float) -> None:
    loopback = Loopback(2, PowerSGD(rank), op="sum")
    for number in range(4):
        matrix = scale * drawn((30, true_rank), number) @ drawn((true_rank, 20), number, 1)
        result = loopback.allreduce([matrix, matrix], name="w")[0]
        assert np.isfinite(result).all()
        if true_rank <= rank:
            np.testing.assert_allclose(result, 2 * matrix, atol=2e-3 * scale)
        assert np.isfinite(loopback.residual("w", 0)).all()


def test_a_tensor_that_was_zero_learns_again() -> None:
    loopback = Loopback(2, PowerSGD(2), op="sum")
    matrix = drawn((30, 2), 1) @ drawn((2, 20), 2)
    for grad in (np.zeros((30, 20), np.float32), matrix, np.zeros((30, 20), np.float32), matrix):
        result = loopback.allreduce([grad, grad], name="w")[0]
    np.testing.assert_allclose(result, 2 * matrix, atol=1e-3)


def test_gradients_of_float64() -> None:
    loopback = Loopback(2, PowerSGD(2), op="sum")
    given = [drawn((30, 20), r).astype(np.float64) for r in range(2)]
    result = loopback.allreduce(given, name="w")[0]
    assert result.dtype == np.float64
    owed = (loopback.residual("w", 0) + loopback.residual("w", 1)).reshape(30, 20)
    np.testing.assert_allclose(result + owed, given[0] + given[1], atol=1e-5)


def test_a_tensor_that_is_left_out_keeps_what_it_owes() -> None:
    of_all = ledgers(2, PowerSGD(1))
    step(of_all, gradients(2, 0))
    before, factor = residuals(of_all, "b"), of_all[0].accounts["b"].factor
    assert factor is not None
    kept = factor.copy()
    sums = step(of_all, gradients(2, 1), without="b")
    assert "b" not in sums
    np.testing.assert_array_equal(before, residuals(of_all, "b"))
    np.testing.assert_array_equal(kept, of_all[0].accounts["b"].factor)


@every_exchange
@pytest.mark.parametrize("where", ["a", "a.bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_number_takes_the_step_back(exchange: str, where: str, value: float) -> None:
    of_all, others = ledgers(3, PowerSGD(2), exchange), ledgers(3, PowerSGD(2), exchange)
    for number in range(2):
        step(of_all, gradients(3, number))
        step(others, gradients(3, number))
    names = ("a", "b", "conv")
    before = {name: residuals(of_all, name) for name in names}
    factors = {name: of_all[1].accounts[name].factor.copy() for name in names}
    bad = gradients(3, 7)
    bad[1][where].reshape(-1)[11] = value
    assert not np.isfinite(step(of_all, bad)[where]).all()
    for name in names:
        np.testing.assert_allclose(residuals(of_all, name), before[name], atol=1e-5)
        for ledger in of_all:
            np.testing.assert_array_equal(ledger.accounts[name].factor, factors[name])
    again, expected = step(of_all, gradients(3, 2)), step(others, gradients(3, 2))
    for name in again:
        np.testing.assert_allclose(again[name], expected[name], atol=1e-4)


@every_exchange
def test_a_step_that_fails_anywhere_is_forgotten(exchange: str) -> None:
    """B8: hivemind adds the gradient to what it owes before it averages, and counts it twice after a failure."""
    stages = len(ledgers(2, PowerSGD(2), exchange)[0].buckets[0].collectives)
    for failing in range(stages + 1):
        of_all = ledgers(2, PowerSGD(2), exchange)
        step(of_all, gradients(2, 0))
        before = {name: residuals(of_all, name) for name in ("a", "b", "conv")}
        buckets = [ledger.buckets[0] for ledger in of_all]
        give(buckets, gradients(2, 1))
        for number, collective in enumerate(buckets[0].collectives[:failing]):
            for bucket, received in zip(buckets, run(collective, buckets), strict=True):
                if number + 1 < stages:
                    bucket.proceed(collective, received)
                else:
                    bucket.arrive(received)
        for ledger in of_all:
            ledger.abandon()
            assert not ledger.buckets[0].busy
        for name, expected in before.items():
            np.testing.assert_allclose(residuals(of_all, name), expected, atol=1e-5)
        step(of_all, gradients(2, 1))


@every_exchange
def test_damaged_payloads_are_refused_in_every_stage(exchange: str) -> None:
    stages = ledgers(2, PowerSGD(2), exchange)[0].buckets[0].collectives
    for damaged in range(len(stages)):
        for forge in (lambda r: r[:-8], lambda r: np.zeros_like(r)):
            of_all = ledgers(2, PowerSGD(2), exchange)
            buckets = [ledger.buckets[0] for ledger in of_all]
            give(buckets, gradients(2, 0))

            def exchanged(buckets: Any = buckets, damaged: int = damaged, forge: Any = forge) -> None:
                for number, collective in enumerate(stages):
                    for bucket, received in zip(buckets, run(collective, buckets), strict=True):
                        message = forge(received) if number == damaged else received
                        take = bucket.arrive if number + 1 == len(stages) else partial(bucket.proceed, collective)
                        take(message)

            with pytest.raises(WireError):
                exchanged()
            for ledger in of_all:
                ledger.abandon()
            assert max(np.abs(residuals(of_all, "a")).max(axis=1)) < 1e-5


# -- what others get wrong -------------------------------------------------------------------------------------------


def test_equal_shapes_in_one_bucket_are_orthonormal_one_by_one() -> None:
    """B1: epfml's rank 1 divides by the norm of the whole batch of matrices of one shape."""
    names = [f"w{i}" for i in range(12)]
    grads = {name: np.outer(drawn((40,), i), drawn((50,), i, 1)) for i, name in enumerate(names)}
    together = Loopback(2, PowerSGD(1)).grouped_allreduce([grads, copy.deepcopy(grads)])[0]
    for name, grad in grads.items():
        np.testing.assert_allclose(together[name], grad, atol=1e-4)


def test_sizes_are_those_of_the_matrix_that_a_tensor_is_seen_as() -> None:
    """B1: epfml counts a convolution by its four dimensions."""
    assert PowerSGD(2).matrix_of((16, 8, 3, 3)) == (16, 72, 2)
    assert PowerSGD(200).matrix_of((16, 8, 3, 3)) == (16, 72, 16)


def test_what_is_owed_is_kept_by_tensor_and_not_by_bucket() -> None:
    """B7: DDP's hook keys errors by buckets, which DDP divides anew after the first step."""
    one, several = ledgers(2, PowerSGD(2)), ledgers(2, PowerSGD(2), bucket_bytes=4 * 2100)
    straight = ledgers(2, PowerSGD(2))
    assert len(one[0].buckets) != len(several[0].buckets)
    step(one, gradients(2, 0))
    step(straight, gradients(2, 0))
    for before, after in zip(one, several, strict=True):
        after.inherit(before)
    again, expected = step(several, gradients(2, 1)), step(straight, gradients(2, 1))
    for name in ("a", "b", "conv"):
        np.testing.assert_array_equal(again[name], expected[name])


def test_nothing_is_owed_of_what_goes_uncompressed() -> None:
    """B7: DDP's hook keeps errors of uncompressed tensors, too."""
    of_all = ledgers(2, PowerSGD(2))
    step(of_all, gradients(2, 0))
    assert set(of_all[0].state_dict()["residuals"]) == {"a", "b", "conv"}


def test_a_warm_start_goes_on_with_the_iteration() -> None:
    """GRACE draws a new Q in each step, from the random numbers of each rank."""
    spectrum = np.diag(np.r_[1.0, 0.9, np.full(28, 0.3)])
    u, v = (np.linalg.qr(drawn((30, 30), i))[0] for i in range(2))
    matrix = (u @ spectrum @ v.T).astype(np.float32)

    def captured(warm_start: bool) -> float:
        """The share of the best product of rank 2 in what the tenth step sends, without what is owed."""
        compressor = PowerSGD(2, warm_start=warm_start)
        ranks = [Ledger(Routing(compressor, min_numel=1), 2, r, [Tensor("w", (30, 30))], bucket_of) for r in range(2)]
        for _ in range(10):
            buckets = [ledger.buckets[0] for ledger in ranks]
            for ledger in ranks:
                account = ledger.accounts["w"]
                account.residual = None if account.residual is None else np.zeros_like(account.residual)
            give(buckets, [{"w": matrix.copy()}, {"w": matrix.copy()}])
            arrive(buckets)
            result = buckets[0].finish(True, 0.5)["w"]
            buckets[1].finish(True, 0.5)
        assert result is not None
        return float(np.linalg.norm(result)) / float(np.hypot(1.0, 0.9))

    assert captured(warm_start=True) > 0.999
    assert captured(warm_start=False) < 0.95


def test_the_first_factor_is_the_same_on_all_ranks_and_no_other() -> None:
    """B8, GRACE: factors that each rank draws from its own random numbers."""
    np.random.seed(1)  # noqa: NPY002 - nothing may depend on the global random numbers
    first = PowerSGD(2, seed=3).first_q((4, 5), "w", 0)
    np.random.seed(2)  # noqa: NPY002
    np.testing.assert_array_equal(first, PowerSGD(2, seed=3).first_q((4, 5), "w", 0))
    for other in (PowerSGD(2, seed=4).first_q((4, 5), "w", 0), PowerSGD(2, seed=3).first_q((4, 5), "v", 0)):
        assert np.abs(first - other).max() > 0.1
    # frozen: ranks with other versions of NumPy must draw the same
    expected = [[-0.62360346, -0.5376358], [-0.8456485, 0.19895816]]
    np.testing.assert_array_equal(PowerSGD(2).first_q((2, 2), "w", 0), np.array(expected, np.float32))


@every_exchange
def test_ranks_with_different_factors_are_told(exchange: str) -> None:
    of_all = ledgers(3, PowerSGD(2), exchange)
    step(of_all, gradients(3, 0))
    before = residuals(of_all, "a")
    of_all[1].accounts["a"].factor[0, 0] += 1
    buckets = [ledger.buckets[0] for ledger in of_all]
    give(buckets, gradients(3, 1))
    for collective in buckets[0].collectives:
        for bucket, received in zip(buckets, run(collective, buckets), strict=True):
            if collective == "gather_left":
                with pytest.raises(MismatchError, match="different factors"):
                    bucket.proceed(collective, received)
            else:
                bucket.proceed(collective, received)
        if collective == "gather_left":
            break
    for ledger in of_all:
        ledger.abandon()
    np.testing.assert_allclose(residuals(of_all, "a"), before, atol=1e-5)


# -- bytes, states, settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "way"), [(2, "allgather"), (4, "two_phase")])
def test_bytes_are_those_of_two_allreduces_of_factors(ranks: int, way: str) -> None:
    of_all = ledgers(ranks, PowerSGD(2), way)
    for number in range(2):
        step(of_all, gradients(ranks, number))
    stats = of_all[0].stats()
    factors = 4 * (2 * (40 + 50) + 2 * (16 + 72) + 2 * (33 + 61)) + 4 * (40 + 61)
    expected = 2 * ring_bytes(factors, ranks)
    assert stats["total"]["steps"] == 2
    # headers of payloads, and the numbers that are compared
    assert expected <= stats["total"]["bytes_sent"] <= expected + 2 * 1200
    assert stats["tensors"]["a"]["exchange"] == f"factors, {way}"
    assert stats["tensors"]["a.bias"]["exchange"] == f"factors, {way}, uncompressed"
    assert stats["tensors"]["a"]["bytes_sent"] > 0
    assert stats["tensors"]["a"]["dense_bytes"] == 2 * ring_bytes(4 * 2000, ranks)


def test_auto_takes_fewer_bytes_among_more_ranks() -> None:
    shape = {"w": ((4096, 4096), PowerSGD(4))}
    from hvd_compress.exchange import plan_together, suited

    way = suited(checked_exchange("auto"), [PowerSGD(4)])
    chosen = {n: plan_together(way, shape, n)["w"].exchange.id for n in (2, 16)}
    assert chosen == {2: "factors, allgather", 16: "factors, two_phase"}


def test_states_go_on_where_they_were(tmp_path: Any) -> None:
    of_all = ledgers(2, PowerSGD(2))
    for number in range(2):
        step(of_all, gradients(2, number))
    again = ledgers(2, PowerSGD(2))
    for ledger, fresh in zip(of_all, again, strict=True):
        write_state(tmp_path / "state.npz", ledger.state_dict())
        fresh.load_state_dict(read_state(tmp_path / "state.npz"))
    expected, found = step(of_all, gradients(2, 2)), step(again, gradients(2, 2))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_states_serve_another_number_of_ranks() -> None:
    of_all = ledgers(4, PowerSGD(2))
    for number in range(2):
        step(of_all, gradients(4, number))
    fewer = ledgers(3, PowerSGD(2))
    for ledger, state in zip(fewer, redistribute([ledger.state_dict() for ledger in of_all], 3), strict=True):
        ledger.load_state_dict(state)
    for name in ("a", "b", "conv"):
        np.testing.assert_allclose(
            np.sum(residuals(fewer, name), axis=0), np.sum(residuals(of_all, name), axis=0), atol=1e-5
        )
        np.testing.assert_array_equal(fewer[2].accounts[name].factor, of_all[0].accounts[name].factor)
    step(fewer, gradients(3, 2))


def test_states_of_different_runs_are_refused() -> None:
    of_all = ledgers(2, PowerSGD(2))
    step(of_all, gradients(2, 0))
    states = [ledger.state_dict() for ledger in of_all]
    states[1]["factors"]["a"]["values"][3] += 1
    with pytest.raises(StateError, match="factor of 'a' in the state of rank 1 is not that of rank 0"):
        redistribute(states, 1)
    states[1]["factors"]["a"]["values"][3] = np.nan
    with pytest.raises(StateError, match="factor of 'a'"):
        redistribute(states, 1)


def test_a_policy_with_others_beside() -> None:
    policy = Policy([("b", OneBit())], default=PowerSGD(2))
    of_all = ledgers(2, policy, "two_phase")
    assert sorted(len(bucket.accounts) for bucket in of_all[0].buckets) == [1, 2]
    assert set(of_all[0].packs) == {"a.bias", "b.bias"}
    given, arrived = np.zeros(SHAPES["a"]), np.zeros(SHAPES["a"])
    for number in range(3):
        grads = gradients(2, number)
        arrived += step(of_all, grads)["a"]
        given += grads[0]["a"] + grads[1]["a"]
    np.testing.assert_allclose(arrived + np.sum(residuals(of_all, "a"), axis=0).reshape(40, 50), given, atol=1e-4)


def test_settings_travel_as_json_and_by_name() -> None:
    compressor = PowerSGD(3, warm_start=False, seed=9)
    assert from_config(json.loads(json.dumps(compressor.get_config()))) == compressor
    assert eval(repr(compressor), {"PowerSGD": PowerSGD}) == compressor
    assert named("powersgd:2") == PowerSGD(2)
    for wrong in ({"rank": 0}, {"rank": 1.5}, {"warm_start": 1}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"PowerSGD\\({next(iter(wrong))}="):
            PowerSGD(**wrong)  # type: ignore[arg-type]


def refusals() -> dict[str, Any]:
    power = PowerSGD()

    def settings(exchange: str) -> Any:
        return lambda: check_settings(power, exchange, 0, 0, True, 1.0, 1, None, False)

    return {
        "hierarchical": (settings("hierarchical"), UnsupportedError, "'auto', 'two_phase' and 'allgather'"),
        "parameter_server": (settings("parameter_server"), UnsupportedError, "'auto', 'two_phase' and 'allgather'"),
        "loopback": (lambda: Loopback(2, power, "hierarchical"), UnsupportedError, "twice in each step"),
        "adagrad": (lambda: exchange_of(AdaGrad(), "two_phase", power), UnsupportedError, "ranks sum factors"),
        "auto": (lambda: Auto([power]), ValueError, "is no candidate"),
        "averaging": (lambda: given_compression("compression", power), UnsupportedError, "exchange of gradients"),
        "policy": (
            lambda: given_compression("compression", Policy({"w": power})), UnsupportedError, "exchange of gradients",
        ),
        "encode": (lambda: power.encode(np.ones((3, 3), np.float32)), UnsupportedError, "makes no payloads"),
    }  # fmt: skip


@pytest.mark.parametrize("case", refusals())
def test_what_cannot_be_is_refused_with_the_reason(case: str) -> None:
    call, kind, says = refusals()[case]
    with pytest.raises(kind, match=says):
        call()
