"""The state of elastic runs, and the callbacks that keep it, for Keras 2 and 3 on either backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress._keras.callbacks import EdgeCallback, sums_of_passes, variables_of
from hvd_compress.engine import Carried, CarryingState
from hvd_compress.errors import UnsupportedError
from hvd_compress.ranks import Ranks

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "VariablesState",
]


class VariablesState(CarryingState):
    """Keeps the values of variables, and what ranks owe, beside plain attributes; laid over Horovod's `ObjectState`."""

    edge: ClassVar[Any]
    """A `Edge`, or the part of one that is used here."""

    def __init__(self, **kwargs: Any) -> None:
        self._values = self._copies()
        self._know_places()
        super().__init__(bcast_object=self.edge.broadcast_object, get_rank=self.edge.rank, **kwargs)  # type: ignore[call-arg]

    def _variables(self) -> Sequence[Any]:
        raise NotImplementedError

    def _shared(self) -> Sequence[Any]:
        """Those that have the same values on all ranks."""
        return self._variables()

    def _carried(self) -> Sequence[Carried]:
        return [self.edge.book]

    def _all_ranks(self) -> Ranks:
        ranks: Ranks = self.edge.book.all_ranks()
        return ranks

    def _hosts_updated(self) -> type[Exception]:
        interrupt: type[Exception] = self.edge.hosts_updated
        return interrupt

    def _know_places(self) -> None:
        self.edge.book.places = {self.edge.key(variable): i for i, variable in enumerate(self._variables())}

    def save(self) -> None:
        """Keep all values, to come back to."""
        self._values = self._copies()
        super().save()

    def restore(self) -> None:
        """Go back to the values that were saved last."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take the values of rank 0, and carry over what this rank owes; a collective call."""
        self._know_places()
        with self.edge.collectives():
            self.edge.broadcast(self._shared(), 0)
            super().sync()

    def check_host_updates(self) -> None:
        with self.edge.collectives():
            super().check_host_updates()

    def _share(self) -> None:
        with self.edge.collectives():
            super()._share()

    def _copies(self) -> list[Any]:
        return [np.array(self.edge.values(variable)) for variable in self._variables()]


class KerasState(VariablesState):
    """A Keras model, its optimizer and further values that all ranks of an elastic run share.

    What compression keeps between steps is carried over, as by `TorchState` of `hvd_compress.torch`.

    Args:
        model: built.
        optimizer: of the model; by default the one that it is compiled with. It is built here, if it is not yet.
        backend: Horovod's, for TensorFlow 1; not used.
        kwargs: further values, which become attributes.

    Raises:
        ValueError: the model has no weights yet, or no optimizer.
        UnsupportedError: an optimizer of Keras 2 that sums gradients up over several passes.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("the model has no weights yet: call model.build(input_shape) before KerasState(model)")
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ValueError("the model has no optimizer: compile it, or give KerasState(model, optimizer)")
        if getattr(getattr(self.optimizer, "_hvd", None), "accumulators", None) is not None:
            raise UnsupportedError(
                "KerasState with backward_passes_per_step and Keras 2: a rank that joins would be in another pass than "
                "the others, and wait for them for ever. Leave backward_passes_per_step out, or use Keras 3"
            )
        # its variables would come with the first step only, and who joins has done none
        if not hasattr(self.optimizer, "build"):
            # optimizers of before TensorFlow 2.11
            self.optimizer._create_all_weights(model.trainable_variables)
        elif not getattr(self.optimizer, "built", False):
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        return variables_of(self.model, self.optimizer)

    def _shared(self) -> Sequence[Any]:
        return [v for v in self._variables() if not any(v is own for own in sums_of_passes(self.optimizer))]


class CommitStateCallback(EdgeCallback):
    """Commits a state every so many batches, and at the end of each epoch.

    Args:
        state: to commit.
        batches_per_commit: a commit copies all weights; fewer of them cost less, and lose more where a rank ends.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from here on, as ranks do that have just joined."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(EdgeCallback):
    """Keeps the number of the batch in `state.batch`; put it before a `CommitStateCallback`.

    Args:
        state: with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget how long the epochs of the training before were."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell other callbacks how many batches are left of an epoch that was interrupted."""
        if self.params.get("steps"):
            self.steps_per_epoch = self.steps_per_epoch or self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(EdgeCallback):
    """Keeps the number of epochs that are done, over all interruptions, in `state.epoch`.

    Args:
        state: with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras counts from 0 in each `fit`."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note that one more is done."""
        self.state.epoch = self.initial_epoch + epoch + 1
