"""The share of one rank on its way to the other nodes and back: as it is, or as the change since the last time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging.flat_tensors import Array, Piece, Share, kept_at
from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.errors import StateError
from hvd_compress.exchange import (
    Account,
    AllGather,
    Bucket,
    Exchange,
    Parcel,
    TwoPhase,
    account_of,
    aligned_empty,
    checked,
    fitted,
    plan_together,
    ring_bytes,
)
from hvd_compress.kernels import merge as kernels
from hvd_compress.policy import Policy, compressor_for
from hvd_compress.ranks import Ranks
from hvd_compress.waiting import waiting

__all__ = ["ShareSync"]

# a payload of a smaller tensor costs more than it saves
_MIN_NUMEL = 1024
# a collective of fewer bytes takes as long
_PART_BYTES = 2**18
_NOTHING = np.zeros(1, np.float32)
_OWED = ("residual", "owner_residual")
_OWED_BEFORE = ("residual_before", "owner_residual_before")


class ShareSync:
    """Sums the values, or averages the changes, of a share over the nodes.

    What compression leaves out of a change is its residual, and goes with the next one. Where the next one goes another
    way it is a debt, added to what is sent until that has been taken over; so nothing is lost whichever ways alternate.

    Ranks of a node issue equally many collectives after each batch, whatever the others do, and never as time has it:
    Horovod numbers the user's unnamed operations by how many there were.

    Args:
        share: of this rank.
        dtype: of its values.
        largest: bytes of the largest share of the node.
        across: the same share of the other nodes.
        weight: of this node.
        name: of its collectives.
        owner: whose states these are, for errors.
        restorable: whether a change that has arrived may be taken back, as another share's is not finite.
    """

    def __init__(
        self,
        share: Share,
        dtype: np.dtype[Any],
        largest: int,
        across: Ranks,
        weight: float,
        name: str,
        owner: str,
        restorable: bool,
    ) -> None:
        self.share = share
        self._pieces = {f"{p.name}:{p.within.start}": p for p in share.pieces}
        self.seconds = 0.0
        """Waited for other nodes."""
        self.bytes_sent = 0
        self._dtype = dtype
        self._largest = largest
        self._across = across
        self._weight = weight
        self._name = name
        self._owner = owner
        self._restorable = restorable
        self._before: dict[str, tuple[Array | None, Array | None]] = {}
        """What was owed of each tensor before the last change was added, if it is restorable: as sender, as owner."""
        self.is_decayed = False
        """Whether residuals have been decayed for a change that could not be taken."""
        self._debt: Array | None = None
        self._resting: set[str] = set()
        """The pieces of which nothing is sent with the change that is under way."""
        self._bucket: Bucket | None = None
        self._compression: Compressor | Policy = NoCompression()
        self._spare: dict[str, Array] = {}
        self._sent: Array = np.empty(0)
        self._later: list[tuple[int, Callable[[], None]]] = []
        """Collectives that are to be started: (batches after the one before, how)."""
        self._handles: list[Any] = []
        """Of values, and of what stands in for a share that is not sent."""
        self._change: Any = None
        self._collective = ""
        """What is under way of a change."""

    def progress(self) -> None:
        """Start what is due; to be called once after each batch."""
        if self._later:
            batches, start = self._later[0]
            self._later[0] = batches - 1, start
            if batches <= 1:
                del self._later[0]
                start()

    # -- values ------------------------------------------------------------------------------------------------------

    def send_values(self, arrays: Sequence[Array], wait: int) -> None:
        """Start to sum the values, weighted by node, which may arrive `wait` batches later."""
        self._owe_residuals()
        share = self.share
        if self._sent.size != share.size:
            self._sent = aligned_empty(share.size, self._dtype)
        for piece in share.pieces:
            self._sent[share.place(piece)] = piece.of(arrays)
        if self._weight != 1.0:
            self._sent *= self._dtype.type(self._weight)
        if self._debt is not None:
            self._sent += self._debt
        count = self._parts_of_values(wait)
        parts = np.array_split(self._sent, min(count, share.size))
        self._start_one_by_one([*parts, *[_NOTHING] * (count - len(parts))])
        self.bytes_sent += round(ring_bytes(self._sent.nbytes, self._across.size))

    def receive_values(self) -> Array:
        """Wait for the sum of the values and return it."""
        received = self._received()
        count = sum(part.size > 0 for part in received)
        total: Array = received[0] if count == 1 else np.concatenate(received)
        return total[: self.share.size]

    def settle_values(self, total: Array, left: float) -> None:
        """Note that the sum was merged, but for this share of what was owed."""
        if self._debt is not None and np.isfinite(total).all():
            self._debt = self._debt * self._debt.dtype.type(left) if left else None

    def _parts_of_values(self, wait: int) -> int:
        # one for each batch: a long collective would keep the next gradients of the node waiting
        return max(1, min(wait, self._largest // _PART_BYTES))

    # -- changes -----------------------------------------------------------------------------------------------------

    def send_changes(
        self,
        arrays: Sequence[Array],
        reference: Array,
        compression: Compressor | Policy,
        wait: int,
        decay: float,
        resting: Collection[str],
    ) -> None:
        """Start to average the change since the reference, laid end to end; it may arrive `wait` batches later.

        Of tensors with names in `resting`, the same on all ranks, nothing is sent, and what is owed of them waits.
        """
        bucket = self._bucket_of(compression)
        self._resting = {key for key, piece in self._pieces.items() if piece.name in resting}
        if decay != 1.0 and not self.is_decayed:
            self._decay(bucket, decay)
        if self._restorable:
            accounts = bucket.accounts.items()
            self._before = {k: (_copied(a.residual), _copied(a.owner_residual)) for k, a in accounts}
        for key, piece in self._pieces.items():
            if key in self._resting:
                bucket.give(key, None)
                continue
            x = piece.of(arrays)
            change = self._spare.pop(key, None)
            if change is None:
                change = aligned_empty(x.size, x.dtype)
            kernels.weighted_difference(x, reference[piece.at], x.dtype.type(self._weight), change)
            if self._debt is not None:
                change += self._debt[self.share.place(piece)]
            bucket.give(key, change)
        self._send_parcel(bucket.collectives[0], bucket.parcel())
        self._later = [(_halfway(wait), partial(self._advance, bucket)) for _ in bucket.collectives[1:]]

    def receive_changes(self, out: Array) -> bool:
        """Write the mean change of the share; returns False, having changed nothing, if it is not finite."""
        bucket = self._bucket
        assert bucket is not None
        self._start_the_rest()
        finite = bucket.arrive(self._wait_for_change())
        # kernels take factors as float32
        is_narrow = self._dtype == np.float32
        for key, change in bucket.finish(keep=finite, scale=1 / self._across.size if is_narrow else 1.0).items():
            place = self.share.place(self._pieces[key])
            if change is None:
                out[place] = 0
                continue
            out[place] = change if is_narrow else change / self._across.size
            self._spare[key] = change
        if finite:
            self._debt = kept_at(self._debt, [self.share.place(self._pieces[key]) for key in self._resting])
            self.is_decayed = False
        return finite

    def take_back(self) -> None:
        """Owe what was owed before the last change, which has arrived and is not taken over; it must be restorable."""
        for key, (residual, owner_residual) in self._before.items():
            assert self._bucket is not None
            account = self._bucket.accounts[key]
            account.residual = _restored(account.residual, residual)
            account.owner_residual = _restored(account.owner_residual, owner_residual)

    def _decay(self, bucket: Bucket, decay: float) -> None:
        """Let what is owed, and is sent, fade on both hops; once for all attempts at one change."""
        for key, account in bucket.accounts.items():
            if key not in self._resting:
                account.residual = _decayed(account.residual, decay)
                account.owner_residual = _decayed(account.owner_residual, decay)
                if self._debt is not None:
                    self._debt[self.share.place(self._pieces[key])] *= self._debt.dtype.type(decay)
        self.is_decayed = True

    # -- in the place of a share that is not sent ----------------------------------------------------------------------

    def idle(self, of_values: bool, wait: int) -> None:
        """Start as many nearly empty collectives as values, or a change, would take."""
        if of_values:
            self._start_one_by_one([_NOTHING] * self._parts_of_values(wait))
            return
        self._start_part(_NOTHING)
        rest = len(_exchange_of(self._across.size).collectives) - 1
        self._later = [(_halfway(wait), partial(self._start_part, _NOTHING)) for _ in range(rest)]

    def forget(self) -> None:
        """Wait for what `idle` has started."""
        self._received()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is owed; nothing may be under way."""
        transfers = {} if self._bucket is None else self._bucket.accounts
        return {
            "debt": None if self._debt is None else self._debt.copy(),
            "transfers": {
                key: {
                    "residual": _copied(t.residual),
                    "owner_residual": _copied(t.owner_residual),
                    "step": t.step,
                    **self._state_before(key),
                }
                for key, t in transfers.items()
            },
            "compression": None if self._bucket is None else self._compression.get_config(),
        }

    def _state_before(self, key: str) -> dict[str, Array | None]:
        before = self._before.get(key, (None, None))
        return dict(zip(_OWED_BEFORE, map(_copied, before), strict=True)) if self._restorable else {}

    def check(self, state: Any, known: Sequence[Compressor | Policy]) -> dict[str, Any]:
        """Check a state and return what `load` takes over of it.

        Args:
            state: of this rank.
            known: the compressions that may have made it.

        Raises:
            StateError: of other tensors or compression, or damaged.
        """
        kind = self._owner
        given = saved.record(f"outgoing of a {kind} state", state, ["debt", "transfers", "compression"])
        debt = given["debt"]
        if debt is not None:
            debt = saved.floats(f"debt of a {kind} state", debt, (self.share.size,), self._dtype)
        if given["compression"] is None:
            return {"debt": debt, "compression": None, "transfers": {}}
        compression = next((c for c in known if saved.equal(given["compression"], c.get_config())), None)
        if compression is None:
            raise StateError(
                f"{kind} state of the compression {given['compression']}, which is not used here. Load it with that "
                "compression"
            )
        transfers = self._accounts_of(compression)
        of_state = saved.record(f"transfers of a {kind} state", given["transfers"])
        if transfers.keys() != of_state.keys():
            raise StateError(
                f"{kind} state of the tensors {sorted(of_state)}, and those here are {sorted(transfers)}. Load it with "
                "the model that it was saved with"
            )
        taken = {}
        for key, transfer in transfers.items():
            what = f"{key!r} of a {kind} state"
            parts = dict(zip(_OWED, (transfer.shard, transfer.owned), strict=True))
            if self._restorable:
                parts |= dict(zip(_OWED_BEFORE, (transfer.shard, transfer.owned), strict=True))
            entry = saved.record(what, of_state[key], [*parts, "step"])
            owed = {}
            for which, part in parts.items():
                owed[which] = entry[which]
                if entry[which] is not None:
                    size = 0 if part is None else part.stop - part.start
                    owed[which] = saved.floats(f"{which} of {what}", entry[which], (size,), self._dtype)
            taken[key] = {**owed, "step": saved.integer(f"step of {what}", entry["step"])}
        return {"debt": debt, "compression": compression, "transfers": taken}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self._bucket = None
        self._before = {}
        if checked["compression"] is not None:
            bucket = self._bucket_of(checked["compression"])
            for key, of_tensor in checked["transfers"].items():
                transfer = bucket.accounts[key]
                transfer.residual = _copied(of_tensor["residual"])
                transfer.owner_residual = _copied(of_tensor["owner_residual"])
                transfer.step = of_tensor["step"]
                if self._restorable:
                    residual, owner_residual = (_copied(of_tensor[which]) for which in _OWED_BEFORE)
                    self._before[key] = residual, owner_residual
        self._debt = _copied(checked["debt"])

    # -- among other ranks -------------------------------------------------------------------------------------------

    def owed(self) -> Array | None:
        """Sum up what this rank owes of the share, as sender and as owner; None if it is nothing."""
        debt = self._debt
        for key, transfer in ({} if self._bucket is None else self._bucket.accounts).items():
            place = self.share.place(self._pieces[key])
            for owed, part in ((transfer.residual, transfer.shard), (transfer.owner_residual, transfer.owned)):
                if owed is None or part is None or not owed.any():
                    continue
                if debt is None or debt is self._debt:
                    debt = np.zeros(self.share.size, owed.dtype) if debt is None else debt.copy()
                debt[place][part] += owed
        return debt

    def owe(self, debt: Array | None) -> None:
        """Owe this of the share; it goes with the next change."""
        self._debt = debt

    def abandon(self) -> None:
        """Forget what is under way, which will never be complete; what is owed is wrong until `load`."""
        self._later, self._handles, self._change = [], [], None
        self._bucket = None

    # -- parts -------------------------------------------------------------------------------------------------------

    def _bucket_of(self, compression: Compressor | Policy) -> Bucket:
        if self._bucket is None or compression != self._compression:
            self._owe_residuals()
            self._compression = compression
            self._bucket = Bucket(self._accounts_of(compression))
        return self._bucket

    def _accounts_of(self, compression: Compressor | Policy) -> dict[str, Account]:
        name = self._dtype.name
        # what is not finite must be told by payloads that are sent as they are, too
        chosen = {
            key: (p.shape, fitted(checked(_compressor_of(compression, p)), name)) for key, p in self._pieces.items()
        }
        plans = plan_together(_exchange_of(self._across.size), chosen, self._across.size)
        position = self._across.position
        return {key: account_of(key, plans[key], compressor, position) for key, (_, compressor) in chosen.items()}

    def _owe_residuals(self) -> None:
        """Make the residuals of the last compression a debt."""
        self._debt = self.owed()
        self._bucket = None

    def _start_one_by_one(self, parts: Sequence[Array]) -> None:
        self._start_part(parts[0])
        self._later = [(1, partial(self._start_part, part)) for part in parts[1:]]

    def _start_part(self, part: Array) -> None:
        self._handles.append(self._across.start("allreduce", f"{self._name}.part.{len(self._handles)}", part))

    def _start_the_rest(self) -> None:
        while self._later:
            self._later.pop(0)[1]()

    def _received(self) -> list[Array]:
        self._start_the_rest()
        begin = time.perf_counter()
        handles, self._handles = self._handles, []
        with waiting(f"for the other nodes' parameters ({self._name})"):
            received = [self._across.wait(handle) for handle in handles]
        self.seconds += time.perf_counter() - begin
        return received

    def _send_parcel(self, collective: str, parcel: Parcel) -> None:
        self._change = self._across.start(collective, f"{self._name}.{collective}", parcel.buffer, parcel.sizes)
        self._collective = collective
        ranks, me = self._across.size, self._across.position
        if collective == "allgather":
            self.bytes_sent += (ranks - 1) * parcel.buffer.size
        else:
            sizes = parcel.sizes or (parcel.buffer.size // ranks,) * ranks
            self.bytes_sent += sum(sizes) - sizes[me]

    def _advance(self, bucket: Bucket) -> None:
        collective = self._collective
        following = bucket.collectives[bucket.collectives.index(collective) + 1]
        self._send_parcel(following, bucket.advance(collective, self._wait_for_change()))

    def _wait_for_change(self) -> Array:
        begin = time.perf_counter()
        handle, self._change = self._change, None
        with waiting(f"for the other nodes' changes ({self._name})"):
            received = self._across.wait(handle)
        self.seconds += time.perf_counter() - begin
        return received


def _exchange_of(nodes: int) -> Exchange:
    """Choose the exchange: between two nodes both send equally many bytes, and an allgather needs one collective."""
    return AllGather() if nodes == 2 else TwoPhase()


def _halfway(wait: int) -> int:
    return max(1, wait // 2)


def _compressor_of(compression: Compressor | Policy, piece: Piece) -> Compressor:
    chosen = compressor_for(compression, piece.name)
    numel = piece.within.stop - piece.within.start
    # neither where it does not pay, nor where it would send more than there is
    pays = numel >= _MIN_NUMEL and chosen.capacity(numel, chosen.group_numel(piece.shape)) < 4 * numel
    return chosen if pays else NoCompression()


def _restored(owed: Array | None, before: Array | None) -> Array | None:
    """Make what is owed what it was before, where it lies, and return it; None is nothing."""
    if owed is not None:
        owed[...] = 0 if before is None else before
    return owed


def _decayed(owed: Array | None, decay: float) -> Array | None:
    if owed is not None:
        owed *= owed.dtype.type(decay)
    return owed


def _copied(values: Any) -> Array | None:
    return None if values is None else np.array(values)
