"""The state of elastic runs: Horovod's, with models and optimizers of any type and layout, and what ranks owe."""

from __future__ import annotations

from typing import Any

import horovod.torch.elastic as horovods
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic.state import ModelStateHandler, OptimizerStateHandler

from hvd_compress.engine import Carried, CarryingState
from hvd_compress.ranks import Ranks
from hvd_compress.torch._averaging.carrying import CarriedAveraging
from hvd_compress.torch._calls import CarriedCalls
from hvd_compress.torch._collectives import forget_count_of_calls
from hvd_compress.torch._gradients.carrying import CarriedOptimizer
from hvd_compress.torch._momentum.base import MomentumOptimizer
from hvd_compress.torch._momentum.carrying import CarriedMomentum
from hvd_compress.torch._ranks import TorchRanks
from hvd_compress.torch._state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["TorchState"]


class _Model(ModelStateHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _Optimizer(OptimizerStateHandler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


def _carried_of(value: Any, name: str) -> Carried | None:
    """What carries over what an optimizer keeps between steps; None if it keeps nothing, or is none of ours."""
    if getattr(value, "_averaging", None) is not None:
        return CarriedAveraging(value, name)
    if isinstance(value, MomentumOptimizer):
        return CarriedMomentum(value, name)
    combiner = getattr(value, "_combiner", None)
    return CarriedOptimizer(combiner, name) if combiner is not None and combiner.wrapping.is_carried else None


_OURS = {ModelStateHandler: _Model, OptimizerStateHandler: _Optimizer}


class TorchState(CarryingState, horovods.TorchState):
    """State of an elastic run, as Horovod's, for models and optimizers of any type and layout.

    What compression keeps between steps is part of it: `commit` keeps residuals, and tells all ranks their norms;
    `restore` goes back to them; `sync` makes exchanges anew for the ranks that there are. Ranks that stay go on owing
    what they owe, ranks that join owe nothing, and what ranks that were lost have owed is dropped, and counted in
    `compression_stats()`. With op=Average residuals are multiplied by new ranks / old ranks, so that the sum
    over those that stay keeps its weight in the update. With one rank left, what it owes goes with its next gradients.

    Args:
        model: whose parameters and buffers all ranks share.
        optimizer: whose state they share; one of `DistributedOptimizer` exchanges after the first `sync`.
        kwargs: more models, optimizers, samplers and plain values, which become attributes.

    Raises:
        MismatchError: by `sync`, on all ranks, where they have wrapped their optimizers differently.
        StateError: by `commit`, while gradients are exchanged.

    Example::

        state = hvd.elastic.TorchState(model, optimizer, batch=0)


        @hvd.elastic.run
        def train(state): ...
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
        self._calls = CarriedCalls("calls")
        self._optimizers: dict[str, tuple[Any, Carried]] = {}
        for name, handler in self._handlers.items():
            # those that users have registered stay
            ours = _OURS.get(type(handler))
            if ours is not None:
                self._handlers[name] = ours(handler.value)

    def sync(self) -> None:
        # who joins has counted nothing
        forget_count_of_calls()
        super().sync()

    def _all_ranks(self) -> Ranks:
        return TorchRanks()

    def _hosts_updated(self) -> type[Exception]:
        interrupt: type[Exception] = HostsUpdatedInterrupt
        return interrupt

    def _carried(self) -> list[Carried]:
        """What is carried over, in an order that all ranks share: optimizers may be given to the state later on."""
        for name, handler in self._handlers.items():
            known, _ = self._optimizers.get(name, (None, None))
            if handler.value is not known:
                self._optimizers.pop(name, None)
                carried = _carried_of(handler.value, name)
                if carried is not None:
                    self._optimizers[name] = handler.value, carried
        return [*(self._optimizers[name][1] for name in sorted(self._optimizers)), self._calls]
