"""Horovod's callbacks for `fit`, for Keras 2 and 3 on either backend: mixins, which edges join with their Keras."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from hvd_compress._keras.edge import Edge
from hvd_compress._keras.optimizer import distributed
from hvd_compress.elastic import is_elastic

__all__ = [
    "ALL_RANKS",
    "BroadcastGlobalVariablesCallback",
    "EdgeCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "sums_of_passes",
    "variables_of",
]


# of an average over ranks of 0 or 1: that of ones may be rounded
ALL_RANKS = 1.0 - 1e-6


class EdgeCallback:
    """Base class of the callbacks here: has the framework's edge, and the distributed optimizer of the model."""

    edge: ClassVar[Edge]
    wrapper: ClassVar[str] = "hvd.DistributedOptimizer(...)"
    """What the model's optimizer is to be wrapped with."""
    model: Any
    params: dict[str, Any]

    def set_model(self, model: Any) -> None:
        """Called by Keras before training; switches off XLA where it would have to compile an exchange."""
        super().set_model(model)  # type: ignore[misc]
        if getattr(model, "jit_compile", False) and distributed(getattr(model, "optimizer", None)) is not None:
            model.jit_compile = False
            if self.edge.rank() == 0:
                warnings.warn(
                    "jit_compile is switched off: XLA cannot compile the exchange of gradients. Give "
                    "model.compile(..., jit_compile=False) to say so yourself",
                    stacklevel=2,
                )

    def optimizer(self) -> Any:
        """The distributed optimizer of the model.

        Raises:
            ValueError: the model is compiled with another one.
        """
        found = distributed(self.model.optimizer)
        if found is None:
            raise ValueError(
                f"{type(self).__name__} needs a model compiled with {self.wrapper}, not with {self.model.optimizer!r}"
            )
        return found


class BroadcastGlobalVariablesCallback(EdgeCallback):
    """Gives all ranks the weights and optimizer variables of one rank, before the first step where that is possible.

    They are broadcast when training begins if they exist by then, else after the first batch. Seeds of random layers
    stay those of each rank.

    Args:
        root_rank: the rank whose values all take.
        device: of Horovod's; variables are broadcast where they are.
        local_variables: variables that each rank keeps for itself.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._of: weakref.ref[Any] | None = None
        several = isinstance(local_variables, Iterable) and not hasattr(local_variables, "assign")
        local = list(local_variables) if several else [local_variables]
        self._local = [v for v in local if v is not None]

    def set_model(self, model: Any) -> None:
        """Called by Keras before training."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        if self._of is None or self._of() is not optimizer:
            # another model, or another optimizer: its variables are to be made equal, too
            self.broadcast_done = False
            self._of = None if optimizer is None else weakref.ref(optimizer)
        if (ours := distributed(optimizer)) is not None:
            ours._hvd.is_broadcast = True

    def register_local_var(self, var: Any) -> None:
        """Leave a variable to each rank."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if all variables exist already, or can be made, on all ranks."""
        optimizer = self.model.optimizer
        can = bool(self.model.built) and hasattr(optimizer, "build")
        # one rank alone may have built the model, to load weights
        if self.edge.average([float(can)], ["ranks with a model that is built"])[0] < ALL_RANKS:
            return
        if not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if that has not been done yet."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        variables = variables_of(self.model, self.model.optimizer)
        own = [*self._local, *(sums_of_passes(self.model.optimizer) if is_elastic() else ())]
        self.edge.broadcast([v for v in variables if not any(v is local for local in own)], self.root_rank)
        self.broadcast_done = True


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """The weights of a model and the variables of an optimizer, as far as they exist."""
    of_optimizer = optimizer.variables
    return [*model.weights, *(of_optimizer if isinstance(of_optimizer, list) else of_optimizer())]


def sums_of_passes(optimizer: Any) -> list[Any]:
    """The variables in which Keras 3 sums up gradients until an update; each rank has its own values there."""
    counted = optimizer, getattr(optimizer, "inner_optimizer", None)
    return [total for one in counted for total in getattr(one, "_accumulated_gradients", ())]


class MetricAverageCallback(EdgeCallback):
    """Averages the metrics of an epoch over all ranks; put it before callbacks that use them.

    Raises:
        MismatchError: the ranks have metrics of other names; raised on all of them.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put averages in the place of this rank's values."""
        if logs is None:
            return
        values = {n: np.asarray(v, np.float64) for n, v in sorted(logs.items()) if _is_number(v)}
        flat = [x for array in values.values() for x in array.reshape(-1).tolist()]
        averages = np.array(self.edge.average(flat, [f"{name}{list(array.shape)}" for name, array in values.items()]))
        for name, array in values.items():
            mine, averages = averages[: array.size].reshape(array.shape), averages[array.size :]
            logs[name] = mine if array.shape else float(mine)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or hasattr(value, "item")


class LearningRateScheduleCallback(EdgeCallback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` until before `end_epoch`.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number for exponential decay.
        start_epoch: the first epoch that is adjusted.
        end_epoch: the first epoch that is not adjusted any more; None for no end.
        staircase: adjust at the beginning of each epoch only; if False, before each batch, with fractions of epochs.
        momentum_correction: multiply the velocities of an optimizer with momentum by the change of the learning rate,
            which they contain (Goyal et al., Accurate, Large Minibatch SGD, 2017, section 3, remark 2). Horovod changes
            the momentum for one batch to the same effect, which a compiled training step would not notice.
        steps_per_epoch: batches in an epoch; known to Keras in most cases.

    Raises:
        ValueError: no `initial_lr`, or the number of steps per epoch is not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr=None: give the learning rate that the multiplier is relative to")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._multiplier = multiplier

    def multiplier(self, epoch: float) -> float:
        """The factor on `initial_lr`."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return self._multiplier ** (epoch - self.start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many steps an epoch has."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__} needs to know the number of steps per epoch, which Keras does not: give "
                "steps_per_epoch="
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Adjust, if it is time."""
        begun = self.current_epoch >= self.start_epoch
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if not begun or ended:
            return
        if not self.staircase and self.steps_per_epoch:
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif self.staircase and batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the learning rate into the logs."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and old and getattr(inner, "momentum", 0):
            for velocity in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ():
                if velocity is not None:
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` during the first epochs.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2.

    Args:
        initial_lr: the learning rate at the end of the warm-up.
        warmup_epochs: how long it takes.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: batches in an epoch; known to Keras in most cases.
        verbose: 1 prints a line when the warm-up ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, self._rise, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the learning rate into the logs; say when the warm-up has ended."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and self.edge.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")

    def _rise(self, epoch: float) -> float:
        # one step ahead, so that the last step of the warm-up has the whole rate
        epoch += 1.0 / (self.steps_per_epoch or 1)
        size = self.edge.size()
        return (epoch * (size - 1) / self.warmup_epochs + 1) / size
