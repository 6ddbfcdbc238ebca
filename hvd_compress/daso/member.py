"""Run one rank of DASO, which asks the clock what is due after each batch, and does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging import Array, FlatTensors, Groups, Meeting, own_state
from hvd_compress.compressors import NoCompression
from hvd_compress.daso.merging import Merging
from hvd_compress.daso.settings import DasoSettings
from hvd_compress.errors import StateError
from hvd_compress.policy import check_patterns
from hvd_compress.schedules import Moment
from hvd_compress.tensors import ParameterSpec

__all__ = ["DasoMember"]

FORMAT = 1
_STEP = "a step"


class DasoMember:
    """The parameters of one rank, flat arrays in the order of `tensors`; creating it is a collective call.

    Args:
        tensors: the same on all ranks.
        settings: the same on all ranks.
        groups: where this rank stands.

    Raises:
        MismatchError: the ranks disagree; raised on all of them.
        ValueError: a pattern of a `Policy` that matches no tensor; likewise.
    """

    def __init__(self, tensors: Sequence[ParameterSpec], settings: DasoSettings, groups: Groups) -> None:
        self.settings = settings
        self.groups = groups
        self._described = {**settings.description(tensors), "nodes": [list(ranks) for ranks in groups.nodes.members]}
        if groups.everyone is not None:
            groups.everyone.agree({"optimizer": "DASO", **self._described})
        for compression in (settings.compression, settings.blocking_compression):
            check_patterns(compression, [t.name for t in tensors])
        self._meeting = Meeting(groups, "DASO's moment")
        self.clock = settings.schedule.clock()
        shares = len(groups.nodes.groups) if settings.form == "sharded" else 1
        dtypes = [dtype for dtype in ("float32", "float64") if any(t.dtype == dtype for t in tensors)]
        self._syncs = [
            Merging(FlatTensors(tensors, dtype, shares), settings, groups, f"{groups.name}.{dtype}")
            for dtype in dtypes
            if groups.nodes.count > 1
        ]
        self._bytes = sum(t.numel * np.dtype(t.dtype).itemsize for t in tensors)
        self._batches = self._blocking = self._sent = self._merged = 0
        self._epochs: list[dict[str, Any]] = []

    # -- training ----------------------------------------------------------------------------------------------------

    def batch(self) -> Moment:
        """Count a batch; returns what is due, which `act` then does."""
        for sync in self._syncs:
            sync.nodes.progress()
        self._batches += 1
        # a batch may begin an epoch of which nobody has said that the one before has ended
        before = self.clock.epoch
        moment = self.clock.batch()
        if self.clock.epoch != before:
            self._epochs.append(self._told(before, None))
        return moment

    def act(self, moment: Moment, arrays: Sequence[Array], phase: str | None = None) -> bool:
        """Send, receive and merge, in place; returns whether parameters have changed.

        Args:
            moment: what is due.
            arrays: flat, of all tensors.
            phase: of the epoch that this belongs to; the present one by default.
        """
        compression = self.settings.compression_in(self.clock.phase if phase is None else phase)
        if moment.arrives is not None:
            self._meeting.settle()
            for sync in self._syncs:
                arrived = sync.receive()
                # of what blocks all nodes take the mean of their present parameters: this would only pull it back
                if not moment.blocks:
                    sync.merge(arrays, arrived, moment.arrives)
            self._merged += not moment.blocks
        if moment.blocks:
            self._tell(_STEP)
            for sync in self._syncs:
                sync.send(arrays, compression, wait=0)
            self._meeting.settle()
            for sync in self._syncs:
                sync.take(arrays, sync.receive())
                if sync.needs_values and compression != NoCompression():
                    # a change was not finite: as values it reaches all ranks, which are to be equal now
                    sync.send(arrays, compression, wait=0)
                    sync.take(arrays, sync.receive())
            self._blocking += 1
        if moment.sends:
            self._tell(_STEP)
            for sync in self._syncs:
                sync.send(arrays, compression, self.clock.wait)
            self._sent += 1
        return bool(self._syncs) and (moment.arrives is not None or moment.blocks)

    def end_epoch(self, arrays: Sequence[Array], loss: float | None) -> bool:
        """End an epoch: all ranks have the same parameters, and B and S of the next one; a collective call.

        Args:
            arrays: flat, of all tensors; changed in place.
            loss: of this rank in the epoch; ranks take the mean.

        Returns:
            Whether parameters have changed.

        Raises:
            MismatchError: some ranks give a loss, others None.
        """
        self._tell("epoch_end()", loss is not None)
        self._meeting.settle()
        if loss is not None and self.groups.everyone is not None:
            loss = float(self.groups.everyone.mean(f"{self.groups.name}.loss.float64", np.array([loss]))[0])
        told, phase = self._told(self.clock.epoch, loss), self.clock.phase
        moment = self.clock.end_epoch(loss)
        self._epochs.append(told)
        return self.act(moment, arrays, phase)

    def level(self, arrays: Sequence[Array]) -> bool:
        """Make all ranks equal in the middle of an epoch; returns whether parameters changed. A collective call."""
        return self.act(self.clock.level(), arrays)

    def declare_steps(self, steps_per_epoch: int | None) -> None:
        """Set the number of batches of the next epochs, between two epochs; a collective call.

        Raises:
            MismatchError: the ranks have different numbers.
        """
        if self.groups.everyone is not None:
            self.groups.everyone.agree({"steps_per_epoch": steps_per_epoch})
        schedule = replace(self.settings.schedule, steps_per_epoch=steps_per_epoch)
        self.settings = replace(self.settings, schedule=schedule)
        self.clock.schedule = schedule
        self._described["schedule"] = schedule.get_config()

    def refuse(self, problem: str) -> None:
        """Let all ranks know where they meet next that this one cannot go on; the caller raises what it knows."""
        # on one node ranks meet in their gradients
        if self._syncs:
            self._meeting.refuse(*self._said(problem))

    def _tell(self, what: str, has_loss: bool = False) -> None:
        """Begin to compare what all ranks do at this moment."""
        # on one node no step is a collective call
        if self._syncs or what != _STEP:
            self._meeting.begin(*self._said(what, has_loss))

    def _said(self, what: str, has_loss: bool = False) -> tuple[str, dict[str, Any]]:
        return f"{what} after {self._batches} batches", {"a loss for epoch_end()": has_loss}

    def average(self, arrays: Mapping[str, Array]) -> None:
        """Make buffers or optimizer states their mean over all ranks, in place; a collective call.

        Raises:
            MismatchError: the ranks have others.
        """
        self._meeting.average(arrays, "at the end of an epoch")

    # -- reports -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `DASO.daso_stats`."""
        clock = self.clock
        return {
            "nodes": self.groups.nodes.count,
            "ranks_of_node": len(self.groups.nodes.members[self.groups.nodes.node_of(self.groups.rank)]),
            "phase": clock.phase,
            "epoch": clock.epoch,
            "global_skips": clock.skips,
            "batches_to_wait": clock.wait,
            "batches": self._batches,
            "synchronizations": {"blocking": self._blocking, "sent": self._sent, "merged": self._merged},
            "parameter_bytes": self._bytes,
            "bytes_between_nodes": sum(sync.nodes.bytes_between for sync in self._syncs),
            "bytes_inside_nodes": sum(sync.nodes.bytes_inside for sync in self._syncs),
            "seconds_between_nodes": sum(sync.nodes.seconds_between for sync in self._syncs),
            "seconds_inside_nodes": sum(sync.nodes.seconds_inside for sync in self._syncs),
            "epochs": [*self._epochs],
        }

    def _told(self, epoch: int, loss: float | None) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "phase": self.settings.schedule.phase_of(epoch),
            "global_skips": self.clock.skips,
            "batches_to_wait": self.clock.wait,
            "loss": loss,
        }

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way; returns everything of this rank that later steps depend on."""
        return {
            "format": FORMAT,
            "rank": self.groups.rank,
            "settings": self._described,
            "clock": self.clock.state_dict(),
            "syncs": [sync.state_dict() for sync in self._syncs],
            "epochs": [dict(told) for told in self._epochs],
        }

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank.

        Raises:
            StateError: not such a state, or of another rank, network, nodes or settings.
        """
        keys = ["clock", "syncs", "epochs"]
        given = own_state("DASO", state, FORMAT, self.groups.rank, self._described, keys)
        # all is checked before anything is changed
        clock = self.clock.check(given["clock"])
        of_syncs = saved.sequence("syncs of a DASO state", given["syncs"], len(self._syncs))
        checked = [sync.check(of_sync) for sync, of_sync in zip(self._syncs, of_syncs, strict=True)]
        if clock["sent_at"] is not None and any(of_sync["flight"] is None for of_sync in checked):
            raise StateError(
                "this DASO state says that something is under way, and not what: it is damaged. Load an earlier one"
            )
        epochs = [_checked_epoch(told) for told in saved.sequence("epochs of a DASO state", given["epochs"])]
        self._meeting.settle()
        for sync, of_sync in zip(self._syncs, checked, strict=True):
            sync.load(of_sync)
        self.clock.load(clock)
        self._epochs = epochs


def _checked_epoch(told: Any) -> dict[str, Any]:
    what = "an epoch of a DASO state"
    numbers = ("epoch", "global_skips", "batches_to_wait")
    given = saved.record(what, told, [*numbers, "phase", "loss"])
    loss = given["loss"]
    if loss is not None and not isinstance(loss, float):
        raise StateError(f"loss of {what} is of type {type(loss).__name__}: must be a float or None")
    return {
        **{key: saved.integer(f"{key} of {what}", given[key]) for key in numbers},
        "phase": saved.text(f"phase of {what}", given["phase"]),
        # as the user told it, be it finite or not
        "loss": loss,
    }
