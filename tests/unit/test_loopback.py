"""N ranks in one process: what must hold of every exchange, whatever carries the bytes."""

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
    Percentile,
    Policy,
    PowerSGD,
    RandomK,
    SignSGD,
    Threshold,
    TopK,
)
from hvd_compress.compressors import Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.loopback import Loopback
from tests.close import check_taken_back
from tests.gradients import SHAPE, arrays

WITH_FEEDBACK = {
    "onebit": OneBit(),
    "onebit-sampled": OneBit(sample=50),
    "threshold": Threshold(0.5),
    "adaptive": Adaptive(pi=16),
    "topk": TopK(ratio=0.05),
    "topk-k": TopK(k=40),
    "percentile-with": Percentile(90, error_feedback=True),
    "bf16": BF16(),
    "randomk": RandomK(ratio=0.05),
    "threshold-golomb": Threshold(0.5, coding="golomb"),
    "adaptive-golomb": Adaptive(pi=16, coding="golomb"),
    "topk-golomb": TopK(ratio=0.05, coding="golomb"),
}
ALL = {
    **WITH_FEEDBACK,
    "onebit-without": OneBit(error_feedback=False),
    "percentile": Percentile(90),
    "qsgd-1": QSGD(bits=1),
    "qsgd-4": QSGD(bits=4),
    "qsgd-1-elias": QSGD(bits=1, coding="elias"),
    "qsgd-4-elias": QSGD(bits=4, coding="elias"),
    "qsgd-max": QSGD(bits=8, norm="max"),
    "none": NoCompression(),
    "fp16": FP16(),
}
every_compressor = pytest.mark.parametrize("compressor", ALL.values(), ids=ALL)
feedback = pytest.mark.parametrize("compressor", WITH_FEEDBACK.values(), ids=WITH_FEEDBACK)
every_exchange = pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
every_size = pytest.mark.parametrize("ranks", range(1, 8))


