"""The share of one rank on its way to the other nodes and back: as it is, or as the change since the last time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.daso.lane import Array, Piece, Share
from hvd_compress.daso.ranks import Ranks
from hvd_compress.errors import StateError
from hvd_compress.exchange import Bucket, Transfer, aligned_empty, plan_together, ring_bytes
from hvd_compress.kernels import merge as kernels
from hvd_compress.policy import Policy

__all__ = ["Outgoing"]

# of smaller tensors a payload costs more than it saves
_MIN_NUMEL = 1024
# a collective of less takes as long
_PART_BYTES = 2**18


class Outgoing:
    """Sums the values, or averages the changes, of a share over the nodes.

    What compression leaves out of a change is its residual, and goes with the next one. Where the next one goes another
    way it is a debt, added to what is sent; so nothing is lost whichever ways alternate.

    Args:
        share: of this rank.
        across: the same share of the other nodes.
        weight: of this node.
        name: of its collectives.
    """

    def __init__(self, share: Share, across: Ranks, weight: float, name: str) -> None:
        self.share = share
        self._pieces = {f"{p.name}:{p.within.start}": p for p in share.pieces}
        self.seconds = 0.0
        """Waited for other nodes."""
        self.bytes_sent = 0
        self._across = across
        self._weight = weight
        self._name = name
        self._debt: Array | None = None
        self._bucket: Bucket[Transfer] | None = None
        self._compression: Compressor | Policy = NoCompression()
        self._spare: dict[str, Array] = {}
        self._sent: Array = np.empty(0)
        self._handle: Any = None
        self._collective = ""
        """What is under way of a change."""
        self._parts: list[Array] = []
        """Of the values, those that are not under way yet."""
        self._handles: list[Any] = []

    # -- values ------------------------------------------------------------------------------------------------------

    def parts_of_values(self, dtype: np.dtype[Any], wait: int) -> int:
        """How many collectives values take that may arrive so many batches later: one for each of these, if they pay.

        Horovod runs one collective after the other: a long one would keep the next gradients of the node waiting.
        """
        return max(1, min(wait, self.share.size * dtype.itemsize // _PART_BYTES))

    def send_values(self, arrays: Sequence[Array], dtype: np.dtype[Any], wait: int) -> None:
        """Start to sum the values, weighted by node; each call of `progress` starts another part."""
        self._owe_residuals()
        share = self.share
        if self._sent.size != share.size:
            self._sent = aligned_empty(share.size, dtype)
        for piece in share.pieces:
            self._sent[share.place(piece)] = piece.of(arrays)
        if self._weight != 1.0:
            self._sent *= dtype.type(self._weight)
        if self._debt is not None:
            self._sent += self._debt
        self._parts = np.array_split(self._sent, self.parts_of_values(dtype, wait))
        self._send_part()
        self.bytes_sent += round(ring_bytes(self._sent.nbytes, self._across.size))

    def _send_part(self) -> None:
        name = f"{self._name}.values.{len(self._handles)}"
        self._handles.append(self._across.start("allreduce", self._parts.pop(0), name))

    def receive_values(self) -> Array:
        """Their sum."""
        while self._parts:
            self._send_part()
        begin = time.perf_counter()
        handles, self._handles = self._handles, []
        received = [self._across.wait(handle) for handle in handles]
        self.seconds += time.perf_counter() - begin
        total: Array = received[0] if len(received) == 1 else np.concatenate(received)
        if self._debt is not None and np.isfinite(total).all():
            self._debt = None
        return total

    # -- changes -----------------------------------------------------------------------------------------------------

    def collectives_of(self, compression: Compressor | Policy) -> int:
        """How many a change takes."""
        return len(self._bucket_of(compression).collectives)

    def send_changes(self, arrays: Sequence[Array], reference: Array, compression: Compressor | Policy) -> None:
        """Start to average the change since the reference, flat, of the lane."""
        bucket = self._bucket_of(compression)
        for key, piece in self._pieces.items():
            x = piece.of(arrays)
            change = self._spare.pop(key, None)
            if change is None:
                change = aligned_empty(x.size, x.dtype)
            kernels.weighted_difference(x, reference[piece.at], x.dtype.type(self._weight), change)
            if self._debt is not None:
                change += self._debt[self.share.place(piece)]
            bucket.encode(key, change)
        self._send_parcel(bucket, bucket.collectives[0], bucket.parcel())

    def progress(self) -> None:
        """Move on what is ready, never waiting; to be called once after each batch."""
        if self._parts:
            self._send_part()
        bucket = self._bucket
        if bucket is not None and self._collective in bucket.collectives[:-1] and self._across.poll(self._handle):
            self._advance(bucket)

    def receive_changes(self, out: Array) -> bool:
        """Write the mean change of the share; False where it is not finite, and then nothing has changed."""
        bucket = self._bucket
        assert bucket is not None
        while self._collective != bucket.collectives[-1]:
            self._advance(bucket)
        finite = bucket.arrive(self._wait())
        for key, change in bucket.finish(keep=finite, scale=1 / self._across.size).items():
            assert change is not None
            out[self.share.place(self._pieces[key])] = change
            self._spare[key] = change
        if finite:
            self._debt = None
        return finite

    def idle(self, count: int) -> list[Any]:
        """Issue as many collectives as a change would, of next to nothing: handles for `forget`."""
        nothing = np.zeros(1, np.float32)
        return [self._across.start("allreduce", nothing, f"{self._name}.idle.{i}") for i in range(count)]

    def forget(self, handles: Sequence[Any]) -> None:
        """Wait for what `idle` has issued."""
        for handle in handles:
            self._across.wait(handle)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is owed; nothing may be under way."""
        transfers = {} if self._bucket is None else self._bucket.transfers
        return {
            "debt": None if self._debt is None else self._debt.copy(),
            "transfers": {
                key: {"residual": _copied(t.residual), "owner_residual": _copied(t.owner_residual), "step": t.step}
                for key, t in transfers.items()
            },
            "compression": None if self._bucket is None else self._compression.get_config(),
        }

    def load_state_dict(self, state: Mapping[str, Any], known: Sequence[Compressor | Policy]) -> None:
        """Take over what `state_dict` returned.

        Args:
            state: of this rank.
            known: the compressions that may have made it.

        Raises:
            StateError: of other tensors or compression.
        """
        self._bucket = None
        if state["compression"] is not None:
            compression = next((c for c in known if c.get_config() == state["compression"]), None)
            if compression is None:
                raise StateError(f"DASO state of the compression {state['compression']}, which is not used here")
            bucket = self._bucket_of(compression)
            if set(bucket.transfers) != set(state["transfers"]):
                raise StateError(f"DASO state of the tensors {sorted(state['transfers'])}, here are others")
            for key, saved in state["transfers"].items():
                transfer = bucket.transfers[key]
                transfer.residual = _copied(saved["residual"])
                transfer.owner_residual = _copied(saved["owner_residual"])
                transfer.step = int(saved["step"])
        self._debt = _copied(state["debt"])

    # -- parts -------------------------------------------------------------------------------------------------------

    def _bucket_of(self, compression: Compressor | Policy) -> Bucket[Transfer]:
        if self._bucket is None or compression != self._compression:
            self._owe_residuals()
            self._compression = compression
            chosen = {key: (p.shape, _compressor_of(compression, p)) for key, p in self._pieces.items()}
            plans = plan_together("auto", chosen, self._across.size)
            position = self._across.position
            self._bucket = Bucket(
                {key: Transfer(key, plans[key], compressor, position) for key, (_, compressor) in chosen.items()}
            )
        return self._bucket

    def _owe_residuals(self) -> None:
        """Make the residuals of the last compression a debt."""
        if self._bucket is None:
            return
        for key, transfer in self._bucket.transfers.items():
            place = self.share.place(self._pieces[key])
            for owed, part in ((transfer.residual, transfer.shard), (transfer.owner_residual, transfer.owned)):
                if owed is None or part is None or not owed.any():
                    continue
                if self._debt is None:
                    self._debt = np.zeros(self.share.size, owed.dtype)
                self._debt[place][part] += owed
        self._bucket = None

    def _send_parcel(self, bucket: Bucket[Transfer], collective: str, parcel: Any) -> None:
        self._issue(collective, parcel.buffer, parcel.sizes)
        ranks, me = self._across.size, self._across.position
        if collective == "allgather":
            self.bytes_sent += (ranks - 1) * parcel.buffer.size
        else:
            sizes = parcel.sizes or (parcel.buffer.size // ranks,) * ranks
            self.bytes_sent += sum(sizes) - sizes[me]

    def _advance(self, bucket: Bucket[Transfer]) -> None:
        collective = self._collective
        following = bucket.collectives[bucket.collectives.index(collective) + 1]
        self._send_parcel(bucket, following, bucket.advance(collective, self._wait()))

    def _issue(self, collective: str, buffer: Array, sizes: Sequence[int] | None) -> None:
        self._handle = self._across.start(collective, buffer, f"{self._name}.{collective}", sizes)
        self._collective = collective

    def _wait(self) -> Array:
        begin = time.perf_counter()
        handle, self._handle, self._collective = self._handle, None, ""
        received = self._across.wait(handle)
        self.seconds += time.perf_counter() - begin
        return received


def _compressor_of(compression: Compressor | Policy, piece: Piece) -> Compressor:
    chosen = compression.for_tensor(piece.name) if isinstance(compression, Policy) else compression
    return chosen if piece.within.stop - piece.within.start >= _MIN_NUMEL else NoCompression()


def _copied(values: Any) -> Array | None:
    return None if values is None else np.array(values)
