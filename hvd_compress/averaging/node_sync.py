"""Synchronize the nodes' parameters of one dtype, on one rank: send, receive, share in the node."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging.flat_tensors import Array, FlatTensors, Share
from hvd_compress.averaging.groups import Groups
from hvd_compress.averaging.share_sync import ShareSync
from hvd_compress.compressors import Compressor
from hvd_compress.errors import StateError
from hvd_compress.exchange import aligned_empty
from hvd_compress.policy import Policy
from hvd_compress.waiting import waiting

__all__ = ["CHANGES", "FORMS", "VALUES", "Arrived", "NodeSync"]

FORMS = ("sharded", "rotate")
KINDS = VALUES, CHANGES = "values", "changes"


class _Flight(NamedTuple):
    """Describes a synchronization that has begun.

    Args:
        kind: `VALUES` or `CHANGES`.
        group: whose turn it is, with form "rotate".
    """

    kind: str
    group: int


class Arrived(NamedTuple):
    """Holds what a synchronization has brought.

    Args:
        kind: `VALUES`, a sum over the nodes, or `CHANGES`, their mean.
        parts: of the elements laid end to end; a change that is not finite is left out.
        is_finite: whether nothing was left out.
        mine: this rank's own part, if it has sent one.
    """

    kind: str
    parts: Sequence[tuple[Share, Array]]
    is_finite: bool
    mine: Array | None


class NodeSync:
    """Synchronizes the tensors of one dtype over the nodes.

    With "sharded" each rank of a node sends a share at the same time, and ranks share what they got. With "rotate" one
    rank of each node sends everything, in turns. All ranks of a node hold the reference, which is what the nodes agreed
    on last; who uses this keeps it up to date.

    Args:
        flat: the tensors.
        form: "sharded" or "rotate".
        known: the compressions that may be used, for the check of states.
        groups: where this rank stands.
        name: of its collectives.
        owner: whose states these are, for errors.
        restorable: whether a change that has arrived may be taken back.
    """

    def __init__(
        self,
        flat: FlatTensors,
        form: str,
        known: Sequence[Compressor | Policy],
        groups: Groups,
        name: str,
        owner: str,
        *,
        restorable: bool = False,
    ) -> None:
        self.flat = flat
        self.reference: Array = np.empty(0, flat.dtype)
        """What nodes agreed on last, or nothing."""
        self.seconds_inside = 0.0
        self.bytes_inside = 0
        self._form = form
        self._known = known
        self._within = groups.within
        self._name = name
        self._owner = owner
        self._position = groups.position
        self._group_count = len(groups.nodes.groups)
        self._share_sync: ShareSync | None = None
        if groups.across is not None:
            mine = flat.shares[self._position if form == "sharded" else 0]
            largest = max(share.size for share in flat.shares) * flat.dtype.itemsize
            label = f"{name}.{self._position}"
            self._share_sync = ShareSync(
                mine, flat.dtype, largest, groups.across, groups.weight, label, owner, restorable
            )
        self._turn = 0
        self._flight: _Flight | None = None
        self._mine: Array | None = None
        """This rank's share of what has arrived, until it is shared in the node."""
        self._whole: Array = np.empty(0, flat.dtype)

    @property
    def seconds_between(self) -> float:
        """The seconds spent waiting for other nodes."""
        return 0.0 if self._share_sync is None else self._share_sync.seconds

    @property
    def bytes_between(self) -> int:
        """The bytes sent to other nodes."""
        return 0 if self._share_sync is None else self._share_sync.bytes_sent

    @property
    def is_decayed(self) -> bool:
        """Whether residuals have been decayed for a change that could not be taken."""
        return self._share_sync is not None and self._share_sync.is_decayed

    @is_decayed.setter
    def is_decayed(self, value: bool) -> None:
        if self._share_sync is not None:
            self._share_sync.is_decayed = value

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        kind: str,
        arrays: Sequence[Array],
        compression: Compressor | Policy,
        wait: int,
        decay: float = 1.0,
        resting: Collection[str] = (),
    ) -> None:
        """Start to synchronize these values; they may change as soon as this returns.

        Args:
            kind: `VALUES`, or `CHANGES` since the reference.
            arrays: flat, of all tensors.
            compression: of changes.
            wait: batches until they are to arrive; 0 if nothing else happens before.
            decay: factor on residuals before a change is added to them.
            resting: names of tensors that have not changed, on all ranks alike; of these no change is sent.
        """
        group, self._turn = self._turn, (self._turn + 1) % self._group_count
        self._flight = _Flight(kind, group)
        if self._share_sync is None:
            return
        if not self._sends_in(group):
            self._share_sync.idle(kind == VALUES, wait)
        elif kind == VALUES:
            self._share_sync.send_values(arrays, wait)
        else:
            self._share_sync.send_changes(arrays, self.reference, compression, wait, decay, resting)

    def progress(self) -> None:
        """Start what is due; to be called once after each batch."""
        if self._share_sync is not None:
            self._share_sync.progress()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for this rank's share of what is under way; without the other ranks of the node."""
        flight, out = self._flight, self._share_sync
        if flight is None or self._mine is not None:
            return
        self._mine = np.empty(0, self.flat.dtype)
        if out is None:
            return
        if not self._sends_in(flight.group):
            out.forget()
        elif flight.kind == VALUES:
            self._mine = out.receive_values()
        else:
            # the last element tells whether the others are to be taken
            self._mine = np.ones(out.share.size + 1, self.flat.dtype)
            if not out.receive_changes(self._mine[:-1]):
                self._mine[-1] = 0

    def receive(self) -> Arrived:
        """Wait for what is under way, and share it in the node."""
        self.drain()
        flight, mine = self._flight, self._mine
        assert flight is not None
        assert mine is not None
        self._flight = self._mine = None
        begin = time.perf_counter()
        with waiting(f"for the ranks of its node to share what has come ({self._name})"):
            whole = self._shared(flight, mine)
        self.seconds_inside += time.perf_counter() - begin
        parts = []
        at = 0
        all_finite = True
        for i, share in enumerate(self.flat.shares):
            values = whole[at : at + share.size]
            at += share.size
            if flight.kind == CHANGES and self._is_sent(i):
                is_finite = bool(whole[at] == 1)
                at += 1
                all_finite = all_finite and is_finite
                if not is_finite:
                    continue
            parts.append((share, values))
        has_sent = self._share_sync is not None and self._sends_in(flight.group)
        return Arrived(flight.kind, parts, all_finite, mine if has_sent else None)

    def _shared(self, flight: _Flight, mine: Array) -> Array:
        within = self._within
        if within is None:
            return mine
        if self._form == "sharded":
            self.bytes_inside += (within.size - 1) * mine.nbytes
            return within.run("allgather", f"{self._name}.share", mine)
        count = self.flat.size + (flight.kind == CHANGES and self._is_sent(0))
        if not self._sends_in(flight.group):
            mine = self._whole = self._whole if self._whole.size == count else np.empty(count, self.flat.dtype)
        else:
            self.bytes_inside += (within.size - 1) * mine.nbytes
        return within.run("broadcast", f"{self._name}.share", mine, root=flight.group)

    def take_back(self) -> None:
        """Owe what was owed before the last change, which has arrived and is not taken over; it must be restorable."""
        if self._share_sync is not None:
            self._share_sync.take_back()

    def settle(self, arrived: Arrived, left: float) -> None:
        """Note that values were taken over, and with them what was owed, but for a share of it."""
        if arrived.kind == VALUES and arrived.mine is not None and self._share_sync is not None:
            self._share_sync.settle_values(arrived.mine, left)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way; returns everything that later steps depend on."""
        self.drain()
        flight = None
        if self._flight is not None and self._mine is not None:
            # Horovod's memory may be used again
            flight = {"kind": self._flight.kind, "group": self._flight.group, "mine": self._mine.copy()}
        return {
            "turn": self._turn,
            "reference": self.reference.copy(),
            # states of earlier releases have this key
            "outgoing": None if self._share_sync is None else self._share_sync.state_dict(),
            "flight": flight,
        }

    def check(self, state: Any, *, finite: bool) -> dict[str, Any]:
        """Check a state of this rank and return what `load` takes over of it.

        Args:
            state: of this rank.
            finite: whether its reference must be so.

        Raises:
            StateError: of another rank or network, or damaged.
        """
        kind, size, dtype = self._owner, self.flat.size, self.flat.dtype
        given = saved.record(f"{kind} state of a dtype", state, ["turn", "reference", "outgoing", "flight"])
        reference = saved.floats(f"reference of a {kind} state", given["reference"], None, dtype, finite=finite)
        if reference.size not in (0, size) or (given["outgoing"] is None) != (self._share_sync is None):
            raise StateError(
                f"this {kind} state does not fit: it has {reference.size} {dtype} parameters, and here are {size}; or "
                "it is of a rank with another place in its node. Load it with the model and the ranks that it was "
                "saved with"
            )
        of_share = None
        if self._share_sync is not None:
            of_share = self._share_sync.check(given["outgoing"], self._known)
        return {
            "turn": saved.integer(f"turn of a {kind} state", given["turn"], 0, self._group_count - 1),
            "reference": reference,
            "outgoing": of_share,
            "flight": None if given["flight"] is None else self._checked_flight(given["flight"], reference.size),
        }

    def _checked_flight(self, state: Any, reference_size: int) -> dict[str, Any]:
        what = f"of what is under way in a {self._owner} state"
        given = saved.record(f"record {what}", state, ["kind", "group", "mine"])
        kind = saved.text(f"kind {what}", given["kind"], KINDS)
        group = saved.integer(f"group {what}", given["group"], 0, self._group_count - 1)
        mine = saved.floats(f"mine {what}", given["mine"], None, self.flat.dtype)
        of_changes = kind == CHANGES
        sent = 0
        if self._share_sync is not None and self._sends_in(group):
            sent = self._share_sync.share.size + of_changes
        if mine.size != sent or (of_changes and reference_size != self.flat.size):
            raise StateError(
                f"values {what} are of another rank or model: there are {mine.size}, and this rank sends {sent}"
            )
        return {"kind": kind, "group": group, "mine": mine}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self.drain()
        if self._share_sync is not None:
            self._share_sync.load(checked["outgoing"])
        self._turn = checked["turn"]
        if self.reference.size == checked["reference"].size:
            # others may see this memory as theirs
            self.reference[...] = checked["reference"]
        else:
            self.reference = checked["reference"].copy()
        flight = checked["flight"]
        self._flight = self._mine = None
        if flight is not None:
            self._flight, self._mine = _Flight(flight["kind"], flight["group"]), flight["mine"].copy()

    # -- among other ranks -------------------------------------------------------------------------------------------

    def owed(self) -> Array | None:
        """Sum up what this rank owes, of all elements; None if it is nothing. Nothing may be under way."""
        debt = None if self._share_sync is None else self._share_sync.owed()
        if debt is None or self._share_sync is None:
            return None
        whole = np.zeros(self.flat.size, self.flat.dtype)
        whole[self._share_sync.share.at] = debt
        return whole

    def owe(self, debt: Array | None) -> None:
        """Owe this of all elements, where this rank sends all of them; it goes with the next change."""
        if self._share_sync is not None:
            self._share_sync.owe(debt)

    def abandon(self) -> None:
        """Forget what is under way, which will never be complete; what is owed is wrong until `load`."""
        self._flight = self._mine = None
        if self._share_sync is not None:
            self._share_sync.abandon()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _sends_in(self, group: int) -> bool:
        """Tell whether this rank has something to send."""
        mine = self._position if self._form == "sharded" else 0
        return self._is_sent(mine) and (self._form == "sharded" or self._position == group)

    def _is_sent(self, index: int) -> bool:
        """Tell whether a share has elements; a node may have more ranks than there are shares with elements."""
        return index < len(self.flat.shares) and self.flat.shares[index].size > 0

    def fit(self) -> Array:
        """Return the reference, made to hold all elements."""
        if self.reference.size != self.flat.size:
            self.reference = aligned_empty(self.flat.size, self.flat.dtype)
        return self.reference
