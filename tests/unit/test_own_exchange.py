"""An exchange of the user's own, which derives from one of the package's, goes wherever those go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from hvd_compress import (
    AdaGrad,
    Adaptive,
    AllGather,
    Auto,
    Exchange,
    Hierarchical,
    OneBit,
    ParameterServer,
    TopK,
    TwoPhase,
)
from hvd_compress.cost import work_of
from hvd_compress.engine import Ledger, Routing, Tensor, check_settings, description
from hvd_compress.errors import ContractError, MismatchError
from hvd_compress.exchange import EXCHANGES, Bucket, Dense, checked_exchange, make_plan, plan_together
from hvd_compress.fingerprint import check_agreement, serialize
from hvd_compress.loopback import Loopback
from tests.outsider import EveryOther, SignSum

RANKS = 5
COMPRESSORS = [OneBit(), Adaptive(pi=8), TopK(0.1), TopK(0.1, coding="golomb"), SignSum()]
SHAPES = {"a": (40, 50), "b": (33, 61), "c": (1500,)}


def gradients(step: int) -> list[dict[str, np.ndarray]]:
    return [
        {
            n: np.random.default_rng([rank, step, i]).standard_normal(s, np.float32)
            for i, (n, s) in enumerate(SHAPES.items())
        }
        for rank in range(RANKS)
    ]


def test_owners_share_the_elements() -> None:
    plan = make_plan(EveryOther(), OneBit(), (18, 512), RANKS)
    assert plan.bounds == (0, 3072, 3072, 6144, 6144, 9216)
    assert [slot > 0 for slot in plan.slots] == [True, False, True, False, True]
    together = plan_together(EveryOther(), {"a": ((18, 512), OneBit()), "b": ((9, 512), OneBit())}, RANKS)
    owned = [sum(plan.bounds[rank + 1] - plan.bounds[rank] for plan in together.values()) for rank in range(RANKS)]
    assert owned == [4608, 0, 4608, 0, 4608]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_what_is_sent_and_what_stays_is_what_came(compressor: Any) -> None:
    ranks = Loopback(RANKS, compressor, EveryOther(), op="sum")
    came, went = dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
    for step in range(4):
        given = gradients(step)
        results = ranks.grouped_allreduce(given)
        for name in SHAPES:
            assert all(np.array_equal(of_rank[name], results[0][name]) for of_rank in results)
            came[name] = came[name] + sum(of_rank[name].ravel().astype(float) for of_rank in given)
            went[name] = went[name] + results[0][name].ravel().astype(float)
    for name in SHAPES:
        owed = sum(ranks.residual(name, rank).astype(float) for rank in range(RANKS))
        for rank, (begin, end) in enumerate(zip(ranks.bounds(name), ranks.bounds(name)[1:], strict=False)):
            assert ranks.owner_residual(name, rank).size in (0, end - begin)
            if end > begin:
                owed[begin:end] += ranks.owner_residual(name, rank)
        np.testing.assert_allclose(went[name] + owed, came[name], rtol=0, atol=2e-4)


def test_all_ranks_own_what_two_phases_say() -> None:
    class Same(TwoPhase):
        id = "same"

    for step in range(2):
        given = gradients(step)
        ours, theirs = (Loopback(RANKS, OneBit(), e).grouped_allreduce(given) for e in (Same(), "two_phase"))
        for name in SHAPES:
            assert np.array_equal(ours[0][name], theirs[0][name])


def test_updates_of_adagrad_are_those_of_other_owners() -> None:
    given = gradients(0)
    all_sent = TopK(ratio=1.0)
    ours, theirs = (
        Loopback(RANKS, all_sent, e, adagrad=AdaGrad(1e-3)).grouped_allreduce(given)
        for e in (EveryOther(), "two_phase")
    )
    for name in SHAPES:
        assert np.array_equal(ours[0][name], theirs[0][name])


def test_an_optimizer_takes_it() -> None:
    tensors = [Tensor(name, shape) for name, shape in SHAPES.items()] + [Tensor("small", (30,))]
    check_settings(OneBit(), EveryOther(), 100, 2**20, True, 1.0, 1, None, False)
    check_settings(Auto(), EveryOther(), 100, 2**20, True, 1.0, 1, None, False)
    ledger = Ledger(Routing(OneBit(), EveryOther(), 100), RANKS, 1, tensors, Bucket)
    assert {entry["exchange"] for name, entry in ledger.stats()["tensors"].items() if name != "small"} == {
        "every_other"
    }
    assert ledger.stats()["tensors"]["small"]["exchange"] == "every_other, uncompressed"
    # what ranks compare tells it from two phases
    told = [description(OneBit(), "Average", [], exchange=e)["exchange"] for e in (EveryOther(), TwoPhase())]
    assert told == [{"id": "every_other"}, {"id": "two_phase"}]


def test_names_stand_for_exchanges() -> None:
    assert {name: exchange.id for name, exchange in EXCHANGES.items()} == {name: name for name in EXCHANGES}
    assert checked_exchange("parameter_server") == ParameterServer()
    for exchange in (*EXCHANGES.values(), EveryOther()):
        assert checked_exchange(exchange) is exchange
        assert hash(exchange) == hash(type(exchange)())
    assert TwoPhase() != EveryOther()


@pytest.mark.parametrize("wrong", ["ring", TwoPhase, None, 3, ["two_phase"], ""])
def test_what_is_no_exchange_is_told(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"exchange=.*: must be one of 'auto', 'two_phase'.*or an Exchange"):
        checked_exchange(wrong)


@pytest.mark.parametrize("owners", [[], [0, 0], [1, 0], [0, RANKS], [-1]], ids=str)
def test_owners_that_are_none_are_told(owners: list[int]) -> None:
    class Wrong(TwoPhase):
        id = "of_no_owners"

        def owners(self, ranks: int) -> list[int]:
            return owners

    with pytest.raises(ContractError, match=r"owners\(5\) returned .*positions from 0 to 4, in ascending order"):
        make_plan(Wrong(), OneBit(), (64, 96), RANKS)


def test_between_hosts_all_ranks_own_a_share() -> None:
    class Wrong(Hierarchical):
        id = "of_some_hosts"

        def owners(self, ranks: int) -> range:
            return range(0, ranks, 2)

    with pytest.raises(ContractError, match="between hosts every rank owns a share"):
        make_plan(Wrong(), OneBit(), (64, 96), 4)


def test_an_exchange_has_an_id_of_its_own() -> None:
    for base in (Exchange, TwoPhase):
        for attributes in ({}, {"id": 3}, {"id": "two_phase"}, {"id": "every_other"}):
            with pytest.raises(ContractError, match=r"Nameless: a class of exchanges needs an id of its own.*it has"):
                type("Nameless", (base,), attributes)
    # a cell of a notebook that is run again
    for _ in range(2):
        type("Again", (TwoPhase,), {"id": "again"})


def test_what_does_not_fit_its_collectives_is_told() -> None:
    with pytest.raises(ContractError, match="Derive from TwoPhase to choose owners"):
        type("Gathers", (AllGather,), {"id": "gathers", "owners": lambda self, ranks: (0,)})
    with pytest.raises(ContractError, match="Derive from Hierarchical"):
        type("Hosts", (TwoPhase,), {"id": "hosts", "uses_hosts": True})


def test_the_root_is_the_owner() -> None:
    class LastRank(ParameterServer):
        id = "last_rank"

        def owners(self, ranks: int) -> tuple[int, ...]:
            return (ranks - 1,)

    class Two(ParameterServer):
        id = "two_roots"

        def owners(self, ranks: int) -> tuple[int, ...]:
            return (0, 1)

    given = gradients(0)
    servers = LastRank(), ParameterServer(RANKS - 1)
    ours, theirs = (Loopback(RANKS, OneBit(), server).grouped_allreduce(given) for server in servers)
    for name in SHAPES:
        assert np.array_equal(ours[0][name], theirs[0][name])
    with pytest.raises(ContractError, match=r"owners\(5\) returned \[0, 1\]; only one rank can broadcast"):
        make_plan(Two(), OneBit(), (64, 96), RANKS)


def test_settings_are_what_ranks_can_compare() -> None:
    class Attribute(TwoPhase):
        id = "attribute"

        def __init__(self, positions: Any) -> None:
            self.positions = positions

    @dataclass(frozen=True)
    class Field(TwoPhase):
        positions: Any = (0, 1)
        id = "field"

        def owners(self, ranks: int) -> Any:
            return self.positions

    with pytest.raises(ContractError, match=r"Attribute: settings have to be fields of a frozen dataclass.*positions"):
        checked_exchange(Attribute((0, 1)))
    with pytest.raises(ContractError, match=r"Field: settings have to be fields.*unhashable"):
        checked_exchange(Field([0, 1]))
    with pytest.raises(ValueError, match="must be one of"):
        checked_exchange(Dense())
    assert checked_exchange(Field((1, 2))) != Field((0, 2))
    for positions in (np.arange(0, RANKS, 2), {0, 2, 4}, (i for i in (0, 2, 4))):
        assert Field(positions).checked_owners(RANKS) == [0, 2, 4]


def test_ranks_compare_owners() -> None:
    class FromOutside(TwoPhase):
        id = "from_outside"
        chosen: ClassVar[Any] = (0, 1)

        def owners(self, ranks: int) -> Any:
            return self.chosen if self.chosen else 1 / 0

    assert TwoPhase().told_among(3) == {"id": "two_phase"}
    assert ParameterServer(2).told_among(3)["sums_on"] == [2]
    assert ParameterServer("round_robin").told_among(3)["sums_on"] == [0]
    told = [FromOutside().told_among(3)]
    FromOutside.chosen = (0, 2)
    told.append(FromOutside().told_among(3))
    FromOutside.chosen = ()
    told.append(FromOutside().told_among(3))
    with pytest.raises(MismatchError, match=r"sums_on\[1\]: rank 0 has 1, rank 1 has 2"):
        check_agreement([serialize(of_rank) for of_rank in told[:2]])
    with pytest.raises(MismatchError, match="ZeroDivisionError"):
        check_agreement([serialize(of_rank) for of_rank in told[1:]])
    # all ranks have compared: now it may be raised
    assert ParameterServer(7).told_among(3)["sums_on"].startswith("UnsupportedError")


def test_predictions_know_how_much_an_owner_sends() -> None:
    class One(TwoPhase):
        id = "one"

        def owners(self, ranks: int) -> range:
            return range(1)

    plans = [make_plan(exchange, OneBit(), (64, 512), 4) for exchange in (One(), ParameterServer())]
    works = [work_of([plan]) for plan in plans]
    slot = max(plans[0].slots)
    assert [work.hop_bytes for work in works] == [(3 / 4 * slot, 3 * slot)] * 2
