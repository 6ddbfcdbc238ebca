"""Call the kernels of one compressor once for many small tensors: one call for each would cost more than its work."""

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
from hvd_compress.exchange.memory import aligned_empty
from hvd_compress.exchange.transfer import Transfer
from hvd_compress.kernels import many as kernels

__all__ = ["Batch", "batches_of"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

_LINE = 16  # elements of a cache line: sums begin on one
_LARGE = 2**18  # a tensor with so many elements is worth a call of its own, as soon as it is there


def batches_of(transfers: Mapping[str, Transfer], layout: Layout) -> list[Batch]:
    """Group the transfers that are better handled together, by compressor.

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

    Gradients are read where they are, and not touched before the results of the step are written there. Residuals are
    those of the transfers.

    Args:
        transfers: by name, in the order of the bucket.
        many: kernels of their compressor.
        layout: of the bucket's messages.
    """

    def __init__(self, transfers: dict[str, Transfer], many: Many, layout: Layout) -> None:
        self.transfers = transfers
        self.held: dict[str, int] = {}
        """Where the gradients of this step lie, and their results will."""
        self.lost: set[str] = set()
        """Those of them that are not what they were, see `Transfer.lose_gradient`."""
        self._flats: dict[str, Array] = {}
        self._results_at: dict[str, int] = {}
        """Where results are to lie that are not to overwrite their gradients."""
        self._many = many
        self._sent = _Table.of_sent(transfers, layout)
        self._to_owner, self._of_owner = _Table.of_owned(transfers, layout)
        self._last = _Table.of_last(transfers, layout)
        self._numbers = {name: i for i, name in enumerate(transfers)}
        ordered = list(transfers.values())
        self._residuals, self._owner_residuals = _Addresses(ordered, False), _Addresses(ordered, True)
        self._sums: Array = np.empty(0, np.float32)
        self._sums_at: Numbers = np.empty(0, np.int64)
        self._sent_at = self._answers_at = 0
        """Where the buffers lie that hold this step's own payloads, and those of its sums; 0 before there are any."""
        # one for all, since they have one compressor
        self._keeps = next(iter(transfers.values())).keeps_residual
        self._received = np.empty(0, np.uint8)
        self._arrived: tuple[_Rows, Numbers, npt.NDArray[np.uint8]] | None = None
        self._tallies = {stage: _Tally() for stage in ("encode", "reduce", "arrive", "finish")}

    @property
    def has_arrived(self) -> bool:
        """Whether `arrive` has found all payloads undamaged."""
        return self._arrived is not None

    def hold(self, name: str, flat: Array) -> None:
        """Take a flat float32 gradient, to be encoded with the others; the result will be written over it."""
        self._flats[name] = flat
        self.hold_at({name: kernels.address_of(flat)})

    def hold_at(self, addresses: Mapping[str, int]) -> None:
        """Do as `hold`, for contiguous gradients that the caller keeps where they are."""
        for name in addresses:
            self.transfers[name].begin()
        self.held.update(addresses)

    def move(self, name: str, out: Array) -> None:
        """Write the result for a held tensor into `out` instead of its gradient."""
        self._flats[name] = out
        self._results_at[name] = kernels.address_of(out)

    def encode(self, send: Bytes) -> None:
        """Write the payloads of the held gradients into the bucket's buffer."""
        if not self.held:
            return
        begin = time.perf_counter()
        rows, gradients_at = self._sent.of(self.held), self._held_at()
        self._sent_at = kernels.address_of(send)
        self._encode(self._residuals_at(), gradients_at, rows, self._sent_at)
        self._note("encode", time.perf_counter() - begin)

    def reduce(self, received: Bytes, result: Bytes) -> set[str]:
        """Sum the chunks that this rank owns and write the sums' payloads into `result`; returns the tensors' names.

        Nothing of it is done if a payload is damaged.
        """
        owned = {name for name in self.held if self.transfers[name].owned is not None}
        if not owned:
            return set()
        begin = time.perf_counter()
        rows, made, numbers = self._to_owner.of(owned), self._of_owner.of(owned), self._numbers_of(owned)
        at, flags = self._checked(received, rows)
        if flags is None:
            return set()
        sums_at = self._sums_of(list(numbers.values()))
        if self._many.decode(at, flags, sums_at[rows.owner], rows.numel, np.float32(1), rows.adds) >= 0:
            return set()
        self._answers_at = kernels.address_of(result)
        self._encode(self._owner_residuals_at(numbers), sums_at, made, self._answers_at)
        self._note("reduce", time.perf_counter() - begin)
        return owned

    def _encode(self, residuals_at: Numbers | None, gradients_at: Numbers, rows: _Rows, buffer_at: int) -> None:
        """Encode the tensors at these addresses, with their residuals if any are kept."""
        given_at = gradients_at[rows.owner] + 4 * rows.start
        used = np.empty(rows.owner.size, np.int64)
        slots_at = buffer_at + rows.offset
        if residuals_at is None:
            x_at, given_at = given_at, np.zeros(rows.owner.size, np.int64)
        else:
            x_at = residuals_at[rows.owner] + 4 * rows.start
        self._many.encode(x_at, given_at, rows.numel, rows.group, slots_at, used)
        kernels.clear_rest(slots_at, used, rows.slot)

    def arrive(self, received: Bytes) -> bool:
        """Check the last payloads and set `has_arrived` unless one is damaged; returns whether all are finite."""
        last = self._last.of(self.held)
        at, flags = self._checked(received, last)
        if flags is None:
            return True
        self._note("arrive", 0.0)
        self._received, self._arrived = received, (last, at, flags)
        return not (flags == kernels.NONFINITE).any()

    def finish(self, keep: bool, scale: float) -> dict[str, Array]:
        """Decode what has arrived; returns the results for the gradients that `hold` took. See `Transfer.finish`.

        Raises:
            WireError: a payload is corrupted.
        """
        if self._arrived is None:
            return {}
        begin = time.perf_counter()
        last, at, flags = self._arrived
        if not keep:
            self._take_back()
        results_at = self._results_at
        at_names = [results_at.get(name, place) for name, place in self._in_order()] if results_at else None
        outs_at = self._held_at() if at_names is None else np.array(at_names, np.int64)
        outs_at = outs_at[last.owner] + 4 * last.start
        bad = self._many.decode(at, flags, outs_at, last.numel, np.float32(scale), last.adds)
        if bad >= 0:
            name = list(self._numbers_of(self.held))[last.owner[bad]]
            raise WireError(
                f"exchange of {name!r}, received by rank {self.transfers[name].position}: an index or count lies "
                "outside of its group"
            )
        for name in self.held:
            self.transfers[name].end(keep)
        self._note("finish", time.perf_counter() - begin)
        results = self._flats
        self.forget()
        return results

    def abandon(self) -> None:
        """Forget a step in flight and make residuals what they were before it."""
        self._take_back()
        self.forget()

    def _take_back(self) -> None:
        """Make residuals what they were before the step, see `Transfer`."""
        residuals_at = self._residuals_at()
        if residuals_at is None or not self._sent_at:
            return
        lost = np.array([name in self.lost for name in self._numbers_of(self.held)])
        self._put_back(residuals_at, self._held_at(), lost, self._sent.of(self.held), self._sent_at)
        if self._answers_at:
            owned = {name for name in self.held if self.transfers[name].owned is not None}
            numbers = self._numbers_of(owned)
            owner_residuals_at = self._owner_residuals_at(numbers)
            sums_at, none = self._sums_of(list(numbers.values())), np.zeros(len(numbers), bool)
            if owner_residuals_at is not None:
                self._put_back(owner_residuals_at, sums_at, none, self._of_owner.of(owned), self._answers_at)
        self._sent_at = self._answers_at = 0

    def _put_back(
        self, residuals_at: Numbers, gradients_at: Numbers, lost: npt.NDArray[np.bool_], rows: _Rows, buffer_at: int
    ) -> None:
        """Add what was encoded to the residuals again, and subtract the gradients that are not lost."""
        at, flags = buffer_at + rows.offset, np.empty(rows.owner.size, np.uint8)
        kernels.check(at, rows.slot, wire.VERSION, self._many.codec, rows.numel, flags)
        # encoding has taken back what is not finite
        encoded = flags == 0
        x_at, given_at = (where[rows.owner] + 4 * rows.start for where in (residuals_at, gradients_at))
        columns = (column[encoded] for column in (at, flags, x_at, rows.numel))
        self._many.decode(*columns, np.float32(1), np.ones(np.count_nonzero(encoded), np.int64))
        known = encoded & ~lost[rows.owner]
        kernels.take_all_back(x_at[known], given_at[known], rows.numel[known])

    def _residuals_at(self) -> Numbers | None:
        """Return the addresses of the held tensors' residuals; None if none are kept."""
        if not self._keeps:
            return None
        return self._residuals.of(self._numbers_of(self.held).values())

    def _owner_residuals_at(self, numbers: Mapping[str, int]) -> Numbers | None:
        """Return the addresses of this rank's residuals as an owner of sums; None if none are kept."""
        if not self._keeps:
            return None
        return self._owner_residuals.of(numbers.values())

    def _sums_of(self, numbers: Sequence[int]) -> Numbers:
        """Return the addresses of the sums that this rank owns of these tensors."""
        if not self._sums_at.size:
            owned = [transfer.owned or slice(0, 0) for transfer in self.transfers.values()]
            starts = np.cumsum([0, *(-(-(part.stop - part.start) // _LINE) * _LINE for part in owned)])
            self._sums = aligned_empty(int(starts[-1]), np.float32)
            self._sums_at = kernels.address_of(self._sums) + 4 * starts[:-1]
        return self._sums_at[numbers]

    def settle_counts(self) -> None:
        """Tell the transfers what their stages have cost."""
        for stage, tally in self._tallies.items():
            if tally.times:
                self._tallies[stage] = _Tally()
                for transfer in self.transfers.values():
                    transfer.note(stage, tally.times, tally.seconds / len(self.transfers))

    def _note(self, stage: str, seconds: float) -> None:
        """Count a stage of the held tensors; tell the transfers at once only if some tensors were not held."""
        if len(self.held) == len(self.transfers):
            self._tallies[stage].times += 1
            self._tallies[stage].seconds += seconds
            return
        for name in self.held:
            self.transfers[name].note(stage, 1, seconds / len(self.held))

    def _numbers_of(self, names: Collection[str]) -> dict[str, int]:
        """Return these tensors with their numbers, in the order of the bucket."""
        if len(names) == len(self.transfers):
            return self._numbers
        return {name: i for name, i in self._numbers.items() if name in names}

    def _held_at(self) -> Numbers:
        return np.array([place for _, place in self._in_order()], np.int64)

    def _in_order(self) -> list[tuple[str, int]]:
        """Return the held tensors with their addresses, in the order of the bucket."""
        return [(name, self.held[name]) for name in self._numbers_of(self.held)]

    def _checked(self, received: Bytes, rows: _Rows) -> tuple[Numbers, npt.NDArray[np.uint8] | None]:
        """Check payloads; returns their addresses and flags, with None for the flags if one is damaged."""
        at = kernels.address_of(received) + rows.offset
        flags = np.empty(at.size, np.uint8)
        bad = kernels.check(at, rows.slot, wire.VERSION, self._many.codec, rows.numel, flags)
        return at, flags if bad < 0 else None

    def forget(self) -> None:
        """End the step: hold nothing any more."""
        self.held, self._flats, self._arrived, self._received = {}, {}, None, np.empty(0, np.uint8)
        self.lost, self._results_at = set(), {}
        self._sent_at = self._answers_at = 0


class _Addresses:
    """Tells where residuals lie; looks again only where there is another array than in the last step.

    Args:
        transfers: whose residuals, by number.
        of_owners: look at what they owe as owners of sums.
    """

    def __init__(self, transfers: Sequence[Transfer], of_owners: bool) -> None:
        self._transfers = transfers
        self._of_owners = of_owners
        self._arrays: list[Array | None] = [None] * len(transfers)
        self._at = np.zeros(len(transfers), np.int64)

    def of(self, numbers: Collection[int]) -> Numbers:
        """Return the addresses for the transfers of these numbers, in float32; makes residuals that are not there."""
        for i in numbers:
            transfer = self._transfers[i]
            array = transfer.owner_residual if self._of_owners else transfer.residual
            if array is None or array is not self._arrays[i]:
                fit = transfer.fit_owner_residual if self._of_owners else transfer.fit_residual
                self._arrays[i] = fit(np.float32)
                self._at[i] = kernels.address_of(self._arrays[i])
        return self._at[list(numbers)]


@dataclass
class _Tally:
    """Counts how often all transfers went through a stage, and in how many seconds."""

    times: int = 0
    seconds: float = 0.0


class _Rows(NamedTuple):
    """Columns that describe payloads, with one row for each payload.

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
    """Lists the payloads of some tensors in one message."""

    def __init__(self, names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> None:
        self._names = names
        self._values = np.array(rows, np.int64).reshape(len(rows), len(_Rows._fields))
        self._all = _columns(self._values)

    @classmethod
    def of_sent(cls, transfers: Mapping[str, Transfer], layout: Layout) -> _Table:
        """List the payloads that this rank sends first."""
        _, places = layout.places()
        return cls(list(transfers), [
            (i, part.start, part.stop - part.start, place.start, place.stop - place.start, t.plan.group, 0)
            for i, (name, t) in enumerate(transfers.items())
            for (_, part), place in zip(t.sent_chunks, places[name], strict=True)
        ])  # fmt: skip

    @classmethod
    def of_owned(cls, transfers: Mapping[str, Transfer], layout: Layout) -> tuple[_Table, _Table]:
        """List the payloads that this rank receives as the owner of a chunk, and those of the sums that it makes."""
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
        """List the payloads that the last collective brings."""
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
        """Return the rows of the held tensors, whose owners are numbered anew among them."""
        if len(held) == len(self._names):
            return self._all
        is_held = np.array([name in held for name in self._names])
        values = self._values[is_held[self._values[:, 0]]]
        values[:, 0] = (np.cumsum(is_held) - 1)[values[:, 0]]
        return _columns(values)


def _columns(values: Numbers) -> _Rows:
    return _Rows(*(np.ascontiguousarray(column) for column in values.T))
