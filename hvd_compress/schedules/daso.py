"""Schedule DASO: after which batches parameters are sent to the other nodes, and after which they arrive.

A `DasoSchedule` is a setting; the `DasoClock` that it starts counts the batches of one rank. Source: Coquelin et al.,
DASO (2021), section 3 and figure 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from hvd_compress import saved
from hvd_compress.compressors.settings import check_int, check_real
from hvd_compress.errors import StateError

__all__ = ["COOLDOWN", "CYCLING", "WARMUP", "DasoClock", "DasoSchedule", "Moment"]

WARMUP, CYCLING, COOLDOWN = "warm-up", "cycling", "cool-down"


class Moment(NamedTuple):
    """Says what happens between nodes after a batch, in this order.

    Args:
        arrives: batches since what arrives now was sent; None if nothing does.
        blocks: all nodes send and wait for the mean, which replaces their parameters; what arrives is discarded.
        sends: parameters are sent, and are not waited for.
    """

    arrives: int | None = None
    blocks: bool = False
    sends: bool = False


@dataclass(frozen=True)
class DasoSchedule:
    """Synchronizes nodes every B batches with values S batches old, and after every batch in warm-up and cool-down.

    An epoch ends with a blocking synchronization, so that all ranks evaluate and save the same parameters. If
    `steps_per_epoch` is known, nothing is sent that could not arrive before. The first epochs warm up and the last ones
    cool down. In between, B and S are halved, down to 1, when the loss has not fallen for more than `patience` epochs.
    If both are 1 already, they begin anew. Differences from the authors' code: S is halved as the paper says, not
    lowered by 1; cycles begin with the given B and S; what is sent after batch t arrives after batch t + S for all S up
    to B.

    Args:
        global_skips: B, in batches.
        batches_to_wait: S, in batches, at most B; 0 waits for the mean, which then replaces the parameters.
        total_epochs: of the training; None if there is no cool-down.
        warmup_epochs: how many epochs warm up, at the beginning.
        cooldown_epochs: how many epochs cool down, at the end; epochs beyond `total_epochs` belong to them.
        patience: epochs in a row that may pass without progress; None keeps B and S.
        stability: the share by which a loss must be below the best one to count as progress.
        steps_per_epoch: batches of an epoch, the same on all ranks; None if only `end_epoch` says when an epoch ends.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> from hvd_compress import DasoSchedule
        >>> clock = DasoSchedule(global_skips=2, batches_to_wait=1, steps_per_epoch=5).clock()
        >>> ["arrives" if m.arrives else "blocks" if m.blocks else "sends" if m.sends else "" for m in
        ...     (clock.batch() for _ in range(5))]
        ['', 'sends', 'arrives', '', 'blocks']
    """

    global_skips: int = 4
    batches_to_wait: int = 1
    total_epochs: int | None = None
    warmup_epochs: int = 0
    cooldown_epochs: int = 0
    patience: int | None = 2
    stability: float = 0.05
    steps_per_epoch: int | None = None

    _MOST: ClassVar[int] = 2**31 - 1

    def __post_init__(self) -> None:
        check_int(self, "global_skips", self.global_skips, 1, self._MOST)
        check_int(self, "batches_to_wait", self.batches_to_wait, 0, self.global_skips)
        check_int(self, "total_epochs", self.total_epochs, 1, self._MOST, none=True)
        check_int(self, "warmup_epochs", self.warmup_epochs, 0, self._MOST)
        check_int(self, "cooldown_epochs", self.cooldown_epochs, 0, self._MOST)
        check_int(self, "patience", self.patience, 0, self._MOST, none=True)
        check_int(self, "steps_per_epoch", self.steps_per_epoch, 1, self._MOST, none=True)
        check_real(self, "stability", self.stability, above=0.0, most=1.0)
        if self.total_epochs is None and self.cooldown_epochs:
            raise ValueError(
                f"cooldown_epochs={self.cooldown_epochs} without total_epochs: the schedule must know when the last "
                "epochs begin. Give total_epochs, or cooldown_epochs=0"
            )
        if self.total_epochs is not None and self.warmup_epochs + self.cooldown_epochs > self.total_epochs:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} and cooldown_epochs={self.cooldown_epochs} are more than "
                f"total_epochs={self.total_epochs}: leave room for cycles between them"
            )

    def clock(self) -> DasoClock:
        """Start the clock of one rank, before its first batch."""
        return DasoClock(self)

    def phase_of(self, epoch: int) -> str:
        """Return `WARMUP`, `CYCLING` or `COOLDOWN` for an epoch, counted from 0."""
        if epoch < self.warmup_epochs:
            return WARMUP
        if self.total_epochs is not None and epoch >= self.total_epochs - self.cooldown_epochs:
            return COOLDOWN
        return CYCLING

    def get_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict, which ranks compare."""
        return asdict(self)


