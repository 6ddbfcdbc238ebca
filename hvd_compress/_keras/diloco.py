"""`DiLoCoCallback`: each rank trains on its own in `fit`, and an outer step takes what all have moved."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress._keras.averaging import AveragingCallback
from hvd_compress._keras.callbacks import ALL_RANKS
from hvd_compress._keras.weights import Array, arrays_of, is_floating, tensors_of, write
from hvd_compress.diloco import DiLoCoMember, DiLoCoSettings, Outcome, OuterSGD
from hvd_compress.elastic import NO_STATE, refuse_elastic_averaging
from hvd_compress.schedules import Turn

__all__ = ["DiLoCoCallback"]


class DiLoCoCallback(AveragingCallback):
    """Trains each rank on its own; every `sync_every` batches an outer optimizer steps with the ranks' average change.

    Compile the model with a plain optimizer, and start from equal weights: put BroadcastGlobalVariablesCallback before
    it. `DiLoCo` of `hvd_compress.torch` explains the settings; names in `fragments` are those of `hvd_compress`, such
    as "dense/kernel". The outer optimizer is SGD. At the end of each epoch, and before a validation, weights become
    their mean over the ranks, so that all evaluate and save the same; with `average_epochs=False` this happens only
    when training ends. With `steps_per_execution` an execution counts as one batch. All ranks must make equally many
    batches. If the model is built by its first batch, the values after that batch are the first that ranks agree on.

    Args:
        sync_every: H, batches from one synchronization of a fragment to its next one.
        fragments: how many there are, or lists of names.
        delay: batches between sending and arrival.
        alpha: weight of a rank's own weights when the average arrives.
        compression: for the change of the weights.
        feedback_decay: factor on what compression left out.
        outer_learning_rate: of SGD, the outer optimizer.
        outer_momentum: of the outer optimizer, at least 0 and less than 1.
        outer_nesterov: whether its momentum is Nesterov's.
        average_epochs: make all ranks equal at the end of each epoch and before each validation.
        average_buffers: then also average weights that are not trained, such as moving means.
        ranks_per_node: with more than 1 compile the model with `hvd.DASO(optimizer, ranks_per_node=...)`.

    Raises:
        ValueError: a setting out of its range.
        TypeError: an argument of another type than stated.
        UnsupportedError: an elastic run.
    """

    def __init__(
        self,
        *,
        sync_every: int = 30,
        fragments: int | Sequence[Sequence[str]] = 1,
        delay: int = 0,
        alpha: float = 0.0,
        compression: Any = None,
        feedback_decay: float = 1.0,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        outer_nesterov: bool = True,
        average_epochs: bool = True,
        average_buffers: bool = True,
        ranks_per_node: int | None = 1,
    ) -> None:
        super().__init__(ranks_per_node, average_buffers, average_state=False)
        refuse_elastic_averaging("DiLoCoCallback", NO_STATE)
        self._settings = DiLoCoSettings(sync_every, fragments, delay, alpha, compression, feedback_decay)
        self._outer = OuterSGD(outer_learning_rate, outer_momentum, outer_nesterov)
        self._averages_epochs = average_epochs
        self._member: DiLoCoMember | None = None
        self._saved: Any = None
        self._trains = False
        self._is_level = True
        """Whether all ranks have been made equal since the last batch."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Note what ranks begin with, if all of them have it already."""
        self._trains = True
        # as BroadcastGlobalVariablesCallback, which may have made it equal
        can = bool(self.model.built) and hasattr(self.model.optimizer, "build")
        if self.edge.average([float(can)], ["ranks with a model that is built"])[0] >= ALL_RANKS:
            self._begin()

    def on_train_end(self, logs: Any = None) -> None:
        """Make ranks equal; what is evaluated from here on is no validation."""
        self._trains = False
        # an optimizer with use_ema=True has made weights the averages of this rank's, and EarlyStopping may have
        # brought back those of an epoch in which ranks were not equal yet
        self._is_level = False
        self._average()

    def on_test_begin(self, logs: Any = None) -> None:
        """Make ranks equal before validation, if that is wanted."""
        if self._trains and self._averages_epochs:
            self._average()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch, and do what is due."""
        member = self._begin()
        self._is_level = False
        turn = member.step()
        weights = self._weights()
        if turn != Turn():
            arrays = arrays_of(self.edge, weights)
            self._take_over(weights, member.act(turn, lambda numbers: [arrays[n] for n in numbers]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Make ranks equal, if that is wanted."""
        if self._averages_epochs:
            self._average()

    def diloco_stats(self) -> dict[str, Any]:
        """What this rank has done so far, as `diloco_stats` of `DiLoCo`; {} before the first batch."""
        return {} if self._member is None else self._member.stats()

    def diloco_state_dict(self) -> dict[str, Any]:
        """What ranks agreed on, the residuals, and what is under way, as plain values and arrays; {} before the first
        batch.

        Call it between batches, on all ranks after the same batch.
        """
        return self._saved or {} if self._member is None else self._member.state_dict()

    def load_diloco_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `diloco_state_dict` returned on this rank; called before the first batch, it takes effect
        there.

        Raises:
            StateError: not such a state, or of another rank, network, nodes or settings.
        """
        if self._member is None:
            self._saved = saved.record("DiLoCo state", state)
        else:
            self._member.load_state_dict(state)

    def _begin(self) -> DiLoCoMember:
        """The member, made when first asked for, with what ranks begin with."""
        if self._member is None:
            sets = self._sets("DiLoCo", may_be_plain=True)
            weights = self._weights()
            arrays = arrays_of(self.edge, weights)
            tensors = tensors_of(weights, arrays)
            # seeds of random layers have no name that fragments could have
            still = [v for v in self.model.non_trainable_variables if is_floating(v)]
            frozen = {t.name for t in tensors_of(still, arrays_of(self.edge, still))}
            member = DiLoCoMember(tensors, self._settings, self.edge.nodes.groups(sets, "diloco"), self._outer, frozen)
            if self._saved:
                member.load_state_dict(self._saved)
            member.begin(lambda numbers: [arrays[n] for n in numbers])
            self._member = member
        return self._member

    def _average(self) -> None:
        member = self._member
        if member is None or self._is_level:
            return
        weights, others = self._weights(), self._others()
        arrays = arrays_of(self.edge, weights)
        named = {f"{i}": x for i, x in enumerate(arrays_of(self.edge, others))}
        self._take_over(weights, member.average_parameters(lambda numbers: [arrays[n] for n in numbers], named))
        write(others, list(named.values()))
        self._is_level = True

    def _take_over(self, weights: list[Any], outcome: Outcome) -> None:
        if outcome.problem is not None:
            warnings.warn(outcome.problem, RuntimeWarning, stacklevel=3)
        numbers = list(outcome.changed)
        write([weights[n] for n in numbers], [outcome.changed[n] for n in numbers])
        if outcome.restored:
            self._forget_spoiled()

    def _forget_spoiled(self) -> None:
        """Let the inner optimizer go on without what it keeps that is not finite, such as momentum."""
        spoiled: list[tuple[Any, Array]] = []
        for variable, array in zip(self._of_optimizer(), arrays_of(self.edge, self._of_optimizer()), strict=True):
            if not np.isfinite(array).all():
                spoiled.append((variable, np.where(np.isfinite(array), array, 0)))
        write([v for v, _ in spoiled], [a for _, a in spoiled])
