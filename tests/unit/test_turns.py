"""Memory that takes turns: what is final, what is not, and where it lies."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.exchange.turns import Turns
from hvd_compress.kernels.many import address_of


@pytest.mark.parametrize("which", [None, [0, 2], []], ids=str)
def test_those_that_turn_are_what_was_to_come(which: list[int] | None) -> None:
    turns = Turns([3, 0, 40])
    turns.make()
    for i in range(3):
        turns.take_over(i, None)
        turns.next[i][:] = i + 1
    turns.turn(which)
    turned = range(3) if which is None else which
    for i, (now, to_come) in enumerate(zip(turns.now, turns.next, strict=True)):
        assert (now == (i + 1 if i in turned else 0)).all()
        assert (to_come == (0 if i in turned else i + 1)).all()


def test_addresses_follow() -> None:
    turns = Turns([3, 17, 40])
    turns.make()
    for which in ([1], None, [0, 2]):
        turns.turn(which)
        assert turns.now_at.tolist() == [address_of(array) for array in turns.now]
        assert turns.next_at.tolist() == [address_of(array) for array in turns.next]
        assert not any(at % 64 for at in turns.now_at)


def test_what_comes_from_elsewhere_is_copied_whatever_its_type() -> None:
    turns = Turns([3])
    turns.make()
    values = np.array([1.5, 2.5, -3.0])
    mine = turns.take_over(0, values)
    assert mine is turns.now[0]
    assert mine.dtype == np.float32
    values[:] = 0
    assert mine.tolist() == [1.5, 2.5, -3.0]


def test_memory_is_made_once() -> None:
    turns = Turns([3])
    assert not turns.now
    turns.make()
    before = turns.now[0]
    turns.make()
    assert turns.now[0] is before