class DasoClock:
    """Counts batches and epochs; ranks that count alike act alike.

    Args:
        schedule: the settings.
    """

    _SAVED = ("skips", "wait", "epoch", "steps", "sent_at", "is_level", "is_told", "best", "bad_epochs")

    def __init__(self, schedule: DasoSchedule) -> None:
        self.schedule = schedule
        self.skips = schedule.global_skips
        """The present B."""
        self.wait = schedule.batches_to_wait
        """The present S."""
        self.epoch = 0
        self.steps = 0
        """Batches of this epoch so far."""
        self.sent_at: int | None = None
        """The batch of this epoch after which what is under way was sent."""
        self.is_level = False
        """Whether all nodes have the same parameters since the last batch."""
        self.is_told = False
        """Whether somebody says when epochs end; else they end with `steps_per_epoch`."""
        self.best: float | None = None
        """The lowest loss of a cycling epoch."""
        self.bad_epochs = 0

    @property
    def phase(self) -> str:
        """The phase of the present epoch: `WARMUP`, `CYCLING` or `COOLDOWN`."""
        return self.schedule.phase_of(self.epoch)

    def batch(self) -> Moment:
        """Count a batch whose update is made.

        Raises:
            ValueError: the epoch has more batches than declared, and was not ended.
        """
        last = self.schedule.steps_per_epoch
        if last is not None and self.steps >= last:
            if self.is_told:
                raise ValueError(
                    f"this epoch has more batches than steps_per_epoch={last}, and ends when epoch_end() says so. Give "
                    "steps_per_epoch as it is on all ranks, or leave it out"
                )
            self._count_epoch()
        self.steps += 1
        due = self.steps % self.skips == 0
        self.is_level = self.phase != CYCLING or self.steps == last or (due and self.wait == 0)
        if self.is_level:
            return Moment(self.arrive(), blocks=True)
        arrives = self.arrive() if self.sent_at is not None and self.steps - self.sent_at == self.wait else None
        sends = due and (last is None or self.steps + self.wait < last)
        if sends:
            self.sent_at = self.steps
        return Moment(arrives, sends=sends)

    def end_epoch(self, loss: float | None) -> Moment:
        """Count an epoch, and choose B and S of the next one.

        Args:
            loss: of the epoch, the same on all ranks; None leaves B and S as they are.

        Returns:
            What still has to happen; nothing if the last batch has done it.
        """
        moment = self.level()
        self.is_told = True
        if loss is not None and self.phase == CYCLING and self.schedule.patience is not None:
            self._note(loss, self.schedule.patience)
        self._count_epoch()
        return moment

    def level(self) -> Moment:
        """Return what must happen so that all nodes have the same parameters, if the last batch has not done it."""
        moment = Moment() if self.is_level else Moment(self.arrive(), blocks=self.steps > 0)
        self.is_level = True
        return moment

    def _count_epoch(self) -> None:
        self.epoch += 1
        self.steps = 0
        self.is_level = True

    def arrive(self) -> int | None:
        """Note that what is under way arrives now; returns how many batches ago it was sent."""
        sent_at, self.sent_at = self.sent_at, None
        return None if sent_at is None else self.steps - sent_at

    def _note(self, loss: float, patience: int) -> None:
        is_new_best = self.best is None or loss < self.best - self.schedule.stability * abs(self.best)
        if math.isfinite(loss) and is_new_best:
            self.best = loss
            self.bad_epochs = 0
            return
        self.bad_epochs += 1
        if self.bad_epochs <= patience:
            return
        self.bad_epochs = 0
        if self.skips > 1:
            self.skips = max(1, self.skips // 2)
            self.wait = max(min(1, self.wait), self.wait // 2)
        else:
            self.skips, self.wait = self.schedule.global_skips, self.schedule.batches_to_wait

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later moments depend on, as plain values."""
        return {"schedule": self.schedule.get_config(), **{key: getattr(self, key) for key in self._SAVED}}

    def check(self, state: Any) -> dict[str, Any]:
        """Check a state of this schedule and return what `load` takes over of it.

        Raises:
            StateError: it is another one, or damaged.
        """
        given = saved.record("clock of a DASO state", state, ["schedule", *self._SAVED])
        of_state = saved.record("schedule of a DASO state", given["schedule"])
        mine = self.schedule.get_config()
        if different := sorted(key for key in mine if not saved.equal(of_state.get(key), mine[key])):
            raise StateError(
                f"this DASO state is of a schedule with {', '.join(f'{k}={of_state.get(k)!r}' for k in different)}, "
                f"and that here has {', '.join(f'{k}={mine[k]!r}' for k in different)}. Load it with the schedule that "
                "it was saved with"
            )

        def counted(key: str, least: int = 0, most: int = 2**63 - 1) -> int:
            return saved.integer(f"{key} of the clock of a DASO state", given[key], least, most)

        last = self.schedule.steps_per_epoch
        steps = counted("steps", 0, 2**63 - 1 if last is None else last)
        return {
            "skips": counted("skips", 1),
            "wait": counted("wait"),
            "epoch": counted("epoch"),
            "steps": steps,
            "sent_at": None if given["sent_at"] is None else counted("sent_at", 0, steps),
            "is_level": saved.flag("is_level of the clock of a DASO state", given["is_level"]),
            "is_told": saved.flag("is_told of the clock of a DASO state", given["is_told"]),
            "best": None if given["best"] is None else saved.real("best loss of a DASO state", given["best"]),
            "bad_epochs": counted("bad_epochs"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            StateError: of another schedule.
        """
        self.load(self.check(state))

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        for key in self._SAVED:
            setattr(self, key, checked[key])
