"""Parameters of tests that `make test` leaves out, since others show the same guarantee there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

__all__ = ["shown_by", "witnessed_by"]


def witnessed_by(witnesses: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of which all but the witnesses are thorough.

    Example:
        >>> [len(parameter.marks) for parameter in witnessed_by(["a"], ["a", "b"])]
        [0, 1]
    """
    return [pytest.param(v, marks=[] if v in witnesses else [pytest.mark.thorough]) for v in values]


def shown_by(shows: Callable[..., bool], combinations: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Combinations of parameters, of which those that `shows` does not choose are exhaustive.

    The chosen ones show each value of each parameter. The others are products of what these show apart.

    Example:
        >>> [len(parameter.marks) for parameter in shown_by(lambda a, b: a == b, [(1, 1), (1, 2)])]
        [0, 1]
    """
    return [pytest.param(*c, marks=[] if shows(*c) else [pytest.mark.exhaustive]) for c in combinations]
