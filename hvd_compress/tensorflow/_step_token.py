"""What keeps the steps of an exchange apart, whatever order TensorFlow runs a graph in."""

from __future__ import annotations

import itertools

import tensorflow as tf

__all__ = ["StepToken"]

_made = itertools.count()


class StepToken:
    """A number that is read before the first stage of a step and written after its last one.

    TensorFlow orders reads and writes of a resource as the program does: between two steps, between iterations of a
    loop in a graph, and between calls of a function. That also makes a step complete whose results are not used.
    Not a `tf.Variable`, which a `tf.function` allows only on its very first trace.
    """

    def __init__(self) -> None:
        name = f"hvd_compress_turn_{next(_made)}"
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name)
            self.write(tf.constant(0, tf.int64))

    def read(self) -> tf.Tensor:
        """The number, in the current graph."""
        return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)

    def write(self, turn: tf.Tensor) -> None:
        """Set it, in the current graph."""
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=turn)
