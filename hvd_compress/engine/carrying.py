"""What ranks owe in an elastic run, from one commit of its state to the next, and from ranks to other ranks."""

from __future__ import annotations

import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.engine.survival import Lost, Seen, has_kept, losses, norm_owed, united_accumulators
from hvd_compress.plain import dumps, loads
from hvd_compress.ranks import Ranks

__all__ = ["Carried", "CarriedStates", "Owed", "State"]

State = dict[str, Any]
Key = Hashable

_RESIDUALS = ("residuals", "owner_residuals")

_log = logging.getLogger("hvd_compress")


class Carried(ABC):
    """What ranks owe, kept beside the values that Horovod's state keeps; its methods are called where those are.

    Residuals never travel. Each commit tells all ranks their norms, so that they know what is lost with a rank.

    Args:
        label: of the collectives; the same on all ranks, and of no other object of this kind.
        ranks: makes the ranks that there are.
    """

    def __init__(self, label: str, ranks: Callable[[], Ranks]) -> None:
        self._label = f"hvd_compress.elastic.{label}"
        self._ranks = ranks
        # as a float64 it is exact
        self._process = float(secrets.randbits(52))
        self._norms: dict[float, float] = {}
        self._lost = Lost()
        """Before this sync, which may fail, and be made again."""
        self.lost = Lost()
        """What was dropped so far."""

    @abstractmethod
    def save(self) -> None:
        """Keep what is owed, to come back to."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was kept last. It is used from the next sync on, which comes before the next step."""

    def gather(self, commits: int) -> None:  # noqa: B027, only ranks that train on their own have something to do here
        """All ranks have met, and still have parameters of their own; a collective call.

        Args:
            commits: as `sync` takes it.
        """

    @abstractmethod
    def sync(self, commits: int) -> None:
        """Take over what this rank owes, among the ranks that there are; a collective call.

        Args:
            commits: of the state that this rank brings, -1 if it has just joined.
        """

    @abstractmethod
    def share(self) -> Callable[[], None]:
        """Let all ranks know what each of them would take with it; a collective call.

        Returns:
            What takes over what was heard. A rank may be lost while ranks tell each other, so that some have heard
            everything and others have not: until this is called, all is as it was at the last commit.
        """

    def _tell(self, states: Sequence[State]) -> Callable[[], None]:
        """Tell all ranks the norm of what these states owe, with arrays of NumPy; see `share`."""
        norms = [norm_owed(state) for state in states]
        mine = np.array([self._process, float(np.hypot.reduce(norms)) if norms else 0.0])
        everyone = self._ranks().run("allgather", f"{self._label}.norms", mine).reshape(-1, 2).tolist()
        return lambda: self._settle(dict(everyone))

    def _settle(self, norms: dict[float, float]) -> None:
        """Note what each process would take with it, and that what was lost until now is counted."""
        self._norms, self._lost = norms, self.lost

    def _gathered(self, what: str, mine: Any) -> list[Any]:
        """What each rank gives, in their order; a collective call."""
        everyone = self._ranks().gather_bytes(dumps(mine) + b"\n", f"{self._label}.{what}")
        return [loads(of_rank) for of_rank in everyone.splitlines()]

    def _meet(self, commits: int, states: Sequence[State]) -> tuple[bool, list[Seen]]:
        """Meet all ranks; returns whether this rank still owes what it has, and what all have said."""
        norms = [norm_owed(state) for state in states]
        steps = sum(state["steps"] for state in states)
        told = Seen(self._process, commits, steps, float(np.hypot.reduce(norms)) if norms else 0.0)
        rows = self._ranks().run("allgather", f"{self._label}.ranks", np.array(told, np.float64))
        seen = [Seen(*row) for row in rows.reshape(-1, len(told)).tolist()]
        return has_kept(told, seen[0]), seen

    def _from_root(self, states: Any) -> Any:
        """What rank 0 gives as `states`, on all ranks, which also take over its norms and losses."""
        ranks = self._ranks()
        mine = dumps([self._norms, tuple(self._lost), states]) if ranks.position == 0 else b""
        self._norms, lost, states = loads(ranks.gather_bytes(mine, f"{self._label}.root"))
        self._lost = Lost(*lost)
        return states

    def _count(self, seen: Sequence[Seen]) -> None:
        self.lost = losses(seen, self._norms, self._lost)
        if self.lost != self._lost and self._ranks().position == 0:
            _log.warning(
                "%s: %d ranks were lost with what they owed, of the norm %.3g; in all %d, %.3g", self._label,
                self.lost.ranks - self._lost.ranks, math.sqrt(self.lost.norm**2 - self._lost.norm**2), *self.lost,
            )  # fmt: skip


