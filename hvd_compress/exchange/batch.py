"""Transfers of one compressor whose kernels are called for all of them at once: a call for each would cost more than
its work, where tensors are small.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors import Compressor, Many
from hvd_compress.errors import WireError
from hvd_compress.exchange.layout import Layout
from hvd_compress.exchange.transfer import Transfer
from hvd_compress.kernels import many as kernels

__all__ = ["Batch", "batches_of"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

_LARGE = 2**18  # elements that are worth a call of their own, as soon as they are there


def batches_of(transfers: Mapping[str, Transfer], layout: Layout) -> list[Batch]:
    """The transfers that are better handled together, by compressor.

    Args:
        transfers: of a bucket.
        layout: of its messages.
    """
    if not layout.fixed_size:
        return []
    alike: dict[tuple[Compressor, Many], list[str]] = {}
    for name, transfer in transfers.items():
        plan, of = transfer.plan, transfer.plan.chunk_compressors[0]
        is_plain = (
            transfer.hosts is None
            and transfer.accumulator is None
            and plan.answer_compressors == plan.chunk_compressors
        )
        many = of.many(plan.group) if is_plain else None
        if many is not None and 0 < transfer.plan.numel < _LARGE:
            alike.setdefault((of, many), []).append(name)
    return [
        Batch({name: transfers[name] for name in names}, many, layout)
        for (_, many), names in alike.items()
        if len(names) > 1
    ]


class Batch:
    """Encodes and decodes several transfers in one call each; one that fails is left to its own methods to explain.

    Args:
        transfers: by name, in the order of the bucket.
        many: kernels of their compressor.
        layout: of the bucket's messages.
    """

    def __init__(self, transfers: dict[str, Transfer], many: Many, layout: Layout) -> None:
        self.transfers = transfers
        self.held: dict[str, Array] = {}
        """The gradients of this step, float32."""
        self._many = many
        self._sent = _Table.of_sent(transfers, layout)
        self._to_owner, self._of_owner = _Table.of_owned(transfers, layout)
        self._last = _Table.of_last(transfers, layout)
        self._received = np.empty(0, np.uint8)
        self._arrived: tuple[_Rows, Numbers, npt.NDArray[np.uint8]] | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether `arrive` has found all payloads in order."""
        return self._arrived is not None

    def hold(self, name: str, flat: Array) -> None:
        """Take a gradient, which will be encoded with the others."""
        self.transfers[name].prepare(flat)
        self.held[name] = flat

    def encode(self, send: Bytes) -> dict[str, list[int]]:
        """Write the payloads of what is held into the bucket's buffer; their bytes by tensor."""
        if not self.held:
            return {}
        begin = time.perf_counter()
        sent = self._sent.of(self.held)
        names = [name for name in self.transfers if name in self.held]
        x_at = _addresses([self.held[name] for name in names])
        r_at = _addresses([self.transfers[name].residual for name in names])
        used = np.empty(sent.owner.size, np.int64)
        starts = 4 * sent.start
        r_of = r_at[sent.owner]
        residuals_at = np.where(r_of, r_of + starts, 0)
        slots_at = kernels.address_of(send) + sent.offset
        self._many.encode(x_at[sent.owner] + starts, residuals_at, sent.numel, sent.group, slots_at, used)
        seconds = (time.perf_counter() - begin) / len(names)
        bytes_of: dict[str, list[int]] = {name: [] for name in names}
        for owner, nbytes in zip(sent.owner.tolist(), used.tolist(), strict=True):
            bytes_of[names[owner]].append(nbytes)
        for name in names:
            self.transfers[name].note_encoded(bytes_of[name], seconds)
        return bytes_of

    def reduce(self, received: Bytes, result: Bytes) -> dict[str, int]:
        """The owner's part: write the payloads of the sums into `result`; their bytes by tensor.

        Nothing of it is done if a payload is damaged.
        """
        owned = {name: gradient for name, gradient in self.held.items() if self.transfers[name].owned is not None}
        if not owned:
            return {}
        begin = time.perf_counter()
        rows, made = self._to_owner.of(owned), self._of_owner.of(owned)
        at, flags = self._checked(received, rows)
        if flags is None:
            return {}
        transfers = [transfer for name, transfer in self.transfers.items() if name in owned]
        sums_at = _addresses([transfer.prepare_sum() for transfer in transfers])
        r_at = _addresses([transfer.owner_residual for transfer in transfers])
        if self._many.decode(at, flags, sums_at[rows.owner], rows.numel, np.float32(1), rows.adds) >= 0:
            return {}
        used = np.empty(len(transfers), np.int64)
        self._many.encode(sums_at, r_at, made.numel, made.group, kernels.address_of(result) + made.offset, used)
        seconds = (time.perf_counter() - begin) / len(transfers)
        for transfer, slot in zip(transfers, made.slot.tolist(), strict=True):
            transfer.note_reduced(transfer.plan.ranks, slot, seconds)
        return dict(zip((transfer.name for transfer in transfers), used.tolist(), strict=True))

    def arrive(self, received: Bytes) -> bool:
        """Check the last payloads; whether all are finite. Afterwards `has_arrived`, unless one is damaged."""
        last = self._last.of(self.held)
        at, flags = self._checked(received, last)
        if flags is None:
            return True
        for name in self.held:
            self.transfers[name].note_arrived()
        self._received, self._arrived = received, (last, at, flags)
        return not (flags == kernels.NONFINITE).any()

    def finish(self, keep: bool, scale: float) -> dict[str, Array]:
        """Decode what has arrived; see `Transfer.finish`.

        Raises:
            WireError: a payload is corrupted.
        """
        if self._arrived is None:
            return {}
        begin = time.perf_counter()
        last, at, flags = self._arrived
        names = [name for name in self.transfers if name in self.held]
        outs = [self.transfers[name].open_result(keep, self.held[name]) for name in names]
        outs_at = _addresses(outs)
        bad = self._many.decode(
            at, flags, outs_at[last.owner] + 4 * last.start, last.numel, np.float32(scale), last.adds
        )
        if bad >= 0:
            name = names[last.owner[bad]]
            position = self.transfers[name].position
            raise WireError(
                f"exchange of {name!r}, received by rank {position}: an index or count lies outside of its group"
            )
        seconds = (time.perf_counter() - begin) / len(names)
        for name in names:
            self.transfers[name].note_finished(seconds)
            self.transfers[name].close(keep)
        self.forget()
        return dict(zip(names, outs, strict=True))

    def _checked(self, received: Bytes, rows: _Rows) -> tuple[Numbers, npt.NDArray[np.uint8] | None]:
        """Addresses of payloads, and what they say of themselves; None if one is damaged."""
        at = kernels.address_of(received) + rows.offset
        flags = np.empty(at.size, np.uint8)
        bad = kernels.check(at, rows.slot, wire.VERSION, self._many.codec, rows.numel, flags)
        return at, flags if bad < 0 else None

    def forget(self) -> None:
        """The step has ended."""
        self.held, self._arrived, self._received = {}, None, np.empty(0, np.uint8)


