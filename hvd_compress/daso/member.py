"""Run one rank of DASO, which asks the clock what is due after each batch, and does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
_COUNTED = ("batches", "blocking", "sent", "merged")
_TRAFFIC = ("bytes_between", "bytes_inside", "seconds_between", "seconds_inside")


class Kept(NamedTuple):
    """What one rank can go back to, as long as its member is the same.

    Args:
        state: of the member.
        counted: its counters.
    """

    state: dict[str, Any]
    counted: dict[str, int]


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
        self._counted = dict.fromkeys(_COUNTED, 0)
        self._traffic: dict[str, Any] = dict.fromkeys(_TRAFFIC, 0)
        """Of the members before this one, among other ranks."""
        self._epochs: list[dict[str, Any]] = []

    # -- training ----------------------------------------------------------------------------------------------------

    def batch(self) -> Moment:
        """Count a batch; returns what is due, which `act` then does."""
        for sync in self._syncs:
            sync.nodes.progress()
        self._counted["batches"] += 1
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
            self._counted["merged"] += not moment.blocks
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
            self._counted["blocking"] += 1
        if moment.sends:
            self._tell(_STEP)
            for sync in self._syncs:
                sync.send(arrays, compression, self.clock.wait)
            self._counted["sent"] += 1
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
        # a state may have been loaded on some ranks only
        clock = self.clock
        return f"{what} after {self.batches} batches", {
            "a loss for epoch_end()": has_loss,
            "epoch": clock.epoch, "batch of the epoch": clock.steps, "global_skips": clock.skips,
            "batches_to_wait": clock.wait, "values are sent, not changes": [sync.needs_values for sync in self._syncs],
        }  # fmt: skip

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
            "batches": self.batches,
            "synchronizations": {kind: self._counted[kind] for kind in _COUNTED[1:]},
            "parameter_bytes": self._bytes,
            **{
                f"{key}_nodes": before + sum(getattr(sync.nodes, key) for sync in self._syncs)
                for key, before in self._traffic.items()
            },
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

    @property
    def batches(self) -> int:
        """How many were made."""
        return self._counted["batches"]

    # -- among other ranks -------------------------------------------------------------------------------------------

    def keep(self) -> Kept:
        """Wait for what is under way, which arrives when it is due; returns what `go_back` takes."""
        self._meeting.settle()
        return Kept(self.state_dict(), dict(self._counted))

    def go_back(self, kept: Kept) -> None:
        """Forget what is under way, which will never be complete, and go back to what `keep` returned here."""
        self._meeting.abandon()
        for sync in self._syncs:
            sync.nodes.abandon()
        self.load_state_dict(kept.state)
        self._counted = dict(kept.counted)

    def land(self, arrays: Sequence[Array]) -> None:
        """Let what is under way arrive before its time, after `keep` or `go_back`; in place.

        Where each rank is a node, this needs no other rank.
        """
        self.act(Moment(self.clock.arrive()), arrays)

    def owed(self) -> dict[str, Array]:
        """Return what this rank owes, by dtypes, in units of the sum over nodes; nothing may be under way."""
        owed = {str(sync.nodes.flat.dtype): sync.nodes.owed() for sync in self._syncs}
        return {dtype: debt for dtype, debt in owed.items() if debt is not None}

    def pay(self, arrays: Sequence[Array], count: int) -> None:
        """Add what this rank owes to its parameters, in place, so that their mean over `count` ranks has it."""
        for sync in self._syncs:
            debt = sync.nodes.owed()
            if debt is None:
                continue
            debt *= debt.dtype.type(count / self.groups.nodes.count)
            for number, part in sync.nodes.flat.views(debt).items():
                arrays[number][...] += part

    def agreed(self) -> dict[str, Any]:
        """Return what is the same on all ranks, when nothing is under way."""
        return {"clock": self.clock.state_dict(), "batches": self.batches, "epochs": [*self._epochs]}

    def go_on_from(self, agreed: Mapping[str, Any], before: DasoMember | None) -> None:
        """Take over what `agreed` returned on a rank of before, and the counters of this rank's member of before.

        All ranks have equal parameters.

        Args:
            agreed: of a rank of before.
            before: the member; None on a rank that has joined.
        """
        if before is not None:
            known = before.stats()
            self._traffic = {key: known[f"{key}_nodes"] for key in self._traffic}
            self._counted = dict(before._counted)
        self._counted["batches"], self._epochs = agreed["batches"], [*agreed["epochs"]]
        self.clock.load_state_dict({**agreed["clock"], "sent_at": None, "is_level": True})

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
