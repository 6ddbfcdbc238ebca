"""The parts of Keras' CompressedAdam that know no ranks, against those of the torch form."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from hvd_compress import FP16, Hierarchical, NoCompression, OneBit, ParameterServer, Policy, PowerSGD, TopK
from hvd_compress._keras.adam_config import compression_of, exchange_of, saved_compression
from hvd_compress._keras.arithmetic import Arithmetic
from hvd_compress._keras.moments import Betas, Moments
from hvd_compress._torch import moments as of_torch
from hvd_compress.compressors.registry import COMPRESSORS
from hvd_compress.engine import resolved
from hvd_compress.engine.momentum import check_betas, check_option, is_renewed, refuse_auto, take_own
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import EXCHANGES
from hvd_compress.policy import Auto

BETAS = Betas(0.8, 0.99, 1e-6)


class Plain(Arithmetic):
    """In NumPy; of the abstract methods, those that moments need do something."""

    def root(self, value: Any) -> Any:
        return np.sqrt(value)

    def clipped(self, value: Any, bound: float) -> Any:
        return np.clip(value, -bound, bound)

    def where(self, flag: Any, one: Any, other: Any) -> Any:
        return np.where(flag, one, other)

    def nothing(self, like: Any) -> Any:
        return np.zeros_like(like)

    def spoiled(self, value: Any) -> Any:
        return 0.0 if np.isfinite(value).all() else np.nan

    def correction(self, beta: float, steps: Any, like: Any) -> Any:
        return 1.0 - beta ** int(steps)


Plain.__abstractmethods__ = frozenset()  # type: ignore[misc]


def gradient(step: int, dtype: Any) -> np.ndarray:
    g = np.random.default_rng(step).normal(size=60).astype(dtype)
    # no variance in the warm-up, and some of these not later either
    g[40:] = 0.0 if step < 4 else g[40:]
    g[50:] = 0.0
    return g


def state_of(m: of_torch.Moments) -> list[np.ndarray]:
    return [m.momentum.numpy(), m.variance.numpy()]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_moments_are_those_of_the_torch_form(dtype: Any, is_frozen: bool) -> None:
    zeros = np.zeros(60, dtype)
    mine = Moments(Plain(), BETAS, zeros, zeros, 0)
    group = {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0}
    state = {"step": 0, "variance_steps": 0, "exp_avg": torch.from_numpy(zeros.copy())}
    theirs = of_torch.Moments(torch.ones(60), group, {**state, "exp_avg_sq": torch.from_numpy(zeros.copy())})
    close = {"rtol": 1e-6 if dtype == np.float32 else 1e-14, "atol": 1e-7 if dtype == np.float32 else 1e-15}
    for step in range(4):
        mine = mine.with_gradient(gradient(step, dtype))
        theirs.take_gradient(torch.from_numpy(gradient(step, dtype)), is_frozen=False)
    for step in range(4, 9):
        unseen = theirs.variance == 0
        assert (np.asarray(mine.unseen()) == unseen.numpy()).all()
        sent = of_torch.direction(theirs, torch.from_numpy(gradient(step, dtype) * 50), unseen).numpy()
        np.testing.assert_allclose(mine.direction(gradient(step, dtype) * 50), sent, **close)
        assert (sent[unseen.numpy()] == 0).all()
        g = gradient(step, dtype)
        mine = mine.with_late_gradient(g) if is_frozen else mine.with_gradient(g)
        theirs.take_gradient(torch.from_numpy(g), is_frozen=is_frozen)
        for found, expected in zip((mine.momentum, mine.variance), state_of(theirs), strict=True):
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected, **close)
        np.testing.assert_allclose(mine.scale(), theirs.scale().numpy(), **close)
        assert mine.seen == theirs.state["variance_steps"]
    assert (mine.variance[50:] == 0).all()
    assert (mine.variance[:50] > 0).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_neither_bound_nor_mask_hides_what_is_not_finite(bad: float) -> None:
    m = Moments(Plain(), BETAS, np.zeros(4), np.zeros(4), 0).with_gradient(np.array([1.0, 0.0, 1.0, 1.0]))
    for place in range(4):
        g = np.ones(4)
        g[place] = bad
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(m.direction(g)).any()
    assert np.isfinite(m.direction(np.ones(4))).all()


GIVEN = [
    *(kind() for name, kind in COMPRESSORS.items() if name != "threshold"),
    PowerSGD(rank=3),
    Policy({"first*": TopK(0.1), "*bias": OneBit(sample=100)}, "none"),
]


@pytest.mark.parametrize("compression", GIVEN, ids=lambda c: c.get_config()["id"])
def test_a_configuration_brings_back_the_compression(compression: Any) -> None:
    assert compression_of(json.loads(json.dumps(saved_compression(compression)))) == compression
    assert compression_of(compression) is compression


@pytest.mark.parametrize("compression", [NoCompression(), FP16()], ids=repr)
def test_what_a_parameter_server_makes_of_a_compression_is_not_saved(compression: Any) -> None:
    made = resolved(compression, "parameter_server")
    assert compression_of(json.loads(json.dumps(saved_compression(made)))) == compression


@pytest.mark.parametrize(
    "exchange", [*EXCHANGES.values(), ParameterServer(root=1), Hierarchical(inside=OneBit())], ids=repr
)
def test_a_configuration_brings_back_the_exchange(exchange: Any) -> None:
    assert exchange_of(json.loads(json.dumps(exchange.get_config()))) == exchange
    assert exchange_of("auto") == "auto"


def test_what_no_configuration_can_hold_is_refused() -> None:
    class Horovods:
        pass

    with pytest.raises(UnsupportedError, match="no settings to save"):
        saved_compression(Horovods())
    with pytest.raises(ValueError, match="must be imported first"):
        exchange_of({"id": "star"})


@pytest.mark.parametrize(("value", "below"), list(itertools.product([-1e-9, float("nan"), float("inf")], [None, 1.0])))
def test_an_option_out_of_its_range_is_refused(value: float, below: float | None) -> None:
    with pytest.raises(ValueError, match=r"Kind\(lr=.*must be .* at least 0"):
        check_option("Kind", "lr", value, 0.0, below)
    check_option("Kind", "lr", 0.0, 0.0, below)


def test_other_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="beta_2=1"):
        check_betas("Kind", beta_1=0.9, beta_2=1)
    with pytest.raises(ValueError, match='"frozen" or "renewed"'):
        is_renewed("Kind", True)
    assert is_renewed("Kind", "renewed")
    assert not is_renewed("Kind", "frozen")
    for auto in (Auto(), "auto"):
        with pytest.raises(UnsupportedError, match="Give a compressor"):
            refuse_auto("Kind", auto)
    refuse_auto("Kind", "onebit")


def test_what_a_rank_keeps_is_taken_out_of_a_state() -> None:
    entry = {"shape": [2, 3], "values": np.arange(6, dtype=np.float32)}
    residuals = {"late gradients of w": entry, "w": entry}
    found = take_own(residuals, "late gradients of w", (2, 3), "float64")
    assert found is not None
    assert found.dtype == np.float64
    assert list(residuals) == ["w"]
    assert take_own(residuals, "late gradients of w", (2, 3), "float32") is None
    with pytest.raises(StateError, match=r"shape \(2, 3\): must be \(3, 2\)"):
        take_own({"x": entry}, "x", (3, 2), "float32")
