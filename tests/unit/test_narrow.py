"""Residuals in 8 bits: what rounding them costs, what it does not, and that all else is as with floats."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import (
    BF16,
    Adaptive,
    Blockwise,
    Key,
    NoCompression,
    OneBit,
    Policy,
    RandomK,
    Threshold,
    TopK,
    from_config,
)
from hvd_compress.async_server.settings import AsyncServerSettings
from hvd_compress.averaging import Nodes
from hvd_compress.daso import DasoMember, DasoSettings
from hvd_compress.engine import Ledger, Routing, Tensor
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Account, Bucket, TwoPhase, account_of, narrow_account, plan_together
from hvd_compress.exchange.narrow_account import NarrowAccount
from hvd_compress.kernels import narrow
from hvd_compress.loopback import Loopback
from hvd_compress.schedules import DasoSchedule
from hvd_compress.tensors import ParameterSpec
from tests.thorough import witnessed_by
from tests.threads import World

WORDS = Key(name="w").words()


def packed(x: np.ndarray, words=WORDS) -> tuple[np.ndarray, np.ndarray]:
    exponents = np.full(-(-x.size // narrow.BLOCK), 99, np.int16)
    codes = np.full(x.size, 99, np.uint8)
    narrow.pack(x, *narrow.exponents_of(x.dtype), *words, exponents, codes)
    return exponents, codes


def unpacked(exponents: np.ndarray, codes: np.ndarray, dtype: type) -> np.ndarray:
    out = np.full(codes.size, 7, dtype)
    narrow.unpack(exponents, codes, out)
    return out


def step_of(x: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The distance of the floats with 3 bits of mantissa around each value, in its block."""
    size = np.repeat(np.ldexp(1.0, exponents.astype(int)), narrow.BLOCK)[: x.size]
    magnitude = np.abs(x.astype(np.float64)) / size
    binade = 2.0 ** np.floor(np.log2(np.maximum(magnitude, 2.0**-14)))
    return binade / 8 * size


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("size", [1.0, 1e-44, 1e-36, 3e38], ids=str)
@pytest.mark.parametrize("power", [1, 9])
def test_values_are_rounded_once_to_one_of_the_two_floats_around_them(dtype, numel: int, size: float, power) -> None:
    x = (np.random.default_rng(numel).uniform(-1, 1, numel) ** power * size).astype(dtype)
    exponents, codes = packed(x)
    kept = unpacked(exponents, codes, dtype)
    assert np.isfinite(kept).all()
    assert (np.abs(kept.astype(np.float64) - x) < step_of(x, exponents) * (1 + 1e-6)).all()
    assert (np.sign(kept) * np.sign(x) >= 0).all()
    # whatever is drawn, what was kept once is kept again
    for seed in range(20):
        again = packed(kept, Key(seed=seed).words())
        assert unpacked(*again, dtype).tobytes() == kept.tobytes()


def test_all_floats_of_8_bits_are_kept_as_they_are() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for exponent in (-132, -20, 0, 126):
        x = unpacked(np.array([exponent], np.int16), codes, np.float32)
        assert len(set(x.tolist())) == 255  # zero has two signs
        assert np.abs(x).max() == np.ldexp(1.875, exponent)
        kept = unpacked(*packed(x), np.float32)
        np.testing.assert_array_equal(kept, x)


def test_rounding_is_right_on_average() -> None:
    x = np.linspace(-1, 1, 256, dtype=np.float32) ** 9
    exponents, _ = packed(x)
    kept = np.array([unpacked(*packed(x, Key(seed=seed).words()), np.float32) for seed in range(2000)], np.float64)
    # the standard deviation of a mean of 2000 is at most 0.5 / sqrt(2000) of a step
    assert (np.abs(kept.mean(axis=0) - x) / step_of(x, exponents)).max() < 5 * 0.5 / 2000**0.5
    assert len({row.tobytes() for row in kept}) > 1000


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_floats_stay_finite(dtype: type) -> None:
    x = np.full(300, np.finfo(dtype).max, dtype)
    kept = unpacked(*packed(x), dtype)
    assert np.isfinite(kept).all()
    assert (kept > 0.9 * x).all()


