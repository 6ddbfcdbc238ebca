"""The place of a `NodeSync` where there is one node: what it has moved is the average, and nothing is sent.

In an elastic run it may owe what it has not told ranks that are gone; that goes with the next change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging import CHANGES, Array, Arrived, FlatTensors, kept_at
from hvd_compress.compressors import Compressor
from hvd_compress.exchange import aligned_empty
from hvd_compress.policy import Policy

__all__ = ["AloneSync"]


class AloneSync:
    """Holds the change of one node until it is due; see `NodeSync`.

    Args:
        flat: the tensors.
    """

    seconds_between = seconds_inside = 0.0
    bytes_between = bytes_inside = 0
    is_decayed = False

    def __init__(self, flat: FlatTensors) -> None:
        self.flat = flat
        self.reference: Array = aligned_empty(flat.size, flat.dtype)
        self._change: Array | None = None
        self._debt: Array | None = None
        self._debt_before: Array | None = None
        """What was owed before the last change, which may be taken back."""
        self._resting: list[slice] = []
        """Where tensors lie that have no part in the change."""

    def fit(self) -> Array:
        """Return the reference."""
        return self.reference

    def send(
        self,
        kind: str,
        arrays: Sequence[Array],
        compression: Compressor | Policy,
        wait: int,
        decay: float = 1.0,
        resting: Collection[str] = (),
    ) -> None:
        """Keep the change since the reference, exactly: compression is for what is sent."""
        change = np.empty(self.flat.size, self.flat.dtype)
        self.flat.gather(arrays, change)
        with np.errstate(invalid="ignore"):
            change -= self.reference
        if self._debt is not None:
            change += self._debt
        self._resting = [p.at for share in self.flat.shares for p in share.pieces if p.name in resting]
        for at in self._resting:
            change[at] = 0
        self._change = change

    def progress(self) -> None:
        """Start nothing."""

    def receive(self) -> Arrived:
        """Return what was kept."""
        change, self._change = self._change, None
        assert change is not None
        is_finite = bool(np.isfinite(change).all())
        self._debt_before = self._debt
        if is_finite:
            self._debt = kept_at(self._debt, self._resting)
        parts = [(share, change[share.at]) for share in self.flat.shares]
        return Arrived(CHANGES, parts if is_finite else [], is_finite, None)

    def drain(self) -> None:
        """Wait for nothing."""

    def take_back(self) -> None:
        """Owe what was owed before the last change."""
        self._debt = self._debt_before

    def owed(self) -> Array | None:
        """Return what is owed; None if it is nothing."""
        return self._debt

    def owe(self, debt: Array | None) -> None:
        """Owe this; it goes with the next change."""
        self._debt = debt

    def abandon(self) -> None:
        """Forget a change that is not due yet."""
        self._change = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "reference": self.reference.copy(),
            "change": None if self._change is None else self._change.copy(),
            "debt": None if self._debt is None else self._debt.copy(),
        }

    def check(self, state: Any, *, finite: bool) -> dict[str, Any]:
        """Check a state and return what `load` takes over of it.

        Raises:
            StateError: of another network, or damaged.
        """
        given = saved.record("DiLoCo state of a dtype", state, ["reference", "change"])
        size, dtype = (self.flat.size,), self.flat.dtype
        change = given["change"]
        if change is not None:
            change = saved.floats("change under way in a DiLoCo state", change, size, dtype, finite=False)
        # states of earlier releases have no debt
        debt = given.get("debt")
        if debt is not None:
            debt = saved.floats("debt of a DiLoCo state", debt, size, dtype)
        reference = saved.floats("reference of a DiLoCo state", given["reference"], size, dtype, finite=finite)
        return {"reference": reference, "flight": change, "debt": debt}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self.reference[...] = checked["reference"]
        self._change = None if checked["flight"] is None else checked["flight"].copy()
        self._debt = None if checked["debt"] is None else checked["debt"].copy()
