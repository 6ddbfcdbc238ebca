"""`EventGraD` for custom training loops: variables averaged among neighbours when they have changed enough."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.compressors import NoCompression
from hvd_compress.elastic import NO_STATE, refuse_elastic_averaging
from hvd_compress.errors import UnsupportedError
from hvd_compress.gossip import GossipMember, GossipSettings, LateGossipMember, ParameterSpec
from hvd_compress.mpi import start_one_sided
from hvd_compress.schedules import SlopeThreshold, Trigger
from hvd_compress.tensorflow._ranks import TensorFlowRanks
from hvd_compress.tensorflow._seams import raw
from hvd_compress.tensorflow._tape import describe_sources
from hvd_compress.topology import Ring, Topology

__all__ = [
    "EventGraD",
]

Array = np.ndarray[Any, Any]


class EventGraD(LateGossipMember):
    """Averages variables with those of the neighbours, sent when they have changed enough; for custom loops.

    Call `step(variables)` in every step between computing the gradients and applying them: equation 3 of Ghosh and
    Gupta, EventGraD (MLHPC 2020). Start all ranks from equal variables, end with `average_parameters`. The arguments
    are those of `EventGraDOptimizer` of `hvd_compress.torch`.

    Args:
        trigger: when a variable is sent.
        topology: who are neighbours, with which weights.
        transport: "alltoall", in which all wait for all, "one_sided", where nobody waits, or "auto" for "alltoall".
        compression: of what is sent: a compressor of hvd_compress or a `Policy`.
        mixing: "stale", "mean_preserving", or "auto" for the second with lossy compression, else the first.
        consensus_rate: of the way to the average that a step goes.
        traced: keep norms, thresholds and events of every step for `event_stats()`.
        process_set: the ranks that take part.

    Raises:
        ValueError: a setting out of its range.
        TypeError: an argument of another type than stated.
        UnsupportedError: a combination of settings that cannot be honoured.

    Example::

        neighbours = hvd.EventGraD(trigger=SlopeThreshold(horizon=1.0))
        for images, labels in dataset:
            with tf.GradientTape() as tape:
                loss = loss_of(model(images), labels)
            gradients = tape.gradient(loss, model.trainable_variables)
            neighbours.step(model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        neighbours.average_parameters(model.trainable_variables, model.non_trainable_variables)
    """

    def __init__(
        self,
        *,
        trigger: Trigger = SlopeThreshold(),
        topology: Topology = Ring(),
        transport: str = "auto",
        compression: Any = NoCompression(),
        mixing: str = "auto",
        consensus_rate: float | None = None,
        traced: bool = False,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        refuse_elastic_averaging("EventGraD of hvd_compress.tensorflow", NO_STATE)
        super().__init__(
            GossipSettings(trigger, topology, transport, compression, mixing, consensus_rate, False, traced)
        )
        self._process_set = process_set
        self._variables: list[tf.Variable] = []

    @tf.autograph.experimental.do_not_convert
    def step(self, variables: Sequence[Any]) -> None:
        """Average the variables with those of the neighbours, in place.

        Raises:
            UnsupportedError: called while a `tf.function` is traced.
            ValueError: other variables than in the calls before.
            MismatchError: the ranks disagree on settings or variables; in the first call.
        """
        arrays = self._arrays(variables, "step")
        self._member_of(variables).mix(arrays)
        _write(variables, arrays)

    @tf.autograph.experimental.do_not_convert
    def average_parameters(self, variables: Sequence[Any], buffers: Sequence[Any] = ()) -> None:
        """When all ranks have come here, make the variables their mean; a collective call.

        Args:
            variables: as given to `step`.
            buffers: others to be averaged, such as `model.non_trainable_variables`; integers are left as they are.
        """
        arrays = self._arrays(variables, "average_parameters")
        floating = [b for b in buffers if tf.as_dtype(b.dtype).is_floating]
        averaged = {f"buffer.{i}": _as_array(b) for i, b in enumerate(floating)}
        self._member_of(variables).average(arrays, averaged)
        _write(variables, arrays)
        _write(floating, list(averaged.values()))

    @tf.autograph.experimental.do_not_convert
    def consensus_distance(self, variables: Sequence[Any]) -> float:
        """The root of the mean over ranks of ‖x - mean of x‖²; a collective call."""
        return self._member_of(variables).consensus_distance(self._arrays(variables, "consensus_distance"))

    def _member_of(self, variables: Sequence[Any]) -> GossipMember:
        given = [raw(v) for v in variables]
        if self._member is None:
            tensors = [
                ParameterSpec(s.name, tuple(s.shape or ()), "float64" if s.dtype == tf.float64 else "float32")
                for s in describe_sources(variables)
            ]
            process_set = self._process_set
            takes_part = process_set.included() and process_set.size() > 1
            ranks = TensorFlowRanks(process_set) if takes_part else None
            member = self._made(tensors, ranks, partial(start_one_sided, hvd))
            self._variables = given
            return member
        if [id(v) for v in given] != [id(v) for v in self._variables]:
            raise ValueError(
                f"{len(given)} variables of shapes {[tuple(v.shape) for v in given]} are not the "
                f"{len(self._variables)} of the calls before, in their order: always give the same, or make a new "
                "EventGraD, on all ranks"
            )
        return self._member

    def _arrays(self, variables: Sequence[Any], method: str) -> list[Array]:
        if not tf.executing_eagerly():
            raise UnsupportedError(
                f"EventGraD.{method}() inside of a tf.function: which variables are sent is decided anew in every "
                "step. Call it between the functions that compute gradients and apply them"
            )
        for variable in variables:
            if not tf.as_dtype(variable.dtype).is_floating:
                raise TypeError(f"variable {variable.name!r} is {variable.dtype}; averaging takes floating types")
        return [_as_array(v).reshape(-1) for v in variables]


def _as_array(variable: Any) -> Array:
    """A copy of the values, float32 or float64."""
    values = raw(variable).numpy()
    return np.array(values, np.float64 if values.dtype == np.float64 else np.float32)


def _write(variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(tf.cast(tf.reshape(array, variable.shape), variable.dtype))
