"""Debts on the torch edge: added to gradients that go uncompressed, once, and kept until a step has been finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_compress import OneBit
from hvd_compress.engine import Routing

torch = pytest.importorskip("torch")
engine = pytest.importorskip("hvd_compress.torch._engine")

SHAPE = (20, 30)
DEBT = np.arange(600, dtype=np.float32)


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # the tests look between the stages
    monkeypatch.setenv("HVD_COMPRESS_WORKER", "0")


def made(min_numel: int = 100, compressor: Any = None, dtype: Any = torch.float32) -> Any:
    """An engine of rank 0 of 2 that owes DEBT of "w", which goes dense unless it is compressed or packed."""
    ranks: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    tensors = [("w", torch.zeros(SHAPE, dtype=dtype)), ("large", torch.zeros(50, 50))]
    it = engine.Engine(Routing(compressor, "two_phase", min_numel), 1.0, ranks, tensors, pays_debts=True)
    entry = {"shape": list(SHAPE), "values": torch.from_numpy(DEBT.copy())}
    state = {**it.state_dict(), "residuals": {"w": entry}}
    it.load_state_dict(state)
    return it


def test_a_debt_is_paid_once() -> None:
    it = made()
    gradient = torch.ones(SHAPE)
    assert it.with_debt("w", gradient) is gradient
    np.testing.assert_array_equal(gradient.numpy().reshape(-1), DEBT + 1)
    other = torch.ones(7)
    assert it.with_debt("other", other) is other
    it.settle(keep=True)
    assert not it.owes
    assert torch.equal(it.with_debt("w", torch.ones(SHAPE)), torch.ones(SHAPE))


def test_a_debt_is_kept_when_the_step_is_not_finite() -> None:
    it = made()
    it.with_debt("w", torch.ones(SHAPE))
    it.settle(keep=False)
    assert it.state_dict()["residuals"]["w"]["values"].tolist() == DEBT.tolist()
    it.with_debt("w", torch.ones(SHAPE))
    it.settle(keep=True)
    assert it.state_dict()["residuals"] == {}


def test_a_debt_is_kept_when_the_step_is_forgotten() -> None:
    it = made()
    it.with_debt("w", torch.ones(SHAPE))
    it.abandon()
    it.settle(keep=True)  # of a step in which "w" went nowhere
    assert it.owes
    gradient = it.with_debt("w", torch.zeros(SHAPE))
    np.testing.assert_array_equal(gradient.numpy().reshape(-1), DEBT)
    it.settle(keep=True)
    assert not it.owes


def test_a_debt_is_in_units_of_the_loss_scale() -> None:
    it = made()
    it.set_loss_scale(4.0)
    np.testing.assert_array_equal(it.with_debt("w", torch.zeros(SHAPE)).numpy().reshape(-1), 4 * DEBT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_debt_has_the_type_of_the_gradient(dtype: Any) -> None:
    it = made(dtype=dtype)
    gradient = it.with_debt("w", torch.zeros(SHAPE, dtype=dtype))
    assert gradient.dtype == dtype
    assert torch.equal(gradient, torch.from_numpy(DEBT).view(SHAPE).to(dtype))


def test_a_debt_of_a_sparse_gradient_keeps_it_sparse() -> None:
    it = made()
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 30), SHAPE, check_invariants=True)
    with_debt = it.with_debt("w", gradient)
    assert with_debt.is_sparse
    assert with_debt.sparse_dim() == 1
    expected = torch.from_numpy(DEBT).view(SHAPE).clone()
    expected[[1, 3]] += 1
    assert torch.equal(with_debt.to_dense(), expected)


def test_strides_do_not_matter() -> None:
    it = made()
    gradient = torch.zeros(30, 20).t()
    it.with_debt("w", gradient)
    assert torch.equal(gradient, torch.from_numpy(DEBT).view(SHAPE))


def test_a_debt_of_a_small_tensor_travels_in_its_pack() -> None:
    # saved when it was compressed, loaded where it is too small for that
    it = made(min_numel=1000, compressor=OneBit())
    assert it.packs.keys() == {"w"}
    gradient = torch.ones(SHAPE)
    it.start("w", gradient)  # the bucket waits for "large", so nothing is sent yet
    taken = it.bucket_of("w").take_together()
    np.testing.assert_array_equal(taken["w"], DEBT + 1)
    it.settle(keep=True)
    assert not it.debts


def gradients(dtype: Any = torch.float32) -> dict[str, Any]:
    return {
        name: torch.randn(64, 70, generator=torch.Generator().manual_seed(i)).to(dtype) for i, name in enumerate("abc")
    }


def started(given: dict[str, Any], order: str) -> tuple[Any, list[bytes]]:
    """An engine of rank 0 of 2 after all gradients but the last have been given, and what it sends after the last."""
    ranks: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    it = engine.Engine(Routing(OneBit(), "two_phase", 100), 1.0, ranks, given.items())
    sent: list[bytes] = []
    (bucket,) = it.buckets
    bucket._issue = lambda _, parcel: sent.append(parcel.buffer.tobytes())
    for name in order:
        assert not sent
        it.start(name, given[name])
    return it, sent


def test_gradients_that_wait_are_taken_together_in_any_order() -> None:
    it, sent = started(gradients(), "abc")
    assert it.buckets[0]._own.keys() == gradients().keys()
    for order in ("cba", "bac"):
        assert started(gradients(), order)[1] == sent
    assert len(sent) == 1


def test_gradients_of_other_types_are_taken_as_they_come() -> None:
    wide = {name: gradient.double() if name == "b" else gradient for name, gradient in gradients().items()}
    it, sent = started(wide, "abc")
    assert it.lanes["b"].residual.dtype == np.float64
    for order in ("cba", "bac", "acb"):
        assert started({n: g.double() if n == "b" else g for n, g in gradients().items()}, order)[1] == sent
    assert len(sent) == 1


def test_what_waits_is_forgotten_with_the_step() -> None:
    given = gradients()
    it, sent = started(given, "ab")
    it.abandon()
    for name, gradient in gradients().items():
        it.start(name, gradient)
    assert sent == started(gradients(), "abc")[1]


def test_what_waits_is_taken_after_a_step_in_which_all_were_left_out() -> None:
    it, sent = started(gradients(), "")
    for _ in range(2):
        for name in "abc":
            it.start(name, None)
    assert it.combine(it.wait()) == {}
    for name, gradient in gradients().items():
        it.start(name, gradient)
    assert sent == started(gradients(), "abc")[1]


def test_what_goes_dense_leaves_no_work_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing would ever drain it
    monkeypatch.setenv("HVD_COMPRESS_WORKER", "1")
    it = made()
    assert not it.buckets
    for _ in range(5):
        it.progress()
    assert not it._worker._given
