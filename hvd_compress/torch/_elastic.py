"""The state of elastic runs: Horovod's, with models and optimizers of any type and layout, and what ranks owe."""

from __future__ import annotations

from typing import Any

import horovod.torch.elastic as horovods
import numpy as np
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic.state import ModelStateHandler, OptimizerStateHandler

from hvd_compress.elastic import note_meeting, note_parting
from hvd_compress.ranks import forget_numbers
from hvd_compress.torch._averaging.carrying import CarriedAveraging
from hvd_compress.torch._calls import CarriedCalls
from hvd_compress.torch._collectives import forget_count_of_calls
from hvd_compress.torch._gradients.carrying import Carried, CarriedOptimizer
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


class TorchState(horovods.TorchState):
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
        self._commits = -1
        """Of this state, on all ranks; -1 before the first sync."""
        for name, handler in self._handlers.items():
            # those that users have registered stay
            ours = _OURS.get(type(handler))
            if ours is not None:
                self._handlers[name] = ours(handler.value)

    def save(self) -> None:
        """Keep all values, to come back to."""
        super().save()
        self._commits += self._commits >= 0
        for carried in self._carried():
            carried.save()

    def commit(self) -> None:
        """Keep all values, tell all ranks what this one owes, and look for other hosts; a collective call.

        Raises:
            HostsUpdatedInterrupt: other hosts are there, which `hvd.elastic.run` waits for.
        """
        self.save()
        self._share(live=False)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if there are other hosts; a collective call."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            # all ranks are still here, with what is lost if they go
            self._share(live=True)
            # exchanges have to be made anew also where nobody joins
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def restore(self) -> None:
        """Go back to the values that were kept last."""
        for carried in self._carried():
            carried.restore()
        super().restore()

    def reset(self) -> None:
        """Ranks have come or gone; they meet in `sync`."""
        note_parting()
        super().reset()

    def sync(self) -> None:
        """Give all ranks the state of rank 0, make exchanges for these ranks, and keep the values; a collective call.

        What each rank owes stays on it.
        """
        # who joins has counted nothing
        forget_count_of_calls()
        forget_numbers()
        note_meeting()
        for carried in self._carried():
            carried.gather(self._commits)
        super().sync()
        for carried in self._carried():
            carried.sync(self._commits)
        commits = TorchRanks().run("broadcast", "hvd_compress.elastic.commits", np.array([self._commits], np.int64))
        self._commits = max(0, int(commits[0]))
        # a step that fails before the next commit goes back to here, on ranks that have joined, too
        self.save()
        self._share(live=False)

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

    def _share(self, live: bool) -> None:
        for carried in self._carried():
            carried.share(live)
