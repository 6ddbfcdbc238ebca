"""Parameters of tests that `make test` leaves out, since others show the same guarantee there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["witnessed_by"]


def witnessed_by(witnesses: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of which all but the witnesses are thorough.

    Example:
        >>> [len(parameter.marks) for parameter in witnessed_by(["a"], ["a", "b"])]
        [0, 1]
    """
    return [pytest.param(v, marks=[] if v in witnesses else [pytest.mark.thorough]) for v in values]