def owed(loopback: Loopback, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What all ranks together have not sent yet, in units of the sum."""
    total = np.zeros(int(np.prod(shape)))
    bounds = loopback.bounds(name)
    for rank in range(loopback.ranks):
        total += loopback.residual(name, rank)
        owned = loopback.owner_residual(name, rank)
        if owned.size:
            total[bounds[rank] : bounds[rank + 1]] += owned
    return total.reshape(shape)


def residuals(loopback: Loopback, name: str) -> list[np.ndarray]:
    both = (loopback.residual, loopback.owner_residual)
    return [of(name, rank) for rank in range(loopback.ranks) for of in both]


def state(loopback: Loopback, name: str) -> bytes:
    return b"".join(values.tobytes() for values in residuals(loopback, name))


@feedback
@every_exchange
@every_size
def test_conservation(compressor: Compressor, exchange: str, ranks: int) -> None:
    loopback = Loopback(ranks, compressor, exchange, op="sum")
    given, arrived = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(4):
        grads = arrays(ranks, step)
        given += np.sum(grads, axis=0, dtype=np.float64)
        arrived += loopback.allreduce(grads, name="w")[0]
        np.testing.assert_allclose(arrived + owed(loopback, "w", SHAPE), given, atol=1e-4)
    assert np.abs(owed(loopback, "w", SHAPE)).max() > 1e-4, "nothing is owed, so nothing is tested"


@every_compressor
@every_exchange
@every_size
def test_replicas_are_bit_identical(compressor: Compressor, exchange: str, ranks: int) -> None:
    loopback = Loopback(ranks, compressor, exchange)
    for step in range(3):
        results = loopback.allreduce(arrays(ranks, step), name="w")
        assert len(results) == ranks
        assert len({r.tobytes() for r in results}) == 1
        assert results[0].shape == SHAPE
        assert np.isfinite(results[0]).all()


@every_exchange
@every_size
def test_nothing_lost_means_the_plain_sum(exchange: str, ranks: int) -> None:
    grads = arrays(ranks, 0)
    total = np.sum(grads, axis=0)
    summed = Loopback(ranks, NoCompression(), exchange, op="sum").allreduce(grads)[0]
    averaged = Loopback(ranks, NoCompression(), exchange).allreduce(grads)[0]
    np.testing.assert_allclose(summed, total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(averaged, total / ranks, rtol=1e-6, atol=1e-6)


@every_exchange
def test_sums_are_made_in_the_order_of_the_ranks(exchange: str) -> None:
    # in float32 (1 + 1e8) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1
    values = [1.0, 1e8, -1e8]
    for order, expected in (((0, 1, 2), 0.0), ((1, 2, 0), 1.0)):
        grads = [np.full(24, values[i], np.float32) for i in order]
        result = Loopback(3, NoCompression(), exchange, op="sum").allreduce(grads)[0]
        np.testing.assert_array_equal(result, np.full(24, expected, np.float32))


def onebit_oracle(x: np.ndarray) -> np.ndarray:
    """One row: what is not negative becomes its mean, and so does what is."""
    positive = x >= 0
    means = [np.mean(x[m], dtype=np.float64) if m.any() else 0.0 for m in (positive, ~positive)]
    return np.where(positive, means[0], means[1]).astype(np.float32)


def test_two_phases_of_onebit_by_hand() -> None:
    grads = arrays(2, 0, (64,))
    own, owner = [np.zeros(64, np.float32) for _ in range(2)], np.zeros(64, np.float32)
    loopback = Loopback(2, OneBit(), "two_phase", op="sum")
    for step in range(3):
        grads = arrays(2, step, (64,))
        expected = np.zeros(64, np.float32)
        for part in (slice(0, 32), slice(32, 64)):
            total = np.zeros(32, np.float32)
            for rank in range(2):
                y = grads[rank][part] + own[rank][part]
                sent = onebit_oracle(y)
                own[rank][part] = y - sent
                total += sent
            total += owner[part]
            expected[part] = onebit_oracle(total)
            owner[part] = total - expected[part]
        found = loopback.allreduce(grads, name="w")[0]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_allgather_of_topk_by_hand() -> None:
    loopback = Loopback(3, TopK(k=5), "allgather", op="sum")
    own = [np.zeros(100, np.float32) for _ in range(3)]
    for step in range(3):
        grads = arrays(3, step, (100,))
        expected = np.zeros(100, np.float32)
        for rank in range(3):
            y = grads[rank] + own[rank]
            kept = np.argsort(-np.abs(y), kind="stable")[:5]
            sent = np.zeros_like(y)
            sent[kept] = y[kept]
            own[rank] = y - sent
            expected += sent
        np.testing.assert_array_equal(loopback.allreduce(grads, name="w")[0], expected)


# -- values that are not finite --------------------------------------------------------------------------------------


@every_compressor
@every_exchange
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_number_reaches_all_ranks_and_changes_no_residual(
    compressor: Compressor, exchange: str, bad: float
) -> None:
    loopback = Loopback(3, compressor, exchange)
    for step in range(2):
        loopback.allreduce(arrays(3, step), name="w")
    before = residuals(loopback, "w")
    grads = arrays(3, 2)
    grads[1][30, 40] = bad
    for result in loopback.allreduce(grads, name="w"):
        assert not np.isfinite(result).all()
    check_taken_back(residuals(loopback, "w"), before, largest=20.0)
    results = loopback.allreduce(arrays(3, 3), name="w")
    assert np.isfinite(results[0]).all()
    assert len({r.tobytes() for r in results}) == 1


@every_exchange
def test_a_skipped_step_is_as_if_it_had_not_been(exchange: str) -> None:
    straight, skipping = (Loopback(3, OneBit(), exchange) for _ in range(2))
    for step in range(4):
        expected = straight.allreduce(arrays(3, step), name="w")[0]
        if step == 2:
            skipping.allreduce([np.full(SHAPE, np.nan, np.float32)] * 3, name="w")
        np.testing.assert_allclose(skipping.allreduce(arrays(3, step), name="w")[0], expected, rtol=1e-5)


@every_exchange
def test_a_sum_that_overflows_is_not_finite(exchange: str) -> None:
    grads = [np.full(1000, 3e38, np.float32)] * 3
    for result in Loopback(3, OneBit(), exchange, op="sum").allreduce(grads):
        assert not np.isfinite(result).any()


# -- names, types, shapes --------------------------------------------------------------------------------------------


def test_inputs_are_not_changed_and_results_are_not_shared() -> None:
    loopback = Loopback(2, OneBit())
    grads = arrays(2, 0)
    copies = [g.copy() for g in grads]
    first = loopback.allreduce(grads, name="w")
    kept = first[0].copy()
    loopback.allreduce(arrays(2, 1), name="w")
    np.testing.assert_array_equal(first[0], kept)
    for grad, copy in zip(grads, copies, strict=True):
        np.testing.assert_array_equal(grad, copy)


def test_names_keep_their_residuals_apart() -> None:
    together, alone = Loopback(2, OneBit()), Loopback(2, OneBit())
    for step in range(3):
        a = together.allreduce(arrays(2, step), name="a")[0]
        together.allreduce(arrays(2, step + 100), name="b")
        assert a.tobytes() == alone.allreduce(arrays(2, step), name="a")[0].tobytes()


def test_randomness_differs_between_names_steps_and_ranks_only() -> None:
    def run(name: str, seed: int = 0) -> bytes:
        loopback = Loopback(2, QSGD(bits=2, seed=seed))
        return b"".join(loopback.allreduce(arrays(2, 0), name=name)[0].tobytes() for _ in range(2))

    assert run("a") == run("a")
    assert run("a") != run("b")
    assert run("a") != run("a", seed=1)
    once = run("a")
    assert once[: len(once) // 2] != once[len(once) // 2 :]


@every_compressor
@every_exchange
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (9,), (1009,), (5, 0, 2), (3, 5, 7)])
def test_awkward_shapes(compressor: Compressor, exchange: str, shape: tuple[int, ...]) -> None:
    loopback = Loopback(4, compressor, exchange)
    for step in range(2):
        results = loopback.allreduce(arrays(4, step, shape), name="w")
        assert all(r.shape == shape for r in results)
        assert len({r.tobytes() for r in results}) == 1


@every_exchange
@pytest.mark.parametrize(("dtype", "kept"), [("float64", "float64"), ("float16", "float32")])
def test_other_types(exchange: str, dtype: str, kept: str) -> None:
    loopback = Loopback(2, OneBit(), exchange)
    result = loopback.allreduce(arrays(2, 0, dtype=dtype), name="w")[0]
    assert result.dtype == kept
    assert loopback.residual("w", 0).dtype == kept


def test_bytes_sent_are_those_of_the_collectives() -> None:
    loopback = Loopback(4, OneBit(), "two_phase")
    loopback.allreduce(arrays(4, 0, (64, 512)), name="w")
    # a chunk is 16 rows: a header of 40 bytes, a bit per element, two means a row
    payload = 40 + 16 * 512 // 8 + 16 * 8
    assert loopback.bytes_sent == [2 * 3 * payload] * 4


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_auto_compresses_even_what_is_not_worth_it(ranks: int) -> None:
    results = Loopback(ranks, OneBit()).allreduce([np.full(3, rank, np.float32) for rank in range(ranks)])
    np.testing.assert_allclose(results[0], np.mean(range(ranks)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Loopback(0, OneBit()), r"ranks=0"),
        (lambda: Loopback(2, OneBit(), op="max"), r"op='max'"),
        (lambda: Loopback(2, OneBit(), "ring").allreduce([np.zeros(3), np.zeros(3)]), r"exchange='ring'"),
        (lambda: Loopback(2, OneBit()).allreduce([np.zeros(3)]), r"1 arrays for 2 ranks"),
        (lambda: Loopback(2, OneBit()).allreduce([np.zeros(3), np.zeros(4)]), r"rank 1"),
        (lambda: Loopback(2, OneBit()).allreduce([np.zeros(3), np.zeros(3, np.float32)]), r"rank 1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_a_name_keeps_its_shape() -> None:
    loopback = Loopback(2, OneBit())
    loopback.allreduce([np.zeros(3)] * 2, name="w")
    with pytest.raises(ValueError, match="'w' had shape"):
        loopback.allreduce([np.zeros(4)] * 2, name="w")


# -- hierarchical ----------------------------------------------------------------------------------------------------

PLACES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (4, 4), (6, 2), (6, 3)]
every_place = pytest.mark.parametrize(("ranks", "per_host"), PLACES)


def shard(loopback: Loopback, name: str, rank: int, per_host: int) -> slice:
    """The elements of a rank: as many chunks as there are hosts, side by side, by its number on its host."""
    hosts, index = loopback.ranks // per_host, rank % per_host
    bounds = loopback.bounds(name)
    return slice(bounds[index * hosts], bounds[(index + 1) * hosts])


def owned(loopback: Loopback, name: str, rank: int, per_host: int) -> slice:
    chunk = rank % per_host * (loopback.ranks // per_host) + rank // per_host
    return slice(*loopback.bounds(name)[chunk : chunk + 2])


def owed_inside(loopback: Loopback, name: str, shape: tuple[int, ...], per_host: int) -> np.ndarray:
    total = np.zeros(int(np.prod(shape)))
    for rank in range(loopback.ranks):
        total[shard(loopback, name, rank, per_host)] += loopback.residual(name, rank)
        total[owned(loopback, name, rank, per_host)] += loopback.owner_residual(name, rank)
    return total.reshape(shape)


def hierarchy(ranks: int, per_host: int, compressor: Compressor, op: str = "sum") -> Loopback:
    return Loopback(ranks, compressor, "hierarchical", op=op, ranks_per_host=per_host)


@feedback
@every_place
def test_a_hierarchy_loses_nothing_of_any_element(compressor: Compressor, ranks: int, per_host: int) -> None:
    loopback = hierarchy(ranks, per_host, compressor)
    given, arrived = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(4):
        grads = arrays(ranks, step)
        given += np.sum(grads, axis=0, dtype=np.float64)
        arrived += loopback.allreduce(grads, name="w")[0]
        np.testing.assert_allclose(arrived + owed_inside(loopback, "w", SHAPE, per_host), given, atol=1e-4)
    assert np.abs(owed_inside(loopback, "w", SHAPE, per_host)).max() > 1e-4, "nothing is owed, so nothing is tested"


@every_compressor
@every_place
def test_replicas_of_a_hierarchy_are_bit_identical(compressor: Compressor, ranks: int, per_host: int) -> None:
    loopback = hierarchy(ranks, per_host, compressor, op="average")
    shapes = {"w": SHAPE, "v": (1000,), "tiny": (3,)}
    for step in range(3):
        grads = [
            {name: arrays(ranks, step + i, shape)[rank] for i, (name, shape) in enumerate(shapes.items())}
            for rank in range(ranks)
        ]
        results = loopback.grouped_allreduce(grads)
        for name, shape in shapes.items():
            assert len({r[name].tobytes() for r in results}) == 1
            assert results[0][name].shape == shape
            assert np.isfinite(results[0][name]).all()


@every_place
def test_a_hierarchy_that_loses_nothing_is_the_plain_sum_in_its_order(ranks: int, per_host: int) -> None:
    grads = arrays(ranks, 0)
    loopback = hierarchy(ranks, per_host, NoCompression())
    found = loopback.allreduce(grads, name="w")[0].reshape(-1)
    expected = np.zeros(found.size, np.float32)
    for index in range(per_host):
        part = shard(loopback, "w", index, per_host)
        of_hosts = []
        for first in range(0, ranks, per_host):
            # who sums up for its host begins with its own gradient
            mine = grads[first + index].reshape(-1)[part].copy()
            for other in range(first, first + per_host):
                if other != first + index:
                    mine += grads[other].reshape(-1)[part]
            of_hosts.append(mine)
        expected[part] = of_hosts[0]
        for of_host in of_hosts[1:]:
            expected[part] += of_host
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found.reshape(SHAPE), np.sum(grads, axis=0), rtol=1e-5, atol=1e-5)


@every_compressor
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_one_rank_on_each_host_is_two_phase(compressor: Compressor, ranks: int) -> None:
    flat, deep = Loopback(ranks, compressor, "two_phase"), hierarchy(ranks, 1, compressor, op="average")
    for step in range(3):
        grads = [{"w": w, "v": v} for w, v in zip(arrays(ranks, step), arrays(ranks, step, (1000,)), strict=True)]
        for a, b in zip(flat.grouped_allreduce(grads), deep.grouped_allreduce(grads), strict=True):
            assert (a["w"].tobytes(), a["v"].tobytes()) == (b["w"].tobytes(), b["v"].tobytes())
        assert state(flat, "w") == state(deep, "w")


def test_a_hierarchy_of_topk_by_hand() -> None:
    # four ranks on two hosts: 64 elements, a shard of 32 for each of a host's ranks, a chunk of 16 for each owner
    loopback = hierarchy(4, 2, TopK(ratio=0.125))
    residual = {(host, chunk): np.zeros(16, np.float32) for host in range(2) for chunk in range(4)}
    owner = {chunk: np.zeros(16, np.float32) for chunk in range(4)}

    def kept(y: np.ndarray) -> np.ndarray:
        sent = np.zeros_like(y)
        largest = np.argsort(-np.abs(y), kind="stable")[:2]
        sent[largest] = y[largest]
        return sent

    for step in range(3):
        grads = arrays(4, step, (64,))
        expected = np.zeros(64, np.float32)
        for chunk in range(4):
            part = slice(16 * chunk, 16 * chunk + 16)
            total = np.zeros(16, np.float32)
            for host in range(2):
                y = grads[2 * host][part] + grads[2 * host + 1][part] + residual[host, chunk]
                sent = kept(y)
                residual[host, chunk] = y - sent
                total += sent
            total += owner[chunk]
            expected[part] = kept(total)
            owner[chunk] = total - expected[part]
        np.testing.assert_array_equal(loopback.allreduce(grads, name="w")[0], expected)


@every_compressor
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 3736])
def test_a_bad_number_changes_nothing_in_a_hierarchy(compressor: Compressor, bad: float, where: int) -> None:
    loopback = hierarchy(4, 2, compressor)
    for step in range(2):
        loopback.allreduce(arrays(4, step), name="w")
    before = residuals(loopback, "w")
    grads = arrays(4, 2)
    grads[1].reshape(-1)[where] = bad
    for result in loopback.allreduce(grads, name="w"):
        assert not np.isfinite(result).all()
    check_taken_back(residuals(loopback, "w"), before, largest=20.0)
    results = loopback.allreduce(arrays(4, 3), name="w")
    assert np.isfinite(results[0]).all()
    assert len({r.tobytes() for r in results}) == 1


@every_compressor
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (9,), (5, 0, 2), (3, 5, 7)])
def test_awkward_shapes_in_a_hierarchy(compressor: Compressor, shape: tuple[int, ...]) -> None:
    loopback = hierarchy(4, 2, compressor)
    for step in range(2):
        results = loopback.allreduce(arrays(4, step, shape), name="w")
        assert all(r.shape == shape for r in results)
        assert len({r.tobytes() for r in results}) == 1


def test_types_may_be_mixed_in_a_hierarchy() -> None:
    loopback = hierarchy(4, 2, OneBit())
    given: dict[str, np.ndarray] = {"d": np.zeros(301), "f": np.zeros(77), "h": np.zeros(33)}
    arrived = {name: np.zeros(value.shape) for name, value in given.items()}
    kinds = {"d": "float64", "f": "float32", "h": "float16"}
    for step in range(3):
        of_ranks = [
            {name: arrays(4, step, given[name].shape, kinds[name])[rank] for name in given} for rank in range(4)
        ]
        results = loopback.grouped_allreduce(of_ranks)
        for name in given:
            given[name] += np.sum([of_rank[name].astype(float) for of_rank in of_ranks], axis=0)
            arrived[name] += results[3][name]
    for name, kind in kinds.items():
        assert results[0][name].dtype == ("float64" if kind == "float64" else "float32")
        np.testing.assert_allclose(
            arrived[name] + owed_inside(loopback, name, given[name].shape, 2), given[name], atol=1e-4
        )


def test_bytes_of_a_hierarchy() -> None:
    loopback = hierarchy(4, 2, OneBit())
    loopback.allreduce(arrays(4, 0, (64, 512)), name="w")
    # a chunk is 16 rows: a header of 40 bytes, a bit per element, two means a row
    payload = 40 + 16 * 512 // 8 + 16 * 8
    inside = 2 * 16 * 512 * 4 + 2 * payload
    between = payload + payload
    assert loopback.bytes_sent == [inside + between] * 4


@pytest.mark.parametrize("per_host", [0, 3, 8])
def test_ranks_that_fill_no_hosts_are_refused(per_host: int) -> None:
    with pytest.raises(ValueError, match=f"ranks_per_host={per_host}"):
        hierarchy(4, per_host, OneBit())


@pytest.mark.parametrize("given", [Policy([("*.bias", NoCompression())], default=OneBit()), Auto(), OneBit, None, 3])
def test_what_is_not_one_compressor_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"compressor=.*give"):
        Loopback(2, given)


@pytest.mark.parametrize("compressor", [PowerSGD(), SignSGD()], ids=repr)
def test_adagrad_of_sums_that_no_rank_owns_is_refused(compressor: Any) -> None:
    with pytest.raises(UnsupportedError, match="AdaGrad"):
        Loopback(2, compressor, adagrad=AdaGrad())


def test_a_compressor_may_be_named() -> None:
    assert Loopback(2, "onebit").compressor == OneBit()


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    rng = np.random.default_rng(0)
    # so large that it is encoded when it is given
    large, small = rng.standard_normal(2**18).astype(np.float32), rng.standard_normal(700).astype(np.float32)
    ranks, others = (Loopback(2, OneBit(), exchange="two_phase") for _ in range(2))
    for wrong in ({"a": large, "b": np.arange(700)}, {"a": large, "b": np.array(["x"] * 700)}):
        with pytest.raises(TypeError, match="cannot encode"):
            ranks.grouped_allreduce([wrong] * 2)
    for _ in range(2):
        results = [each.grouped_allreduce([{"a": large, "b": small}] * 2)[0] for each in (ranks, others)]
        for name in ("a", "b"):
            np.testing.assert_array_equal(results[0][name], results[1][name])
            np.testing.assert_array_equal(ranks.residual(name, 0), others.residual(name, 0))


def test_a_name_keeps_the_precision_that_it_is_sent_in() -> None:
    ranks = Loopback(2, NoCompression(), exchange="parameter_server")
    ranks.allreduce([np.ones(5, np.float32)] * 2, "w")
    with pytest.raises(ValueError, match=r"'w' was sent as .* before, which rounds float64; use another name"):
        ranks.allreduce([np.full(5, 1 / 3)] * 2, "w")
    np.testing.assert_array_equal(ranks.allreduce([np.full(5, 1 / 3)] * 2, "x")[0], np.full(5, 1 / 3))


def test_no_tensors_are_no_exchange() -> None:
    ranks = Loopback(2, OneBit())
    assert ranks.grouped_allreduce([{}, {}]) == [{}, {}]
    assert ranks.bytes_sent == [0, 0]
