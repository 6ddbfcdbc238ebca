"""Transfers of one compressor whose kernels are called for all of them at once: a call for each would cost more than
its work, where tensors are small.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
        self._x_at = self._r_at = np.empty(0, np.int64)
        """Where what is held lies, and its residuals; 0 for those that keep none."""
        self._arrived: tuple[_Rows, Numbers, npt.NDArray[np.uint8]] | None = None
        self._tallies = {stage: _Tally() for stage in ("encode", "reduce", "arrive", "finish")}

    @property
    def has_arrived(self) -> bool:
        """Whether `arrive` has found all payloads in order."""
        return self._arrived is not None

    def hold(self, name: str, flat: Array) -> None:
        """Take a gradient, which will be encoded with the others."""
        self.transfers[name].prepare(flat)
        self.held[name] = flat

    def encode(self, send: Bytes) -> None:
        """Write the payloads of what is held into the bucket's buffer."""
        if not self.held:
            return
        begin = time.perf_counter()
        sent, transfers = self._sent.of(self.held), self._of_held()
        self._x_at = _addresses([self.held[transfer.name] for transfer in transfers])
        self._r_at = _addresses([transfer.residual for transfer in transfers])
        used = np.empty(sent.owner.size, np.int64)
        starts = 4 * sent.start
        r_of = self._r_at[sent.owner]
        residuals_at = np.where(r_of, r_of + starts, 0)
        slots_at = kernels.address_of(send) + sent.offset
        self._many.encode(self._x_at[sent.owner] + starts, residuals_at, sent.numel, sent.group, slots_at, used)
        kernels.clear_rest(slots_at, used, sent.slot)
        self._note("encode", time.perf_counter() - begin)

    def reduce(self, received: Bytes, result: Bytes) -> set[str]:
        """The owner's part: write the payloads of the sums into `result`; of which tensors.

        Nothing of it is done if a payload is damaged.
        """
        transfers = [transfer for transfer in self._of_held() if transfer.owned is not None]
        if not transfers:
            return set()
        begin = time.perf_counter()
        owned = {transfer.name for transfer in transfers}
        rows, made = self._to_owner.of(owned), self._of_owner.of(owned)
        at, flags = self._checked(received, rows)
        if flags is None:
            return set()
        sums_at = _addresses([transfer.prepare_sum() for transfer in transfers])
        r_at = _addresses([transfer.owner_residual for transfer in transfers])
        if self._many.decode(at, flags, sums_at[rows.owner], rows.numel, np.float32(1), rows.adds) >= 0:
            return set()
        used = np.empty(len(transfers), np.int64)
        slots_at = kernels.address_of(result) + made.offset
        self._many.encode(sums_at, r_at, made.numel, made.group, slots_at, used)
        kernels.clear_rest(slots_at, used, made.slot)
        self._note("reduce", time.perf_counter() - begin)
        return owned

    def arrive(self, received: Bytes) -> bool:
        """Check the last payloads; whether all are finite. Afterwards `has_arrived`, unless one is damaged."""
        last = self._last.of(self.held)
        at, flags = self._checked(received, last)
        if flags is None:
            return True
        self._note("arrive", 0.0)
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
        transfers = self._of_held()
        # where there is a residual the new one lies in the gradient's memory, and the result takes that of the old one
        outs_at = np.where(self._r_at, self._r_at, self._x_at) if keep else self._x_at
        bad = self._many.decode(
            at, flags, outs_at[last.owner] + 4 * last.start, last.numel, np.float32(scale), last.adds
        )
        if bad >= 0:
            name, position = transfers[last.owner[bad]].name, transfers[0].position
            raise WireError(
                f"exchange of {name!r}, received by rank {position}: an index or count lies outside of its group"
            )
        results = {}
        for transfer in transfers:
            results[transfer.name] = transfer.open_result(keep, self.held[transfer.name])
            transfer.close(keep)
        self._note("finish", time.perf_counter() - begin)
        self.forget()
        return results

    def settle_counts(self) -> None:
        """Let the transfers know what their stages have cost."""
        for stage, tally in self._tallies.items():
            if tally.times:
                self._tallies[stage] = _Tally()
                for transfer in self.transfers.values():
                    transfer.note(stage, tally.times, tally.seconds / len(self.transfers))

    def _note(self, stage: str, seconds: float) -> None:
        """What is held has gone through a stage; told at once only where that is not all, as it is in most steps."""
        if len(self.held) == len(self.transfers):
            self._tallies[stage].times += 1
            self._tallies[stage].seconds += seconds
            return
        for name in self.held:
            self.transfers[name].note(stage, 1, seconds / len(self.held))

    def _of_held(self) -> list[Transfer]:
        """In the order of the bucket."""
        return [transfer for name, transfer in self.transfers.items() if name in self.held]

    def _checked(self, received: Bytes, rows: _Rows) -> tuple[Numbers, npt.NDArray[np.uint8] | None]:
        """Addresses of payloads, and what they say of themselves; None if one is damaged."""
        at = kernels.address_of(received) + rows.offset
        flags = np.empty(at.size, np.uint8)
        bad = kernels.check(at, rows.slot, wire.VERSION, self._many.codec, rows.numel, flags)
        return at, flags if bad < 0 else None

    def forget(self) -> None:
        """The step has ended."""
        self.held, self._arrived, self._received = {}, None, np.empty(0, np.uint8)


@dataclass
class _Tally:
    """Times that all transfers have gone through a stage, and the seconds of all of them."""

    times: int = 0
    seconds: float = 0.0


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

    def of(self, held: Collection[str]) -> _Rows:
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