class _Rows(NamedTuple):
    """Numbers of payloads, one of each for every payload.

    Args:
        owner: number of its tensor.
        start: of its elements in the tensor.
        numel: its elements.
        offset: of its slot in the message.
        slot: bytes.
        group: elements per group.
        adds: whether it is added to the one before.
    """

    owner: Numbers
    start: Numbers
    numel: Numbers
    offset: Numbers
    slot: Numbers
    group: Numbers
    adds: Numbers


class _Table:
    """The payloads of some tensors in one message."""

    def __init__(self, names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> None:
        self._names = names
        self._values = np.array(rows, np.int64).reshape(len(rows), len(_Rows._fields))
        self._all = _columns(self._values)

    @classmethod
    def of_sent(cls, transfers: Mapping[str, Transfer], layout: Layout) -> _Table:
        """Those that this rank sends first."""
        _, places = layout.places()
        return cls(list(transfers), [
            (i, part.start, part.stop - part.start, place.start, place.stop - place.start, t.plan.group, 0)
            for i, (name, t) in enumerate(transfers.items())
            for (_, part), place in zip(t.sent_chunks, places[name], strict=True)
        ])  # fmt: skip

    @classmethod
    def of_owned(cls, transfers: Mapping[str, Transfer], layout: Layout) -> tuple[_Table, _Table]:
        """Those that the owner of a chunk gets, and those that it makes of them."""
        first = next(iter(transfers.values()))
        parts = layout.owned if first.plan.exchange != "allgather" else []
        offsets = np.cumsum([0, *(slot for _, _, slot in parts)]).tolist()
        got, made = [], []
        names = [name for name, _, _ in parts if name in transfers]
        for (name, _, slot), offset in zip(parts, offsets, strict=False):
            transfer = transfers.get(name)
            if transfer is None or transfer.owned is None:
                continue
            owner, numel, group = names.index(name), transfer.owned.stop - transfer.owned.start, transfer.plan.group
            made.append((owner, 0, numel, offset, slot, group, 0))
            got += [
                (owner, 0, numel, sender * offsets[-1] + offset, slot, group, int(sender > 0))
                for sender in range(transfer.plan.ranks)
            ]
        return cls(names, got), cls(names, made)

    @classmethod
    def of_last(cls, transfers: Mapping[str, Transfer], layout: Layout) -> _Table:
        """Those that the last collective brings."""
        slots = [slot for _, parts in layout.last for _, _, slot in parts]
        offsets = np.cumsum([0, *slots]).tolist()
        rows = []
        for i, (name, transfer) in enumerate(transfers.items()):
            gathered = transfer.plan.exchange == "allgather"
            parts = [slice(0, transfer.plan.numel)] * transfer.plan.ranks
            parts = parts if gathered else [part for _, part in transfer.plan.chunks]
            for sender, (number, part) in enumerate(zip(layout.arriving[name], parts, strict=True)):
                numel, adds = part.stop - part.start, int(gathered and sender > 0)
                rows.append((i, part.start, numel, offsets[number], slots[number], transfer.plan.group, adds))
        return cls(list(transfers), rows)

    def of(self, held: Mapping[str, Array]) -> _Rows:
        """The rows of the tensors that are held; their owners are numbered among these."""
        if len(held) == len(self._names):
            return self._all
        is_held = np.array([name in held for name in self._names])
        values = self._values[is_held[self._values[:, 0]]]
        values[:, 0] = (np.cumsum(is_held) - 1)[values[:, 0]]
        return _columns(values)


def _columns(values: Numbers) -> _Rows:
    return _Rows(*(np.ascontiguousarray(column) for column in values.T))


def _addresses(arrays: Sequence[Array | None]) -> Numbers:
    """0 for None."""
    return np.array([0 if array is None else kernels.address_of(array) for array in arrays], np.int64)
