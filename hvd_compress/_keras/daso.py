"""`DASOCallback`: averages a model's weights between nodes in `fit`; gradients are averaged inside by `hvd.DASO`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from hvd_compress import saved
from hvd_compress._keras.averaging import AveragingCallback
from hvd_compress._keras.weights import arrays_of, tensors_of, write
from hvd_compress.compressors import BF16, NoCompression
from hvd_compress.daso import DasoMember, DasoSettings, number_of
from hvd_compress.elastic import NO_STATE, refuse_elastic_averaging
from hvd_compress.schedules import DasoSchedule, Moment

__all__ = ["DASOCallback"]


class DASOCallback(AveragingCallback):
    """Averages weights between nodes every B batches, with values S batches old, and makes ranks equal at epoch ends.

    Compile the model with `hvd.DASO(optimizer)`, which averages gradients inside of a node, and start from equal
    weights: put BroadcastGlobalVariablesCallback before it. The loss of an epoch, averaged over the ranks, decides
    about B and S; the last batch of an epoch makes ranks equal, and so does the beginning of a validation. With
    `steps_per_execution` an execution counts as one batch. The arguments are those of `DASO` of `hvd_compress.torch`;
    `steps_per_epoch` comes from `fit`. All ranks must make equally many batches.

    Args:
        total_epochs: of the training; needed for a cool-down.
        warmup_epochs: at the beginning, in which nodes average after every batch and wait for it.
        cooldown_epochs: the same at the end.
        global_skips: B, batches from one averaging of nodes to the next.
        batches_to_wait: S, batches until what was sent arrives, at most B; with 0 the batch waits, and
            weights become the mean.
        patience: epochs in a row without progress after which B and S are halved; None keeps them.
        stability: the share of the best loss by which a loss must be lower to count as progress.
        form: "sharded" or "rotate".
        merge: "paper", "delta", or the weight of what arrives.
        compression: for the change since the last averaging, between warm-up and cool-down.
        blocking_compression: the same for warm-up and cool-down.
        average_state: average the optimizer's floating variables over the ranks at the end of each epoch.
        average_buffers: the same for weights that are not trained, such as moving means.
        monitor: the entry of an epoch's logs that decides about B and S.
        ranks_per_node: as given to `hvd.DASO`.

    Raises:
        ValueError: a setting out of its range.
        TypeError: an argument of another type than stated.
        UnsupportedError: an elastic run.
    """

    def __init__(
        self,
        *,
        total_epochs: int | None = None,
        warmup_epochs: int = 0,
        cooldown_epochs: int = 0,
        global_skips: int = 4,
        batches_to_wait: int = 1,
        patience: int | None = 2,
        stability: float = 0.05,
        form: str = "sharded",
        merge: str | float = "paper",
        compression: Any = NoCompression(),
        blocking_compression: Any = BF16(),
        average_state: bool = False,
        average_buffers: bool = True,
        monitor: str = "loss",
        ranks_per_node: int | None = None,
    ) -> None:
        refuse_elastic_averaging("DASOCallback", NO_STATE)
        super().__init__(ranks_per_node, average_buffers, average_state)
        schedule = DasoSchedule(
            global_skips, batches_to_wait, total_epochs, warmup_epochs, cooldown_epochs, patience, stability
        )
        self._settings = DasoSettings(schedule, form, merge, compression, blocking_compression, average_state)
        self._monitor = monitor
        # without patience nothing follows from the entry
        self._watches = patience is not None
        self._member: DasoMember | None = None
        self._saved: Any = None
        self._trains = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Learn how many batches the epochs of this `fit` have."""
        self._trains = True
        if self._member is not None and self._member.clock.schedule.steps_per_epoch != self._steps():
            self._member.declare_steps(self._steps())

    def on_train_end(self, logs: Any = None) -> None:
        """Make ranks equal; what is evaluated from here on is no validation."""
        self._trains = False
        if self._member is not None:
            # an optimizer with use_ema=True has made weights the averages of this rank's, and EarlyStopping may have
            # brought back those of an epoch in which ranks were not equal yet
            self._average([*self._weights(), *self._others()])

    def on_test_begin(self, logs: Any = None) -> None:
        """Make ranks equal before validation, if the last batch has not done it."""
        if self._trains and self._member is not None:
            self._change(self._weights(), self._member.level)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch, and do what is due."""
        member = self._member_of()
        moment = member.batch()
        if moment != Moment():
            self._change(self._weights(), lambda arrays: member.act(moment, arrays))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Make ranks equal, and let the schedule look at the loss."""
        member = self._member_of()
        loss = (logs or {}).get(self._monitor)
        if loss is None and self._watches:
            # told once
            self._watches = False
            warnings.warn(
                f"DASOCallback(monitor={self._monitor!r}): epoch {epoch} has no such entry, and without it the "
                f"schedule stays as it is; there are {', '.join(sorted(logs or {})) or 'none'}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._change(self._weights(), lambda arrays: member.end_epoch(arrays, number_of(loss)))
        self._average(self._others())

    def _average(self, weights: list[Any]) -> None:
        """Make some weights the mean over all ranks; a collective call."""
        named = {f"{i}": x for i, x in enumerate(arrays_of(self.edge, weights))}
        self._member_of().average(named)
        write(weights, list(named.values()))

    def daso_stats(self) -> dict[str, Any]:
        """What this rank has done so far, as `daso_stats` of `DASO`; {} before the first batch."""
        return {} if self._member is None else self._member.stats()

    def daso_state_dict(self) -> dict[str, Any]:
        """The schedule, the residuals, and what is under way, as plain values and NumPy arrays; {} before the first
        batch.

        Call it between batches, on all ranks after the same batch.
        """
        return self._saved or {} if self._member is None else self._member.state_dict()

    def load_daso_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `daso_state_dict` returned on this rank; called before the first batch, it takes effect there.

        Raises:
            StateError: not such a state, or of another rank, network, nodes or settings.
        """
        if self._member is None:
            self._saved = saved.record("DASO state", state)
        else:
            self._member.load_state_dict(state)

    def _member_of(self) -> DasoMember:
        weights = self._weights()
        if self._member is None:
            sets = self._sets("DASO")
            schedule = replace(self._settings.schedule, steps_per_epoch=self._steps())
            settings = replace(self._settings, schedule=schedule)
            tensors = tensors_of(weights, arrays_of(self.edge, weights))
            member = DasoMember(tensors, settings, self.edge.nodes.groups(sets))
            if self._saved:
                member.load_state_dict(self._saved)
            self._member = member
        return self._member

    def _steps(self) -> int | None:
        """Executions of an epoch, where Keras knows them."""
        of_keras_2 = getattr(self.model, "_steps_per_execution", None)
        each: Any = getattr(self.model, "steps_per_execution", 1) if of_keras_2 is None else of_keras_2
        each = int(each.numpy()) if hasattr(each, "numpy") else int(each or 1)
        steps = self.params.get("steps")
        return -(-int(steps) // each) if steps else None
