"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import agree, scope_of

__all__ = ["require_agreement"]


def require_agreement(description: dict[str, Any], process_set: hvd.ProcessSet, name: str | None = None) -> None:
    """Compare `description` across the ranks of `process_set`; a collective call, made at once even while tracing.

    Args:
        description: see `fingerprint.describe`.
        process_set: the ranks that take part.
        name: see `fingerprint.agree`.

    Raises:
        MismatchError: on all ranks, naming the first difference.
    """

    def allgather(data: bytes, name: str) -> bytes:
        with tf.init_scope(), tf.device("CPU:0"):
            tensor = tf.constant(np.frombuffer(data, np.uint8))
            # named in a graph; outside of one, the kernel would go by the name of its type
            gather = tf.function(lambda t: hvd.allgather(t, name=name, process_set=process_set), autograph=False)
            try:
                return bytes(gather(tensor).numpy().tobytes())
            except tf.errors.FailedPreconditionError as error:
                raise MismatchError(
                    f"another rank does something else than this one under the name {name!r}: it may not compress "
                    "there, or have another shape. Give all ranks the same arguments. Horovod says: "
                    f"{error.message}"
                ) from error

    agree(description, scope_of(process_set), allgather, name)
