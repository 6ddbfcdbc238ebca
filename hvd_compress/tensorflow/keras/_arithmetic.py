"""The arithmetic of `hvd_compress._keras.arithmetic` on TensorFlow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress._keras.arithmetic import Arithmetic
from hvd_compress.fingerprint import scope_of
from hvd_compress.tensorflow._gradients import all_finite
from hvd_compress.tensorflow._seams import raw
from hvd_compress.tensorflow._settings import claim

__all__ = ["TensorFlowArithmetic"]


class TensorFlowArithmetic(Arithmetic):
    """See `Arithmetic`."""

    def read(self, variable: Any) -> tf.Tensor:
        return raw(variable).read_value()

    def write(self, variable: Any, value: Any) -> None:
        raw(variable).assign(value)

    def zeros(self, variable: Any) -> tf.Variable:
        like = raw(variable)
        # variables of a function belong to its first trace alone
        with tf.init_scope():
            return tf.Variable(tf.zeros(like.shape, like.dtype), trainable=False)

    def counter(self) -> tf.Variable:
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.Variable(0, dtype=tf.int64, trainable=False)

    def array(self, variable: Any) -> Any:
        return np.array(self.read(variable))

    def number(self, value: Any) -> tf.Tensor:
        return tf.cast(value, tf.int64)

    def dense(self, gradient: Any, variable: Any) -> tf.Tensor:
        like = raw(variable)
        if gradient is None:
            return tf.zeros(like.shape, like.dtype)
        return tf.cast(tf.convert_to_tensor(gradient), like.dtype)

    def root(self, value: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(value)

    def clipped(self, value: tf.Tensor, bound: float) -> tf.Tensor:
        return tf.clip_by_value(value, -bound, bound)

    def where(self, flag: Any, one: Any, other: Any) -> tf.Tensor:
        return tf.where(flag, one, other)

    def nothing(self, like: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(like)

    def spoiled(self, value: tf.Tensor) -> tf.Tensor:
        zero = tf.zeros((), value.dtype)
        return tf.where(all_finite(value), zero, zero + np.nan)

    def correction(self, beta: float, steps: Any, like: tf.Tensor) -> tf.Tensor:
        return tf.cast(1.0 - tf.constant(beta, tf.float64) ** tf.cast(steps, tf.float64), like.dtype)

    def rate(self, learning_rate: Any, like: tf.Tensor) -> tf.Tensor:
        return tf.cast(learning_rate, like.dtype)

    def all_finite(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.reduce_all(tf.stack([all_finite(value) for value in values]))

    def any_nonzero(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.reduce_any(tf.stack([tf.reduce_any(tf.not_equal(value, 0)) for value in values]))

    def choose(self, flag: Any, one: Callable[[], Any], other: Callable[[], Any]) -> tf.Tensor:
        return tf.cond(flag, lambda: tf.convert_to_tensor(one()), lambda: tf.convert_to_tensor(other()))

    def decided(self, decision: Callable[[int], bool], number: Any) -> tf.Tensor:
        def ask(number: np.int64) -> np.bool_:
            return np.bool_(decision(int(number)))

        with tf.device("CPU:0"):
            said = tf.numpy_function(ask, [number], tf.bool, stateful=False)
        said.set_shape([])
        return said

    def any_rank(self, flag: Any, name: str, process_set: Any) -> tf.Tensor:
        with tf.device("CPU:0"):
            mine = tf.cast(flag, tf.float32)
            found = hvd.allreduce(mine, op=hvd.Max, name=name, ignore_name_scope=True, process_set=process_set)
            return found > 0.0

    def claimed(self, name: str, process_set: Any) -> str:
        return claim(f"{name}.{scope_of(process_set)}", process_set)

    def warned(self, text: str) -> tf.Tensor:
        def warn() -> np.bool_:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return np.bool_(False)

        with tf.device("CPU:0"):
            said = tf.numpy_function(warn, [], tf.bool)
        said.set_shape([])
        return said

    def one_piece(self, function: Callable[..., Any]) -> Callable[..., Any]:
        unconverted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
        return unconverted
