"""What ranks go on with when others come and go."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvd_compress import OneBit
from hvd_compress.engine import Ledger, Lost, Routing, Seen, Tensor, has_kept, losses, norm_owed, survivor_state
from hvd_compress.engine import united_accumulators as united
from hvd_compress.errors import StateError
from hvd_compress.exchange import Bucket
from hvd_compress.feedback import check_state
from tests.unit.test_accumulators import ADAGRAD, SHAPES, ledgers, train

RANKS, STEPS = 3, 4
NAMES = ("w", "v")  # those that are compressed


def trained(adagrad: Any = None, ranks: int = RANKS) -> list[Ledger[Bucket]]:
    of_all = ledgers(ranks, compressor=OneBit(), adagrad=adagrad)
    for step in range(STEPS):
        train(of_all, step)
    return of_all


def owed(states: list[dict[str, Any]], name: str) -> Any:
    """By some ranks, of all elements, as senders and as owners."""
    total = np.zeros(math.prod(SHAPES[name]))
    for state in states:
        for kind in ("residuals", "owner_residuals"):
            if name in state[kind]:
                entry = state[kind][name]
                total[entry.get("start", 0) :][: entry["values"].size] += entry["values"]
    return total


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_survivors_go_on_owing_what_they_owe(ranks: int) -> None:
    """Two of three stay, among `ranks`: what they owe keeps its weight in the average."""
    before = [ledger.state_dict() for ledger in trained()]
    stay = [before[0], before[2]]
    after = [survivor_state(state, ranks, new, ranks / RANKS) for new, state in enumerate(stay)]
    new = ledgers(ranks, compressor=OneBit(), adagrad=None)
    for ledger, state in zip(new, after, strict=False):
        check_state(state)
        ledger.load_state_dict(state)
    # who joins begins at the same step, with nothing owed
    for ledger in new[2:]:
        empty = {**after[0], "rank": ledger._position, "residuals": {}}
        ledger.load_state_dict(empty)
    now = [ledger.state_dict() for ledger in new]
    for name in NAMES:
        assert np.abs(owed(stay, name)).max() > 0
        np.testing.assert_allclose(owed(now, name) / ranks, owed(stay, name) / RANKS, rtol=1e-5, atol=1e-6)
    assert {state["steps"] for state in now} == {STEPS}
    assert {state["transfer_steps"]["w"] for state in now} == {STEPS}
    # nothing was taken from the states of before
    np.testing.assert_array_equal(owed(before[:1], "w"), owed([stay[0]], "w"))


def test_the_last_rank_pays_with_its_next_gradients() -> None:
    before = trained()[1].state_dict()
    alone = Ledger(Routing(None), 1, 0, [Tensor(n, SHAPES[n]) for n in NAMES], Bucket, pays_debts=True)
    alone.load_state_dict(survivor_state(before, 1, 0, 1 / RANKS))
    assert set(alone.debts) == set(NAMES)
    for name in NAMES:
        np.testing.assert_allclose(alone.debts[name], owed([before], name) / RANKS, rtol=1e-5, atol=1e-7)


def test_with_adagrad_nothing_that_belongs_to_elements_is_lost() -> None:
    before = [ledger.state_dict() for ledger in trained(ADAGRAD)]
    of_elements = united(before)
    ranks = 2
    new = ledgers(ranks, compressor=OneBit(), adagrad=ADAGRAD)
    for position, (ledger, state) in enumerate(zip(new, before[1:], strict=True)):
        ledger.load_state_dict(survivor_state(state, ranks, position, ranks / RANKS) | of_elements)
    now = united([ledger.state_dict() for ledger in new])
    for kind in ("accumulators", "owner_residuals"):
        for name in NAMES:
            np.testing.assert_array_equal(now[kind][name]["values"], of_elements[kind][name]["values"])
    # owners owe updates, which have another unit than what senders owe
    assert norm_owed(before[0]) == pytest.approx(norm_owed({**before[0], "owner_residuals": {}}))
    train(new, STEPS)


def test_an_accumulator_that_nobody_has_told_is_missed() -> None:
    before = [ledger.state_dict() for ledger in trained(ADAGRAD)]
    before[1]["accumulators"] = {}
    with pytest.raises(StateError, match="no state has the accumulator"):
        united(before)


def test_the_norm_is_that_of_all_that_is_owed() -> None:
    state = trained()[0].state_dict()
    entries = [*state["residuals"].values(), *state["owner_residuals"].values()]
    whole = np.concatenate([entry["values"].astype(np.float64) for entry in entries])
    assert norm_owed(state) == pytest.approx(np.linalg.norm(whole))


def test_what_is_dropped_is_counted() -> None:
    def seen(process: int, commits: int = 7, steps: int = 9, norm: float = 0.0) -> Seen:
        return Seen(process, commits, steps, norm)

    norms = {50.0: 3.0, 51.0: 4.0, 52.0: 12.0}
    joined = seen(60, -1, 0)
    # all are here, in another order, with one more
    assert losses([seen(52), seen(50), joined, seen(51)], norms, Lost()) == (0, 0.0)
    assert losses([seen(51), joined], norms, Lost(1, 84.0)) == (3, pytest.approx(math.hypot(84, 3, 12)))
    # on rank 0, a step was completed that has failed on another one, or the other way about
    behind = [seen(51), seen(50, commits=6, norm=5.0), seen(52)]
    assert losses(behind, norms, Lost()) == (1, 5.0)
    assert [has_kept(one, behind[0]) for one in behind] == [True, False, True]
    assert not has_kept(seen(50, steps=8), behind[0])
    # a rank 0 that has joined brings new parameters, to which nobody owes anything
    assert losses([joined, seen(50, norm=8.0), seen(51, norm=6.0)], {50: 3, 51: 4}, Lost()) == (2, 10.0)
    assert not has_kept(joined, joined)
    # at the beginning, and with a sync that has failed for a second rank: what is lost is counted from the last commit
    assert losses([joined, seen(61, -1, 0)], {}, Lost()) == Lost()
    assert losses([seen(51), seen(52)], norms, Lost()) == (1, 3.0)
    assert losses([seen(51)], norms, Lost()) == (2, pytest.approx(math.hypot(3, 12)))
