"""The TensorFlow edge as the Keras code sees it: `hvd_compress._keras.edge.Edge`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvd_compress._keras.edge import Edge
from hvd_compress.mpi import start_one_sided
from hvd_compress.tensorflow import _carried
from hvd_compress.tensorflow._carried import broadcast_variables
from hvd_compress.tensorflow._carried_exchange import BOOK, CarriedGraphExchange, exchange_for
from hvd_compress.tensorflow._exchange import GradientExchange
from hvd_compress.tensorflow._failures import as_horovods
from hvd_compress.tensorflow._functions import allreduce
from hvd_compress.tensorflow._ranks import NODES, TensorFlowRanks
from hvd_compress.tensorflow._seams import key_of, raw
from hvd_compress.tensorflow._settings import Settings, ranks_of
from hvd_compress.tensorflow._tape import describe_sources, divided, positions_of, variables_of
from hvd_compress.tensorflow.compression import horovod_compressor
from hvd_compress.tensorflow.keras._arithmetic import TensorFlowArithmetic

__all__ = ["EDGE"]


class TensorFlowEdge(Edge):
    """See `Edge`."""

    divided = staticmethod(divided)
    collectives = staticmethod(as_horovods)

    def exchange(
        self, variables: Sequence[Any], groups: Any, settings: dict[str, Any], compares: bool
    ) -> GradientExchange | CarriedGraphExchange:
        made = Settings(groups=positions_of(groups, variables), **settings)
        described = describe_sources(variables)
        return exchange_for(made, described, variables_of(described, variables), compares)

    def divisor_of(self, process_set: Any) -> Any:
        return ranks_of(process_set)

    def accumulators(self, passes: int) -> GradientSums:
        return GradientSums(passes)

    def key(self, variable: Any) -> Any:
        return key_of(variable)

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        broadcast_variables(variables, root_rank)

    def tensor(self, value: Any) -> tf.Tensor:
        return tf.convert_to_tensor(value)

    def values(self, variable: Any) -> Any:
        # in a function that is traced, too
        with tf.init_scope():
            return raw(variable).numpy()


class GradientSums:
    """Sums of the gradients of several backward passes, and a count of them.

    Args:
        passes: until they are full.
    """

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._sums: dict[Any, tuple[tf.Variable, Any]] = {}
        self._count: tf.Variable | None = None

    def add(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[tf.Variable, Any]]:
        """Add one pass of (gradient, variable); sparse gradients become dense.

        Returns:
            The sum and the variable of each that had a gradient in any pass until now.
        """
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        for gradient, variable in pairs:
            dense = tf.convert_to_tensor(gradient)
            if variable.ref() not in self._sums:
                with tf.init_scope():
                    total = tf.Variable(tf.zeros(dense.shape, dense.dtype), trainable=False)
                self._sums[variable.ref()] = total, variable
            self._sums[variable.ref()][0].assign_add(dense)
        self._count.assign_add(1)
        return list(self._sums.values())

    def when_full(self, update: Callable[[], Any], wait: Callable[[], Any]) -> None:
        """Call `update` if this was the last pass, else `wait`; in a graph too."""
        if self._count is None:
            raise RuntimeError("when_full() before add()")

        def then(call: Callable[[], Any]) -> Callable[[], tf.Tensor]:
            def branch() -> tf.Tensor:
                call()
                return tf.constant(True)

            return branch

        tf.cond(tf.equal(self._count % self._passes, 0), then(update), then(wait))

    def clear(self) -> None:
        """Set the sums to zero."""
        for total, _ in self._sums.values():
            total.assign(tf.zeros_like(total))


EDGE = TensorFlowEdge(
    hvd, allreduce, horovod_compressor, TensorFlowRanks, partial(start_one_sided, hvd), NODES, ObjectState, _carried,
    BOOK, HostsUpdatedInterrupt, TensorFlowArithmetic(),
)  # fmt: skip
