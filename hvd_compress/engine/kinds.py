"""What ranks tell each other of their gradients, which decide what collectives there are, and of their variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

__all__ = ["DENSE", "NONE", "NOT_COMPARED", "SPARSE", "first_unequal", "kinds_told", "only_here", "only_there"]

NONE, SPARSE, DENSE = "None", "sparse", "dense"
"""Kinds of gradients."""

NOT_COMPARED = -1
"""In the place of a checksum."""

_REMEDY = (
    "A gradient is None where the loss of a rank does not depend on the variable: let it depend on the same ones on "
    "all ranks, as by adding 0 times the variable's sum, or with unconnected_gradients=tf.UnconnectedGradients.ZERO, "
    "which makes it dense. sparse_as_dense=True makes sparse ones dense"
)
_SUBJECT = f"what kind of gradient there is of each variable ({_REMEDY})"


def kinds_told(names: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """Return what a rank compares when its gradients are of new kinds."""
    return {_SUBJECT: dict(zip(names, kinds, strict=True))}


def only_here(names: Sequence[str], before: Sequence[str], now: Sequence[str]) -> str:
    """Return the error for a rank whose gradients are of new kinds, where those of others are as before."""
    changed = [
        f"that of {name!r} is {new} and was {old}"
        for name, old, new in zip(names, before, now, strict=True)
        if old != new
    ]
    return (
        "the ranks disagree on what kind of gradient there is of each variable: on this rank "
        f"{_listed(changed)}, and other ranks go on as before. {_REMEDY}"
    )


def only_there(names: Sequence[str], kinds: Sequence[str]) -> str:
    """Return the error for ranks whose gradients are as before."""
    kept = [f"{name!r} {kind}" for name, kind in zip(names, kinds, strict=True)]
    return (
        "the ranks disagree on what kind of gradient there is of each variable: on another rank, whose error says "
        f"more, they are of other kinds in this step than before, or it has called join(). Here they are "
        f"{_listed(kept)}, as before. {_REMEDY}"
    )


def first_unequal(checksums: npt.NDArray[Any], names: Sequence[str]) -> tuple[str, int] | None:
    """The first tensor whose values differ between ranks, and a rank that differs from the first one; None if none.

    Args:
        checksums: a row for each rank, a column for each name; NOT_COMPARED where a rank does not say it.
        names: of the tensors.
    """
    differs = (checksums != checksums[0]) & (checksums != NOT_COMPARED).all(axis=0)
    if not differs.any():
        return None
    i = int(differs.any(axis=0).argmax())
    return names[i], int(differs[:, i].argmax())


_MOST_LISTED = 10


def _listed(parts: Sequence[str]) -> str:
    left = len(parts) - _MOST_LISTED
    return ", ".join([*parts[:_MOST_LISTED], *([f"and {left} more"] if left > 0 else [])])
