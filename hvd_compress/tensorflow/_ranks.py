"""Horovod's collectives on arrays, which run at once or while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.errors import MismatchError
from hvd_compress.horovod_nodes import HorovodNodes
from hvd_compress.ranks import HorovodRanks
from hvd_compress.tensorflow._seams import known_process_sets
from hvd_compress.waiting import shut_down_by

__all__ = ["NODES", "BackgroundRanks", "TensorFlowRanks"]

Array = np.ndarray[Any, Any]

shut_down_by("horovod.tensorflow", hvd.shutdown)

# of the functions that are kept; those of comparisons, each of which has a name of its own, are not used again
_MOST_KEPT = 64


class TensorFlowRanks(HorovodRanks):
    """See `Ranks`. Horovod's TensorFlow has no handles: what is started has ended when `start` returns.

    Args:
        process_set: the ranks that take part; this rank is one of them.
    """

    def __init__(self, process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
        super().__init__(hvd, process_set)
        self._function = lru_cache(_MOST_KEPT)(self._made)

    def run(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Array:
        # at once, even while a function is traced
        with tf.init_scope(), tf.device("CPU:0"):
            try:
                function = self._function(collective, name, root, array.dtype)
                received = function(tf.constant(array), self._splits(array, sizes))
            except tf.errors.FailedPreconditionError as error:
                raise MismatchError(
                    f"another rank does something else than this one under the name {name!r}: it may not compress "
                    "there, or have another shape. Give all ranks the same arguments. Horovod says: "
                    f"{error.message}"
                ) from error
        # TensorFlow's own memory is not to be written to
        return np.array(received.numpy())

    def repeated(
        self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None
    ) -> Callable[[], object]:
        with tf.device("CPU:0"):
            tensor, splits = tf.constant(array), self._splits(array, sizes)

        def run() -> None:
            # no function, which would take time of its own: that the kernel goes by the name of its type does no harm
            with tf.device("CPU:0"):
                self._call(collective, name, 0, tensor, splits)

        return run

    def start(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        return self.run(collective, name, array, sizes, root)

    def is_done(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> Array:
        array: Array = handle
        return array

    def _splits(self, array: Array, sizes: Sequence[int] | None) -> tf.Tensor:
        return tf.constant([array.size // self.size] * self.size if sizes is None else list(sizes), tf.int32)

    def _made(self, collective: str, name: str, root: int, dtype: Any) -> Callable[..., tf.Tensor]:
        def run(values: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
            return self._call(collective, name, root, values, splits)

        # named in a graph; outside of one, the kernel would go by the name of its type. One for all lengths, or
        # TensorFlow would warn of tracing too often
        inputs = tf.TensorSpec([None], dtype), tf.TensorSpec([self.size], tf.int32)
        return tf.function(run, autograph=False).get_concrete_function(*inputs)

    def _call(self, collective: str, name: str, root: int, values: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        common = {"name": name, "process_set": self._process_set}
        if collective == "allreduce":
            return hvd.allreduce(values, op=hvd.Sum, **common)
        if collective == "allgather":
            return hvd.allgather(values, **common)
        if collective == "broadcast":
            # Horovod counts roots among all ranks
            return hvd.broadcast(values, self._process_set.ranks[root], **common)
        return hvd.alltoall(values, splits, **common)[0]


class BackgroundRanks(TensorFlowRanks):
    """`TensorFlowRanks` whose collectives go on after `start`: one thread issues them and waits for each.

    That needs all ranks to start them in the same order, which `daso` does: never as time has it. What nobody starts,
    but runs, does not wait for them.
    """

    def start(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        return _thread().submit(self.run, collective, name, array, sizes, root)

    def is_done(self, handle: Future[Array]) -> bool:
        return handle.done()

    def wait(self, handle: Future[Array]) -> Array:
        return handle.result()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "hvd_compress")


NODES = HorovodNodes(hvd, known_process_sets, BackgroundRanks)
