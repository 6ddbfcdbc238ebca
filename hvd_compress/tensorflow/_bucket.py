"""One bucket's exchange as nodes of a graph: the stages of `exchange.Bucket` joined by Horovod's asynchronous ops."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.exchange import Bucket, Parcel, aligned_empty
from hvd_compress.fingerprint import Place

__all__ = ["GraphStages"]

Array = np.ndarray[Any, Any]

_WITHOUT_SIZES = ("allgather", "broadcast")


class GraphStages:
    """Lays the stages of a bucket into the current graph.

    No stage waits for anything but its input. Stages are Python functions without side effects that TensorFlow has to
    know of (`stateful=False`), so that it may run those of different buckets in any order; what keeps the steps of
    one bucket apart is the `turn` that the first stage takes as an input (see `GradientExchange`).

    Args:
        bucket: its stages.
        process_set: the ranks that take part.
        wire_names: of the tensors, unique in this process and without characters that a graph does not allow.
    """

    def __init__(self, bucket: Bucket, process_set: hvd.ProcessSet, wire_names: Mapping[str, str]) -> None:
        self.bucket = bucket
        self.tensors = bucket.tensors
        """The names of all tensors, in the order in which their gradients are expected."""
        self._process_set = process_set
        self._wire_name = wire_names[bucket.name]
        self._left_at = 0.0

    @property
    def place(self) -> Place:
        """The first collective."""
        return Place(self.bucket.collectives[0], self._name_of(self.bucket.collectives[0]))

    # -- laying stages into the graph ------------------------------------------------------------------------------

    def lay_encode(self, gradients: Mapping[str, tf.Tensor], turn: tf.Tensor) -> list[tf.Tensor]:
        """The first stage: (payloads, bytes for each rank), see `_lay_stage`.

        Args:
            gradients: by name; tensors that are not among them are left out of this step, on all ranks alike.
            turn: of this step.
        """
        names = [name for name in self.tensors if name in gradients]
        wide = [_wide(gradients[name]) for name in names]

        def encode(turn: np.int64, *arrays: Array) -> Any:
            return self._encode(dict(zip(names, arrays, strict=True)))

        return self._lay_stage(encode, [turn, *wide], self.bucket.collectives[0])

    def lay_advance(self, sent: Sequence[tf.Tensor], of_all: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """All collectives but the last one, each with the stage after it.

        Args:
            sent: what `lay_encode` returned.
            of_all: what that of all buckets returned; for stages that wait for other ranks, as none does here.
        """
        for collective, following in pairwise(self.bucket.collectives):
            sent = self._lay_stage(partial(self._advance, collective), [self._lay(collective, sent)], following)
        return list(sent)

    def lay_arrive(self, sent: Sequence[tf.Tensor], of_all: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        """The last collective; whether all that it brings is finite. See `lay_advance` for `of_all`."""
        gathered = self._lay(self.bucket.collectives[-1], sent)
        finite = tf.numpy_function(self._arrive, [gathered], tf.bool, stateful=False)
        finite.set_shape([])
        return finite

    def _lay_stage(self, stage: Callable[..., Any], inputs: list[tf.Tensor], collective: str) -> list[tf.Tensor]:
        """A stage before a collective: (payloads, bytes for each rank), the second for an alltoall."""
        kinds = [tf.uint8] if collective in _WITHOUT_SIZES else [tf.uint8, tf.int32]
        sent = tf.numpy_function(stage, inputs, kinds, stateful=False)
        sent[0].set_shape([None])
        if len(sent) > 1:
            sent[1].set_shape([self.bucket.ranks])
        return list(sent)

    def _lay(self, collective: str, sent: Sequence[tf.Tensor]) -> tf.Tensor:
        settings = {"ignore_name_scope": True, "process_set": self._process_set}
        if collective == "allgather":
            return hvd.allgather(sent[0], self._name_of(collective), **settings)
        if collective == "broadcast":
            # Horovod counts roots among all ranks
            root = self._process_set.ranks[self.bucket.root]
            return hvd.broadcast(sent[0], root, self._name_of(collective), **settings)
        return hvd.alltoall(sent[0], sent[1], self._name_of(collective), **settings)[0]

    def lay_finish(
        self, gradients: Mapping[str, tf.Tensor], keep: tf.Tensor, scale: float
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Stage 3: (the combined gradients, a number that exists when this stage has run).

        `keep` is the same for all tensors of the step. A control dependency would not do instead of the number:
        TensorFlow's optimizer takes nodes whose values nobody uses out of the graph, and keeps the dependency only.
        """
        names = [name for name in self.tensors if name in gradients]
        dtypes = [tf.float64 if gradients[name].dtype == tf.float64 else tf.float32 for name in names]

        def finish(keep: np.bool_) -> list[Any]:
            for name, dtype in zip(names, dtypes, strict=True):
                # a TensorFlow tensor must not change
                if name in self.bucket.accounts:
                    self.bucket.move(name, aligned_empty(self.bucket.accounts[name].plan.numel, dtype.as_numpy_dtype))
            results = self.bucket.finish(bool(keep), scale)
            # a pack's buffer is used again, and TensorFlow takes arrays over without a copy
            flats = [
                results[n] if self.bucket.pack is None or n in self.bucket.accounts else self.bucket.pack.part(n).copy()
                for n in names
            ]
            return [*flats, np.int64(1)]

        *flats, done = tf.numpy_function(finish, [keep], [*dtypes, tf.int64], stateful=False)
        done.set_shape([])
        combined = {
            name: tf.cast(tf.reshape(flat, self.bucket.shape_of(name)), gradients[name].dtype)
            for name, flat in zip(names, flats, strict=True)
        }
        return combined, done

    def settle_counts(self) -> None:
        """Bring the counters of the tensors up to date."""
        self.bucket.settle_counts()

    def abandon(self) -> None:
        """Forget a step in flight and make residuals what they were before it."""
        self.bucket.abandon()

    # -- what the nodes run ------------------------------------------------------------------------------------------

    def _encode(self, gradients: Mapping[str, Array]) -> Any:
        # still busy: another bucket's stage has failed in the last step, which thereby never happened
        self.abandon()
        for name in self.tensors:
            gradient = gradients.get(name)
            self.bucket.give(name, None if gradient is None else gradient.reshape(-1))
        return self._handed_on(self.bucket.parcel(), self.bucket.collectives[0])

    def _handed_on(self, parcel: Parcel, collective: str) -> Any:
        self._left_at = time.perf_counter()
        if collective in _WITHOUT_SIZES:
            return parcel.buffer
        sizes = parcel.sizes or (parcel.buffer.size // self.bucket.ranks,) * self.bucket.ranks
        return parcel.buffer, np.array(sizes, np.int32)

    def _advance(self, collective: str, received: Array) -> Any:
        self.bucket.tally.seconds["exchange_seconds"] += time.perf_counter() - self._left_at
        following = self.bucket.collectives[self.bucket.collectives.index(collective) + 1]
        return self._handed_on(self.bucket.advance(collective, received), following)

    def _arrive(self, gathered: Array) -> np.bool_:
        self.bucket.tally.seconds["exchange_seconds"] += time.perf_counter() - self._left_at
        return np.bool_(self.bucket.arrive(gathered))

    def _name_of(self, collective: str) -> str:
        # Horovod's torch interface puts the kind of the collective before every name, its TensorFlow interface does
        # not: written out, ranks of both can take part in one exchange
        kind = collective if collective in _WITHOUT_SIZES else "alltoall"
        return f"{kind}.hvd_compress.{collective}.{self._wire_name}"


def _wide(gradient: tf.Tensor) -> tf.Tensor:
    return gradient if gradient.dtype in (tf.float32, tf.float64) else tf.cast(gradient, tf.float32)
