from __future__ import annotations

import dataclasses
import itertools

import pytest

from hvd_compress import Key


def test_words_are_frozen():
    """Replayed draws must not change between releases; these are what version 1 gives."""
    assert [int(w) for w in Key().words()] == [572659834, 4266399902]
    assert [int(w) for w in Key(seed=7, name="conv1.weight", step=12, rank=3, hop=1).words()] == [
        1307360147,
        3983692745,
    ]


def test_every_field_changes_the_words():
    keys = [Key()] + [Key(**{f.name: "a" if f.name == "name" else 1}) for f in dataclasses.fields(Key)]
    assert len({k.words() for k in keys}) == len(keys)


def test_fields_do_not_run_into_each_other():
    values = [Key(step=1, rank=11), Key(step=11, rank=1), Key(name="1/1"), Key(chunk=1, name="1"), Key(chunk=11)]
    assert len({k.words() for k in values}) == len(values)


def test_many_steps_and_ranks_do_not_collide():
    words = {
        Key(name="w", step=s, rank=r, hop=h).words() for s, r, h in itertools.product(range(500), range(8), (0, 1))
    }
    assert len(words) == 8000


def test_frozen_hashable_comparable():
    assert Key(name="a") == Key(name="a")
    assert len({Key(), Key(), Key(step=1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Key().step = 3
