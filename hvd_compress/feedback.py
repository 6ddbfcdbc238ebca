"""Check, write, read and redistribute saved states: which rank owes what, with any number of ranks.

A state is what `compression_state_dict()` of an edge returns on one rank:

    {"format": 1, "size": ranks, "rank": position, "steps": n, "compressor": config or None,
     "residuals":       {name: {"shape": [...], "values": flat array}},
     "owner_residuals": {name: {"shape": [...], "start": element, "values": flat array}},
     "accumulators":    {name: {"shape": [...], "start": element, "values": flat array}},
     "factors":         {name: {"shape": [...], "values": flat array}}}

Both kinds of residuals count in the units of the sum over ranks. Residuals are per rank: a state goes back to the rank
it came from. "accumulators" is there with AdaGrad only: the sums of squares of the elements that the rank owns, or of
all of a tensor that is not compressed. Owner residuals then count in updates, and like accumulators they
belong to an element, not to a rank.

"factors" is there with PowerSGD only: the Q that the next step of a tensor begins with, the same on all ranks, however
many they are.

A state may also have "loss_scale", which residuals count in, "transfer_steps", how often each tensor has been encoded,
and entries of others, which are kept. Values are float32 or float64, or a smaller floating type, and finite.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress.errors import StateError
from hvd_compress.state_files import read_arrays, write_arrays

__all__ = ["FORMAT", "check_state", "read_state", "redistribute", "write_state"]

FORMAT = 1
State = dict[str, Any]

_NEEDED = ("size", "rank", "steps", "residuals", "owner_residuals")
_KINDS = {
    "residuals": "residual", "owner_residuals": "owner residual", "accumulators": "accumulator", "factors": "factor",
}  # fmt: skip
_OPTIONAL = ("accumulators", "factors")
# a tensor of up to so many elements is believed without values to show for them
_MOST_UNBACKED = 2**20


def check_state(state: Any) -> State:
    """Check that a state has the form that is described at the top of this module.

    Returns:
        The same state with Python's numbers and flat NumPy arrays, float32 or float64; these share memory with the
        given ones where they can. Further entries of the state are kept.

    Raises:
        StateError: it does not have this form, or a value is not finite.

    Example:
        >>> from hvd_compress.feedback import check_state
        >>> check_state({"format": 2})
        Traceback (most recent call last):
        ...
        hvd_compress.errors.StateError: not a compressor state of format 1: its format is 2
    """
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if isinstance(found, bool) or not isinstance(found, int | np.integer) or found != FORMAT:
        raise StateError(f"not a compressor state of format {FORMAT}: its format is {found!r}")
    given = saved.record("compressor state", state, _NEEDED)
    size = saved.integer("size of a compressor state", given["size"], 1)
    checked = {
        **given,
        "format": FORMAT,
        "size": size,
        "rank": saved.integer(f"rank of a compressor state of {size} ranks", given["rank"], 0, size - 1),
        "steps": saved.integer("steps of a compressor state", given["steps"]),
        **{kind: _checked_entries(kind, given[kind]) for kind in _kinds(given)},
    }
    if "loss_scale" in given:
        checked["loss_scale"] = saved.real("loss_scale of a compressor state", given["loss_scale"], above=0.0)
    if "transfer_steps" in given:
        counts = saved.record("transfer_steps of a compressor state", given["transfer_steps"])
        checked["transfer_steps"] = {n: saved.integer(f"transfer_steps of {n!r}", count) for n, count in counts.items()}
    if given.get("compressor") is not None:
        config = saved.record("compressor of a compressor state", given["compressor"], ["id"])
        saved.text("id of the compressor of a compressor state", config["id"])
    return checked


def _kinds(state: Mapping[str, Any]) -> list[str]:
    return [kind for kind in _KINDS if kind not in _OPTIONAL or kind in state]


def _checked_entries(kind: str, entries: Any) -> dict[str, Any]:
    checked = {}
    for name, entry in saved.record(f"{kind} of a compressor state", entries).items():
        what = f"{_KINDS[kind]} of {name!r}"
        has_start = kind not in ("residuals", "factors")
        entry = saved.record(what, entry, ["shape", "values", *(["start"] if has_start else [])])
        shape = saved.shape_of(what, entry["shape"])
        values = saved.floats(what, entry["values"])
        numel = math.prod(shape)
        if not has_start:
            if values.size != numel:
                raise StateError(f"{what} has {values.size} values for shape {shape}")
            checked[name] = {"shape": list(shape), "values": values}
            continue
        start = saved.integer(f"start of the {what}", entry["start"], least=-(2**63))
        if not 0 <= start <= start + values.size <= numel:
            raise StateError(
                f"{what} lies outside of shape {shape}: it has elements {start} to {start + values.size} of {numel}"
            )
        if kind == "accumulators" and (values < 0).any():
            raise StateError(f"{what} has values that are no sums of squares")
        checked[name] = {"shape": list(shape), "start": start, "values": values}
    return checked


def write_state(path: str | os.PathLike[str], state: State) -> None:
    """Write a state to a file of NumPy's npz format, completely or not at all; further JSON-able entries are kept.

    Raises:
        StateError: not a state.
        TypeError: a further entry is not JSON-able.

    Example:
        >>> import tempfile, numpy as np
        >>> from hvd_compress.feedback import read_state, write_state
        >>> owed = {"w": {"shape": [2], "values": np.array([1.0, 2.0], np.float32)}}
        >>> state = {"format": 1, "size": 1, "rank": 0, "steps": 3, "residuals": owed, "owner_residuals": {}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_state(f"{folder}/rank0.npz", state)
        ...     again = read_state(f"{folder}/rank0.npz")
        >>> again["residuals"]["w"]["values"]
        array([1., 2.], dtype=float32)
    """
    plain = check_state(state)
    arrays: dict[str, Any] = {}
    for kind in _kinds(plain):
        for name, entry in plain[kind].items():
            key = f"values{len(arrays)}"
            arrays[key] = entry["values"]
            plain[kind][name] = {**entry, "values": key}
    write_arrays(Path(path), {"plain": np.frombuffer(json.dumps(plain).encode(), np.uint8), **arrays})


def read_state(path: str | os.PathLike[str]) -> State:
    """Read a state that `write_state` wrote; see its example.

    Raises:
        StateError: the file is something else, or damaged.
        FileNotFoundError: there is none.
        OSError: it cannot be opened.
    """
    with Path(path).open("rb") as file:
        try:
            arrays = read_arrays(file)
            state = json.loads(arrays.pop("plain").tobytes())
            for kind in _kinds(state):
                for entry in state[kind].values():
                    # each array is used once: else a small file could stand for any number of arrays
                    entry["values"] = arrays.pop(entry["values"])
            return check_state(state)
        except Exception as error:
            # a damaged file can hold anything, and what that raises depends on where it is met: in the zip directory,
            # in JSON, in a name that is a list
            raise StateError(f"{path} is not a file with a compressor state, or damaged: {error}") from error


def redistribute(states: Sequence[State], size: int, *, average: bool = False) -> list[State]:
    """Divide the residuals of all ranks among another number of ranks so that their sum is kept.

    Args:
        states: of all ranks, in any order.
        size: the new number of ranks.
        average: set this if the ranks' gradients are averaged (op=Average, DDP). A residual counts in units of the sum,
            which is divided by another number of ranks from now on. So each residual is multiplied by new / old ranks,
            which keeps its weight in the update. AdaGrad's owner residuals are updates already, and stay as they are.

    Returns:
        One state per new rank. A new rank takes the sum of the old ranks that are congruent to it modulo `size`; owner
        residuals join the residual of their owner, since another number of ranks means other chunks. With AdaGrad every
        new rank is given the owner residuals and accumulators of all elements, and takes those that it owns. So this
        also works where the same ranks own other elements than before.

    Raises:
        StateError: states of different runs or compressors, or not one of each rank; values that contradict each other,
            or whose sum is not finite; accumulators that no rank has.
        ValueError: `size` is no integer of at least 1.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.feedback import redistribute
        >>> state = {"format": 1, "size": 2, "steps": 3, "compressor": None, "owner_residuals": {}}
        >>> value = {"shape": [2], "values": np.array([1.0, 2.0], np.float32)}
        >>> old = [{**state, "rank": rank, "residuals": {"w": value}} for rank in range(2)]
        >>> redistribute(old, 1)[0]["residuals"]["w"]["values"]
        array([2., 4.], dtype=float32)
    """
    try:
        size = saved.integer("size", size, 1)
    except StateError as error:
        raise ValueError(str(error)) from None
    checked = [check_state(state) for state in states]
    by_rank = {state["rank"]: state for state in checked}
    # a size that a damaged state claims sets no memory aside
    ranks = checked[0]["size"] if checked else 0
    if not checked or len(checked) != ranks or set(by_rank) != set(range(len(checked))):
        raise StateError(
            f"need one state of each of {ranks} ranks, and got those of the ranks "
            f"{sorted(s['rank'] for s in checked)}: give the states that all ranks have saved after the same step"
        )
    _check_together(by_rank)
    factor = size / len(by_rank) if average else 1.0
    return [_state_of(by_rank, new, size, factor) for new in range(size)]


def _check_together(by_rank: dict[int, State]) -> None:
    """Raise StateError unless the states are of one step of one run."""
    first = by_rank[0]
    if len({"accumulators" in state for state in by_rank.values()}) > 1:
        raise StateError("some of the states are of a run with AdaGrad, and some are not: give those of one run")
    shapes: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for rank, state in by_rank.items():
        if state["steps"] != first["steps"] or state["size"] != first["size"]:
            raise StateError(
                f"state of rank {rank} is of step {state['steps']} among {state['size']} ranks, and that of rank 0 of "
                f"step {first['steps']} among {first['size']}: give the states that all ranks have saved after the "
                "same step"
            )
        for key, default in (("compressor", None), ("loss_scale", 1.0)):
            if not saved.equal(state.get(key, default), first.get(key, default)):
                raise StateError(
                    f"state of rank {rank} has the {key} {state.get(key, default)}, that of rank 0 "
                    f"{first.get(key, default)}: they are of different runs"
                )
        for kind in _kinds(state):
            if kind == "factors":
                # of another shape than their tensors, and each state has all of them
                _check_factors(rank, state, first)
                continue
            for name, entry in state[kind].items():
                if shapes.setdefault(name, entry["shape"]) != entry["shape"]:
                    raise StateError(
                        f"{_KINDS[kind]} of {name!r} on rank {rank} has shape {tuple(entry['shape'])}, elsewhere "
                        f"{tuple(shapes[name])}"
                    )
                counts[name] = counts.get(name, 0) + entry["values"].size
    for name, shape in shapes.items():
        # each of the ranks may have as little as one chunk to show, but what there is to be must not follow from a
        # damaged shape alone
        if math.prod(shape) > max(_MOST_UNBACKED, len(by_rank) * counts[name]):
            raise StateError(f"{name!r} has shape {tuple(shape)}, and all states together {counts[name]} values of it")


def _check_factors(rank: int, state: State, first: State) -> None:
    """Raise StateError unless the factors of a state are those of rank 0."""
    expected = first.get("factors", {})
    for name in state["factors"].keys() | expected.keys():
        mine, other = state["factors"].get(name), expected.get(name)
        if mine is None or other is None or not np.array_equal(mine["values"], other["values"]):
            raise StateError(
                f"the factor of {name!r} in the state of rank {rank} is not that of rank 0: they are of different runs"
            )


def _state_of(by_rank: dict[int, State], new: int, size: int, factor: float) -> State:
    first = by_rank[0]
    has_accumulators = "accumulators" in first
    parts: dict[str, list[dict[str, Any]]] = {}
    for rank in range(new, len(by_rank), size):
        for kind in ("residuals",) if has_accumulators else ("residuals", "owner_residuals"):
            for name, entry in by_rank[rank][kind].items():
                parts.setdefault(name, []).append(entry)
    residuals = {name: _summed(name, entries, factor) for name, entries in parts.items()}
    divided = {**first, "size": size, "rank": new, "residuals": residuals, "owner_residuals": {}}
    if has_accumulators:
        divided["owner_residuals"], _ = _put_together(by_rank, "owner_residuals")
        divided["accumulators"], held = _put_together(by_rank, "accumulators")
        for name, of_tensor in held.items():
            if not of_tensor.all():
                raise StateError(
                    f"no state has the accumulator of {name!r} from element {of_tensor.argmin()} on: a state is "
                    "missing, or of another run"
                )
    return divided


def _summed(name: str, entries: Sequence[dict[str, Any]], factor: float) -> dict[str, Any]:
    total = _zeros(entries)
    with np.errstate(over="ignore"):
        for entry in entries:
            start = entry.get("start", 0)
            total["values"][start : start + entry["values"].size] += entry["values"]
        total["values"] *= total["values"].dtype.type(factor)
    if not np.isfinite(total["values"]).all():
        raise StateError(f"residuals of {name!r} are so large that their sum is not finite")
    return total


def _put_together(by_rank: dict[int, State], kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Join the ranks' entries to all elements of each tensor; returns them, and which elements some rank has."""
    whole: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in by_rank.values() for name in state[kind]):
        entries = {rank: state[kind][name] for rank, state in by_rank.items() if name in state[kind]}
        target = _zeros(list(entries.values()))
        known = np.zeros(target["values"].size, bool)
        for rank, entry in entries.items():
            elements = slice(entry["start"], entry["start"] + entry["values"].size)
            if (known[elements] & (target["values"][elements] != entry["values"])).any():
                raise StateError(f"{_KINDS[kind]} of {name!r} on rank {rank} differs from that of another rank")
            target["values"][elements] = entry["values"]
            known[elements] = True
        whole[name], held[name] = {**target, "start": 0}, known
    return whole, held


def _zeros(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make an entry of zeros for all elements, in the largest of the types."""
    dtype = np.result_type(*(entry["values"].dtype for entry in entries))
    return {"shape": list(entries[0]["shape"]), "values": np.zeros(math.prod(entries[0]["shape"]), dtype)}
