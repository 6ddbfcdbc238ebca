"""Gradients as TensorFlow has them: tensors, `tf.IndexedSlices`, or None."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_compress.errors import UnsupportedError

__all__ = ["KINDS", "Gradient", "all_finite", "first_value", "kind_of", "refuse_unfit", "same"]

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None

KINDS = (
    "what kind of gradient there is of each variable (None where the loss does not depend on it; "
    "unconnected_gradients=tf.UnconnectedGradients.ZERO makes these dense, sparse_as_dense=True sparse ones)"
)


def kind_of(gradient: Gradient, sparse_as_dense: bool) -> str:
    """What decides which collectives a gradient takes: "None", "sparse" or "dense"."""
    if gradient is None:
        return "None"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense else "dense"


def refuse_unfit(name: str, dtype: tf.DType, exchanged: bool) -> None:
    """Raise UnsupportedError if a tensor is to be exchanged that no compressor takes."""
    if exchanged and not dtype.is_floating:
        raise UnsupportedError(
            f"{name!r} is {dtype.name}: compressors take float16, bfloat16, float32 and float64. Give a "
            f"Policy with the rule ({name!r}, NoCompression()), or use compression=hvd.Compression.none"
        )


def same(gradient: Gradient) -> Gradient:
    """The gradient, but not before what it is made to wait for."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices), gradient.dense_shape)
    return tf.identity(gradient)


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
