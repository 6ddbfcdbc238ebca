"""The state of elastic runs: Horovod's, with models and optimizers of any type and layout."""

from __future__ import annotations

from typing import Any

import horovod.torch.elastic as horovods
from horovod.torch.elastic.state import ModelStateHandler, OptimizerStateHandler

from hvd_compress.torch._collectives import forget_count_of_calls
from hvd_compress.torch._state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["TorchState"]


class _Model(ModelStateHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _Optimizer(OptimizerStateHandler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


_OURS = {ModelStateHandler: _Model, OptimizerStateHandler: _Optimizer}


class TorchState(horovods.TorchState):
    """State of an elastic run, as Horovod's, for models and optimizers of any type and layout.

    Args:
        model: whose parameters and buffers all ranks share.
        optimizer: whose state they share.
        kwargs: more models, optimizers, samplers and plain values, which become attributes.

    Example::

        state = hvd.elastic.TorchState(model, optimizer, batch=0)


        @hvd.elastic.run
        def train(state): ...
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
        for name, handler in self._handlers.items():
            # those that users have registered stay
            ours = _OURS.get(type(handler))
            if ours is not None:
                self._handlers[name] = ours(handler.value)

    def sync(self) -> None:
        """Give all ranks the state of rank 0; a collective call."""
        # who joins has counted no calls
        forget_count_of_calls()
        super().sync()
