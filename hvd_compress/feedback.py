"""Residuals in a saved state: who owes what, and how that is divided among another number of ranks.

A state is what `compression_state_dict()` of an edge returns on one rank:

    {"format": 1, "size": ranks, "rank": position, "steps": n, "compressor": config or None,
     "residuals":       {name: {"shape": [...], "values": flat array}},
     "owner_residuals": {name: {"shape": [...], "start": element, "values": flat array}},
     "accumulators":    {name: {"shape": [...], "start": element, "values": flat array}}}

Both kinds of residuals count in the units of the sum over ranks. Residuals are per rank: a state goes back to the rank
it came from. "accumulators" is there with AdaGrad only: the sums of squares of the elements that the rank owns, or of
all of a tensor that is not compressed. Owner residuals then count in updates, and like accumulators they
belong to an element, not to a rank.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress.errors import StateError

__all__ = ["FORMAT", "check_state", "read_state", "redistribute", "write_state"]

FORMAT = 1
State = dict[str, Any]


def check_state(state: Any) -> None:
    """Raise StateError unless `state` has the form that is described at the top of this module."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != FORMAT:
        raise StateError(f"not a compressor state of format {FORMAT}: its format is {found!r}")
    missing = {"size", "rank", "steps", "residuals", "owner_residuals"} - state.keys()
    if missing:
        raise StateError(f"compressor state lacks {', '.join(sorted(missing))}")
    for name, entry in state["residuals"].items():
        if len(entry["values"]) != math.prod(entry["shape"]):
            raise StateError(
                f"residual of {name!r} has {len(entry['values'])} values for shape {tuple(entry['shape'])}"
            )
    for name, entry in state["owner_residuals"].items():
        if not 0 <= entry["start"] <= entry["start"] + len(entry["values"]) <= math.prod(entry["shape"]):
            raise StateError(f"owner residual of {name!r} lies outside of shape {tuple(entry['shape'])}")
    for name, entry in state.get("accumulators", {}).items():
        if not 0 <= entry["start"] <= entry["start"] + len(entry["values"]) <= math.prod(entry["shape"]):
            raise StateError(f"accumulator of {name!r} lies outside of shape {tuple(entry['shape'])}")
        values = np.asarray(entry["values"])
        if not ((values >= 0) & np.isfinite(values)).all():
            raise StateError(f"accumulator of {name!r} has values that are no sums of squares")


def _kinds(state: State) -> list[str]:
    return ["residuals", "owner_residuals", *(["accumulators"] if "accumulators" in state else [])]


def write_state(path: str | os.PathLike[str], state: State) -> None:
    """Write a state to a file of NumPy's npz format, whole or not at all; further JSON-able entries are kept."""
    check_state(state)
    arrays: dict[str, Any] = {}
    plain = dict(state)
    for kind in _kinds(state):
        plain[kind] = {}
        for name, entry in state[kind].items():
            key = f"values{len(arrays)}"
            arrays[key] = np.asarray(entry["values"])
            plain[kind][name] = {**entry, "values": key}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez(file, plain=np.frombuffer(json.dumps(plain).encode(), np.uint8), **arrays)
    partial.replace(path)


def read_state(path: str | os.PathLike[str]) -> State:
    """The state that `write_state` wrote.

    Raises:
        StateError: the file is something else, or damaged.
        FileNotFoundError: there is none.
    """
    try:
        # opened here: np.load leaves what it has opened open if the file is damaged
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            state: State = json.loads(file["plain"].tobytes())
            for kind in _kinds(state):
                for entry in state[kind].values():
                    entry["values"] = file[entry["values"]]
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise StateError(f"{path} is not a file with a compressor state: {error}") from error
    check_state(state)
    return state


def redistribute(states: Sequence[State], size: int) -> list[State]:
    """Divide the residuals of all ranks among another number of ranks so that their sum is kept.

    Args:
        states: of all ranks, in any order.
        size: the new number of ranks.

    Returns:
        One state per new rank. A new rank takes the sum of the old ranks that are congruent to it modulo `size`; owner
        residuals join the residual of their owner, since another number of ranks means other chunks. With AdaGrad every
        new rank is given the owner residuals and accumulators of all elements, of which it takes those that it owns: so
        this also serves where the same ranks own other elements than before.

    Raises:
        StateError: states of different runs, or not one of each rank; accumulators that no rank has.
        ValueError: `size` below 1.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.feedback import redistribute
        >>> state = {"format": 1, "size": 2, "steps": 3, "compressor": None, "owner_residuals": {}}
        >>> value = {"shape": [2], "values": np.array([1.0, 2.0], np.float32)}
        >>> old = [{**state, "rank": rank, "residuals": {"w": value}} for rank in range(2)]
        >>> redistribute(old, 1)[0]["residuals"]["w"]["values"]
        array([2., 4.], dtype=float32)
    """
    if size < 1:
        raise ValueError(f"size={size}: must be at least 1")
    for state in states:
        check_state(state)
    by_rank = {state["rank"]: state for state in states}
    expected = set(range(states[0]["size"])) if states else set()
    if not states or set(by_rank) != expected or len(states) != len(expected):
        raise StateError(
            f"need one state of each of {len(expected)} ranks, got those of ranks {sorted(s['rank'] for s in states)}"
        )
    first = by_rank[0]
    if len({"accumulators" in state for state in states}) > 1:
        raise StateError("some of the states are of a run with AdaGrad, others are not")
    for rank, state in by_rank.items():
        if state["steps"] != first["steps"] or state["size"] != first["size"]:
            raise StateError(
                f"state of rank {rank} is of step {state['steps']}, that of rank 0 of step {first['steps']}"
            )
    return [_state_of(by_rank, new, size, first) for new in range(size)]


def _state_of(by_rank: dict[int, State], new: int, size: int, first: State) -> State:
    residuals: dict[str, Any] = {}
    has_accumulators = "accumulators" in first
    for rank in sorted(by_rank):
        if rank % size != new:
            continue
        state = by_rank[rank]
        for name, entry in state["residuals"].items():
            target = residuals.setdefault(name, _zeros(entry))
            target["values"] += np.asarray(entry["values"])
        for name, entry in state["owner_residuals"].items() if not has_accumulators else ():
            target = residuals.setdefault(name, _zeros(entry))
            values = np.asarray(entry["values"])
            target["values"][entry["start"] : entry["start"] + len(values)] += values
    divided = {**first, "size": size, "rank": new, "residuals": residuals, "owner_residuals": {}}
    if has_accumulators:
        divided["owner_residuals"], _ = _put_together(by_rank, "owner_residuals")
        divided["accumulators"], held = _put_together(by_rank, "accumulators")
        for name, of_tensor in held.items():
            if not of_tensor.all():
                raise StateError(f"no state has the accumulator of {name!r} from element {of_tensor.argmin()} on")
    return divided


def _put_together(by_rank: dict[int, State], kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries with all elements of each tensor, and which of them some rank has."""
    whole: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for state in by_rank.values():
        for name, entry in state[kind].items():
            target = whole.setdefault(name, {**_zeros(entry), "start": 0})
            elements = slice(entry["start"], entry["start"] + len(entry["values"]))
            target["values"][elements] = np.asarray(entry["values"])
            held.setdefault(name, np.zeros(target["values"].size, bool))[elements] = True
    return whole, held


def _zeros(entry: dict[str, Any]) -> dict[str, Any]:
    values = np.zeros(math.prod(entry["shape"]), np.asarray(entry["values"]).dtype)
    return {"shape": list(entry["shape"]), "values": values}