def test_a_large_table_leaves_no_room_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_account, "_MOST_KEPT", 20_000)
    for numel, kept in ((1000, True), (100_000, False)):
        plan = plan_together(TwoPhase(), {"w": ((numel,), COMPRESSORS[2])}, 1)["w"]
        one_step(Bucket({"w": account_of("w", plan, COMPRESSORS[2], 0)}), {"w": np.ones(numel, np.float32)})
        assert bool(narrow_account.ROOM._bytes.size) == kept


def test_zeros_stay_zeros() -> None:
    exponents, codes = packed(np.zeros(300, np.float32))
    assert not codes.any()
    assert not unpacked(exponents, codes, np.float32).any()


COMPRESSORS = [
    OneBit(error_feedback="float8"),
    Adaptive(8, error_feedback="float8"),
    TopK(0.05, error_feedback="float8"),
    TopK(0.05, coding="golomb", error_feedback="float8"),
    TopK(chunk=256, ratio=1 / 16, value_bits=2, error_feedback="float8"),
    Threshold(0.5, error_feedback="float8"),
    RandomK(0.05, error_feedback="float8"),
    Blockwise(bits=4, error_feedback="float8"),
]


@pytest.mark.parametrize("compressor", witnessed_by([*COMPRESSORS[::2], COMPRESSORS[-1]], COMPRESSORS), ids=repr)
@pytest.mark.parametrize("exchange", witnessed_by(["two_phase"], ["two_phase", "allgather", "hierarchical"]))
def test_what_is_left_out_comes_later(compressor, exchange: str) -> None:
    """After many steps of one gradient, what has come is that many of it, but for what is owed and a random walk."""
    ranks, steps = 4, 200
    hosts = {"ranks_per_host": 2} if exchange == "hierarchical" else {}
    loopback = Loopback(ranks, compressor, exchange=exchange, **hosts)
    grads = [np.random.default_rng(rank).normal(size=(40, 64)).astype(np.float32) for rank in range(ranks)]
    came = np.zeros((40, 64))
    for _ in range(steps):
        came += loopback.allreduce(grads, name="w")[0].astype(np.float64)
    mean = np.mean(grads, axis=0, dtype=np.float64)
    floats = Loopback(ranks, compressor(**{**settings(compressor), "error_feedback": True}), exchange, **hosts)
    expected = np.zeros((40, 64))
    for _ in range(steps):
        expected += floats.allreduce(grads, name="w")[0].astype(np.float64)
    # with float residuals the error is what is owed; 8 bits add some, and not more each step
    error, usual = np.abs(came / steps - mean).mean(), np.abs(expected / steps - mean).mean()
    assert error < 3 * usual + 0.02, (error, usual)


def settings(compressor) -> dict:
    config = compressor.get_config()
    del config["id"]
    return config


def bucket_of(kind: type[Account] | None = None, compressor=COMPRESSORS[0]) -> Bucket:
    plans = plan_together(TwoPhase(), {"w": ((40, 64), compressor), "v": ((3000,), compressor)}, 1)
    make = account_of if kind is None else kind
    return Bucket({name: make(name, plan, compressor, 0) for name, plan in plans.items()})


def sent(parcel) -> np.ndarray:
    return parcel.buffer if parcel.sizes is None else parcel.buffer[: sum(parcel.sizes)]


def one_step(bucket: Bucket, gradients: dict[str, np.ndarray], keep: bool = True) -> None:
    for name, gradient in gradients.items():
        bucket.give(name, gradient.copy())
    parcel = bucket.parcel()
    for collective in bucket.collectives[:-1]:
        parcel = bucket.advance(collective, sent(parcel))
    bucket.arrive(sent(parcel))
    bucket.finish(keep=keep, scale=1.0)


