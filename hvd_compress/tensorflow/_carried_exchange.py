"""Exchanges of elastic runs on TensorFlow, which graphs that are traced already go on using when ranks have changed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.engine import CarriedExchange, CarriedExchanges, description, is_carried
from hvd_compress.tensorflow._exchange import GradientExchange
from hvd_compress.tensorflow._failures import as_horovods
from hvd_compress.tensorflow._gradients import Gradient
from hvd_compress.tensorflow._ranks import TensorFlowRanks
from hvd_compress.tensorflow._relay import relay
from hvd_compress.tensorflow._seams import key_of, refuse_xla
from hvd_compress.tensorflow._settings import Settings, Source

__all__ = ["BOOK", "CarriedGraphExchange", "exchange_for"]


class _Book(CarriedExchanges):
    def sync(self, commits: int) -> None:
        if relay.cache_info().currsize:
            relay().finish()
        super().sync(commits)


BOOK = _Book(TensorFlowRanks)


class CarriedGraphExchange(CarriedExchange[GradientExchange]):
    """A `GradientExchange` of an elastic run; see `CarriedExchange`.

    A graph has no collectives of it, but waits for a thread, which runs the exchange that there is then in eager mode.

    Args:
        settings: see `GradientExchange`.
        sources: likewise.
        variables: likewise.
        compares: likewise.
        told: further things that tell it from others.
    """

    keeps_state = True

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[Source],
        variables: Mapping[str, tf.Variable] | None = None,
        compares: bool = True,
        **told: Any,
    ) -> None:
        known = variables or {}
        # whose variables go, goes with them
        references = {name: weakref.ref(variable) for name, variable in known.items()}

        def make() -> GradientExchange:
            found = {name: reference() for name, reference in references.items()}
            alive = {name: variable for name, variable in found.items() if variable is not None}
            return GradientExchange(settings, sources, variables=alive, compares=compares)

        tensors = [[s.name, s.shape, s.dtype.name] for s in sources]
        super().__init__(
            make, description(settings.compression, settings.op, tensors, **told),
            [key_of(known[s.name]) if s.name in known else None for s in sources], settings.op == hvd.Average, BOOK,
        )  # fmt: skip
        self._sparse_as_dense = settings.sparse_as_dense

    @tf.autograph.experimental.do_not_convert
    def reduce(self, gradients: Sequence[Gradient], loss_scale: tf.Tensor | None = None) -> list[Gradient]:
        """See `GradientExchange.reduce`."""
        if tf.executing_eagerly():
            return self._step(list(gradients), loss_scale)
        refuse_xla()
        return relay().lay(self._step, gradients, loss_scale, self._sparse_as_dense)

    def _step(self, gradients: list[Gradient], loss_scale: Any) -> list[Gradient]:
        with as_horovods():
            exchange = self.exchange()
            if loss_scale is not None:
                # what is owed is in units of the gradients that it is added to
                exchange.set_loss_scale(float(loss_scale))
            return exchange.reduce(exchange.with_debts(gradients), loss_scale)


def exchange_for(
    settings: Settings, sources: Sequence[Source], variables: Mapping[str, tf.Variable], compares: bool = True
) -> GradientExchange | CarriedGraphExchange:
    """An exchange of gradients: at once, in a collective call, or in an elastic run when ranks have met."""
    if is_carried(settings.compression, settings.adagrad):
        return CarriedGraphExchange(settings, sources, variables, compares)
    return GradientExchange(settings, sources, variables=variables, compares=compares)
