"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.fingerprint import agree, scope_of

__all__ = ["require_agreement"]


def require_agreement(description: dict[str, Any], process_set: hvd.ProcessSet) -> None:
    """Compare `description` across the ranks of `process_set`; a collective call, made at once even while tracing.

    Raises:
        MismatchError: on all ranks, naming the first difference.
    """

    def allgather(data: bytes, name: str) -> bytes:
        with tf.init_scope(), tf.device("CPU:0"):
            tensor = tf.constant(np.frombuffer(data, np.uint8))
            return bytes(hvd.allgather(tensor, name=name, process_set=process_set).numpy().tobytes())

    agree(description, scope_of(process_set), allgather)
