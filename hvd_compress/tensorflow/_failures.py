"""Collectives that fail since a rank is lost: TensorFlow has errors of its own for them, and elastic runs Horovod's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

__all__ = ["as_horovods"]

_OF_PYTHON = "Traceback (most recent call last)"


@contextmanager
def as_horovods() -> Iterator[None]:
    """Raise HorovodInternalError, after which an elastic run goes on, where a collective fails for want of a rank."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
        if _OF_PYTHON in str(error):
            # of a stage, not of Horovod: going on would meet it again
            raise
        raise HorovodInternalError(str(error)) from error
