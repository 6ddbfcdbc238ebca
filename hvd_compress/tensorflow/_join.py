"""Horovod's `join`, which stands in for ranks that have ended, where exchanges are compressed."""

from __future__ import annotations

import gc
from queue import SimpleQueue
from threading import Thread

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.tensorflow._exchange import GradientExchange, in_use

__all__ = ["join"]


def join() -> tf.Tensor:
    """Wait until all ranks have come here; a collective call, outside of a `tf.function`.

    As Horovod's, and ranks may come after different numbers of steps, as long as no tape or optimizer compresses:
    Horovod adds zeros for a rank that has come, and these are no payloads. With compression all ranks must have made
    the same number of steps.

    Returns:
        The rank that came last.

    Raises:
        MismatchError: on all ranks, where something is compressed and ranks go on to another step. Within a
            `tf.function` it is an error of TensorFlow.
    """
    # ranks must find the same exchanges in use
    gc.collect()
    answers: SimpleQueue[Exception | None] = SimpleQueue()
    exchanges = in_use()
    for exchange in exchanges:
        # ranks make their next step in any of them, so none waits for another
        Thread(target=_agree, args=(exchange, answers), daemon=True, name="hvd_compress join").start()
    for _ in exchanges:
        problem = answers.get()
        if problem is not None:
            raise problem
    return hvd.join()


def _agree(exchange: GradientExchange, answers: SimpleQueue[Exception | None]) -> None:
    try:
        exchange.agree_to_join()
        answers.put(None)
    except Exception as error:
        answers.put(error)
