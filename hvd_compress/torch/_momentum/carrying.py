"""Optimizers that exchange momentum, when ranks of an elastic run come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd

from hvd_compress.torch._gradients.carrying import CarriedOptimizer, State
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._momentum.base import MomentumOptimizer
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["CarriedMomentum"]


class CarriedMomentum(CarriedOptimizer):
    """Of an optimizer that exchanges momentum: beside residuals, what its ranks keep for themselves and add up.

    What is the same on all ranks lies in the optimizer's state, which becomes that of rank 0.

    Args:
        optimizer: it has carriers, which are made for the ranks of each sync.
        label: see `Carried`.
    """

    def __init__(self, optimizer: MomentumOptimizer, label: str) -> None:
        super().__init__(optimizer.combiner, label)
        self._optimizer = optimizer

    def restore(self) -> None:
        super().restore()
        if self._saved is not None:
            self._optimizer.own_values = self._split(self._saved)[0]

    def _state(self) -> State | None:
        state = super()._state()
        if state is None or self._combiner.sender.engine is None:
            # what was saved has them already
            return state
        return {**state, "residuals": {**state["residuals"], **self._optimizer.own_values}}

    def _split(self, state: State) -> tuple[State, State]:
        """What the optimizer keeps, and what its carrier owes."""
        labels = self._optimizer.own_labels()
        residuals = state["residuals"]
        own = {name: entry for name, entry in residuals.items() if name in labels}
        return own, {**state, "residuals": {name: entry for name, entry in residuals.items() if name not in labels}}

    def sync(self, commits: int) -> None:
        """Make the exchanges for the ranks that there are, and take over what this one keeps; a collective call.

        Raises:
            MismatchError: ranks have made their optimizers differently; raised on all of them.
        """
        self._optimizer.agree_in_elastic_run()
        super().sync(commits)
        self._optimizer.has_met = True

    def _take(self, engine: Engine, mine: State | None, root: State, united: Mapping[str, Any]) -> None:
        own, rest = ({}, None) if mine is None else self._split(mine)
        super()._take(engine, rest, root, united)
        factor = TorchRanks().size / root["size"] if self._combiner.wrapping.op == hvd.Average else 1.0
        # what was saved stays as it is, for a sync that fails
        self._optimizer.own_values = {
            name: {**entry, "values": entry["values"] * entry["values"].dtype.type(factor)}
            for name, entry in own.items()
        }
