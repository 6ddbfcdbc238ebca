"""Gradients as TensorFlow has them: tensors, `tf.IndexedSlices`, or None."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.engine import DENSE, NONE, SPARSE
from hvd_compress.errors import UnsupportedError

__all__ = ["Gradient", "after", "all_finite", "first_value", "kind_of", "refuse_unfit", "with_debt"]

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None


def kind_of(gradient: Gradient, sparse_as_dense: bool) -> str:
    """What decides which collectives a gradient takes: NONE, SPARSE or DENSE."""
    if gradient is None:
        return NONE
    return SPARSE if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense else DENSE


def refuse_unfit(name: str, dtype: tf.DType, exchanged: bool) -> None:
    """Raise UnsupportedError if a tensor is to be exchanged that no compressor takes."""
    if exchanged and not dtype.is_floating:
        raise UnsupportedError(
            f"{name!r} is {dtype.name}: compressors take float16, bfloat16, float32 and float64. Give a "
            f"Policy with the rule ({name!r}, NoCompression()), or use compression=hvd.Compression.none"
        )


def after(gradient: Gradient, turn: tf.Tensor, position: int) -> Gradient:
    """The gradient, but not before there is a turn.

    No control dependency: a gradient may be a constant, and so would be what Horovod makes of it, which TensorFlow
    would compute while it optimizes the graph, on the ranks where it is one. And gradients at different positions may
    be one tensor, of which it would make one collective.
    """
    has_come = tf.greater_equal(turn, -position)

    def wait(tensor: tf.Tensor) -> tf.Tensor:
        waiting = tf.raw_ops.Switch(data=tensor, pred=has_come).output_true
        waiting.set_shape(tensor.shape)
        return waiting

    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(wait(gradient.values), wait(gradient.indices), gradient.dense_shape)
    return wait(gradient)


def with_debt(gradient: Gradient, debt: np.ndarray[Any, Any], sparse_as_dense: bool) -> Gradient:
    """A gradient and what is still owed of its tensor, flat; a sparse one then has all rows."""
    dense = tf.convert_to_tensor(gradient)
    whole = dense + tf.cast(tf.reshape(tf.constant(debt), tf.shape(dense)), dense.dtype)
    if not isinstance(gradient, tf.IndexedSlices) or sparse_as_dense:
        return whole
    rows = tf.range(tf.shape(whole)[0], dtype=gradient.indices.dtype)
    return tf.IndexedSlices(whole, rows, gradient.dense_shape)


def first_value(gradient: Gradient) -> tf.Tensor:
    """What exists when the gradient does, and is small."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reshape(values, [-1])[:1]


def all_finite(gradient: Gradient) -> tf.Tensor:
    """Whether no value is an infinity or a NaN."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if values.dtype.is_complex:
        values = tf.abs(values)
    return tf.reduce_all(tf.math.is_finite(values)) if values.dtype.is_floating else tf.constant(True)
