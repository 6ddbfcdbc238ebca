"""The ledger of one rank, with stages joined by hand: what is owed when the compressor changes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_compress import FP16, Adaptive, NoCompression, OneBit, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.engine import (
    Lane,
    Ledger,
    average_share,
    check_settings,
    empty_state,
    exchanged,
    horovod_compressor,
    names_of_call,
    op_of_call,
    refuse_other_ops,
    refuse_residuals,
)
from hvd_compress.errors import StateError, UnsupportedError

TENSORS = [("w", (40, 50), 4), ("b", (50,), 4)]
RANKS = 2


def ledgers(compressor: Compressor | None, min_numel: int = 100) -> list[Ledger[Lane]]:
    return [Ledger(compressor, "two_phase", min_numel, RANKS, rank, TENSORS, Lane) for rank in range(RANKS)]


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(2000).astype(np.float32)


def step(of_all: list[Ledger[Lane]], number: int, keep: bool = True) -> list[np.ndarray]:
    """One exchange of "w": the sums that the ranks get."""
    lanes = [ledger.lanes["w"] for ledger in of_all]
    parcels = [lane.encode(gradient(rank, number)) for rank, lane in enumerate(lanes)]
    slot = lanes[0].plan.slot
    sums = []
    for rank, lane in enumerate(lanes):
        sums.append(lane.reduce(np.concatenate([p.buffer[rank * slot : (rank + 1) * slot] for p in parcels])).buffer)
    everything = np.concatenate(sums)
    for lane in lanes:
        assert lane.arrive(everything)
    results = [lane.finish(keep, 1.0, 8000).copy() for lane in lanes]
    for ledger in of_all:
        ledger.count_step()
    return results


def owed(of_all: list[Ledger[Lane]]) -> np.ndarray:
    total = np.zeros(2000)
    for ledger in of_all:
        lane = ledger.lanes["w"]
        if lane.residual is not None:
            total += lane.residual
        part = lane.transfer.owner_residual
        if part is not None:
            start = lane.plan.bounds[lane.transfer.position]
            total[start : start + part.size] += part
    return total


def test_routes_follow_the_size_of_a_tensor() -> None:
    ledger = ledgers(OneBit())[0]
    assert ledger.is_used
    assert ledger.compresses("w")
    assert not ledger.compresses("b")
    assert not ledgers(None)[0].is_used


@pytest.mark.parametrize("after", [Adaptive(pi=4), TopK(0.1), OneBit(group="tensor")])
def test_another_compressor_inherits_what_is_owed(after: Compressor) -> None:
    before, now = ledgers(OneBit()), ledgers(after)
    for number in range(3):
        step(before, number)
    debt = owed(before)
    for old, new in zip(before, now, strict=True):
        new.inherit(old)
    np.testing.assert_allclose(owed(now), debt, atol=1e-4)
    # nothing is lost in the next step either: gradients + debt = results + debt
    results = step(now, 3)
    given = gradient(0, 3).astype(np.float64) + gradient(1, 3) + debt
    np.testing.assert_allclose(results[0] + owed(now), given, atol=1e-3)
    assert now[0].stats()["total"]["steps"] == 4
    assert now[0].stats()["tensors"]["w"]["steps"] == 4


@pytest.mark.parametrize("after", [None, TopK(0.1, error_feedback=False)])
def test_what_is_owed_is_not_dropped(after: Compressor | None) -> None:
    before, now = ledgers(OneBit()), ledgers(after)
    step(before, 0)
    with pytest.raises(UnsupportedError, match=r"of 'w', of which .* is still owed"):
        now[0].inherit(before[0])


def test_from_dense_to_compressed_keeps_the_counters() -> None:
    before, now = ledgers(None)[0], ledgers(OneBit())[0]
    before.count_dense("w", 8000, 8000)
    before.count_step()
    now.inherit(before)
    assert now.stats()["tensors"]["w"]["bytes_sent"] == 8000
    assert now.stats()["total"]["steps"] == 1


def test_a_step_that_is_taken_back_leaves_no_trace_in_the_residuals() -> None:
    of_all = ledgers(OneBit())
    step(of_all, 0)
    debt = owed(of_all)
    step(of_all, 1, keep=False)
    assert owed(of_all).tobytes() == debt.tobytes()


def test_a_changed_loss_scale_converts_the_residuals() -> None:
    of_all = ledgers(OneBit())
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
    assert again[0].lanes["w"].residual.tobytes() == of_all[0].lanes["w"].residual.tobytes()
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
        horovod_compressor("onebit", "none", "dense")


def test_settings_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {
        "compression": OneBit(), "exchange": "auto", "min_numel": 0, "averages": True,
        "gradient_predivide_factor": 1.0, "backward_passes_per_step": 1, "groups": None, "rocm": False,
    }  # fmt: skip
    check_settings(**good)
    for wrong in (
        {"exchange": "ring"},
        {"min_numel": -1},
        {"min_numel": 1.5},
        {"gradient_predivide_factor": 2.0, "averages": False},
        {"gradient_predivide_factor": 2.0, "rocm": True},
        {"backward_passes_per_step": 0},
        {"groups": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            check_settings(**{**good, **wrong})
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    check_settings(**{**good, "compression": NoCompression()})
    with pytest.raises(UnsupportedError, match="elastic"):
        check_settings(**good)


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


def test_names_of_a_call() -> None:
    assert names_of_call("g", 1) == ["g"]
    assert names_of_call("g", 2) == ["g.0", "g.1"]
    first, second = names_of_call(None, 1) + names_of_call(None, 1)
    assert first != second
