"""What an optimizer owes in an elastic run, from one commit of its state to the next, and from ranks to other ranks."""

from __future__ import annotations

import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np

from hvd_compress.engine import (
    Ledger,
    Lost,
    Seen,
    average_share,
    has_kept,
    losses,
    norm_owed,
    survivor_state,
    united_accumulators,
)
from hvd_compress.errors import StateError
from hvd_compress.torch._gradients.combiner import Combiner
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._gradients.wrapping import label_for
from hvd_compress.torch._plain import dumps, loads
from hvd_compress.torch._ranks import TorchRanks
from hvd_compress.torch._state import of_root

__all__ = ["Carried", "CarriedOptimizer"]

State = dict[str, Any]

_log = logging.getLogger("hvd_compress")


class Carried(ABC):
    """What ranks owe, kept beside the values that Horovod's state keeps; its methods are called where those are.

    Residuals never travel. Each commit tells all ranks their norms, so that they know what is lost with a rank.

    Args:
        label: of the collectives; the same on all ranks, and of no other object of this kind.
    """

    def __init__(self, label: str) -> None:
        self._label = f"hvd_compress.elastic.{label}"
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
    def _owing(self, live: bool) -> list[State]:
        """States as they are now, or as they were when they were kept or restored; arrays of NumPy."""

    def share(self, live: bool) -> None:
        """Let all ranks know what each of them would take with it; a collective call.

        Args:
            live: of what is now, not of what was kept.
        """
        norms = [norm_owed(state) for state in self._owing(live)]
        mine = np.array([self._process, float(np.hypot.reduce(norms)) if norms else 0.0])
        everyone = TorchRanks().run("allgather", f"{self._label}.norms", mine).reshape(-1, 2).tolist()
        self.settle(dict(everyone))

    def settle(self, norms: dict[float, float]) -> None:
        """Note what each process would take with it, and that what was lost until now is counted."""
        self._norms, self._lost = norms, self.lost

    def _meet(self, commits: int, states: Sequence[State]) -> tuple[bool, list[Seen]]:
        """Meet all ranks; returns whether this rank still owes what it has, and what all have said."""
        norms = [norm_owed(state) for state in states]
        steps = sum(state["steps"] for state in states)
        told = Seen(self._process, commits, steps, float(np.hypot.reduce(norms)) if norms else 0.0)
        rows = TorchRanks().run("allgather", f"{self._label}.ranks", np.array(told, np.float64))
        seen = [Seen(*row) for row in rows.reshape(-1, len(told)).tolist()]
        return has_kept(told, seen[0]), seen

    def _from_root(self, states: Any) -> Any:
        """What rank 0 gives as `states`, on all ranks, which also take over its norms and losses."""
        mine = [self._norms, tuple(self._lost), states] if hvd.rank() == 0 else None
        self._norms, lost, states = of_root(mine, f"{self._label}.root")
        self._lost = Lost(*lost)
        return states

    def _count(self, seen: Sequence[Seen]) -> None:
        self.lost = losses(seen, self._norms, self._lost)
        if self.lost != self._lost and hvd.rank() == 0:
            _log.warning(
                "%s: %d ranks were lost with what they owed, of the norm %.3g; in all %d, %.3g", self._label,
                self.lost.ranks - self._lost.ranks, math.sqrt(self.lost.norm**2 - self._lost.norm**2), *self.lost,
            )  # fmt: skip


class CarriedOptimizer(Carried):
    """Of a `DistributedOptimizer`, whose exchanges are made for the ranks of each sync.

    Args:
        combiner: of the optimizer.
        label: see `Carried`.
    """

    def __init__(self, combiner: Combiner, label: str) -> None:
        super().__init__(label)
        self._combiner = combiner
        self._engine: Engine | None = None
        """The one of before a failed step, for its counters."""
        self._saved: State | None = None
        self._united: dict[str, Any] = {}
        """With AdaGrad, what belongs to elements, as all ranks know it."""
        self._held: dict[str, Any] = {}
        """With AdaGrad, what owners owe while there is one rank, which sends everything."""

    def save(self) -> None:
        self._saved = self._state()

    def restore(self) -> None:
        sender = self._combiner.sender
        if sender.engine is not None:
            # its collectives have failed, or will never be complete: nothing of it is waited for
            sender.engine.rest()
            self._engine, sender.engine, sender.steering = sender.engine, None, None
        self._combiner.give_up()

    def _state(self) -> State | None:
        sender = self._combiner.sender
        if sender.engine is None:
            return self._saved
        self._combiner.refuse_while_open("commit()", StateError)
        sender.count_plain()
        # not those of the engine, which are tensors
        state = Ledger.state_dict(sender.engine)
        return {**state, "owner_residuals": {**self._held, **state["owner_residuals"]}}

    def _owing(self, live: bool) -> list[State]:
        state = self._state() if live else self._saved
        return [] if state is None else [state]

    def share(self, live: bool) -> None:
        super().share(live)
        if self._combiner.wrapping.adagrad is not None:
            mine = [{**state, "residuals": {}} for state in self._owing(live)]
            everyone = TorchRanks().gather_bytes(dumps(mine) + b"\n", f"{self._label}.accumulators")
            states = [state for of_rank in everyone.splitlines() for state in loads(of_rank)]
            self._united = united_accumulators(states) if states else {}

    def sync(self, commits: int) -> None:
        """Make the exchanges for the ranks that there are, and take over what this one owes; a collective call.

        Raises:
            MismatchError: ranks have wrapped their optimizers differently; raised on all of them.
        """
        combiner = self._combiner
        wrapping, sender = combiner.wrapping, combiner.sender
        state, before = self._state(), sender.engine or self._engine
        owes, seen = self._meet(commits, [] if state is None else [state])
        root = self._from_root((None if state is None else {**state, "residuals": {}, "owner_residuals": {}},
                                self._united))  # fmt: skip
        self._count(seen)
        combiner.begin_again()
        names = {id(p): name for p, name in combiner.members.names.items()}
        wrapping.agree(combiner.param_groups, names)
        ranks, process_set = TorchRanks(), wrapping.process_set
        wrapping.label = label_for(combiner.param_groups, set(names.values()), process_set)
        if wrapping.ours is not None:
            wrapping.scale = average_share(wrapping.ours, wrapping.op, hvd.Average, hvd.Sum, ranks.size)
        wrapping.equip(sender)
        engine = sender.known_engine()
        if before is not None:
            engine.inherit_counters(before)
        if root[0] is not None:
            self._take(engine, state if owes else None, root[0], root[1])
        sender.begin_way()
        self._engine, combiner.lost = None, self.lost

    def _take(self, engine: Engine, mine: State | None, root: State, united: dict[str, Any]) -> None:
        """Take over what this rank owes, and what all ranks share with rank 0."""
        ranks = TorchRanks()
        # of Average and Sum, only one is divided
        factor = ranks.size / root["size"] if self._combiner.wrapping.op == hvd.Average else 1.0
        common = {**root, "residuals": {} if mine is None else mine["residuals"]}
        if mine is not None:
            common["owner_residuals"] = mine["owner_residuals"]
        state = survivor_state(common, ranks.size, ranks.position, factor)
        self._held, self._united = {}, united
        if united:
            if ranks.size == 1:
                self._held = united["owner_residuals"]
            state |= {"accumulators": united["accumulators"],
                      "owner_residuals": {} if self._held else united["owner_residuals"]}  # fmt: skip
        engine.load_state_dict(state)
