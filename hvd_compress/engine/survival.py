"""What ranks owe when others come and go: who was lost with how much, and what each of the others goes on with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.feedback import redistribute

__all__ = ["Lost", "Seen", "has_kept", "losses", "norm_owed", "survivor_state", "taken_up", "united_accumulators"]

State = dict[str, Any]


class Seen(NamedTuple):
    """What a rank says of itself when all have met.

    Args:
        process: a number that no other process has.
        commits: how often the state was committed when what it has now was so; -1 if it has just joined.
        steps: that were made by then.
        norm: Euclidean, of what it owes.
    """

    process: float
    commits: float
    steps: float
    norm: float


class Lost(NamedTuple):
    """What was dropped since the run began.

    Args:
        ranks: how many were lost with what they owed.
        norm: Euclidean, of what they owed, as if it were one vector; in units of the sum over the ranks of its time.
    """

    ranks: int = 0
    norm: float = 0.0


def has_kept(mine: Seen, root: Seen) -> bool:
    """Whether a rank owes what it has, with the parameters of `root`, which all ranks take over.

    It does not if it has joined, or if one of the two has completed a step that failed on the other: of such a step,
    what the rank owed before has been sent.
    """
    return mine.commits >= 0 and (mine.commits, mine.steps) == (root.commits, root.steps)


def losses(seen: Sequence[Seen], norms: Mapping[float, float], before: Lost) -> Lost:
    """Count what is dropped now.

    Args:
        seen: of all ranks, by their new numbers; all take over the parameters of the first.
        norms: of what each process owed at the last commit of all.
        before: what had been dropped by then.

    Example:
        >>> from hvd_compress.engine import Lost, Seen, losses
        >>> seen = [Seen(process=71, commits=8, steps=8, norm=2.0), Seen(process=72, commits=-1, steps=0, norm=0.0)]
        >>> losses(seen, {70: 3.0, 71: 2.0}, Lost())  # one has ended, another one has joined
        Lost(ranks=1, norm=3.0)
    """
    here = {rank.process for rank in seen}
    gone = [norm for process, norm in norms.items() if process not in here]
    stale = [rank.norm for rank in seen if rank.commits >= 0 and not has_kept(rank, seen[0])]
    return Lost(before.ranks + len(gone) + len(stale), math.hypot(before.norm, *gone, *stale))


def norm_owed(state: Mapping[str, Any]) -> float:
    """Compute the Euclidean norm of what would be lost with the rank that a state is of.

    With AdaGrad, what owners owe belongs to elements, and all ranks know it (`united_accumulators`).
    """
    kinds = ["residuals"] if "accumulators" in state else ["residuals", "owner_residuals"]
    values = [entry["values"] for kind in kinds for entry in state[kind].values()]
    return math.sqrt(sum(float(np.square(v, dtype=np.float64).sum()) for v in values))


def survivor_state(state: State, size: int, rank: int, factor: float) -> State:
    """Make of the state of a rank what it goes on with among another number of ranks.

    What it owed as the owner of chunks joins what it owes as a sender, since other ranks own these chunks now.

    Args:
        state: that `check_state` takes; not changed. Entries of AdaGrad are left out.
        size: the new number of ranks.
        rank: its new number.
        factor: on residuals. They count in units of the sum over ranks, which with op=Average is divided by another
            number now: new ranks / old ranks keeps what they are worth to the parameters.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.engine import survivor_state
        >>> own = {"w": {"shape": [2], "values": np.array([1.0, 2.0], np.float32)}}
        >>> as_owner = {"w": {"shape": [2], "start": 1, "values": np.array([4.0], np.float32)}}
        >>> old = {"format": 1, "size": 4, "rank": 3, "steps": 9, "residuals": own, "owner_residuals": as_owner}
        >>> survivor_state(old, size=2, rank=1, factor=2 / 4)["residuals"]["w"]["values"]
        array([0.5, 3. ], dtype=float32)
    """
    kinds = ["residuals"] if "accumulators" in state else ["residuals", "owner_residuals"]
    owed: dict[str, Any] = {}
    for kind in kinds:
        for name, entry in state[kind].items():
            values, start = entry["values"], entry.get("start", 0)
            if name not in owed:
                whole = np.zeros(math.prod(entry["shape"]), values.dtype)
                owed[name] = {"shape": entry["shape"], "values": whole}
            owed[name]["values"][start : start + values.size] += values
    for entry in owed.values():
        entry["values"] *= entry["values"].dtype.type(factor)
    rest = {key: value for key, value in state.items() if key != "accumulators"}
    return {**rest, "size": size, "rank": rank, "residuals": owed, "owner_residuals": {}}


def taken_up(state: State, united: Mapping[str, Any] | None, size: int, rank: int, factor: float) -> State:
    """Make of the state of a rank what it goes on with, with what belongs to elements where AdaGrad is used.

    Args:
        state: see `survivor_state`.
        united: of `united_accumulators`, or nothing without AdaGrad.
        size: see `survivor_state`.
        rank: likewise.
        factor: likewise.
    """
    new = survivor_state(state, size, rank, factor)
    if not united:
        return new
    return {**new, "accumulators": united["accumulators"], "owner_residuals": united["owner_residuals"]}


def united_accumulators(states: Sequence[State]) -> dict[str, Any]:
    """Join what all ranks with AdaGrad keep of the elements that they own: "accumulators" and "owner_residuals"."""
    united = redistribute([{**state, "residuals": {}} for state in states], 1)[0]
    return {kind: united[kind] for kind in ("accumulators", "owner_residuals")}
