"""What an optimizer owes in an elastic run, from one commit of its state to the next, and from ranks to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd

from hvd_compress.engine import Carried, Ledger, average_share, taken_up, united_accumulators
from hvd_compress.errors import StateError
from hvd_compress.torch._gradients.combiner import Combiner
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._gradients.wrapping import label_for
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["CarriedOptimizer", "State"]

State = dict[str, Any]


class CarriedOptimizer(Carried):
    """Of a `DistributedOptimizer`, whose exchanges are made for the ranks of each sync.

    Args:
        combiner: of the optimizer.
        label: see `Carried`.
    """

    def __init__(self, combiner: Combiner, label: str) -> None:
        super().__init__(label, TorchRanks)
        self._combiner = combiner
        self._engine: Engine | None = None
        """The one of before a failed step, for its counters."""
        self._saved: State | None = None
        self._united: dict[str, Any] = {}
        """With AdaGrad, what belongs to elements, as all ranks know it."""

    def save(self) -> None:
        self._saved = self._state()

    def restore(self) -> None:
        sender = self._combiner.sender
        sender.forget_plain()
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
        return Ledger.state_dict(sender.engine)

    def share(self) -> Callable[[], None]:
        state = self._state()
        mine = [] if state is None else [state]
        settle = self._tell(mine)
        if self._combiner.wrapping.adagrad is None:
            return settle
        mine = [{**state, "residuals": {}} for state in mine]
        states = [state for of_rank in self._gathered("accumulators", mine) for state in of_rank]
        united = united_accumulators(states) if states else {}

        def take() -> None:
            settle()
            self._united = united

        return take

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

    def _take(self, engine: Engine, mine: State | None, root: State, united: Mapping[str, Any]) -> None:
        """Take over what this rank owes, and what all ranks share with rank 0."""
        ranks = TorchRanks()
        # of Average and Sum, only one is divided
        factor = ranks.size / root["size"] if self._combiner.wrapping.op == hvd.Average else 1.0
        common = {**root, "residuals": {} if mine is None else mine["residuals"]}
        if mine is not None:
            common["owner_residuals"] = mine["owner_residuals"]
        self._united = dict(united)
        engine.load_state_dict(taken_up(common, united, ranks.size, ranks.position, factor))
