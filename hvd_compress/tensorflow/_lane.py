"""One tensor's exchange as nodes of a graph: the stages of `engine.Lane` joined by Horovod's asynchronous ops."""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress import engine
from hvd_compress.compressors import Compressor
from hvd_compress.exchange import Plan, aligned_empty

__all__ = ["Lane"]

Array = np.ndarray[Any, Any]


class Lane(engine.Lane):
    """`engine.Lane` with methods that lay its stages into the current graph.

    No stage waits for anything but its input. Stages are Python functions without side effects that TensorFlow has to
    know of (`stateful=False`), so that it may run those of different tensors in any order; what keeps the steps of
    one tensor apart is the `turn` that the first stage takes as an input (see `GradientExchange`).

    Args:
        name: of the tensor, the same on all ranks.
        plan: sizes, the same on all ranks.
        compressor: of the whole tensor.
        position: of this rank in the process set.
        process_set: the ranks that take part.
        wire_name: `name`, unique in this process and without characters that a graph does not allow.
    """

    def __init__(
        self, name: str, plan: Plan, compressor: Compressor, position: int, process_set: hvd.ProcessSet, wire_name: str
    ) -> None:
        super().__init__(name, plan, compressor, position)
        self._process_set = process_set
        self._wire_name = wire_name
        self._left_at = 0.0

    # -- laying stages into the graph ------------------------------------------------------------------------------

    def lay_encode(self, gradient: tf.Tensor, turn: tf.Tensor) -> list[tf.Tensor]:
        """Stage 1: (payloads, bytes for each rank), the second for payloads whose sizes vary only."""
        wide = gradient if gradient.dtype in (tf.float32, tf.float64) else tf.cast(gradient, tf.float32)
        sends_sizes = self.plan.exchange == "two_phase" and not self.plan.fixed_size
        kinds = [tf.uint8, tf.int32] if sends_sizes else [tf.uint8]
        sent = tf.numpy_function(self._encode, [wide, turn], kinds, stateful=False)
        sent[0].set_shape([None])
        if sends_sizes:
            sent[1].set_shape([self.plan.ranks])
        return list(sent)

    def lay_reduce(self, sent: list[tf.Tensor]) -> tf.Tensor:
        """The first of two collectives, and stage 2."""
        splits = sent[1] if len(sent) > 1 else None
        received = hvd.alltoall(
            sent[0], splits, self._name_of("alltoall"), ignore_name_scope=True, process_set=self._process_set
        )
        payloads = received if splits is None else received[0]
        reduced = tf.numpy_function(self._reduce, [payloads], tf.uint8, stateful=False)
        reduced.set_shape([None])
        return reduced

    def lay_arrive(self, payload: tf.Tensor) -> tf.Tensor:
        """The last collective; whether all that it brings is finite."""
        gathered = hvd.allgather(
            payload, self._name_of("allgather"), ignore_name_scope=True, process_set=self._process_set
        )
        finite = tf.numpy_function(self._arrive, [gathered], tf.bool, stateful=False)
        finite.set_shape([])
        return finite

    def lay_finish(self, gradient: tf.Tensor, keep: tf.Tensor, scale: float) -> tuple[tf.Tensor, tf.Tensor]:
        """Stage 3: (the combined gradient, a number that exists when this stage has run).

        `keep` is the same for all tensors of the step. A control dependency would not do instead of the number:
        TensorFlow's optimizer takes nodes whose values nobody uses out of the graph, and keeps the dependency only.
        """
        dtype = tf.float64 if gradient.dtype == tf.float64 else tf.float32
        gradient_bytes = self.plan.numel * gradient.dtype.size

        def finish(keep: np.bool_) -> tuple[Array, np.int64]:
            return self.finish(bool(keep), scale, gradient_bytes), np.int64(1)

        flat, done = tf.numpy_function(finish, [keep], [dtype, tf.int64], stateful=False)
        done.set_shape([])
        return tf.cast(tf.reshape(flat, self.plan.shape), gradient.dtype), done

    # -- what the nodes run ------------------------------------------------------------------------------------------

    def _encode(self, gradient: Array, turn: np.int64) -> Any:
        # still busy: another tensor's stage has failed in the last step, which thereby never happened
        self.abandon()
        begin = time.perf_counter()
        # the residual will be written here, and a TensorFlow tensor must not change
        flat = aligned_empty(gradient.size, gradient.dtype)
        np.copyto(flat, gradient.reshape(-1))
        self.counters.encode_seconds += time.perf_counter() - begin
        parcel = self.encode(flat)
        self._left_at = time.perf_counter()
        if parcel.sizes is None:
            return parcel.buffer
        return parcel.buffer, np.array(parcel.sizes, np.int32)

    def _reduce(self, received: Array) -> Array:
        self.counters.exchange_seconds += time.perf_counter() - self._left_at
        parcel = self.reduce(received)
        self._left_at = time.perf_counter()
        return parcel.buffer

    def _arrive(self, gathered: Array) -> np.bool_:
        self.counters.exchange_seconds += time.perf_counter() - self._left_at
        return np.bool_(self.arrive(gathered))

    def _name_of(self, collective: str) -> str:
        # Horovod's torch interface puts the kind of the collective before every name, its TensorFlow interface does
        # not: written out, ranks of both can take part in one exchange
        return f"{collective}.hvd_compress.{collective}.{self._wire_name}"
