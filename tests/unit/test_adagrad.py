"""AdaGrad within exchanges, against ten lines of NumPy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hvd_compress import BF16, FP16, QSGD, AdaGrad, Adaptive, NoCompression, OneBit, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import (
    Accumulator,
    AllGather,
    Hierarchical,
    TwoPhase,
    checked_exchange,
    chunk_bounds,
    exchange_with,
)
from hvd_compress.loopback import Loopback
from tests.close import check_taken_back

EPSILON = 1e-3
SHAPE = (37, 101)
NUMEL = 37 * 101
COMPRESSORS = {
    "onebit": OneBit(),
    "adaptive": Adaptive(pi=16),
    "topk": TopK(ratio=0.05),
    "topk-golomb": TopK(ratio=0.05, coding="golomb"),
    "qsgd": QSGD(bits=4),
    "bf16": BF16(),
    "bf16-without": BF16(error_feedback=False),
    "none": NoCompression(),
    "fp16": FP16(),
}
EXCHANGES = {"two_phase": {}, "hierarchical": {"ranks_per_host": 2}, "auto": {}}
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def gradients(ranks: int, step: int, dtype: Any = np.float32) -> list[np.ndarray]:
    """Of columns with very different magnitudes."""
    columns = np.logspace(-3, 2, SHAPE[1])
    return [
        (np.random.default_rng([rank, step]).standard_normal(SHAPE) * columns).astype(dtype) for rank in range(ranks)
    ]


class Oracle:
    """AdaGrad as Duchi et al. write it, of the averages or sums that it is given."""

    def __init__(self, epsilon: float = EPSILON) -> None:
        self.epsilon = epsilon
        self.squares: Any = 0.0

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        self.squares = self.squares + np.square(gradient)
        return gradient / (np.sqrt(self.squares) + self.epsilon)


def loopback(ranks: int, compressor: Compressor, exchange: str = "two_phase", op: str = "average") -> Loopback:
    return Loopback(ranks, compressor, exchange, op, adagrad=AdaGrad(EPSILON), **EXCHANGES[exchange])


def accumulators(of: Loopback) -> bytes:
    return b"".join(of.accumulator("w", rank).tobytes() for rank in range(of.ranks))


def residuals(of: Loopback) -> list[list[np.ndarray]]:
    return [[kind("w", rank) for rank in range(of.ranks)] for kind in (of.residual, of.owner_residual)]


@every_exchange
@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compressor", [NoCompression(), TopK(ratio=1.0)], ids=["none", "topk"])
def test_where_everything_is_sent_updates_are_adagrads(
    compressor: Compressor, dtype: Any, op: str, exchange: str
) -> None:
    ranks, oracle = loopback(4, compressor, exchange, op), Oracle()
    for step in range(5):
        grads = gradients(4, step, dtype)
        total = np.sum(grads, axis=0, dtype=np.float64)
        results = ranks.allreduce(grads, name="w")
        np.testing.assert_allclose(results[0], oracle(total / 4 if op == "average" else total), rtol=1e-4, atol=1e-6)
        assert len({r.tobytes() for r in results}) == 1
    assert results[0].dtype == dtype


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_owners_divide_before_they_encode_again(ranks: int) -> None:
    compressor, scale = OneBit(group=8), np.float32(1 / ranks)
    bounds = chunk_bounds(NUMEL, ranks, 8)
    owed = np.zeros((ranks, NUMEL), np.float32)
    owners = [np.zeros(b - a, np.float32) for a, b in pairwise(bounds)]
    oracles = [Oracle(np.float32(EPSILON)) for _ in owners]
    of_all = loopback(ranks, compressor)
    for step in range(6):
        grads = gradients(ranks, step)
        expected = np.empty(NUMEL, np.float32)
        for (a, b), owner, oracle in zip(pairwise(bounds), owners, oracles, strict=True):
            sent = [compressor.encode(g.ravel()[a:b], r[a:b]) for g, r in zip(grads, owed, strict=True)]
            total = sum(compressor.decode(payload) for payload in sent)
            expected[a:b] = compressor.decode(compressor.encode(oracle(total * scale), owner))
        found = of_all.allreduce(grads, name="w")[0]
        np.testing.assert_allclose(found.ravel(), expected, rtol=1e-5, atol=1e-7)
        for rank, owner in enumerate(owners):
            np.testing.assert_allclose(of_all.owner_residual("w", rank), owner, rtol=1e-4, atol=1e-6)


@every_compressor
@every_exchange
@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e30])
def test_a_step_that_is_not_finite_leaves_no_trace(compressor: Compressor, exchange: str, bad: float) -> None:
    """1e30 is finite, its square is not: from then on all updates of its element would be 0."""
    of_all, other = loopback(4, compressor, exchange), loopback(4, compressor, exchange)
    for step in range(3):
        of_all.allreduce(gradients(4, step), name="w")
        other.allreduce(gradients(4, step), name="w")
    before = accumulators(of_all), residuals(of_all)
    largest = 4 * max(float(np.abs(g).max(initial=0)) for g in [*gradients(4, 3), *before[1][0]])
    spoiled = gradients(4, 3)
    for gradient in spoiled:
        gradient[...] = bad
    results = of_all.allreduce(spoiled, name="w")
    assert not any(np.isfinite(result).any() for result in results)
    assert accumulators(of_all) == before[0]
    # residuals of float32 beside gradients of 1e30 are lost
    of_ranks, of_owners = before[1]
    check_taken_back(residuals(of_all), [[0 * r for r in of_ranks] if bad == 1e30 else of_ranks, of_owners], largest)
    before = accumulators(of_all), residuals(of_all)
    one = gradients(4, 3)
    one[1][5, 7] = bad
    results = of_all.allreduce(one, name="w")
    if not (isinstance(compressor, TopK | Adaptive | OneBit | QSGD) and bad == 1e30):
        # the mean of a row, or what is left out, may hide a finite value
        assert not any(np.isfinite(result).all() for result in results)
        assert accumulators(of_all) == before[0]
        if bad != 1e30:
            check_taken_back(residuals(of_all), before[1], largest)


def test_values_in_other_units_give_the_same_updates() -> None:
    """What AdaGrad is in an exchange for: the second hop sees values of similar magnitude."""
    plain, scaled = (Loopback(2, OneBit(group="tensor"), "two_phase", adagrad=AdaGrad(1e-30)) for _ in range(2))
    for step in range(4):
        grads = gradients(2, step)
        results = plain.allreduce(grads, name="w")[0], scaled.allreduce([g * 1024 for g in grads], name="w")[0]
        np.testing.assert_allclose(*results, rtol=1e-5)


def test_a_gradient_that_was_always_zero_gives_zero() -> None:
    results = loopback(2, NoCompression()).allreduce([np.zeros(SHAPE, np.float32)] * 2, name="w")
    assert not results[0].any()


# -- accumulators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_accumulator_is_final_when_it_is_settled(dtype: Any) -> None:
    accumulator, oracle = Accumulator(AdaGrad(EPSILON), 0.5), Oracle()
    rng = np.random.default_rng(0)
    for keep in (True, False, True, True):
        gradient = rng.standard_normal(1009).astype(dtype)
        before = None if accumulator.values is None else accumulator.values.tobytes()
        x = 2 * gradient
        assert accumulator.precondition(x)
        assert before is None or accumulator.values.tobytes() == before
        accumulator.settle(keep)
        squares = oracle.squares
        np.testing.assert_allclose(x, oracle(gradient), rtol=1e-5)
        if not keep:
            oracle.squares = squares
        np.testing.assert_allclose(accumulator.values, oracle.squares, rtol=1e-5)
        assert accumulator.values.dtype == dtype
        after = accumulator.values.tobytes()
        # nothing is under way
        accumulator.settle(keep=True)
        assert accumulator.values.tobytes() == after


def test_a_loss_scale_changes_neither_accumulator_nor_update() -> None:
    plain, scaled = Accumulator(AdaGrad(EPSILON), 1.0), Accumulator(AdaGrad(EPSILON), 1.0)
    for step, scale in enumerate((1.0, 65536.0, 32768.0, 2.0**-3)):
        x = np.random.default_rng(step).standard_normal(100).astype(np.float32)
        y = x * np.float32(scale)
        scaled.loss_scale = scale
        for accumulator, values in ((plain, x), (scaled, y)):
            assert accumulator.precondition(values)
            accumulator.settle(keep=True)
        assert x.tobytes() == y.tobytes()
        assert plain.values.tobytes() == scaled.values.tobytes()


def test_an_accumulator_follows_the_type_of_a_model() -> None:
    accumulator = Accumulator(AdaGrad(), 1.0)
    for dtype in (np.float32, np.float64, np.float32):
        x = np.full(3, 2.0, dtype)
        accumulator.precondition(x)
        accumulator.settle(keep=True)
    assert accumulator.values.tolist() == [12.0] * 3
    assert accumulator.values.dtype == np.float32


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings() -> None:
    assert AdaGrad() == AdaGrad(epsilon=1e-8)
    assert AdaGrad(1e-6).get_config() == {"id": "adagrad", "epsilon": 1e-6}
    assert eval(repr(AdaGrad(0.25))) == AdaGrad(0.25)
    for wrong in (0.0, -1.0, 1e-40, float("nan"), 2.0, "small"):
        with pytest.raises(ValueError, match="epsilon="):
            AdaGrad(wrong)  # type: ignore[arg-type]


def test_exchanges() -> None:
    assert exchange_with(None, AllGather()) == AllGather()
    given = [checked_exchange(name) for name in EXCHANGES]
    assert [exchange_with(AdaGrad(), e) for e in given] == [TwoPhase(), Hierarchical(), TwoPhase()]
    with pytest.raises(UnsupportedError, match=r"AdaGrad\(epsilon=1e-08\).*use exchange='two_phase'"):
        exchange_with(AdaGrad(), AllGather())
    with pytest.raises(TypeError, match=r"adagrad=True: give an AdaGrad"):
        exchange_with(True, TwoPhase())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="allgather"):
        Loopback(2, OneBit(), "allgather", adagrad=AdaGrad())