def gradients_of(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    return {"w": draw.normal(size=2560).astype(np.float32), "v": draw.normal(size=3000).astype(np.float32)}


def test_between_steps_a_residual_takes_a_byte_for_each_element() -> None:
    bucket = bucket_of()
    one_step(bucket, gradients_of(0))
    for account in bucket.accounts.values():
        assert isinstance(account, NarrowAccount)
        for narrowed in (account._now[False], account._now[True]):
            numel = account.plan.numel
            assert narrowed.codes.nbytes + narrowed.exponents.nbytes <= numel + 2 * (numel // 256 + 1)
        assert not any(isinstance(value, np.ndarray) for value in vars(account).values())
    assert type(next(iter(bucket_of(compressor=OneBit()).accounts.values()))) is Account


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_a_step_taken_back_restores_residuals_to_the_bit(compressor) -> None:
    """Also where its gradients were far larger than what is owed: rounded with them, nothing would be left of that."""
    bucket = bucket_of(compressor=compressor)
    for step in range(3):
        one_step(bucket, gradients_of(step))
    before = {name: (a.residual, a.owner_residual) for name, a in bucket.accounts.items()}
    one_step(bucket, {name: 1e6 * gradient for name, gradient in gradients_of(3).items()}, keep=False)
    for name, account in bucket.accounts.items():
        was, owner_was = before[name]
        assert was.any()
        assert np.array_equal(account.residual, was)
        assert np.array_equal(account.owner_residual, owner_was)
        assert not account._before


def test_a_gradient_that_is_lost_stays_owed() -> None:
    bucket = bucket_of()
    one_step(bucket, gradients_of(0))
    before = bucket.accounts["w"].residual
    for name, gradient in gradients_of(1).items():
        bucket.give(name, gradient.copy())
    bucket.lose_gradient("w")
    bucket.arrive(bucket.advance("alltoall", bucket.parcel().buffer).buffer)
    bucket.finish(keep=False, scale=1.0)
    owed, expected = bucket.accounts["w"].residual, before + gradients_of(1)["w"]
    assert np.abs(owed - expected).mean() < 0.1 * np.abs(expected).mean()


def test_a_value_that_is_not_finite_changes_no_residual() -> None:
    bucket = bucket_of()
    one_step(bucket, gradients_of(0))
    before = {name: a.residual for name, a in bucket.accounts.items()}
    bad = gradients_of(1)
    bad["w"][:] = np.nan
    one_step(bucket, bad, keep=False)
    assert bucket.accounts["w"].residual.tobytes() == before["w"].tobytes()


def ledger() -> Ledger:
    routing = Routing(COMPRESSORS[0], TwoPhase(), 0, 2**20)
    tensors = [Tensor("w", (64, 512)), Tensor("v", (30, 100))]
    return Ledger(routing, 2, 0, tensors, lambda accounts, pack: Kept(accounts))


class Kept:
    def __init__(self, accounts: dict[str, Account]) -> None:
        self.tensors = list(accounts)

    def abandon(self) -> None:
        pass

    def settle_counts(self) -> None:
        pass


def owed_of(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {"w": draw.normal(size=64 * 512).astype(np.float32), "v": draw.normal(size=3000).astype(np.float32)}


def test_a_state_brings_back_every_bit() -> None:
    first, second = ledger(), ledger()
    for name, gradient in owed_of(5).items():
        first.accounts[name].residual = gradient
        owned = first.accounts[name].owned
        first.accounts[name].owner_residual = None if owned is None else gradient[owned]
    state = first.state_dict()
    second.load_state_dict(state)
    for name, account in first.accounts.items():
        other = second.accounts[name]
        assert other._now[False].codes.tobytes() == account._now[False].codes.tobytes() or (
            other.residual.tobytes() == account.residual.tobytes()
        )
        assert np.array_equal(other.owner_residual, account.owner_residual)
    assert second.accounts["w"].owner_residual.any()


def test_a_loss_scale_multiplies_what_is_owed() -> None:
    books = ledger()
    books.accounts["w"].residual = owed_of(1)["w"]
    before = books.accounts["w"].residual
    books.set_loss_scale(4.0)
    assert np.array_equal(books.accounts["w"].residual, 4 * before)
    assert books.accounts["w"].residual_norm() == pytest.approx(4 * float(np.linalg.norm(before)), rel=1e-6)


def test_a_residual_in_8_bits_becomes_one_of_floats_and_back() -> None:
    plan = plan_together(TwoPhase(), {"w": ((40, 64), OneBit())}, 2)["w"]
    floats, narrowed = Account("w", plan, OneBit(), 0), account_of("w", plan, COMPRESSORS[0], 0)
    floats.residual = gradients_of(2)["w"]
    narrowed.inherit(floats)
    assert np.abs(narrowed.residual / gradients_of(2)["w"] - 1).max() <= 1 / 8 + 1e-6
    again = Account("w", plan, OneBit(), 0)
    again.inherit(narrowed)
    assert np.array_equal(again.residual, narrowed.residual)


@pytest.mark.parametrize("form", ["sharded", "rotate"])
def test_nodes_that_average_parameters_keep_8_bits_too(form: str) -> None:
    tensors = [ParameterSpec("w", (40, 64))]
    schedule = DasoSchedule(global_skips=1, batches_to_wait=0, patience=None)
    chosen = DasoSettings(schedule, form, compression=TopK(0.1, error_feedback="float8"))

    def program(groups):
        member = DasoMember(tensors, chosen, groups)
        arrays = [np.random.default_rng(0).normal(size=2560).astype(np.float32)]
        for step in range(60):
            if step < 10:
                arrays[0] += np.random.default_rng([step, groups.nodes.node_of(groups.rank)]).normal(size=2560) * 0.1
            member.act(member.batch(), arrays)
        return arrays[0]

    results = World().run(Nodes.of_equal(4, 2), program)
    for x in results[1:]:
        np.testing.assert_array_equal(x, results[0])
    expected = np.random.default_rng(0).normal(size=2560) + sum(
        0.05 * np.random.default_rng([step, node]).normal(size=2560) for step in range(10) for node in range(2)
    )
    assert np.abs(results[0] - expected).mean() < 0.02


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_settings_go_through_a_configuration(compressor) -> None:
    assert from_config(compressor.get_config()) == compressor
    assert compressor.feedback
    assert compressor.has_narrow_residuals
    assert not type(compressor)(**{**settings(compressor), "error_feedback": True}).has_narrow_residuals
    assert OneBit(error_feedback=np.str_("float8")).get_config()["error_feedback"] == "float8"


@pytest.mark.parametrize("wrong", ["int8", "8", 8, None, 1, np.array("float8")])
def test_other_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="error_feedback must be True, False or 'float8'"):
        OneBit(error_feedback=wrong)


def test_one_whose_residuals_are_smaller_than_its_rounding_has_none() -> None:
    with pytest.raises(ValueError, match="error_feedback must be True or False"):
        BF16(error_feedback="float8")


def test_the_asynchronous_server_has_none() -> None:
    for compression in (OneBit(error_feedback="float8"), Policy([("w", OneBit(error_feedback="float8"))])):
        with pytest.raises(UnsupportedError, match="Use error_feedback=True"):
            AsyncServerSettings(compression=compression)
    with pytest.raises(UnsupportedError, match="answers have none"):
        AsyncServerSettings(answer=OneBit(error_feedback="float8"))
    AsyncServerSettings(compression=NoCompression())


def test_dgc_has_none() -> None:
    torch = pytest.importorskip("torch")
    from hvd_compress.torch import DGC

    with pytest.raises(UnsupportedError, match="in 8 bits small values may become nothing"):
        DGC([torch.nn.Parameter(torch.zeros(3))], lr=0.1, compression=TopK(0.1, error_feedback="float8"))
