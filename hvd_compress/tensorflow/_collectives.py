"""Horovod's collectives on arrays, for those who average parameters or go over MPI."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.mpi import HorovodRanks
from hvd_compress.tensorflow._agreement import require_agreement

__all__ = ["TensorFlowCollectives"]

Array = np.ndarray[Any, Any]


class TensorFlowCollectives(HorovodRanks):
    """See `gossip.Collectives`.

    Args:
        process_set: the ranks that take part; this rank is one of them.
    """

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        super().__init__(hvd, process_set, require_agreement)

        # named in a graph; outside of one, the kernel would go by the name of its type
        @tf.function(autograph=False)
        def alltoall(words: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
            return hvd.alltoall(words, splits, name=self._name, ignore_name_scope=True, process_set=process_set)[0]

        @tf.function(autograph=False, reduce_retracing=True)
        def mean(values: tf.Tensor, name: str) -> tf.Tensor:
            return hvd.allreduce(values, name=name, op=hvd.Average, ignore_name_scope=True, process_set=process_set)

        self._alltoall, self._mean = alltoall, mean

    def start(self, words: Array, splits: Array) -> Any:
        """Horovod's TensorFlow has no handles: the alltoall runs here."""
        with tf.device("CPU:0"):
            return self._alltoall(tf.constant(words), tf.constant(splits))

    def wait(self, handle: Any) -> Array:
        """What it brought, in the order of the senders."""
        received: Array = handle.numpy()
        return received

    def mean(self, array: Array, name: str) -> Array:
        """Over the ranks."""
        with tf.device("CPU:0"):
            mean: Array = self._mean(tf.constant(array), f"{self._name}.{name}").numpy()
        return mean

    def barrier(self) -> None:
        """Wait for all ranks; Horovod has none for TensorFlow."""
        self.mean(np.zeros(1, np.float32), "barrier")
