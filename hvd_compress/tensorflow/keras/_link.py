"""The TensorFlow edge as the Keras code sees it: `hvd_compress._keras.link.Link`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.tensorflow._agreement import require_agreement
from hvd_compress.tensorflow._exchange import GradientExchange
from hvd_compress.tensorflow._functions import allreduce
from hvd_compress.tensorflow._tape import describe_sources, divided, make_settings

__all__ = ["LINK"]


class TensorFlowLink:
    """See `Link`."""

    none = hvd.Compression.none
    average_op = hvd.Average
    all_ranks = hvd.global_process_set

    rank = staticmethod(hvd.rank)
    size = staticmethod(hvd.size)
    divided = staticmethod(divided)

    def check(self, *, backward_passes_per_step: int = 1, groups: Any = None, **settings: Any) -> None:
        """Raise what a wrong setting of a wrapper is to raise."""
        make_settings(backward_passes_per_step=backward_passes_per_step, groups=groups, **settings)

    def exchange(self, variables: Sequence[Any], groups: Any, settings: dict[str, Any]) -> GradientExchange:
        """An exchange for the gradients of Keras variables; a collective call."""
        if isinstance(groups, list):
            positions = {id(v): i for i, v in enumerate(variables)}
            groups = tuple(tuple(positions[id(v)] for v in group if id(v) in positions) for group in groups)
        made = make_settings(backward_passes_per_step=1, groups=groups, **settings)
        return GradientExchange(made, describe_sources(variables))

    def ranks_of(self, process_set: hvd.ProcessSet) -> int:
        """How many ranks a process set has; 1 where this one is not among them."""
        return int(process_set.size()) if process_set.included() else 1

    def accumulators(self, passes: int) -> Accumulators:
        """Sums of the gradients of several backward passes."""
        return Accumulators(passes)

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        """Make Keras variables those of the root; a collective call."""
        hvd.broadcast_variables([_raw(v) for v in variables], root_rank)

    def average(self, values: Sequence[float], names: Sequence[str]) -> list[float]:
        """Averages over all ranks; a collective call."""
        require_agreement({"names of the metrics": list(names)}, hvd.global_process_set)
        with tf.device("CPU:0"):
            mine = tf.constant(values, dtype=tf.float64)
            averages: list[float] = hvd.allreduce(mine, name="hvd_compress.metrics", op=hvd.Average).numpy().tolist()
        return averages

    def allreduce(
        self,
        value: Any,
        name: str | None,
        average: bool | None,
        prescale_factor: float,
        postscale_factor: float,
        op: Any,
        compression: Any,
    ) -> tf.Tensor:
        """See `Interface.allreduce`."""
        return allreduce(
            tf.convert_to_tensor(value), average, compression=compression, op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, name=name,
        )  # fmt: skip

    def allgather(self, value: Any, name: str | None) -> tf.Tensor:
        """See `Interface.allgather`."""
        return hvd.allgather(tf.convert_to_tensor(value), name)

    def broadcast_value(self, value: Any, root_rank: int, name: str | None) -> tf.Tensor:
        """See `Interface.broadcast`."""
        return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name)

    def reducescatter(self, value: Any, name: str | None, op: Any) -> tf.Tensor:
        """See `Interface.reducescatter`."""
        return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name)


class Accumulators:
    """Sums of the gradients of several backward passes, and a count of them.

    Args:
        passes: until they are full.
    """

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._sums: list[tf.Variable] = []
        self._count: tf.Variable | None = None

    def add(self, gradients: Sequence[Any]) -> list[tf.Variable]:
        """Add one pass; sparse gradients become dense."""
        dense = [tf.convert_to_tensor(g) for g in gradients]
        if self._count is None:
            with tf.init_scope():
                self._sums = [tf.Variable(tf.zeros(g.shape, g.dtype), trainable=False) for g in dense]
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        for total, gradient in zip(self._sums, dense, strict=True):
            total.assign_add(gradient)
        self._count.assign_add(1)
        return self._sums

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
        for total in self._sums:
            total.assign(tf.zeros_like(total))


def _raw(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else variable.value


LINK = TensorFlowLink()