class Owed(NamedTuple):
    """What a rank owes of one exchange, until that is made for the ranks that there are.

    Args:
        state: of this rank.
        united: with AdaGrad, what belongs to elements, as all ranks know it, and `state` does not; see
            `united_accumulators`. None where no rank knows it yet.
        is_as_saved: the state is that of this rank among these ranks, as a user has loaded it.
    """

    state: State
    united: Mapping[str, Any] | None = None
    is_as_saved: bool = False


class CarriedStates(Carried):
    """Of exchanges that are made in their first step among the ranks that there are; by keys, equal on all ranks."""

    def __init__(self, label: str, ranks: Callable[[], Ranks]) -> None:
        super().__init__(label, ranks)
        self._saved: dict[Key, Owed] = {}
        self._united: dict[Key, Mapping[str, Any]] = {}
        self._shared = _Shared.NOTHING
        """In commits, on all ranks: it never becomes less, as Python collects garbage when it likes."""

    @abstractmethod
    def _owed(self) -> dict[Key, Owed]:
        """What is owed now, of all exchanges."""

    @abstractmethod
    def _go_back(self, owed: dict[Key, Owed]) -> None:
        """Give up all exchanges, of which steps may be under way; this is owed."""

    def _said(self, key: Key) -> Any:
        """A key as plain values."""
        return key

    def _heard(self, said: Any) -> Key:
        key: Key = said
        return key

    def save(self) -> None:
        self._saved = self._owed()

    def restore(self) -> None:
        self._go_back(self._saved)

    def share(self) -> Callable[[], None]:
        owed = self._owed()
        self._shared = max(self._shared, _shared_of(owed))
        if self._shared is _Shared.NOTHING:
            return lambda: self._settle({})
        settle = self._tell([one.state for one in owed.values()])
        united = {key: one.united for key, one in owed.items() if one.united is not None}
        parts = {
            key: {**one.state, "residuals": {}}
            for key, one in owed.items()
            if one.united is None and "accumulators" in one.state
        }
        if self._shared is _Shared.ACCUMULATORS:
            told = self._gathered("accumulators", [[self._said(key), state] for key, state in parts.items()])
            everyone = [{self._heard(said): state for said, state in of_rank} for of_rank in told]
            for key in parts:
                if all(key in of_rank for of_rank in everyone):
                    united[key] = united_accumulators([of_rank[key] for of_rank in everyone])

        def take() -> None:
            settle()
            self._united = united

        return take

    def sync(self, commits: int) -> None:
        mine = self._owed()
        owes, seen = self._meet(commits, [owed.state for owed in mine.values()])
        # who joins begins at the same step, which randomness depends on
        told = [[self._said(key), _common(owed.state), self._united.get(key)] for key, owed in mine.items()]
        common, shared = self._from_root([told, int(max(self._shared, _shared_of(mine)))])
        self._shared = _Shared(shared)
        self._count(seen)
        taken: dict[Key, Owed] = {}
        for said, state, united in common:
            key = self._heard(said)
            kinds = _RESIDUALS[:1] if united is not None else _RESIDUALS
            own = {kind: mine[key].state[kind] for kind in kinds} if owes and key in mine else {}
            taken[key] = Owed({**state, **own}, united)
        self._go_back(taken)


class _Shared(IntEnum):
    NOTHING = 0
    NORMS = 1
    ACCUMULATORS = 2


def _shared_of(owed: Mapping[Key, Owed]) -> _Shared:
    """What ranks have to share of this."""
    if any(one.united is not None or "accumulators" in one.state for one in owed.values()):
        return _Shared.ACCUMULATORS
    return _Shared.NORMS if owed else _Shared.NOTHING


def _common(state: State) -> State:
    """What of a rank's state is the same on all ranks."""
    return {**{key: value for key, value in state.items() if key != "accumulators"}, **{key: {} for key in _RESIDUALS}}
