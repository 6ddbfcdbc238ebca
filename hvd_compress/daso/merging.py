"""Merge what arrives from the other nodes, of one dtype, with the parameters of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging import CHANGES, VALUES, Array, Arrived, FlatTensors, Groups, NodeSync
from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.daso.settings import DasoSettings
from hvd_compress.errors import StateError
from hvd_compress.exchange import aligned_empty
from hvd_compress.kernels import merge as kernels
from hvd_compress.policy import Policy

__all__ = ["Merging"]


class Merging:
    """Synchronizes the tensors of one dtype, and merges what arrives with this rank's parameters.

    All ranks of a node hold the reference, which is what the nodes agreed on last, and each merges for itself.

    Args:
        flat: the tensors.
        settings: the same on all ranks.
        groups: where this rank stands.
        name: of its collectives.
    """

    def __init__(self, flat: FlatTensors, settings: DasoSettings, groups: Groups, name: str) -> None:
        known = (settings.compression, settings.blocking_compression)
        self.nodes = NodeSync(flat, settings.form, known, groups, name, "DASO")
        self._flat = flat
        self._merge = settings.merge
        self._node_count = groups.nodes.count
        self._follows = False
        """Whether changes will follow what is under way, so that it is to be remembered."""
        self._snapshot: Array = np.empty(0, flat.dtype)
        self.needs_values = True
        """Whether there is no reference that a change could be added to, or it has not got everywhere."""

    # -- sending and receiving ---------------------------------------------------------------------------------------

    def send(self, arrays: Sequence[Array], compression: Compressor | Policy, wait: int) -> None:
        """Start to synchronize these values; they may change as soon as this returns.

        Args:
            arrays: flat, of all tensors.
            compression: of changes.
            wait: batches until they are to arrive; 0 if nothing else happens before.
        """
        self._follows = compression != NoCompression()
        kind = CHANGES if self._follows and not self.needs_values else VALUES
        if wait and (self._merge == "delta" or kind == CHANGES):
            if self._snapshot.size != self._flat.size:
                self._snapshot = aligned_empty(self._flat.size, self._flat.dtype)
            self._flat.gather(arrays, self._snapshot)
        self.nodes.send(kind, arrays, compression, wait)

    def receive(self) -> Arrived:
        """Wait for what is under way; remember what changes will follow."""
        arrived = self.nodes.receive()
        self.needs_values = not self._follows or not arrived.is_finite
        for share, values in arrived.parts:
            if arrived.kind == CHANGES:
                self.nodes.reference[share.at] += values
            elif self._follows:
                np.divide(values, self._count, out=self.nodes.fit()[share.at])
        return arrived

    # -- merging -----------------------------------------------------------------------------------------------------

    def take(self, arrays: Sequence[Array], arrived: Arrived) -> None:
        """Replace parameters by what has arrived."""
        for share, values in arrived.parts:
            for piece in share.pieces:
                if arrived.kind == CHANGES:
                    piece.of(arrays)[...] = self.nodes.reference[piece.at]
                else:
                    np.divide(values[share.place(piece)], self._count, out=piece.of(arrays))
        self.nodes.settle(arrived, 0.0)

    def merge(self, arrays: Sequence[Array], arrived: Arrived, staleness: int) -> None:
        """Merge what has arrived with parameters that have made `staleness` further steps."""
        keep, divisor = self._weights(staleness)
        number = self._flat.dtype.type
        for share, values in arrived.parts:
            for piece in share.pieces:
                x, part = piece.of(arrays), values[share.place(piece)]
                if arrived.kind == CHANGES:
                    reference, snapshot = self.nodes.reference[piece.at], self._snapshot[piece.at]
                    kernels.follow(x, reference, snapshot, number(keep / divisor))
                elif self._merge == "delta":
                    kernels.follow(x, part / self._count, self._snapshot[piece.at], number(1))
                else:
                    kernels.blend(x, part, number(keep), number(divisor))
        self.nodes.settle(arrived, 0.0 if self._merge == "delta" else keep / divisor)

    def _weights(self, staleness: int) -> tuple[float, float]:
        """Return factors (k, d), with which parameters become (k x + sum over nodes) / d."""
        merge = self._merge
        if merge == "paper":
            return 2.0 * staleness, 2.0 * staleness + self._node_count
        if merge == "delta":
            return 1.0, 1.0
        return self._node_count * (1 - merge) / merge, self._node_count / merge

    @property
    def _count(self) -> Any:
        return self._flat.dtype.type(self._node_count)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way; returns everything that later steps depend on."""
        state = self.nodes.state_dict()
        if state["flight"] is not None:
            state["flight"] |= {"follows": self._follows, "snapshot": self._snapshot.copy()}
        return {**state, "needs_values": self.needs_values}

    def check(self, state: Any) -> dict[str, Any]:
        """Check a state of this rank and return what `load` takes over of it.

        Raises:
            StateError: of another rank or network, or damaged.
        """
        given = saved.record("DASO state of a dtype", state, ["needs_values"])
        needs_values = saved.flag("needs_values of a DASO state", given["needs_values"])
        # what is replaced by the next values may have been anything
        checked = {**self.nodes.check(state, finite=not needs_values), "needs_values": needs_values}
        if checked["flight"] is not None:
            checked["flight"] |= self._checked_flight(given["flight"], checked["flight"]["kind"])
        return checked

    def _checked_flight(self, state: Any, kind: str) -> dict[str, Any]:
        what = "of what is under way in a DASO state"
        given = saved.record(f"record {what}", state, ["follows", "snapshot"])
        follows = saved.flag(f"follows {what}", given["follows"])
        snapshot = saved.floats(f"snapshot {what}", given["snapshot"], None, self._flat.dtype)
        size = self._flat.size
        is_compared = kind == CHANGES or self._merge == "delta"
        if snapshot.size not in ((size,) if is_compared else (0, size)):
            raise StateError(
                f"values {what} are of another rank or model: there are {snapshot.size}, and this rank keeps {size}"
            )
        return {"follows": follows, "snapshot": snapshot}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self.nodes.load(checked)
        self.needs_values = checked["needs_values"]
        flight = checked["flight"]
        if flight is not None:
            self._follows, self._snapshot = flight["follows"], flight["snapshot"].copy()
