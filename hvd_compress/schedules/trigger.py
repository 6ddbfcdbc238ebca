"""Decide which tensors have changed so much that the neighbours must hear of it.

A `Trigger` is a setting; the `Watch` that it starts remembers what was sent when, for all tensors of one rank.
Source: Ghosh and Gupta, EventGraD (MLHPC 2020), section IV, equations 2 and 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_compress import saved
from hvd_compress.compressors.settings import check_choice, check_int
from hvd_compress.errors import StateError

__all__ = ["MEASURES", "ConstantThreshold", "SlopeThreshold", "Trigger", "Watch"]

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MEASURES = ("norm", "change")


class Watch(ABC):
    """Remembers, for each of `count` tensors of a rank, what was sent when, and how much must change until the next
    time.

    Args:
        trigger: the settings.
        count: how many tensors there are.
    """

    SAVED: ClassVar[tuple[str, ...]] = ("norms", "sent_at", "thresholds")
    """The attributes, NumPy arrays, that a saved state has."""

    def __init__(self, trigger: Trigger, count: int) -> None:
        self.trigger = trigger
        self.passes = 0
        """The number of calls of `decide` so far."""
        self.norms: Floats = np.zeros(count)
        """Euclidean norms of the values sent last."""
        self.sent_at = np.zeros(count, np.int64)
        """The pass of the last event, counted from 1; 0 before the first."""
        self.thresholds: Floats = np.zeros(count)
        self.compared: Floats = np.zeros(count)
        """The thresholds that the last pass has compared with."""
        self._forced = False

    def decide(self, norms: Floats, changes: Floats | None = None, absent: Flags | None = None) -> Flags:
        """Count a pass, and tell which tensors are to be sent in it; these count as sent.

        Args:
            norms: Euclidean norm of each tensor, float64.
            changes: norm of (tensor - what was sent last), for measure="change".
            absent: tensors that are never sent, whatever their norm.

        Returns:
            One flag for each tensor. A tensor that is not finite is always sent, so that its neighbours hear of it;
            one that has not changed at all is not, unless forced.
        """
        self.passes += 1
        self.begin_pass()
        self.compared = self.thresholds.copy()
        # the difference of two infinities is no number
        with np.errstate(invalid="ignore"):
            moved = np.abs(norms - self.norms) if changes is None else changes
            due = (moved >= self.thresholds) & ((moved > 0) | self.trigger.sends_unchanged)
        due |= ~np.isfinite(moved)
        if self.passes <= self.trigger.initial_passes or self._forced:
            due[:] = True
        self._forced = False
        if absent is not None:
            due &= ~absent
        self.end_pass(due, moved)
        self.norms[due] = norms[due]
        self.sent_at[due] = self.passes
        return due

    def force(self) -> None:
        """Send everything in the next pass."""
        self._forced = True

    def take_as_sent(self, norms: Floats) -> Flags:
        """Note that what the receivers have was replaced, without an event; returns which tensors are finite."""
        self.norms[:] = norms
        return np.isfinite(norms)

    def begin_pass(self) -> None:  # noqa: B027, a constant threshold does nothing here
        """Change thresholds that depend on the number of passes since the last event."""

    @abstractmethod
    def end_pass(self, due: Flags, moved: Floats) -> None:
        """Set the thresholds of what is sent, for later passes.

        Args:
            due: what is sent in this pass; its `norms` and `sent_at` are still those of the event before.
            moved: by how much each tensor has changed since then.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as plain numbers and arrays."""
        arrays = {key: getattr(self, key).copy() for key in self.SAVED}
        return {"trigger": self.trigger.get_config(), "passes": self.passes, **arrays}

    def check(self, state: Any) -> dict[str, Any]:
        """Check a state of this trigger and as many tensors; returns what `load` takes over of it.

        Raises:
            StateError: it is another one, or damaged.
        """
        given = saved.record("watch of an event state", state, ["trigger", "passes", *self.SAVED])
        if not saved.equal(given["trigger"], self.trigger.get_config()):
            raise StateError(
                f"this event state is of the trigger {given['trigger']}, and here is {self.trigger!r}, which takes its "
                "own only"
            )
        passes = saved.integer("passes of an event state", given["passes"])
        checked: dict[str, Any] = {}
        for key in self.SAVED:
            what, mine = f"{key} of the trigger in an event state", getattr(self, key)
            if mine.dtype == np.int64:
                checked[key] = saved.integers(what, given[key], mine.shape)
                continue
            # what was sent last may have had no finite norm, and thresholds may grow without bound; but a slope that is
            # infinite would make the next threshold so, and its tensor would never be sent again
            values = saved.floats(what, given[key], mine.shape, mine.dtype, finite=key == "slopes")
            if key != "norms" and not (values >= 0).all():
                raise StateError(f"{what} are negative, or no numbers: they must be 0 or more")
            checked[key] = values
        most = {"sent_at": passes, "known": len(checked.get("slopes", ()))}
        for key in most.keys() & checked.keys():
            if (checked[key] > most[key]).any():
                raise StateError(
                    f"{key} of the trigger in an event state reach {checked[key].max()}: {most[key]} at most"
                )
        return {"passes": passes, **checked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            StateError: of another kind of trigger, or of another number of tensors.
        """
        self.load(self.check(state))

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self.passes = checked["passes"]
        for key in self.SAVED:
            setattr(self, key, checked[key].copy())


