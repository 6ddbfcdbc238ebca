"""A bucket whose payloads go to its root, and back, as messages of MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.exchange import Bucket, Parcel
from hvd_compress.mpi import Channel
from hvd_compress.tensorflow._bucket import GraphStages

__all__ = ["RootGraphStages", "after_others", "let_others_follow"]

_LAST = "hvd_compress_last_exchange"
"""The collection of a graph that holds a number, which exists when the last exchange laid into it has ended."""


def after_others(turn: tf.Tensor) -> tf.Tensor:
    """`turn`, but not before the exchanges that were laid into this graph earlier have ended.

    Each of two exchanges might else hold the only thread of a rank, and wait for the thread that the other one holds on
    another rank.
    """
    graph = tf.compat.v1.get_default_graph()
    # a function inside of another one begins with a copy of that one's collections
    last = [tensor for tensor in graph.get_collection_ref(_LAST) if tensor.graph is graph]
    return tf.numpy_function(lambda turn, _: turn, [turn, *last], tf.int64, stateful=False) if last else turn


def let_others_follow(ends: Sequence[tf.Tensor]) -> None:
    """Note what exists when an exchange has ended, for `after_others`."""
    last = tf.compat.v1.get_default_graph().get_collection_ref(_LAST)
    last[:] = [tf.numpy_function(lambda *_: np.int64(0), list(ends), tf.int64, stateful=False)]


class RootGraphStages(GraphStages):
    """`GraphStages` with messages in place of Horovod's collectives.

    Two of its stages wait for other ranks, on a thread of TensorFlow's, which may be the only one. So none of them runs
    before all buckets have run the stage before: then everything that any rank waits for is under way.

    Args:
        bucket: its stages.
        process_set: the ranks that take part.
        wire_names: see `GraphStages`.
        channel: of the bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        process_set: hvd.ProcessSet,
        wire_names: Mapping[str, str],
        channel: Channel,
    ) -> None:
        super().__init__(bucket, process_set, wire_names)
        channel.answer_bytes = bucket.answer_bytes
        self._channel = channel
        self._pending: Any = None

    def lay_advance(self, sent: Sequence[tf.Tensor], of_all: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        started = [tf.size(first) for first, *_ in of_all]

        def advance(*_: Any) -> Any:
            return self._advance("alltoall", self._awaited())

        return self._lay_stage(advance, started, self.bucket.collectives[-1])

    def lay_arrive(self, sent: Sequence[tf.Tensor], of_all: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        answered = [tf.size(first) for first, *_ in of_all]

        def arrive(*_: Any) -> np.bool_:
            return self._arrive(self._awaited())

        finite = tf.numpy_function(arrive, answered, tf.bool, stateful=False)
        finite.set_shape([])
        return finite

    def abandon(self) -> None:
        if self._pending is not None:
            self._awaited()
        super().abandon()

    def _handed_on(self, parcel: Parcel, collective: str) -> Any:
        root = self.bucket.root or 0
        self._pending = self._channel.start(collective, self.bucket.name, parcel.buffer, parcel.sizes, root)
        return super()._handed_on(parcel, collective)

    def _awaited(self) -> Any:
        if self._pending is None:
            raise RuntimeError(f"nothing is under way for {self.bucket.name!r}")
        pending, self._pending = self._pending, None
        return self._channel.wait(pending)
