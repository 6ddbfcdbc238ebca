"""Synchronize the nodes' parameters of one dtype, on one rank: send, receive, share in the node, merge."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress import saved
from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.daso.groups import Groups
from hvd_compress.daso.lane import Array, Lane, Share
from hvd_compress.daso.settings import DasoSettings
from hvd_compress.daso.share_sync import ShareSync
from hvd_compress.errors import StateError
from hvd_compress.exchange import aligned_empty
from hvd_compress.kernels import merge as kernels
from hvd_compress.policy import Policy
from hvd_compress.waiting import waiting

__all__ = ["NodeSync"]

_KINDS = VALUES, CHANGES = "values", "changes"


class _Flight(NamedTuple):
    """Describes a synchronization that has begun.

    Args:
        kind: `VALUES` or `CHANGES`.
        group: whose turn it is, with form "rotate".
        follows: whether changes will follow, so that what arrives is to be remembered.
    """

    kind: str
    group: int
    follows: bool


class _Arrived(NamedTuple):
    """Holds what a synchronization has brought.

    Args:
        kind: `VALUES`, a sum over the nodes, or `CHANGES`, which the reference has taken in.
        parts: of the lane; one that is not finite is left out.
        mine: this rank's own part, if it has sent one.
    """

    kind: str
    parts: Sequence[tuple[Share, Array]]
    mine: Array | None


class NodeSync:
    """Synchronizes the tensors of one dtype over the nodes.

    With "sharded" each rank of a node sends a share at the same time, and ranks share what they got. With "rotate" one
    rank of each node sends everything, in turns. All ranks of a node hold the reference, which is what the nodes agreed
    on last, and each merges what arrives with its own parameters.

    Args:
        lane: the tensors.
        settings: the same on all ranks.
        groups: where this rank stands.
        name: of its collectives.
    """

    def __init__(self, lane: Lane, settings: DasoSettings, groups: Groups, name: str) -> None:
        self._lane = lane
        self._settings = settings
        self._within = groups.within
        self._nodes = groups.nodes.count
        self._name = name
        self._position = groups.position
        self._group_count = len(groups.nodes.groups)
        self._share_sync: ShareSync | None = None
        if groups.across is not None:
            mine = lane.shares[self._position if settings.form == "sharded" else 0]
            largest = max(share.size for share in lane.shares) * lane.dtype.itemsize
            self._share_sync = ShareSync(mine, largest, groups.across, groups.weight, f"{name}.{self._position}")
        self._turn = 0
        self._flight: _Flight | None = None
        self._snapshot: Array = np.empty(0, lane.dtype)
        self._reference: Array = np.empty(0, lane.dtype)
        self.needs_values = True
        """Whether there is no reference that a change could be added to, or it has not got everywhere."""
        self._mine: Array | None = None
        """This rank's share of what has arrived, until it is shared in the node."""
        self._whole: Array = np.empty(0, lane.dtype)
        self.seconds_inside = 0.0
        self.bytes_inside = 0

    @property
    def seconds_between(self) -> float:
        """The seconds spent waiting for other nodes."""
        return 0.0 if self._share_sync is None else self._share_sync.seconds

    @property
    def bytes_between(self) -> int:
        """The bytes sent to other nodes."""
        return 0 if self._share_sync is None else self._share_sync.bytes_sent

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, arrays: Sequence[Array], compression: Compressor | Policy, wait: int) -> None:
        """Start to synchronize these values; they may change as soon as this returns.

        Args:
            arrays: flat, of all tensors.
            compression: of changes.
            wait: batches until they are to arrive; 0 if nothing else happens before.
        """
        follows = compression != NoCompression()
        kind = CHANGES if follows and not self.needs_values else VALUES
        if wait and (self._settings.merge == "delta" or kind == CHANGES):
            self._lane.gather(arrays, self._fitting("_snapshot"))
        group, self._turn = self._turn, (self._turn + 1) % self._group_count
        self._flight = _Flight(kind, group, follows)
        if self._share_sync is None:
            return
        if not self._sends_in(group):
            self._share_sync.idle(kind == VALUES, wait)
        elif kind == VALUES:
            self._share_sync.send_values(arrays, self._lane.dtype, wait)
        else:
            self._share_sync.send_changes(arrays, self._reference, compression, wait)

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
        self._mine = np.empty(0, self._lane.dtype)
        if out is None:
            return
        if not self._sends_in(flight.group):
            out.forget()
        elif flight.kind == VALUES:
            self._mine = out.receive_values()
        else:
            # the last element tells whether the others are to be taken
            self._mine = np.ones(out.share.size + 1, self._lane.dtype)
            if not out.receive_changes(self._mine[:-1]):
                self._mine[-1] = 0

    def receive(self) -> _Arrived:
        """Wait for what is under way, and share it in the node; remember what changes will follow."""
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
        self.needs_values = not flight.follows
        for i, share in enumerate(self._lane.shares):
            values = whole[at : at + share.size]
            at += share.size
            if flight.kind == CHANGES and self._is_sent(i):
                is_finite = bool(whole[at] == 1)
                at += 1
                self.needs_values = self.needs_values or not is_finite
                if not is_finite:
                    continue
            self._remember(flight, share, values)
            parts.append((share, values))
        has_sent = self._share_sync is not None and self._sends_in(flight.group)
        return _Arrived(flight.kind, parts, mine if has_sent else None)

    def _remember(self, flight: _Flight, share: Share, values: Array) -> None:
        """Bring the reference up to date."""
        if flight.kind == CHANGES:
            self._reference[share.at] += values
        elif flight.follows:
            np.divide(values, self._count, out=self._fitting("_reference")[share.at])

    def _shared(self, flight: _Flight, mine: Array) -> Array:
        within = self._within
        if within is None:
            return mine
        if self._settings.form == "sharded":
            self.bytes_inside += (within.size - 1) * mine.nbytes
            return within.run("allgather", f"{self._name}.share", mine)
        count = self._lane.size + (flight.kind == CHANGES and self._is_sent(0))
        if not self._sends_in(flight.group):
            mine = self._whole = self._whole if self._whole.size == count else np.empty(count, self._lane.dtype)
        else:
            self.bytes_inside += (within.size - 1) * mine.nbytes
        return within.run("broadcast", f"{self._name}.share", mine, root=flight.group)

    # -- merging -----------------------------------------------------------------------------------------------------

    def take(self, arrays: Sequence[Array], arrived: _Arrived) -> None:
        """Replace parameters by what has arrived."""
        for share, values in arrived.parts:
            for piece in share.pieces:
                if arrived.kind == CHANGES:
                    piece.of(arrays)[...] = self._reference[piece.at]
                else:
                    np.divide(values[share.place(piece)], self._count, out=piece.of(arrays))
        self._settle(arrived, 0.0)

    def merge(self, arrays: Sequence[Array], arrived: _Arrived, staleness: int) -> None:
        """Merge what has arrived with parameters that have made `staleness` further steps."""
        keep, divisor = self._weights(staleness)
        number = self._lane.dtype.type
        for share, values in arrived.parts:
            for piece in share.pieces:
                x, part = piece.of(arrays), values[share.place(piece)]
                if arrived.kind == CHANGES:
                    reference, snapshot = self._reference[piece.at], self._snapshot[piece.at]
                    kernels.follow(x, reference, snapshot, number(keep / divisor))
                elif self._settings.merge == "delta":
                    kernels.follow(x, part / self._count, self._snapshot[piece.at], number(1))
                else:
                    kernels.blend(x, part, number(keep), number(divisor))
        self._settle(arrived, 0.0 if self._settings.merge == "delta" else keep / divisor)

    def _settle(self, arrived: _Arrived, left: float) -> None:
        """Note that what was owed has got into the parameters, but for a share of it."""
        if arrived.kind == VALUES and arrived.mine is not None and self._share_sync is not None:
            self._share_sync.settle_values(arrived.mine, left)

    def _weights(self, staleness: int) -> tuple[float, float]:
        """Return factors (k, d), with which parameters become (k x + sum over nodes) / d."""
        merge = self._settings.merge
        if merge == "paper":
            return 2.0 * staleness, 2.0 * staleness + self._nodes
        if merge == "delta":
            return 1.0, 1.0
        return self._nodes * (1 - merge) / merge, self._nodes / merge

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way; returns everything that later steps depend on."""
        self.drain()
        flight = None
        if self._flight is not None and self._mine is not None:
            # Horovod's memory may be used again, and snapshots are taken into ours
            flight = {
                "kind": self._flight.kind,
                "group": self._flight.group,
                "follows": self._flight.follows,
                "mine": self._mine.copy(),
                "snapshot": self._snapshot.copy(),
            }
        return {
            "turn": self._turn,
            "needs_values": self.needs_values,
            "reference": self._reference.copy(),
            # states of earlier releases have this key
            "outgoing": None if self._share_sync is None else self._share_sync.state_dict(),
            "flight": flight,
        }

    def check(self, state: Any) -> dict[str, Any]:
        """Check a state of this rank and return what `load` takes over of it.

        Raises:
            StateError: of another rank or network, or damaged.
        """
        keys = ["turn", "needs_values", "reference", "outgoing", "flight"]
        given = saved.record("DASO state of a dtype", state, keys)
        dtype, size = self._lane.dtype, self._lane.size
        needs_values = saved.flag("needs_values of a DASO state", given["needs_values"])
        # what is replaced by the next values may have been anything
        finite = not needs_values
        reference = saved.floats("reference of a DASO state", given["reference"], None, dtype, finite=finite)
        if reference.size not in (0, size) or (given["outgoing"] is None) != (self._share_sync is None):
            raise StateError(
                f"DASO state of {reference.size} {dtype} parameters, here are {size}; or of a rank with another place "
                "in its node"
            )
        of_share = None
        if self._share_sync is not None:
            known = (self._settings.compression, self._settings.blocking_compression)
            of_share = self._share_sync.check(given["outgoing"], known, dtype)
        return {
            "turn": saved.integer("turn of a DASO state", given["turn"], 0, self._group_count - 1),
            "needs_values": needs_values,
            "reference": reference,
            "outgoing": of_share,
            "flight": None if given["flight"] is None else self._checked_flight(given["flight"], reference.size),
        }

    def _checked_flight(self, state: Any, reference_size: int) -> dict[str, Any]:
        what = "of what is under way in a DASO state"
        given = saved.record(f"record {what}", state, ["kind", "group", "follows", "mine", "snapshot"])
        kind = saved.text(f"kind {what}", given["kind"], _KINDS)
        group = saved.integer(f"group {what}", given["group"], 0, self._group_count - 1)
        follows = saved.flag(f"follows {what}", given["follows"])
        # parameters of a network that diverges are on their way as they are
        mine, snapshot = (
            saved.floats(f"{key} {what}", given[key], None, self._lane.dtype, finite=False)
            for key in ("mine", "snapshot")
        )
        of_changes = kind == CHANGES
        sent = 0
        if self._share_sync is not None and self._sends_in(group):
            sent = self._share_sync.share.size + of_changes
        size = self._lane.size
        is_compared = of_changes or self._settings.merge == "delta"
        if (
            mine.size != sent
            or snapshot.size not in ((size,) if is_compared else (0, size))
            or (of_changes and reference_size != size)
        ):
            raise StateError(f"values {what} are of another rank or network: {mine.size} sent, {snapshot.size} kept")
        return {"kind": kind, "group": group, "follows": follows, "mine": mine, "snapshot": snapshot}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self.drain()
        if self._share_sync is not None:
            self._share_sync.load(checked["outgoing"])
        self._turn, self.needs_values = checked["turn"], checked["needs_values"]
        self._reference = checked["reference"].copy()
        flight = checked["flight"]
        self._flight = self._mine = None
        if flight is not None:
            self._flight = _Flight(flight["kind"], flight["group"], flight["follows"])
            self._mine, self._snapshot = flight["mine"].copy(), flight["snapshot"].copy()

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _count(self) -> Any:
        return self._lane.dtype.type(self._nodes)

    def _sends_in(self, group: int) -> bool:
        """Tell whether this rank has something to send."""
        mine = self._position if self._settings.form == "sharded" else 0
        return self._is_sent(mine) and (self._settings.form == "sharded" or self._position == group)

    def _is_sent(self, index: int) -> bool:
        """Tell whether a share has elements; a node may have more ranks than there are shares with elements."""
        return index < len(self._lane.shares) and self._lane.shares[index].size > 0

    def _fitting(self, name: str) -> Array:
        """Return this object's buffer for all elements of the lane, made when first needed."""
        if getattr(self, name).size != self._lane.size:
            setattr(self, name, aligned_empty(self._lane.size, self._lane.dtype))
        buffer: Array = getattr(self, name)
        return buffer
