"""The seams of TensorFlow, Keras variables and horovod.tensorflow 0.28, all of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from horovod.common import process_sets
from horovod.common.util import split_list
from tensorflow.python.ops import control_flow_util

from hvd_compress.errors import UnsupportedError

__all__ = [
    "ALLGATHER",
    "ALLREDUCE",
    "BROADCAST",
    "key_of",
    "known_process_sets",
    "overlay",
    "raw",
    "refuse_xla",
    "split_list",
]

# hvd.elastic.run takes an error of TensorFlow for one of Horovod where its text has such a name (elastic.py l. 54)
ALLGATHER, ALLREDUCE, BROADCAST = (f"Horovod{kind}.hvd_compress" for kind in ("Allgather", "Allreduce", "Broadcast"))


def is_compiled_by_xla() -> bool:
    """Whether the function being traced is compiled as a whole (`jit_compile=True`); TensorFlow has no public name."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def refuse_xla() -> None:
    """Raise UnsupportedError within a function that is compiled as a whole."""
    if is_compiled_by_xla():
        raise UnsupportedError(
            "jit_compile=True: XLA cannot compile the exchange of gradients, which runs in Python and in "
            "Horovod. Use jit_compile=False for the function that combines and applies gradients "
            "(Keras: model.compile(..., jit_compile=False)); the layers can be in functions of their own"
        )


def raw(variable: Any) -> tf.Variable:
    """The TensorFlow variable in one of Keras 3; others as they are."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def key_of(variable: Any) -> Any:
    """The same for all objects that stand for the same variable."""
    return raw(variable)._unique_id


def overlay(tape: tf.GradientTape, methods: type, **attributes: Any) -> Any:
    """The same tape, recording included, as an object of a class with `methods` laid over those of its own.

    Horovod makes a new tape from three private attributes instead (tensorflow/__init__.py, l. 1130). The two objects
    here share all attributes but those given, so either can be entered, watched and reset, and wrapped again.
    """
    body = {"__module__": type(tape).__module__, **attributes}
    cls = type(type(tape).__name__, (methods, type(tape)), body)
    wrapped: Any = object.__new__(cls)
    wrapped.__dict__ = tape.__dict__
    return wrapped


def known_process_sets() -> dict[int, list[int]]:
    """The ranks of each process set by its number; horovod/common/process_sets.py l. 105 reads them in this way."""
    sets: dict[int, list[int]] = process_sets._basics._get_process_set_ids_and_ranks()
    return {number: list(ranks) for number, ranks in sets.items()}
