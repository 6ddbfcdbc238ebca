"""Handle saved states where nothing is exchanged, and fit the entries of a state to the tensors that are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import saved
from hvd_compress.engine.accumulators import refuse_accumulators
from hvd_compress.errors import StateError
from hvd_compress.feedback import FORMAT, check_state

__all__ = ["empty_state", "fitted_entries", "has_residuals", "refuse_residuals"]

_RESIDUALS = ("residuals", "owner_residuals")


def empty_state() -> dict[str, Any]:
    """Return the state of a rank where nothing is exchanged."""
    return {"format": FORMAT, "size": 1, "rank": 0, "steps": 0, "residuals": {}, "owner_residuals": {}}


def has_residuals(state: Any) -> bool:
    """Tell whether a state owes anything.

    Raises:
        StateError: it is no compressor state.
    """
    state = check_state(state)
    return bool(state["residuals"] or state["owner_residuals"])


def refuse_residuals(state: dict[str, Any]) -> None:
    """Raise StateError if a state with residuals is loaded where nobody pays them."""
    owes = has_residuals(state)
    refuse_accumulators(state)
    if owes:
        raise StateError(
            "compressor state with residuals, but nothing is exchanged here that would pay them (an elastic run "
            "without compression): train with the compression as before, or leave the state out, which drops what was "
            "still owed"
        )


def fitted_entries(state: Mapping[str, Any], dtypes: Mapping[str, npt.DTypeLike]) -> dict[str, Any]:
    """Convert the values of a state that `check_state` returned to the types in which gradients are handled.

    Raises:
        StateError: a value is too large for that, or for the sum that is made of both kinds of residuals.
    """
    fitted = dict(state)
    for kind in (*_RESIDUALS, *(["accumulators"] if "accumulators" in state else [])):
        fitted[kind] = {
            name: {**entry, "values": saved.floats(f"{kind} of {name!r}", entry["values"], dtype=dtypes[name])}
            for name, entry in state[kind].items()
        }
    for name in fitted["residuals"].keys() & fitted["owner_residuals"].keys():
        most = [np.abs(fitted[kind][name]["values"]).max(initial=0) for kind in _RESIDUALS]
        with np.errstate(over="ignore"):
            if not np.isfinite(most[0] + most[1]):
                raise StateError(f"residuals of {name!r} are so large that their sum is not finite")
    return fitted
