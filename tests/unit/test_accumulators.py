"""AdaGrad's accumulators in the ledgers of several ranks: what is saved, and who is given it when things move."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_compress import AdaGrad, Auto, OneBit, ParameterServer, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.engine import Ledger, LedgerAlone, Routing, Tensor, exchange_of, refuse_residuals
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import Bucket, Plan, TwoPhase
from hvd_compress.feedback import check_state, read_state, redistribute, write_state
from tests.close import check_taken_back
from tests.stages import last_message

EPSILON = 1e-3
ADAGRAD, ALL_SENT = AdaGrad(EPSILON), TopK(ratio=1.0)
SHAPES = {"w": (40, 50), "b": (50,), "v": (30, 70), "c": (7, 3), "d": (11,)}
# of another type than what it could travel beside
DENSE = ("d",)


class Always(TwoPhase):
    """Of what sends all of it, too, which is more than there is, and would go dense."""

    id = "always"

    def pays(self, plan: Plan, itemsize: int) -> bool:
        return True


def ledgers(
    ranks: int,
    bucket_bytes: int = 0,
    compressor: Compressor = ALL_SENT,
    adagrad: AdaGrad | None = ADAGRAD,
) -> list[Ledger[Bucket]]:
    routing = Routing(compressor, Always(), 100, bucket_bytes)
    tensors = [Tensor(n, s, *(("float64", 8) if n in DENSE else ())) for n, s in SHAPES.items()]
    return [Ledger(routing, ranks, r, tensors, Bucket, adagrad=adagrad, scale=1 / ranks) for r in range(ranks)]


def gradient(name: str, rank: int, step: int) -> np.ndarray:
    rng = np.random.default_rng([ord(name), rank, step])
    return rng.standard_normal(math.prod(SHAPES[name])).astype(np.float32)


def mean(name: str, step: int, ranks: int) -> np.ndarray:
    return np.mean([gradient(name, rank, step) for rank in range(ranks)], axis=0, dtype=np.float64)


def train(of_all: list[Ledger[Bucket]], number: int, keep: bool = True) -> dict[str, np.ndarray]:
    """One step of all tensors: the results of rank 0."""
    ranks, results = len(of_all), {}
    for buckets in zip(*(ledger.buckets for ledger in of_all), strict=True):
        for rank, bucket in enumerate(buckets):
            for name in bucket.tensors:
                bucket.give(name, gradient(name, rank, number))
        message = last_message(buckets)
        for bucket in buckets:
            assert bucket.arrive(message)
        for bucket in buckets:
            finished = bucket.finish(keep, 1 / ranks)
            results |= {name: finished[name].copy() for name in bucket.accounts}
            results |= {name: bucket.pack.part(name).copy() for name in (bucket.pack.members if bucket.pack else ())}
    for name in SHAPES.keys() - results.keys():
        for ledger in of_all:
            results[name] = mean(name, number, ranks).astype(np.float32)
            assert ledger.precondition(name, results[name])
    for ledger in of_all:
        ledger.settle(keep)
        ledger.count_step()
    return results


def squares(steps: range, ranks: int, name: str) -> np.ndarray:
    return sum(mean(name, step, ranks) ** 2 for step in steps)


def states(of_all: list[Ledger[Bucket]]) -> list[dict[str, Any]]:
    return [ledger.state_dict() for ledger in of_all]


buckets = pytest.mark.parametrize("bucket_bytes", [0, 4 * 2200, 2**20])


@buckets
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_tensors_are_updates_and_states_have_each_element(bucket_bytes: int, ranks: int) -> None:
    of_all = ledgers(ranks, bucket_bytes)
    for number in range(4):
        results = train(of_all, number)
        for name in SHAPES:
            root = np.sqrt(squares(range(number + 1), ranks, name))
            np.testing.assert_allclose(
                results[name], mean(name, number, ranks) / (root + EPSILON), rtol=1e-3, atol=1e-5
            )
    for name in SHAPES:
        found = np.full(math.prod(SHAPES[name]), np.nan)
        for state in states(of_all):
            check_state(state)
            if entry := state["accumulators"].get(name):
                assert tuple(entry["shape"]) == SHAPES[name]
                found[entry["start"] : entry["start"] + entry["values"].size] = entry["values"]
        np.testing.assert_allclose(found, squares(range(4), ranks, name), rtol=1e-4, atol=1e-6)


@buckets
def test_a_step_that_is_taken_back_leaves_no_trace(bucket_bytes: int) -> None:
    of_all, others = ledgers(2, bucket_bytes, OneBit()), ledgers(2, bucket_bytes, OneBit())
    for each in (of_all, others):
        train(each, 0)
    before = copy.deepcopy(states(of_all))
    train(of_all, 1, keep=False)
    for after, was in zip(states(of_all), before, strict=True):
        np.testing.assert_equal(after["accumulators"], was["accumulators"])
        for kind in ("residuals", "owner_residuals"):
            values = ({name: entry["values"] for name, entry in state[kind].items()} for state in (after, was))
            check_taken_back(*values, largest=40.0)


@buckets
@pytest.mark.parametrize("compressor", [OneBit(), TopK(ratio=0.1)])
def test_a_state_goes_on_bit_for_bit(bucket_bytes: int, compressor: Compressor, tmp_path: Path) -> None:
    of_all, others = ledgers(2, bucket_bytes, compressor), ledgers(2, bucket_bytes, compressor)
    for number in range(3):
        train(of_all, number)
    for rank, (ledger, other) in enumerate(zip(of_all, others, strict=True)):
        ledger.set_loss_scale(4.0)
        write_state(tmp_path / f"{rank}.npz", ledger.state_dict())
        other.load_state_dict(read_state(tmp_path / f"{rank}.npz"))
    for number in range(3, 6):
        one, two = train(of_all, number), train(others, number)
        for name in SHAPES:
            assert one[name].tobytes() == two[name].tobytes(), name


@pytest.mark.parametrize("old", [1, 2, 4])
@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 2**20])
@pytest.mark.parametrize("after", [0, 2**20])
def test_other_ranks_and_buckets_are_given_all_that_they_own(old: int, new: int, before: int, after: int) -> None:
    of_all, others = ledgers(old, before, OneBit()), ledgers(new, after, OneBit())
    for number in range(3):
        train(of_all, number)
    saved = states(of_all)
    divided = redistribute(saved, new)
    for state in divided:
        check_state(state)
    for ledger, state in zip(others, divided, strict=True):
        ledger.load_state_dict(state)
    for kind in ("accumulators", "owner_residuals"):
        for name in SHAPES:
            whole = [np.full(math.prod(SHAPES[name]), np.nan) for _ in range(2)]
            for into, of_run in zip(whole, (saved, states(others)), strict=True):
                for state in of_run:
                    if entry := state[kind].get(name):
                        into[entry["start"] : entry["start"] + len(entry["values"])] = entry["values"]
            assert (kind, name in ("w", "v")) != ("owner_residuals", True) or np.isfinite(whole[0]).all()
            np.testing.assert_array_equal(*whole, err_msg=f"{kind} of {name}")
    # residuals of gradients keep their sum, as without AdaGrad
    for name in ("w", "v"):
        owed = [
            sum(state["residuals"][name]["values"] for state in of_run if name in state["residuals"])
            for of_run in (saved, divided)
        ]
        np.testing.assert_allclose(*owed, atol=1e-5)
    train(others, 3)


def test_what_other_ranks_have_is_not_made_up() -> None:
    of_all, others = ledgers(2, 0), ledgers(2, 2**20)
    train(of_all, 0)
    for ledger, state in zip(others, states(of_all), strict=True):
        with pytest.raises(StateError, match=r"accumulators of '[wv]': this rank needs .*redistribute\(states, 2\)"):
            ledger.load_state_dict(state)
    # the first rank owns all of "w" now, the state of the second has none of it
    state = states(of_all)[0]
    del state["accumulators"]["w"]
    with pytest.raises(StateError, match=r"accumulators of 'w': .* its state has 0 to 0"):
        ledgers(2, 0)[0].load_state_dict(state)
    incomplete = states(of_all)
    del incomplete[1]["accumulators"]["w"]
    with pytest.raises(StateError, match=r"no state has the accumulator of 'w' from element 1000 on"):
        redistribute(incomplete, 3)


def test_tensors_without_a_gradient_so_far_begin_anew() -> None:
    of_all, others = ledgers(2), ledgers(2, 2**20)
    for ledger, state in zip(others, redistribute(states(of_all), 2), strict=True):
        ledger.load_state_dict(state)
    train(others, 0)


def test_states_of_other_runs_and_damaged_ones_are_refused() -> None:
    of_all = ledgers(2)
    train(of_all, 0)
    state, plain = of_all[0].state_dict(), ledgers(2, adagrad=None)[0]
    for refuse in (plain.load_state_dict, refuse_residuals):
        with pytest.raises(StateError, match=r"adagrad=AdaGrad\(\)"):
            refuse(state)
    with pytest.raises(StateError, match="some of the states"):
        redistribute([state, {**plain.state_dict(), "rank": 1, "steps": 1}], 2)
    entry = state["accumulators"]["b"]
    for said, wrong in {
        "outside": {**entry, "start": 1},
        "no sums": {**entry, "values": entry["values"] - 100},
        "not finite": {**entry, "values": entry["values"] * np.float32(np.nan)},
        r"shape \(5, 10\): the tensor has \(50,\)": {**entry, "shape": [5, 10]},
    }.items():
        with pytest.raises(StateError, match=said):
            of_all[0].load_state_dict({**state, "accumulators": {"b": wrong}})
    with pytest.raises(StateError, match=r"'x' .*no such tensor"):
        of_all[0].load_state_dict({**state, "accumulators": {"x": entry}})


def test_what_was_owed_before_adagrad_goes_with_the_next_gradients() -> None:
    before, now = ledgers(2, 0, OneBit(), None), ledgers(2, 0, OneBit())
    for number in range(2):
        train(before, number)
    for ledger, other in zip(now, before, strict=True):
        ledger.load_state_dict(other.state_dict())
        assert not ledger.state_dict()["owner_residuals"]
    for name in ("w", "v"):
        owed = sum(state["residuals"][name]["values"] for state in states(before))
        for state in states(before):
            entry = state["owner_residuals"][name]
            owed[entry["start"] : entry["start"] + entry["values"].size] += entry["values"]
        found = sum(state["residuals"][name]["values"] for state in states(now))
        np.testing.assert_allclose(found, owed, atol=1e-5)
    # accumulators begin with this step
    train(now, 2)


def test_a_loss_scale_is_of_gradients_not_of_what_owners_owe() -> None:
    of_all = ledgers(2, 0, OneBit())
    train(of_all, 0)
    before = of_all[0].state_dict()
    of_all[0].set_loss_scale(8.0)
    after = of_all[0].state_dict()
    for name in ("w", "v"):
        np.testing.assert_array_equal(after["residuals"][name]["values"], 8 * before["residuals"][name]["values"])
    for kind in ("owner_residuals", "accumulators"):
        np.testing.assert_equal(after[kind], before[kind])


def test_updates_that_owners_owe_come_through_one_rank() -> None:
    of_all = ledgers(2, 0, OneBit())
    train(of_all, 0)
    (divided,) = redistribute(states(of_all), 1)
    tensors = [Tensor(n, s, *(("float64", 8) if n in DENSE else ())) for n, s in SHAPES.items()]
    alone = LedgerAlone(tensors, ADAGRAD)
    alone.load_state_dict(divided)
    alone.set_loss_scale(8.0)
    for name in ("w", "v"):
        np.testing.assert_array_equal(alone.due(name), 8 * divided["residuals"][name]["values"])
    alone.settle(keep=False)
    assert alone.debts.keys() == {"w", "v"}
    assert [alone.due(name) is None for name in SHAPES] == [False, True, False, True, True]
    alone.settle(keep=True)
    state = alone.state_dict()
    assert state["residuals"] == {}
    # no owner is here
    np.testing.assert_equal(state["owner_residuals"], divided["owner_residuals"])
    np.testing.assert_equal(state["accumulators"], divided["accumulators"])
    again = ledgers(3, 0, OneBit())
    for ledger, of_rank in zip(again, redistribute([state], 3), strict=True):
        ledger.load_state_dict(of_rank)
    for name in ("w", "v"):
        parts = [ledger.accounts[name].owner_residual for ledger in again]
        whole = np.concatenate([part for part in parts if part is not None])
        np.testing.assert_array_equal(whole, divided["owner_residuals"][name]["values"])


def test_auto_moves_tensors_and_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"AdaGrad\(.* with Auto\(.*Policy"):
        exchange_of(AdaGrad(), "auto", Auto())
    assert exchange_of(None, "auto", Auto()).id == "auto"
    assert exchange_of(AdaGrad(), "auto", OneBit()) == TwoPhase()


def test_updates_that_nobody_would_send_any_more_are_refused() -> None:
    def of_root(answer: str) -> Ledger[Bucket]:
        routing = Routing(OneBit(), ParameterServer(answer=answer), 100, 0)
        return Ledger(routing, 2, 0, [Tensor("w", SHAPES["w"])], Bucket, adagrad=ADAGRAD, scale=1 / 2)

    state = of_root("compressed").state_dict()
    values = np.ones(math.prod(SHAPES["w"]), np.float32)
    state["owner_residuals"]["w"] = {"shape": list(SHAPES["w"]), "start": 0, "values": values}
    of_root("compressed").load_state_dict(copy.deepcopy(state))
    ledger = of_root("dense")
    before = ledger.state_dict()
    with pytest.raises(StateError, match=r"updates that an owner still owes of 'w'.*ParameterServer"):
        ledger.load_state_dict(state)
    assert ledger.state_dict() == before
