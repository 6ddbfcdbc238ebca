"""What exchanges owe that are made anew when ranks come and go, with threads for ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_compress import OneBit, ThreadRanks, elastic
from hvd_compress.engine import CarriedExchange, CarriedExchanges, Ledger, Lost, Routing, Tensor, norm_owed
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from hvd_compress.exchange import Bucket
from hvd_compress.feedback import check_state
from tests.unit.test_accumulators import ADAGRAD, SHAPES, Always, train
from tests.unit.test_survival import NAMES, owed

STEPS = 3


class _Exchange(Ledger[Bucket]):
    def rest(self) -> None:
        """Nothing is under way."""


class _Process:
    """One process, with its exchanges."""

    def __init__(self, adagrad: Any = None, averages: bool = True) -> None:
        self.ranks: Any = None
        self.book = CarriedExchanges(lambda: self.ranks)
        self.adagrad, self.averages, self.commits = adagrad, averages, -1
        self.exchange = self.carried()

    def carried(self, **told: Any) -> CarriedExchange[_Exchange]:
        return CarriedExchange(self.make, {"of": "w", **told}, ["w"], self.averages, self.book)

    def make(self) -> _Exchange:
        tensors = [Tensor(name, shape) for name, shape in SHAPES.items()]
        size, position = self.ranks.size, self.ranks.position
        routing = Routing(None if size == 1 else OneBit(), Always(), 100, 0)
        return _Exchange(
            routing, size, position, tensors, Bucket, adagrad=self.adagrad, scale=1 / size, pays_debts=True
        )

    def commit(self) -> None:
        take = self.book.share()
        self.commits += 1
        take()
        self.book.save()

    def meet(self) -> None:
        self.book.sync(self.commits)
        self.commits = max(0, self.commits)
        self.book.share()()
        self.book.save()


@pytest.fixture(autouse=True)
def elastic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr(elastic, "_together", True)


def together(processes: Sequence[_Process], do: Any) -> list[Any]:
    """What all processes return of a collective call."""

    def program(ranks: ThreadRanks) -> Any:
        process = processes[ranks.position]
        process.ranks = ranks
        return do(process)

    return ThreadRanks.run_all(len(processes), program)


def begun(processes: Sequence[_Process]) -> list[_Exchange]:
    together(processes, _Process.meet)
    return together(processes, lambda process: process.exchange.exchange())


def trained(ranks: int, **settings: Any) -> tuple[list[_Process], list[dict[str, Any]]]:
    """Processes that have committed after some steps, and their states then."""
    processes = [_Process(**settings) for _ in range(ranks)]
    exchanges: Any = begun(processes)
    for step in range(STEPS):
        train(exchanges, step)
    together(processes, _Process.commit)
    return processes, [exchange.state_dict() for exchange in exchanges]


@pytest.mark.parametrize("averages", [True, False])
def test_who_stays_goes_on_owing_and_what_is_lost_is_counted(averages: bool) -> None:
    processes, states = trained(3, averages=averages)
    train([process.exchange.exchange() for process in processes], STEPS)  # and fails afterwards
    for process in processes:
        process.book.restore()
    stay = [processes[0], processes[2]]
    now = [*stay, _Process(averages=averages), _Process(averages=averages)]
    after = [exchange.state_dict() for exchange in begun(now)]
    factor = 4 / 3 if averages else 1.0
    for name in NAMES:
        kept = owed([states[0], states[2]], name)
        assert np.abs(kept).max() > 0
        np.testing.assert_allclose(owed(after, name), factor * kept, rtol=1e-5, atol=1e-6)
    assert not after[2]["residuals"] or all(not e["values"].any() for e in after[2]["residuals"].values())
    assert {state["steps"] for state in after} == {STEPS}
    norm = norm_owed(states[1])
    for process in now:
        stats = process.exchange.stats()
        assert (stats["lost_ranks"], stats["lost_norm"]) == (1, pytest.approx(norm))
    assert stay[0].exchange.stats()["total"]["steps"] == STEPS + 1  # counters go on
    assert now[-1].exchange.stats()["total"]["steps"] == 0


def test_a_second_change_before_a_step_loses_nothing() -> None:
    processes, states = trained(3)
    together(processes[:2], _Process.meet)
    now = [*processes[:2], _Process(), _Process()]
    after = [exchange.state_dict() for exchange in begun(now)]
    for name in NAMES:
        np.testing.assert_allclose(owed(after, name), 4 / 3 * owed(states[:2], name), rtol=1e-5, atol=1e-6)
    assert processes[0].book.lost.ranks == 1


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("adagrad", [None, ADAGRAD])
def test_what_replaced_an_exchange_since_the_commit_goes_on_owing_for_it(times: int, adagrad: Any) -> None:
    processes, states = trained(3, adagrad=adagrad)
    for i in range(times):
        for process in processes:
            former = process.exchange
            # the last of three is told like the first
            process.exchange = process.carried(compression=i) if i < 2 else process.carried()
            process.exchange.inherit(former)
        train(together(processes, lambda process: process.exchange.exchange()), STEPS + i)
    for process in processes:
        process.book.restore()
    after = [exchange.state_dict() for exchange in begun(processes[:2])]
    for name in NAMES:
        if adagrad is None:
            kept = owed(states[:2], name)
            assert np.abs(kept).max() > 0
            np.testing.assert_allclose(owed(after, name), 2 / 3 * kept, rtol=1e-5, atol=1e-6)
        else:
            squares = [sum(float(s["accumulators"][name]["values"].sum()) for s in of) for of in (after, states)]
            assert squares[0] == pytest.approx(squares[1], rel=1e-5)
    assert {state["steps"] for state in after} == {STEPS}


def test_the_last_one_sends_everything() -> None:
    processes, states = trained(2)
    [alone] = begun(processes[1:])
    assert not alone.buckets
    for name in NAMES:
        np.testing.assert_allclose(alone.debts[name], owed(states[1:], name) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_accumulators_are_all_there(ranks: int) -> None:
    processes, states = trained(3, adagrad=ADAGRAD)
    now = [*processes[: min(ranks, 2)], *(_Process(adagrad=ADAGRAD) for _ in range(ranks - 2))]
    begun(now)

    def whole(kind: str, of_all: list[dict[str, Any]], name: str) -> Any:
        total = np.zeros(math.prod(SHAPES[name]))
        for state in of_all:
            if name in state[kind]:
                entry = state[kind][name]
                total[entry.get("start", 0) :][: entry["values"].size] += entry["values"]
        return total

    after = [check_state(process.exchange.state_dict()) for process in now]
    for name in NAMES:
        for kind in ("accumulators", "owner_residuals"):
            assert whole(kind, states, name).any()
            np.testing.assert_allclose(whole(kind, after, name), whole(kind, states, name), rtol=1e-6)


def test_a_rank_that_is_lost_while_ranks_commit_leaves_them_the_commit_before() -> None:
    processes, states = trained(3, adagrad=ADAGRAD)
    train([process.exchange.exchange() for process in processes], STEPS)
    # they tell each other, and the third is lost before all have heard it
    together(processes, lambda process: process.book.share())
    for process in processes:
        process.book.restore()
    after = [check_state(exchange.state_dict()) for exchange in begun(processes[:2])]
    for name in NAMES:
        for kind in ("accumulators", "owner_residuals"):
            whole = [sum(float(np.abs(s[kind][name]["values"]).sum()) for s in of if name in s[kind]) for of in
                     (states, after)]  # fmt: skip
            assert whole[1] == pytest.approx(whole[0], rel=1e-5)
            assert whole[0] > 0


@pytest.mark.parametrize("adagrad", [None, ADAGRAD])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_that_is_saved_before_the_first_step_is_that_of_this_rank(ranks: int, adagrad: Any) -> None:
    processes, _ = trained(3, adagrad=adagrad)
    now = processes[1 : 1 + ranks]
    together(now, _Process.meet)
    early = [check_state(process.exchange.state_dict()) for process in now]
    assert [(state["size"], state["rank"]) for state in early] == [(ranks, rank) for rank in range(ranks)]
    made = [e.state_dict() for e in together(now, lambda process: process.exchange.exchange())]
    for name in NAMES if adagrad is None else ():
        np.testing.assert_allclose(owed(early, name), owed(made, name), rtol=1e-6)
    # with AdaGrad each of them has what all owners owe, and takes its part
    fresh = [_Process(adagrad=adagrad) for _ in now]
    together(fresh, _Process.meet)
    for process, state in zip(fresh, early, strict=True):
        process.exchange.load_state_dict(state)
    again = [e.state_dict() for e in together(fresh, lambda process: process.exchange.exchange())]
    for name in NAMES:
        np.testing.assert_allclose(owed(again, name), owed(made, name), rtol=1e-6)


def test_exchanges_of_tensors_of_the_same_names_are_told_apart() -> None:
    """By the places of their variables, where a process that joins uses them in another order."""
    processes, _ = trained(2)

    def second(process: _Process) -> CarriedExchange[_Exchange]:
        process.book.places = {"w": 0, "x": 1}
        return CarriedExchange(process.make, {"of": "w"}, ["x"], True, process.book)

    # places are known before anything is exchanged
    for process in processes:
        process.book.places = {"w": 0}
    fresh = [_Process(), _Process()]
    others = [second(process) for process in fresh]
    together(fresh, _Process.meet)
    exchanges: Any = together(fresh, lambda process: process.exchange.exchange())
    of_others: Any = together(fresh, lambda process: others[fresh.index(process)].exchange())
    train(exchanges, 0)
    for step in range(2):
        train(of_others, step)
    together(fresh, _Process.commit)
    joined = _Process()
    its_other = second(joined)
    now = [fresh[0], joined]
    together(now, _Process.meet)
    # the one that joins begins with the other one
    assert [e.steps for e in together(now, lambda p: (others[0] if p is fresh[0] else its_other).exchange())] == [2, 2]
    assert [e.steps for e in together(now, lambda p: p.exchange.exchange())] == [1, 1]


def test_ranks_that_make_different_exchanges_are_told() -> None:
    processes, _ = trained(2)
    now = [processes[0], _Process()]
    together(now, _Process.meet)
    now[1].exchange = now[1].carried(compression="another")

    def make(process: _Process) -> str:
        with pytest.raises(MismatchError, match="steps made before") as caught:
            process.exchange.exchange()
        return str(caught.value)

    assert len(set(together(now, make))) == 1


def test_nothing_is_exchanged_or_loaded_before_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_together", False)
    process = _Process()
    with pytest.raises(UnsupportedError, match="no state has synced the ranks"):
        process.exchange.exchange()
    with pytest.raises(StateError, match="before its state is synced"):
        process.exchange.load_state_dict(process.exchange.state_dict())
    assert process.exchange.stats() == {"total": {}, "tensors": {}, "lost_ranks": 0, "lost_norm": 0.0}


def test_a_state_that_is_loaded_is_taken_up_in_the_next_step() -> None:
    _, states = trained(2)
    fresh = [_Process(), _Process()]
    together(fresh, _Process.meet)
    for process, state in zip(fresh, states, strict=True):
        process.exchange.load_state_dict(state)
    after = [e.state_dict() for e in together(fresh, lambda process: process.exchange.exchange())]
    for old, new in zip(states, after, strict=True):
        for name in NAMES:
            np.testing.assert_array_equal(owed([new], name), owed([old], name))
    assert fresh[0].book.lost == Lost()


def test_another_compression_takes_over_what_is_owed() -> None:
    processes, states = trained(2)
    for process in processes:
        follower = process.carried(compression="another")
        follower.inherit(process.exchange)
        process.exchange = follower
    after = [e.state_dict() for e in together(processes, lambda process: process.exchange.exchange())]
    for name in NAMES:
        np.testing.assert_allclose(owed(after, name), owed(states, name), rtol=1e-6)
    # and that is owed once
    together(processes, _Process.commit)
    norms = [norm_owed(state) for state in after]
    assert sorted(processes[0].book._norms.values()) == pytest.approx(sorted(norms))
