"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.fingerprint import Place, agree_at
from hvd_compress.tensorflow._ranks import TensorFlowRanks

__all__ = ["is_mismatch", "met", "require_agreement_through"]

Array = np.ndarray[Any, Any]


def require_agreement_through(
    description: dict[str, Any], process_set: hvd.ProcessSet, places: Sequence[Place]
) -> None:
    """`Ranks.agree` in place of collectives that ranks are about to start who do not know of it.

    Horovod refuses operations of one name whose types differ, on all ranks: so nobody waits for ever.

    Raises:
        MismatchError: on all ranks, naming the first difference.
        tf.errors.OpError: another rank has started these operations themselves, see `is_mismatch`.
    """
    allgather = TensorFlowRanks(process_set).gather_bytes
    agree_at(places, description, lambda data: met(data, places, process_set), allgather)


def is_mismatch(error: Exception) -> bool:
    """Whether ranks have started different operations of one name, of which at least one compares."""
    return isinstance(error, tf.errors.OpError) and "Mismatched" in str(error) and "int32" in str(error)


def met(data: bytes, places: Sequence[Place], process_set: hvd.ProcessSet) -> bytes:
    """Bytes of all ranks, as many of each, when they have come to all these places; a collective call.

    Raises:
        tf.errors.OpError: another rank has started one of these operations itself.
    """
    # TensorFlow would make one of operations that have the same input
    mine = [np.frombuffer(data, np.uint8).astype(np.int32) for _ in places]
    meeting = _meeting(tuple(places), process_set, process_set.size(), process_set.rank())
    return bytes(_first(meeting, mine).astype(np.uint8).tobytes())


@lru_cache(64)
def _meeting(places: tuple[Place, ...], process_set: hvd.ProcessSet, ranks: int, position: int) -> Any:
    # number and position change in elastic runs
    def meet(*mine: tf.Tensor) -> list[tf.Tensor]:
        return [_laid(place, each, process_set, ranks, position) for place, each in zip(places, mine, strict=True)]

    return tf.function(meet, autograph=False)


def _first(collectives: Callable[..., list[tf.Tensor]], inputs: Sequence[Array]) -> Array:
    """What the first of some collectives brings, when all have ended.

    They are in a function, since outside of one the kernel would go by the name of its type, and all of them are
    results: TensorFlow leaves out what nobody uses.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        first: Array = collectives(*map(tf.constant, inputs))[0].numpy()
    return first


def _laid(place: Place, mine: tf.Tensor, process_set: hvd.ProcessSet, ranks: int, position: int) -> tf.Tensor:
    """An operation of the name of a place that brings the numbers of all ranks, in their order."""
    common = {"name": place.name, "process_set": process_set}
    if place.collective == "allgather":
        return hvd.allgather(mine, **common)
    if place.collective in ("allreduce", "grouped_allreduce"):
        rows = tf.reshape(tf.one_hot(position, ranks, dtype=mine.dtype)[:, tf.newaxis] * mine, [-1])
        if place.collective == "allreduce":
            return hvd.allreduce(rows, op=hvd.Sum, **common)
        return hvd.grouped_allreduce([rows] * place.tensors, op=hvd.Sum, **common)[0]
    return hvd.alltoall(tf.tile(mine, [ranks]), [tf.size(mine)] * ranks, **common)[0]
