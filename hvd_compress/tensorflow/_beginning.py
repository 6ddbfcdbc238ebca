"""Whether all ranks began with the same variables, which is looked at once."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress._keras.names import not_broadcast
from hvd_compress.engine import NOT_COMPARED, first_unequal

__all__ = ["lay_comparison"]

Array = np.ndarray[Any, Any]


def lay_comparison(
    names: Sequence[str],
    variables: Mapping[str, tf.Variable],
    turn: tf.Tensor,
    collective: str,
    process_set: hvd.ProcessSet,
) -> tf.Tensor:
    """In the second step, compare the variables of all ranks and warn of the first that differs; a collective call.

    Horovod's own recipe broadcasts them after the first step, in which some of them are made. So it is the second one.

    Args:
        names: of all tensors, the same on all ranks.
        variables: those to compare, by name; where one is not among them on some rank, it is not compared.
        turn: of this step.
        collective: its name.
        process_set: the ranks that take part.

    Returns:
        The turn, when this is done.
    """
    # a graph keeps the functions that it runs, which must not keep variables
    compared = list(variables)

    def checksums(turn: np.int64, *values: Array) -> Array:
        found = {name: zlib.crc32(np.ascontiguousarray(v).data) for name, v in zip(compared, values, strict=True)}
        return np.array([[found.get(name, NOT_COMPARED) for name in names]], np.int64)

    def warn(turn: np.int64, rows: Array) -> np.int64:
        unequal = first_unequal(rows, names)
        if unequal is not None:
            warnings.warn(not_broadcast(*unequal), stacklevel=2)
        return turn

    def compare() -> tf.Tensor:
        bits = [_bits(variable.read_value()) for variable in variables.values()]
        # the turn is an input, so that this is no constant
        mine = tf.numpy_function(checksums, [turn, *bits], tf.int64, stateful=False)
        mine.set_shape([1, len(names)])
        rows = hvd.allgather(mine, collective, ignore_name_scope=True, process_set=process_set)
        done = tf.numpy_function(warn, [turn, rows], tf.int64, stateful=False)
        done.set_shape([])
        return done

    with tf.device("CPU:0"):
        return tf.cond(tf.equal(turn, 1), compare, lambda: tf.identity(turn))


def _bits(value: tf.Tensor) -> tf.Tensor:
    # NumPy does not know all types of TensorFlow
    return tf.cast(value, tf.uint8) if value.dtype == tf.bool else tf.bitcast(value, tf.uint8)
