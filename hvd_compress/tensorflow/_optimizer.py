"""`DistributedOptimizer` of `hvd_compress.tensorflow`: which wrapper an optimizer gets."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL, exchanged
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import AdaGrad, Exchange
from hvd_compress.tensorflow.compression import horovod_compressor

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    exchange: str | Exchange = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    adagrad: AdaGrad | None = None,
) -> Any:
    """Wrap an optimizer of Keras (see `hvd_compress.tensorflow.keras.DistributedOptimizer`) or of TensorFlow 1.

    Arguments up to `scale_local_gradients` are those of `horovod.tensorflow.DistributedOptimizer`, in its order; the
    other arguments are those of the Keras wrapper, and mean the same here. `use_locking` is for optimizers of
    TensorFlow 1, which are wrapped by Horovod itself and take no compressor of hvd_compress.

    Raises:
        UnsupportedError: an optimizer of TensorFlow 1 with a compressor of hvd_compress, or with `adagrad`.
        ValueError: a setting out of its range.
        TypeError: `compression` is no compressor, or `optimizer` no optimizer.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if exchanged(compression) is not None or adagrad is not None:
            raise UnsupportedError(
                f"{adagrad or compression!r} with {type(optimizer).__name__} of TensorFlow 1: use one of "
                "keras.optimizers, or hvd.DistributedGradientTape and apply its gradients with this one"
            )
        return hvd.DistributedOptimizer(
            optimizer, name, use_locking, device_dense, device_sparse, horovod_compressor(compression),
            sparse_as_dense, backward_passes_per_step, op, gradient_predivide_factor, average_aggregated_gradients,
            num_groups, groups, process_set, scale_local_gradients,
        )  # fmt: skip
    # importing Keras takes a while, and not every user of TensorFlow needs it
    from hvd_compress.tensorflow import keras

    of_keras: Any = keras

    return of_keras.DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, num_groups, groups, process_set,
        scale_local_gradients, exchange=exchange, min_numel=min_numel, bucket_bytes=bucket_bytes, adagrad=adagrad,
    )  # fmt: skip
