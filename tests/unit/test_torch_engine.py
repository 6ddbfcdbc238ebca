"""Debts on the torch edge: added to gradients that go uncompressed, once, and kept until a step has been finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_compress import OneBit
from hvd_compress.engine import Routing
from hvd_compress.exchange import AllGather, TwoPhase
from tests.close import check_taken_back

torch = pytest.importorskip("torch")
engine = pytest.importorskip("hvd_compress.torch._gradients.engine")

SHAPE = (20, 30)
DEBT = np.arange(600, dtype=np.float32)


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # the tests look between the stages
    monkeypatch.setenv("HVD_COMPRESS_KERNEL_THREAD", "0")


def made(min_numel: int = 100, compressor: Any = None, dtype: Any = torch.float32) -> Any:
    """An engine of rank 0 of 2 that owes DEBT of "w", which goes dense unless it is compressed or packed."""
    ranks: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, process_set_id=0)
    tensors = [("w", torch.zeros(SHAPE, dtype=dtype)), ("large", torch.zeros(50, 50))]
    it = engine.Engine(Routing(compressor, TwoPhase(), min_numel), 1.0, ranks, tensors, pays_debts=True)
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
    (shipment,) = it.buckets
    shipment._issue = lambda *_: None
    it.start("w", gradient)
    it.start("large", torch.zeros(50, 50))
    np.testing.assert_array_equal(it.packs["w"].part("w"), DEBT + 1)
    it.settle(keep=True)
    assert not it.debts


def gradients(dtype: Any = torch.float32) -> dict[str, Any]:
    return {
        name: torch.randn(64, 70, generator=torch.Generator().manual_seed(i)).to(dtype) for i, name in enumerate("abc")
    }


def started(given: dict[str, Any], order: str) -> tuple[Any, list[bytes]]:
    """An engine of rank 0 of 2 after all gradients but the last have been given, and what it sends after the last."""
    ranks: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, process_set_id=0)
    it = engine.Engine(Routing(OneBit(), TwoPhase(), 100), 1.0, ranks, given.items())
    sent: list[bytes] = []
    (bucket,) = it.buckets
    bucket._issue = lambda _: sent.append(bucket.bucket.parcel().buffer.tobytes())
    for name in order:
        assert not sent
        it.start(name, given[name])
    return it, sent


def test_gradients_that_wait_are_taken_together_in_any_order() -> None:
    it, sent = started(gradients(), "abc")
    assert it.buckets[0]._placed.keys() == gradients().keys()
    for order in ("cba", "bac"):
        assert started(gradients(), order)[1] == sent
    assert len(sent) == 1


def combined(given: dict[str, Any], disturb: Any = None, steps: int = 3, keep: bool = True) -> tuple[Any, Any]:
    """The results of the last step on rank 0 of 2, both of which give the same, and the engine of rank 0."""
    ranks: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, process_set_id=0)
    it = engine.Engine(Routing(OneBit(), AllGather(), 100), 1.0, ranks, given.items())
    (bucket,) = it.buckets
    for step in range(steps):
        sent: list[np.ndarray] = []
        bucket._issue = lambda _, bucket=bucket, sent=sent: sent.append(bucket.bucket.parcel().buffer.copy())
        gradients_now = {name: gradient * (step + 1) for name, gradient in given.items()}
        for name, gradient in gradients_now.items():
            it.start(name, gradient)
        if disturb is not None:
            disturb(gradients_now)
        assert bucket.bucket.arrive(np.concatenate(sent * 2))
        results = bucket.combine(keep, 0.5)
    return results, it


def owed(it: Any) -> dict[str, np.ndarray]:
    return {name: account.residual.copy() for name, account in it.accounts.items()}


def test_results_are_written_where_the_gradients_lie() -> None:
    seen: dict[str, Any] = {}
    results, it = combined(gradients(), seen.update)
    for name, gradient in seen.items():
        assert results[name] is gradient
        assert not torch.equal(gradient, gradients()[name] * 3)
    assert all(residual.any() for residual in owed(it).values())


@pytest.mark.parametrize("kind", ["written", "another", "smaller", "none"])
def test_what_becomes_of_a_gradient_meanwhile_does_not_matter(kind: str) -> None:
    def disturb(now: dict[str, Any]) -> None:
        if kind == "written":
            now["b"].fill_(torch.nan)
        elif kind != "none":
            now["b"].data = torch.zeros(64, 70) if kind == "another" else torch.zeros(3)

    expected, undisturbed = combined(gradients())
    results, it = combined(gradients(), disturb)
    for name, result in results.items():
        assert result.shape == (64, 70)
        assert torch.equal(result, expected[name])
        np.testing.assert_array_equal(owed(it)[name], owed(undisturbed)[name])


def test_what_becomes_of_a_gradient_does_not_spoil_a_step_that_is_taken_back() -> None:
    _, it = combined(gradients())
    before = owed(it)
    for name, gradient in gradients().items():
        it.start(name, gradient)
        it._kernel_thread.drain()
        gradient.fill_(torch.nan)
    it.abandon()
    *earlier, last = gradients()
    for name in earlier:
        # it waited for the others, and was encoded when it was no number any more
        check_taken_back(it.accounts[name].residual, before[name], largest=20.0)
    # it was encoded at once, and cannot be subtracted any more: it stays owed
    lost = gradients()[last].numpy().ravel()
    np.testing.assert_allclose(it.accounts[last].residual, before[last] + lost, atol=1e-5)
    results, it = combined(gradients(), keep=False)
    assert all(result.isfinite().all() for result in results.values())
    nothing = {name: np.zeros(64 * 70) for name in gradients()}
    check_taken_back(owed(it), nothing, largest=20.0, times=3)


def test_gradients_of_other_types_are_taken_as_they_come() -> None:
    wide = {name: gradient.double() if name == "b" else gradient for name, gradient in gradients().items()}
    it, sent = started(wide, "abc")
    assert it.accounts["b"].residual.dtype == np.float64
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
    monkeypatch.setenv("HVD_COMPRESS_KERNEL_THREAD", "1")
    it = made()
    assert not it.buckets
    for _ in range(5):
        it.progress()
    assert not it._kernel_thread._given
