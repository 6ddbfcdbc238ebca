"""Ledgers of several ranks in one process: what is owed when tensors go another way, and who pays it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hvd_compress import (
    QSGD,
    Adaptive,
    Blockwise,
    Exchange,
    Hierarchical,
    NoCompression,
    OneBit,
    ParameterServer,
    Policy,
    TopK,
    wire,
)
from hvd_compress.engine import Ledger, Routing, Tensor
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import AllGather, Bucket, Hosts, Parcel, TwoPhase, checked_exchange
from hvd_compress.exchange.raw import CheckedRaw
from hvd_compress.policy import Assigned
from tests.close import check_taken_back
from tests.thorough import shown_by

TENSORS = [Tensor("a", (40, 50)), Tensor("small", (30,)), Tensor("b", (33, 61)), Tensor("c", (1500,))]
SHAPES = {tensor.name: tensor.shape for tensor in TENSORS}
RANKS = 4
HOSTS = Hosts.of_names("abba")
DENSE = Routing(None, min_numel=100)


def routing(compressor: Any, exchange: str | Exchange = "two_phase", bucket_bytes: int = 4 * 4100) -> Routing:
    return Routing(compressor, checked_exchange(exchange), min_numel=100, bucket_bytes=bucket_bytes)


def ledgers(of: Routing, pays_debts: bool = True) -> list[Ledger[Bucket]]:
    return [Ledger(of, RANKS, rank, TENSORS, Bucket, pays_debts=pays_debts, hosts=HOSTS) for rank in range(RANKS)]


def gradients(step: int) -> list[dict[str, np.ndarray]]:
    return [
        {
            name: np.random.default_rng([i, rank, step]).standard_normal(shape).astype(np.float32).reshape(-1)
            for i, (name, shape) in enumerate(SHAPES.items())
        }
        for rank in range(RANKS)
    ]


def alltoall(parcels: Sequence[Parcel]) -> list[np.ndarray]:
    cut = []
    for parcel in parcels:
        sizes = parcel.sizes or (parcel.buffer.size // RANKS,) * RANKS
        cut.append([parcel.buffer[a:b].copy() for a, b in pairwise(np.cumsum((0, *sizes)))])
    return [np.concatenate(of_receiver) for of_receiver in zip(*cut, strict=True)]


def run(collective: str, parcels: Sequence[Parcel]) -> list[np.ndarray]:
    if collective == "allgather":
        return [np.concatenate([parcel.buffer for parcel in parcels])] * RANKS
    if collective == "broadcast":
        # the only root here is rank 0
        return [parcels[0].buffer.copy() for _ in parcels]
    return alltoall(parcels)


def step(
    of_all: list[Ledger[Bucket]], number: int, keep: bool = True, without: str = "", scale: float = 1.0
) -> dict[str, np.ndarray]:
    """One step of all ranks: the sums. What goes dense is summed as it is, with what is owed of it."""
    grads = [{name: np.float32(scale) * value for name, value in of_rank.items()} for of_rank in gradients(number)]
    sums = {}
    for name in SHAPES:
        if not of_all[0].exchanges(name):
            parts = [g[name] + ledger.debts.get(name, 0) for g, ledger in zip(grads, of_all, strict=True)]
            sums[name] = np.sum(parts, axis=0)
            for ledger in of_all:
                ledger.count_dense(name, 4 * parts[0].size, 4 * parts[0].size)
                if keep:
                    ledger.debts.pop(name, None)
    for buckets in zip(*(ledger.buckets for ledger in of_all), strict=True):
        for bucket, of_rank in zip(buckets, grads, strict=True):
            given = [bucket.give(name, None if name == without else of_rank[name]) for name in bucket.tensors]
            assert not any(given[:-1])
            sends = given[-1]
        if not sends:
            assert buckets[0].tensors == [without]
            continue
        parcels = [bucket.parcel() for bucket in buckets]
        *earlier, last = buckets[0].collectives
        for collective in earlier:
            received = run(collective, parcels)
            parcels = [b.advance(collective, r) for b, r in zip(buckets, received, strict=True)]
        assert all(b.arrive(r) for b, r in zip(buckets, run(last, parcels), strict=True))
        results = [bucket.finish(keep, 1.0) for bucket in buckets]
        for name in buckets[0].tensors:
            found = [
                bucket.pack.part(name) if bucket.pack and name not in bucket.accounts else result[name]
                for bucket, result in zip(buckets, results, strict=True)
            ]
            if name != without:
                assert len({f.tobytes() for f in found}) == 1
                sums[name] = found[0].copy()
    for ledger in of_all:
        ledger.count_step()
    return sums


def owed(of_all: list[Ledger[Bucket]]) -> dict[str, np.ndarray]:
    """What all ranks together owe, by what they would save."""
    total = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    for ledger in of_all:
        state = ledger.state_dict()
        for name, entry in state["residuals"].items():
            total[name] += entry["values"]
        for name, entry in state["owner_residuals"].items():
            total[name][entry["start"] : entry["start"] + len(entry["values"])] += entry["values"]
    return total


def check_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=atol, err_msg=name)


ROUTINGS = {
    "two_phase": routing(OneBit()),
    "alone": routing(TopK(0.05), bucket_bytes=0),
    "allgather": routing(Adaptive(pi=8), "allgather"),
    "hierarchical": routing(OneBit(group="tensor"), "hierarchical"),
    "hierarchical-alone": routing(TopK(0.1), "hierarchical", bucket_bytes=0),
    "mixed": routing(Policy([("a", OneBit()), ("b", TopK(0.05))]), "hierarchical"),
    "inside": routing(Blockwise(bits=4), Hierarchical(inside=OneBit())),
    "inside, alone": routing(TopK(0.1), Hierarchical(inside=TopK(0.2, coding="golomb")), bucket_bytes=0),
    "server": routing(TopK(0.1), ParameterServer()),
    "server, dense answers": routing(TopK(0.1), ParameterServer(answer="dense")),
    "at once": Routing(
        Assigned(dict.fromkeys("abc", OneBit()), dict.fromkeys("abc", AllGather())),
        min_numel=100,
        bucket_bytes=4 * 4100,
    ),
    "dense": DENSE,
}
ORDER = list(ROUTINGS)
# each is left for two others, and comes after two; `inherit` has one common form between all of them
WAYS = shown_by(
    lambda before, after: (ORDER.index(after) - ORDER.index(before)) % len(ORDER) in (1, 5),
    [(one, other) for one in ORDER for other in ORDER if one != "dense" and one != other],
)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_nothing_is_lost_when_tensors_go_another_way(before: str, after: str) -> None:
    old = ledgers(ROUTINGS[before])
    given = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    arrived = {name: np.zeros_like(value) for name, value in given.items()}

    def train(of_all: list[Ledger[Bucket]], number: int) -> None:
        for name, value in step(of_all, number).items():
            arrived[name] += value
            given[name] += np.sum([g[name] for g in gradients(number)], axis=0, dtype=np.float64)

    for number in range(3):
        train(old, number)
    debt = owed(old)
    assert max(np.abs(value).max() for value in debt.values()) > 0.1, "nothing is owed, so nothing is tested"
    new = ledgers(ROUTINGS[after])
    for one, other in zip(new, old, strict=True):
        one.inherit(other)
    check_same(owed(new), debt)
    for number in range(3, 6):
        train(new, number)
        check_same({n: arrived[n] + left for n, left in owed(new).items()}, given, atol=2e-3)
    stats = new[0].stats()
    assert stats["total"]["steps"] == 6
    assert {name: counters["steps"] for name, counters in stats["tensors"].items()} == dict.fromkeys(SHAPES, 6)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_saved_state_may_be_loaded_another_way(before: str, after: str) -> None:
    old, new = ledgers(ROUTINGS[before]), ledgers(ROUTINGS[after])
    for number in range(2):
        step(old, number)
    step(new, 7)  # what is there is replaced
    for one, other in zip(new, old, strict=True):
        one.load_state_dict(other.state_dict())
    check_same(owed(new), owed(old))
    sums, left = step(new, 2), owed(new)
    debt = owed(old)
    for name in SHAPES:
        total = np.sum([g[name] for g in gradients(2)], axis=0, dtype=np.float64)
        np.testing.assert_allclose(sums[name] + left[name], total + debt[name], atol=2e-3)


@pytest.mark.parametrize("way", ["inherit", "load"])
def test_what_a_root_owed_of_sums_is_sent_where_answers_are_dense(way: str) -> None:
    old, new = ledgers(ROUTINGS["server"]), ledgers(ROUTINGS["server, dense answers"])
    for number in range(3):
        step(old, number)
    debt = owed(old)
    for one, other in zip(new, old, strict=True):
        one.inherit(other) if way == "inherit" else one.load_state_dict(other.state_dict())
    check_same(owed(new), debt)
    # an owner whose answers leave nothing out has no use for a residual
    assert all(account.owner_residual is None for ledger in new for account in ledger.accounts.values())
    # each step sends a tenth of what is owed by a rank
    for number in range(3, 20):
        step(new, number, scale=0.0)
    assert not any(value.any() for value in owed(new).values())


@pytest.mark.parametrize("before", ["inside", "inside, alone", "hierarchical", "mixed"])
def test_a_hierarchy_goes_on_from_its_state_to_the_bit(before: str) -> None:
    straight, resumed = ledgers(ROUTINGS[before]), ledgers(ROUTINGS[before])
    for number in range(3):
        step(straight, number)
    for one, other in zip(resumed, straight, strict=True):
        one.load_state_dict(other.state_dict())
    for number in range(3, 6):
        check_same(step(resumed, number), step(straight, number), atol=0)
    check_same(owed(resumed), owed(straight), atol=0)


def test_back_and_forth_is_as_if_nothing_had_been() -> None:
    straight, turning = ledgers(ROUTINGS["two_phase"]), ledgers(ROUTINGS["two_phase"])
    step(straight, 0)
    step(turning, 0)
    again = ledgers(ROUTINGS["two_phase"])
    for one, other in zip(again, turning, strict=True):
        one.inherit(other)
    check_same(step(again, 1), step(straight, 1), atol=0)
    check_same(owed(again), owed(straight), atol=0)


@pytest.mark.parametrize("after", ["hierarchical", "hierarchical-alone", "mixed"])
def test_what_a_hierarchy_inherits_is_pending_until_a_step_is_kept(after: str) -> None:
    old, new = ledgers(ROUTINGS["two_phase"]), ledgers(ROUTINGS[after])
    step(old, 0)
    for one, other in zip(new, old, strict=True):
        one.inherit(other)
    before = owed(new)
    assert any(account.pending is not None for account in new[0].accounts.values())
    step(new, 1, keep=False)
    check_taken_back(owed(new), before, largest=20.0)
    before = owed(new)
    # a tensor that is left out keeps what is owed of it; the others pay
    step(new, 2, without="a")
    assert owed(new)["a"].tobytes() == before["a"].tobytes()
    assert all(account.pending is None for ledger in new for name, account in ledger.accounts.items() if name != "a")
    step(new, 3)
    assert all(account.pending is None for ledger in new for account in ledger.accounts.values())


def test_a_loss_scale_converts_what_is_pending_and_debts() -> None:
    for after in ("hierarchical", "dense"):
        old, new = ledgers(ROUTINGS["alone"]), ledgers(ROUTINGS[after])
        step(old, 0)
        for one, other in zip(new, old, strict=True):
            one.inherit(other)
        before = owed(new)
        for ledger in new:
            ledger.set_loss_scale(8.0)
            ledger.set_loss_scale(8.0)
        check_same(owed(new), {name: 8 * value for name, value in before.items()}, atol=0)
        # and it is kept by the next way
        last = ledgers(ROUTINGS["two_phase"])
        for one, other in zip(last, new, strict=True):
            one.inherit(other)
            one.set_loss_scale(8.0)
        check_same(owed(last), {name: 8 * value for name, value in before.items()})


def test_debts_count_in_the_norm_of_what_is_owed() -> None:
    old, new = ledgers(ROUTINGS["two_phase"]), ledgers(DENSE)
    step(old, 0)
    for one, other in zip(new, old, strict=True):
        one.inherit(other)
        assert one.owes
        for name in ("a", "b", "c"):
            norm = np.linalg.norm(one.debts[name].astype(float))
            assert one.stats()["tensors"][name]["residual_norm"] == pytest.approx(norm, rel=1e-5)
        total = np.sqrt(sum(np.linalg.norm(debt.astype(float)) ** 2 for debt in one.debts.values()))
        assert one.stats()["total"]["residual_norm"] == pytest.approx(total, rel=1e-5)
    step(new, 1)
    assert not any(ledger.owes for ledger in new)
    assert new[0].stats()["total"]["residual_norm"] == 0


def test_who_pays_no_debts_makes_none() -> None:
    old = ledgers(ROUTINGS["two_phase"])
    step(old, 0)
    state, before = old[0].state_dict(), owed(old)
    for compressor in (None, Policy([("b", OneBit())]), TopK(0.1, error_feedback=False)):
        new = ledgers(routing(compressor), pays_debts=False)[0]
        with pytest.raises(UnsupportedError, match=r"keeps no residual of 'c', of which .* is still owed"):
            new.inherit(old[0])
        with pytest.raises(StateError, match=r"residual of '[abc]'"):
            new.load_state_dict(state)
        assert owed(old)["c"].tobytes() == before["c"].tobytes()


@pytest.mark.parametrize("owes", [True, False])
@pytest.mark.parametrize("after", [QSGD(8, norm="max"), CheckedRaw()], ids=repr)
def test_an_account_that_keeps_no_residual_inherits_none(after: Any, owes: bool) -> None:
    """It would send it beside the debt."""
    old, new = ledgers(routing(TopK(0.1))), ledgers(routing(after))
    if owes:
        step(old, 0)
    else:
        for account in (account for ledger in old for account in ledger.accounts.values()):
            account.fit_residual(np.float32)
    for one, other in zip(new, old, strict=True):
        assert other.accounts["a"].residual is not None
        assert other.accounts["a"].is_owing() == owes
        one.inherit(other)
        assert all(
            account.residual is account.pending is account.owner_residual is None for account in one.accounts.values()
        )
        assert ("a" in one.debts) == owes
    account = new[0].accounts["a"]
    gradient = np.ones(account.plan.numel, np.float32)
    bucket = Bucket({"a": account})
    assert bucket.give("a", gradient)
    payloads = wire.frames(bucket.parcel().buffer, len(account.sent_chunks))
    for (_, part), slot in zip(account.sent_chunks, payloads, strict=True):
        out = np.empty(part.stop - part.start, np.float32)
        assert after.decode_into(slot, out)
        np.testing.assert_array_equal(out, gradient[part])


def test_debts_are_not_handed_to_a_compressor_that_keeps_none() -> None:
    old, dense = ledgers(ROUTINGS["two_phase"]), ledgers(DENSE)
    step(old, 0)
    dense[0].inherit(old[0])
    assert dense[0].debts.keys() == {"a", "b", "c"}
    with pytest.raises(UnsupportedError, match=r"QSGD.* keeps no residual of 'c', of which .* is still owed"):
        ledgers(routing(QSGD(4)))[0].inherit(dense[0])


def test_a_state_of_another_rank_is_refused_where_all_go_dense_too() -> None:
    of_all = ledgers(DENSE)
    with pytest.raises(StateError, match="of rank 1, and this is rank 0"):
        of_all[0].load_state_dict(of_all[1].state_dict())
    # who owes nothing and never will takes any
    ledgers(DENSE, pays_debts=False)[0].load_state_dict(of_all[1].state_dict())


def test_randomness_is_not_used_again_after_steps_that_went_dense() -> None:
    old, dense, new = ledgers(routing(OneBit())), ledgers(DENSE), ledgers(routing(OneBit()))
    step(old, 0)
    dense[0].inherit(old[0])
    for ledger in dense[:1]:
        ledger.count_step()
        ledger.count_step()
    new[0].inherit(dense[0])
    assert {account.step for account in new[0].accounts.values()} == {3}


def test_what_auto_assigns_is_followed() -> None:
    chosen = Assigned({"a": OneBit(), "small": OneBit(), "b": NoCompression(), "c": TopK(0.1)})
    ledger = ledgers(routing(chosen))[0]
    assert ledger.accounts.keys() == {"a", "c"}
    assert ledger.packs.keys() == {"small"}
    assert ledger.dense.keys() == {"b"}


def test_a_bucket_goes_as_its_tensors_want_if_they_agree() -> None:
    ways = {"a": AllGather(), "b": AllGather()}
    whole = Routing(Assigned(dict.fromkeys("abc", OneBit()), ways), TwoPhase(), min_numel=100, bucket_bytes=4 * 4100)
    # c and b share a bucket, and differ; a has one of its own
    assert {n: account.plan.exchange.id for n, account in ledgers(whole)[0].accounts.items()} == {
        "a": "allgather", "b": "two_phase", "c": "two_phase",
    }  # fmt: skip
