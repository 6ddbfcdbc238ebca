"""One rank's part in synchronizing the nodes' parameters of one dtype: send, receive, share in the node, merge."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.daso.lane import Array, Lane, Share
from hvd_compress.daso.outgoing import Outgoing
from hvd_compress.daso.ranks import Groups
from hvd_compress.daso.settings import DasoSettings
from hvd_compress.errors import StateError
from hvd_compress.exchange import aligned_empty
from hvd_compress.kernels import merge as kernels
from hvd_compress.policy import Policy

__all__ = ["NodeSync"]

VALUES, CHANGES = "values", "changes"


class _Flight(NamedTuple):
    """A synchronization that has begun.

    Args:
        kinds: how each share goes.
        group: whose turn it is, with form "rotate".
        follows: whether changes will follow, so that what arrives is to be remembered.
        idle: what a rank has issued whose turn it is not.
    """

    kinds: tuple[str, ...]
    group: int
    follows: bool
    idle: Sequence[Any] = ()


class _Arrived(NamedTuple):
    """What has come of a share.

    Args:
        kind: `VALUES`, a sum over the nodes, or `CHANGES`, which the reference has taken in.
        share: of the lane.
        values: of its elements.
    """

    kind: str
    share: Share
    values: Array


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
        self._outgoing: Outgoing | None = None
        if groups.across is not None:
            mine = lane.shares[self._position if settings.form == "sharded" else 0]
            self._outgoing = Outgoing(mine, groups.across, groups.weight, f"{name}.{self._position}")
        self._turn = 0
        self._flight: _Flight | None = None
        self._snapshot: Array = np.empty(0, lane.dtype)
        self._reference: Array = np.empty(0, lane.dtype)
        self._needs_values = [True] * len(lane.shares)
        """Of which shares there is no reference."""
        self._mine: Array | None = None
        """This rank's share of what has arrived, until it is shared in the node."""
        self._whole: Array = np.empty(0, lane.dtype)
        self.seconds_inside = 0.0
        self.bytes_inside = 0

    @property
    def seconds_between(self) -> float:
        """Waited for other nodes."""
        return 0.0 if self._outgoing is None else self._outgoing.seconds

    @property
    def bytes_between(self) -> int:
        """Sent to other nodes."""
        return 0 if self._outgoing is None else self._outgoing.bytes_sent

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, arrays: Sequence[Array], compression: Compressor | Policy, wait: int) -> None:
        """Start to synchronize these values; they may change as soon as this returns.

        Args:
            arrays: flat, of all tensors.
            compression: of changes.
            wait: batches until they are to arrive; 0 if nothing else happens before.
        """
        follows = compression != NoCompression()
        kinds = tuple(VALUES if needs or not follows else CHANGES for needs in self._needs_values)
        if wait and (self._settings.merge == "delta" or CHANGES in kinds):
            self._lane.gather(arrays, self._fitting("_snapshot"))
        group, self._turn = self._turn, (self._turn + 1) % self._group_count
        idle: Sequence[Any] = ()
        if self._outgoing is not None and self._outgoing.share.size:
            if not self._sends_in(group):
                of_values = self._outgoing.parts_of_values(self._lane.dtype, wait)
                idle = self._outgoing.idle(
                    of_values if kinds[0] == VALUES else self._outgoing.collectives_of(compression)
                )
            elif kinds[self._index] == VALUES:
                self._outgoing.send_values(arrays, self._lane.dtype, wait)
            else:
                self._outgoing.send_changes(arrays, self._reference, compression)
        self._flight = _Flight(kinds, group, follows, idle)

    def progress(self) -> None:
        """Move on what is ready, never waiting."""
        if self._outgoing is not None:
            self._outgoing.progress()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for this rank's share of what is under way; without the other ranks of the node."""
        flight, out = self._flight, self._outgoing
        if flight is None or self._mine is not None:
            return
        share = self._own_share()
        self._mine = np.empty(0, self._lane.dtype)
        if out is None or share is None or not share.size:
            return
        if not self._sends_in(flight.group):
            out.forget(flight.idle)
        elif flight.kinds[self._index] == VALUES:
            self._mine = out.receive_values()
        else:
            # the last element tells whether the others are to be taken
            self._mine = np.ones(share.size + 1, self._lane.dtype)
            if not out.receive_changes(self._mine[:-1]):
                self._mine[-1] = 0

    def receive(self) -> list[_Arrived]:
        """Wait for what is under way, and share it in the node; remember what changes will follow."""
        self.drain()
        flight, mine = self._flight, self._mine
        assert flight is not None
        assert mine is not None
        self._flight = self._mine = None
        begin = time.perf_counter()
        whole = self._shared(flight, mine)
        self.seconds_inside += time.perf_counter() - begin
        arrived = []
        at = 0
        for i, (kind, share) in enumerate(zip(flight.kinds, self._lane.shares, strict=True)):
            values = whole[at : at + share.size]
            at += share.size
            is_usable = True
            if kind == CHANGES and share.size:
                is_usable = bool(whole[at] == 1)
                at += 1
            self._needs_values[i] = not (is_usable and flight.follows)
            if is_usable:
                self._remember(kind, share, values, flight.follows)
                arrived.append(_Arrived(kind, share, values))
        return arrived

    def _remember(self, kind: str, share: Share, values: Array, follows: bool) -> None:
        """Bring the reference up to date."""
        if kind == CHANGES:
            self._reference[share.at] += values
        elif follows:
            kernels.divided(values, self._count, self._fitting("_reference")[share.at])

    def _shared(self, flight: _Flight, mine: Array) -> Array:
        within = self._within
        if within is None:
            return mine
        if self._settings.form == "sharded":
            self.bytes_inside += (within.size - 1) * mine.nbytes
            return within.wait(within.start("allgather", mine, f"{self._name}.share"))
        count = self._lane.size + (flight.kinds[0] == CHANGES and self._lane.size > 0)
        if not self._sends_in(flight.group):
            mine = self._whole = self._whole if self._whole.size == count else np.empty(count, self._lane.dtype)
        else:
            self.bytes_inside += (within.size - 1) * mine.nbytes
        return within.wait(within.start("broadcast", mine, f"{self._name}.share", None, flight.group))

    # -- merging -----------------------------------------------------------------------------------------------------

    def take(self, arrays: Sequence[Array], arrived: Sequence[_Arrived]) -> None:
        """Replace parameters by what has arrived."""
        for kind, share, values in arrived:
            for piece in share.pieces:
                if kind == CHANGES:
                    piece.of(arrays)[...] = self._reference[piece.at]
                else:
                    kernels.divided(values[share.place(piece)], self._count, piece.of(arrays))

    def merge(self, arrays: Sequence[Array], arrived: Sequence[_Arrived], staleness: int) -> None:
        """Merge what has arrived with parameters that have made `staleness` further steps."""
        keep, divisor = self._weights(staleness)
        number = self._lane.dtype.type
        for kind, share, values in arrived:
            for piece in share.pieces:
                x, part = piece.of(arrays), values[share.place(piece)]
                if kind == CHANGES:
                    reference, snapshot = self._reference[piece.at], self._snapshot[piece.at]
                    kernels.follow(x, reference, snapshot, number(keep / divisor))
                elif self._settings.merge == "delta":
                    kernels.divided(part, self._count, part)
                    kernels.follow(x, part, self._snapshot[piece.at], number(1))
                else:
                    kernels.blend(x, part, number(keep), number(divisor))

    def _weights(self, staleness: int) -> tuple[float, float]:
        """Factors (k, d): parameters become (k x + sum over nodes) / d."""
        merge = self._settings.merge
        if merge == "paper":
            return 2.0 * staleness, 2.0 * staleness + self._nodes
        if merge == "delta":
            return 1.0, 1.0
        return self._nodes * (1 - merge) / merge, self._nodes / merge

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on; what is under way is waited for first."""
        self.drain()
        flight = None
        if self._flight is not None and self._mine is not None:
            # Horovod's memory may be used again, and snapshots are taken into ours
            flight = {
                "kinds": list(self._flight.kinds),
                "group": self._flight.group,
                "follows": self._flight.follows,
                "mine": self._mine.copy(),
                "snapshot": self._snapshot.copy(),
            }
        return {
            "turn": self._turn,
            "needs_values": list(self._needs_values),
            "reference": self._reference.copy(),
            "outgoing": None if self._outgoing is None else self._outgoing.state_dict(),
            "flight": flight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank.

        Raises:
            StateError: of another rank or network.
        """
        size = np.size(state["reference"])
        if size not in (0, self._lane.size) or (state["outgoing"] is None) != (self._outgoing is None):
            raise StateError(
                f"DASO state of {size} {self._lane.dtype} parameters, here are {self._lane.size}; or of a rank with "
                "another place in its node"
            )
        self.drain()
        if self._outgoing is not None:
            known = (self._settings.compression, self._settings.blocking_compression)
            self._outgoing.load_state_dict(state["outgoing"], known)
        self._turn = int(state["turn"])
        self._needs_values = [bool(needs) for needs in state["needs_values"]]
        self._reference = np.array(state["reference"], self._lane.dtype)
        flight = state["flight"]
        self._flight = self._mine = None
        if flight is not None:
            self._flight = _Flight(tuple(flight["kinds"]), int(flight["group"]), bool(flight["follows"]))
            self._mine = np.array(flight["mine"], self._lane.dtype)
            self._snapshot = np.array(flight["snapshot"], self._lane.dtype)

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        """Of this rank's share."""
        return self._position if self._settings.form == "sharded" else 0

    @property
    def _count(self) -> Any:
        return self._lane.dtype.type(self._nodes)

    def _own_share(self) -> Share | None:
        return None if self._outgoing is None else self._outgoing.share

    def _sends_in(self, group: int) -> bool:
        return self._settings.form == "sharded" or self._position == group

    def _fitting(self, name: str) -> Array:
        """A buffer of this object for all elements of the lane, made when it is needed."""
        if getattr(self, name).size != self._lane.size:
            setattr(self, name, aligned_empty(self._lane.size, self._lane.dtype))
        buffer: Array = getattr(self, name)
        return buffer