class Trigger(ABC):
    """Base class of triggers, also of your own, which decide when a tensor is sent.

    A subclass is a frozen dataclass whose fields are the settings, equal on all ranks. It has an `id` and the method
    `watch`. The `Watch` that this returns sets thresholds: in `end_pass` when a pass (a round of sending) has ended, in
    `begin_pass` before one is decided.

    Example:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> from hvd_compress import Trigger
        >>> from hvd_compress.schedules import Watch
        >>> class Relative(Watch):
        ...     def end_pass(self, due, moved):
        ...         self.thresholds[due] = self.trigger.share * self.norms[due]
        >>> @dataclass(frozen=True)
        ... class RelativeThreshold(Trigger):
        ...     share: float = 0.1
        ...     id = "relative"
        ...     def watch(self, count):
        ...         return Relative(self, count)
        >>> watch = RelativeThreshold(0.5).watch(1)
        >>> [bool(watch.decide(np.array([norm]))[0]) for norm in (2.0, 4.0, 4.5, 9.0)]
        [True, True, False, True]
    """

    id: ClassVar[str]
    initial_passes: int = 1
    """In how many passes, from the first on, everything is sent."""
    measure: str = "norm"
    """What is compared with thresholds: "norm", by how much a norm has changed, or "change", the norm of the change."""

    @property
    def sends_unchanged(self) -> bool:
        """Whether a tensor that has not changed is sent as well: only where everything is always sent."""
        return False

    def __post_init__(self) -> None:
        check_int(self, "initial_passes", self.initial_passes, 1, 2**63 - 1)
        check_choice(self, "measure", self.measure, MEASURES)

    @abstractmethod
    def watch(self, count: int) -> Watch:
        """Start the watch of one rank that has `count` tensors, before its first pass."""

    def get_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict, which ranks compare."""
        return {"id": self.id, **asdict(self)}  # type: ignore[call-overload]

    def _check_number(self, name: str, least: float, *, strict: bool) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
        if not is_number or value < least or (strict and value == least):
            bound = "greater than" if strict else "at least"
            raise ValueError(f"{type(self).__name__}({name}={value!r}): must be a finite number {bound} {least:g}")


@dataclass(frozen=True)
class ConstantThreshold(Trigger):
    """Sends a tensor when its norm has changed by `delta` or more since it was sent last.

    `ConstantThreshold(0)` sends everything in every pass, which is D-PSGD (Lian et al., NeurIPS 2017).

    Args:
        delta: the threshold, in units of the parameters.
        initial_passes: number of first passes, in which everything is sent.
        measure: "norm" compares norms, as the paper does, and is blind to a tensor that only rotates; "change" takes
            the norm of the change, which needs a copy of what was sent.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import ConstantThreshold
        >>> watch = ConstantThreshold(0.5).watch(1)
        >>> [bool(watch.decide(np.array([norm]))[0]) for norm in (3.0, 3.4, 3.5, 3.6)]
        [True, False, True, False]
    """

    delta: float
    initial_passes: int = 1
    measure: str = "norm"

    id: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("delta", 0.0, strict=False)

    @property
    def sends_unchanged(self) -> bool:
        """Whether a tensor that has not changed is sent as well: only where everything is always sent."""
        return self.delta == 0

    def watch(self, count: int) -> Watch:
        """Start the watch of one rank that has `count` tensors, before its first pass."""
        return _ConstantWatch(self, count)


class _ConstantWatch(Watch):
    def __init__(self, trigger: ConstantThreshold, count: int) -> None:
        super().__init__(trigger, count)
        self.thresholds[:] = trigger.delta

    def end_pass(self, due: Flags, moved: Floats) -> None:
        pass


@dataclass(frozen=True)
class SlopeThreshold(Trigger):
    """Sends a tensor when its norm has changed by as much as it recently did in `horizon` passes (rounds of sending).

    At each event, that is, when the tensor is sent, the threshold becomes horizon × the mean of the last `history`
    slopes. A slope is the change since the event before, divided by the passes in between (equation 4). The threshold
    stays until the next event, as in the paper, or shrinks or grows by the factor `decay` in every pass. Differences
    from the authors' code: its slopes start with zeros and a norm of 0 before the first event, ours with the second
    event (until then every change is sent); its `horizon` is our `decay`; it forces 29 passes (`initial_passes=29`),
    and it sends tensors that do not move at all.

    Args:
        horizon: the tensor is sent when it has changed by the recent change of this many passes.
        history: how many slopes to average.
        decay: the factor on the threshold in each pass; below 1 the threshold falls until the tensor is sent, above 1 a
            tensor may never be sent again.
        initial_passes: number of first passes, in which everything is sent; the paper has 1.
        measure: "norm" compares norms, as the paper does, and is blind to a tensor that only rotates; "change" takes
            the norm of the change, which needs a copy of what was sent.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import SlopeThreshold
        >>> watch = SlopeThreshold(horizon=2.0).watch(1)
        >>> [bool(watch.decide(np.array([norm]))[0]) for norm in (3.0, 3.5, 4.0, 4.5, 5.0)]
        [True, True, False, True, False]
    """

    horizon: float = 1.0
    history: int = 2
    decay: float = 1.0
    initial_passes: int = 1
    measure: str = "norm"

    id: ClassVar[str] = "slope"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("horizon", 0.0, strict=False)
        self._check_number("decay", 0.0, strict=True)
        check_int(self, "history", self.history, 1, 2**31 - 1)

    def watch(self, count: int) -> Watch:
        """Start the watch of one rank that has `count` tensors, before its first pass."""
        return _SlopeWatch(self, count)


class _SlopeWatch(Watch):
    SAVED = (*Watch.SAVED, "slopes", "known")
    trigger: SlopeThreshold

    def __init__(self, trigger: SlopeThreshold, count: int) -> None:
        super().__init__(trigger, count)
        self.slopes: Floats = np.zeros((trigger.history, count))
        """The last slopes of each tensor, newest first."""
        self.known = np.zeros(count, np.int64)
        """How many slopes of each tensor there are so far."""

    def begin_pass(self) -> None:
        self.thresholds *= self.trigger.decay

    def end_pass(self, due: Flags, moved: Floats) -> None:
        # the first event has none before it, and what is not finite has no slope
        sloped = due & (self.sent_at > 0) & np.isfinite(moved)
        self.slopes[1:, sloped] = self.slopes[:-1, sloped]
        self.slopes[0, sloped] = moved[sloped] / (self.passes - self.sent_at[sloped])
        self.known[sloped] = np.minimum(self.known[sloped] + 1, self.trigger.history)
        # slopes that are not known yet are zeros
        self.thresholds[sloped] = self.trigger.horizon * self.slopes[:, sloped].sum(axis=0) / self.known[sloped]
