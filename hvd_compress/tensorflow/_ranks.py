"""Horovod's collectives on arrays, among the ranks of a process set; they run while training goes on.

Horovod's TensorFlow has no handles, so one thread issues these collectives and waits for each. That needs all ranks to
start them in the same order, which `daso` does: never as time has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.fingerprint import begin_agreement, scope_of
from hvd_compress.horovod_nodes import HorovodNodes
from hvd_compress.tensorflow._agreement import require_agreement
from hvd_compress.tensorflow._seams import known_process_sets

__all__ = ["NODES", "TensorFlowRanks"]

Array = np.ndarray[Any, Any]


class TensorFlowRanks:
    """See `daso.Ranks`.

    Args:
        process_set: the ranks that take part; this rank is one of them.
    """

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        self.size, self.position = int(process_set.size()), int(process_set.rank())
        self._process_set = process_set
        ranks, common = list(process_set.ranks), {"ignore_name_scope": True, "process_set": process_set}

        # named in a graph; outside of one, the kernel would go by the name of its type
        @tf.function(autograph=False, reduce_retracing=True)
        def run(collective: str, name: str, values: tf.Tensor, splits: tf.Tensor, root: int) -> tf.Tensor:
            if collective == "allreduce":
                return hvd.allreduce(values, name=name, op=hvd.Sum, **common)
            if collective == "allgather":
                return hvd.allgather(values, name=name, **common)
            if collective == "broadcast":
                return hvd.broadcast(values, ranks[root], name=name, **common)
            return hvd.alltoall(values, splits, name=name, **common)[0]

        self._run = run

    def require_agreement(self, description: dict[str, Any]) -> None:
        """Raise MismatchError on all ranks unless all say the same."""
        require_agreement(description, self._process_set)

    def begin_agreement(self, description: dict[str, Any]) -> Callable[[], None]:
        """The same in two parts: begins, and returns what ends it."""

        def start(data: bytes, name: str) -> Callable[[], bytes]:
            handle = self.start("allgather", np.frombuffer(bytearray(data), np.uint8), name)
            return lambda: self.wait(handle).tobytes()

        return begin_agreement(description, scope_of(self._process_set), start)

    def start(
        self, collective: str, array: Array, name: str, sizes: Sequence[int] | None = None, root: int = 0
    ) -> Future[Array]:
        """Start a collective."""
        splits = [array.size // self.size] * self.size if sizes is None else list(sizes)
        return _thread().submit(self._now, collective, name, array, splits, root)

    def _now(self, collective: str, name: str, array: Array, splits: list[int], root: int) -> Array:
        with tf.device("CPU:0"):
            received = self._run(collective, name, tf.constant(array), tf.constant(splits, tf.int32), root)
        # TensorFlow's own memory is not to be written to
        return np.array(received.numpy())

    def wait(self, handle: Future[Array]) -> Array:
        """What it has brought."""
        return handle.result()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "hvd_compress")


NODES = HorovodNodes(hvd, tf.constant, known_process_sets, TensorFlowRanks, require_agreement)
