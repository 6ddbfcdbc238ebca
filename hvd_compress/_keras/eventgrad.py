"""`EventGraDCallback`: event-triggered averaging among neighbours in `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress._keras.callbacks import EdgeCallback
from hvd_compress._keras.optimizer import distributed
from hvd_compress._keras.weights import arrays_of, is_floating, tensors_of, write
from hvd_compress.compressors import NoCompression
from hvd_compress.elastic import NO_STATE, refuse_elastic_averaging
from hvd_compress.gossip import GossipMember, GossipSettings, LateGossipMember
from hvd_compress.schedules import SlopeThreshold, Trigger
from hvd_compress.topology import Ring, Topology

__all__ = ["EventGraDCallback"]

Array = np.ndarray[Any, Any]


class EventGraDCallback(LateGossipMember, EdgeCallback):
    """Lets each rank train on its own and average its weights with those that neighbours send when they change enough.

    It takes the place of `hvd.DistributedOptimizer`: compile the model with a plain optimizer. A batch's gradient
    belongs to the weights before the averaging, as in equation 3 of Ghosh and Gupta, EventGraD (MLHPC 2020): what
    averaging would change is computed when a batch begins and added when its update is made. The arguments are those of
    `EventGraDOptimizer` of `hvd_compress.torch`. Start from equal weights: put BroadcastGlobalVariablesCallback before
    it. With `steps_per_execution` neighbours average once per execution. Ranks may make different numbers of batches,
    unless other callbacks communicate between ranks: MetricAverageCallback needs equal numbers.

    Args:
        trigger: when a weight is sent.
        topology: who are neighbours, with which weights.
        transport: "alltoall", in which all wait for all, "one_sided", where nobody waits, or "auto" for "alltoall".
        compression: of what is sent: a compressor of hvd_compress or a `Policy`.
        mixing: "stale", "mean_preserving", or "auto" for the second with lossy compression, else the first.
        consensus_rate: how far a step goes towards the average, as a fraction.
        traced: keep norms, thresholds and events of every step for `event_stats()`.
        average_at_end: make all weights the mean over ranks when training ends.
        process_set: the ranks that take part; None for all.

    Raises:
        ValueError: a setting out of its range.
        TypeError: an argument of another type than stated.
        UnsupportedError: a combination of settings that cannot be honoured.
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
        average_at_end: bool = True,
        process_set: Any = None,
    ) -> None:
        refuse_elastic_averaging("EventGraDCallback", NO_STATE)
        settings = GossipSettings(trigger, topology, transport, compression, mixing, consensus_rate, False, traced)
        LateGossipMember.__init__(self, settings)
        # Keras' own callback, which this is joined with, comes behind these two
        super(LateGossipMember, self).__init__()
        self._process_set = process_set
        self._averages_at_end = average_at_end
        self._changes: list[Array] | None = None
        self._keys: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Send, receive, and find out what averaging changes."""
        if not self.model.built:
            # its first batch builds the model, on all ranks
            return
        weights = self.model.trainable_variables
        before = arrays_of(self.edge, weights)
        mixed = [x.copy() for x in before]
        self._member_of(weights).mix(mixed)
        self._changes = [after - x for after, x in zip(mixed, before, strict=True)]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add what averaging changes to the updated weights."""
        if self._changes is None:
            return
        weights = self.model.trainable_variables
        now = arrays_of(self.edge, weights)
        write(weights, [x + change for x, change in zip(now, self._changes, strict=True)])
        self._changes = None

    def on_train_end(self, logs: Any = None) -> None:
        """Make the weights of all ranks their mean."""
        if self._averages_at_end:
            self.average_parameters()

    def average_parameters(self) -> None:
        """Make all floating weights, those that are not trained too, their mean over the ranks; a collective call."""
        weights = self.model.trainable_variables
        others = [v for v in self.model.non_trainable_variables if is_floating(v)]
        arrays = arrays_of(self.edge, weights)
        buffers = {f"buffer.{i}": x for i, x in enumerate(arrays_of(self.edge, others))}
        self._member_of(weights).average(arrays, buffers)
        write(weights, arrays)
        write(others, list(buffers.values()))

    def consensus_distance(self) -> float:
        """The root of the mean over ranks of ‖x - mean of x‖²; a collective call."""
        weights = self.model.trainable_variables
        return self._member_of(weights).consensus_distance(arrays_of(self.edge, weights))

    def _member_of(self, weights: Sequence[Any]) -> GossipMember:
        keys = [self.edge.key(v) for v in weights]
        if self._member is None:
            if distributed(self.model.optimizer) is not None:
                raise ValueError(
                    "EventGraDCallback with a model that is compiled with hvd.DistributedOptimizer: ranks would "
                    "exchange gradients, and average weights. Compile it with the plain optimizer"
                )
            tensors = tensors_of(weights, arrays_of(self.edge, weights))
            process_set = self.edge.all_ranks if self._process_set is None else self._process_set
            takes_part = process_set.included() and process_set.size() > 1
            ranks = self.edge.ranks(process_set) if takes_part else None
            member = self._made(tensors, ranks, self.edge.one_sided)
            self._keys = keys
            return member
        if keys != self._keys:
            raise ValueError(
                "the trainable weights of the model are not those that this EventGraDCallback has begun with: after "
                "freezing or unfreezing layers use a new one, on all ranks"
            )
        return self._member
