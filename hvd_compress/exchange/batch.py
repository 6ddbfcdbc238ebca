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
from hvd_compress.exchange.turns import Turns
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

    Gradients are read where they are, and not touched before the results of the step are written there. Residuals lie
    side by side, twice: with the memory for the new ones a step is taken back by doing nothing, whatever became of the
    gradients meanwhile. (A single transfer has the gradient's memory for that, and so hands one over in each step.)

    Args:
        transfers: by name, in the order of the bucket.
        many: kernels of their compressor.
        layout: of the bucket's messages.
    """

    def __init__(self, transfers: dict[str, Transfer], many: Many, layout: Layout) -> None:
        self.transfers = transfers
        self.held: dict[str, int] = {}
        """Where the gradients of this step lie, and their results will."""
        self._flats: dict[str, Array] = {}
        self._many = many
        self._sent = _Table.of_sent(transfers, layout)
        self._to_owner, self._of_owner = _Table.of_owned(transfers, layout)
        self._last = _Table.of_last(transfers, layout)
        self._numbers = {name: i for i, name in enumerate(transfers)}
        owned = [transfer.owned or slice(0, 0) for transfer in transfers.values()]
        self._residuals = Turns([transfer.plan.numel for transfer in transfers.values()])
        self._sums = Turns([part.stop - part.start for part in owned])
        # the same for all, which have one compressor
        self._keeps = next(iter(transfers.values())).keeps_residual
        self._received = np.empty(0, np.uint8)
        self._arrived: tuple[_Rows, Numbers, npt.NDArray[np.uint8]] | None = None
        self._tallies = {stage: _Tally() for stage in ("encode", "reduce", "arrive", "finish")}

    @property
    def has_arrived(self) -> bool:
        """Whether `arrive` has found all payloads in order."""
        return self._arrived is not None

    def hold(self, name: str, flat: Array) -> None:
        """Take a gradient, flat and float32, which will be encoded with the others; the result will lie there."""
        self._flats[name] = flat
        self.hold_at({name: kernels.address_of(flat)})

    def hold_at(self, addresses: Mapping[str, int]) -> None:
        """The same with gradients that the caller keeps in their places, contiguous."""
        for name in addresses:
            self.transfers[name].begin()
        self.held.update(addresses)

    def move(self, name: str, flat: Array) -> None:
        """The result of what is held is wanted elsewhere."""
        self._flats[name] = flat
        self.held[name] = kernels.address_of(flat)

    def encode(self, send: Bytes) -> None:
        """Write the payloads of what is held into the bucket's buffer."""
        if not self.held:
            return
        begin = time.perf_counter()
        rows, gradients_at, send_at = self._sent.of(self.held), self._held_at(), kernels.address_of(send)
        if self._keeps:
            chosen = self._ready_residuals()
            now_at, next_at = self._residuals.now_at[chosen], self._residuals.next_at[chosen]
            self._encode(next_at, now_at, gradients_at, rows, send_at)
        else:
            self._encode(gradients_at, None, None, rows, send_at)
        self._note("encode", time.perf_counter() - begin)

    def reduce(self, received: Bytes, result: Bytes) -> set[str]:
        """The owner's part: write the payloads of the sums into `result`; of which tensors.

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
        self._sums.make()
        sums_at = self._sums.next_at[list(numbers.values())]
        if self._many.decode(at, flags, sums_at[rows.owner], rows.numel, np.float32(1), rows.adds) >= 0:
            return set()
        residuals_at = self._ready_owner_residuals(numbers) if self._keeps else None
        self._encode(sums_at, residuals_at, None, made, kernels.address_of(result))
        self._note("reduce", time.perf_counter() - begin)
        return owned

    def _encode(
        self, x_at: Numbers, r_at: Numbers | None, source_at: Numbers | None, rows: _Rows, buffer_at: int
    ) -> None:
        """Encode tensors that lie there: see `Many`; None for what is not given."""
        starts, none = 4 * rows.start, np.zeros(rows.owner.size, np.int64)
        args = [none if at is None else at[rows.owner] + starts for at in (x_at, r_at, source_at)]
        used = np.empty(rows.owner.size, np.int64)
        slots_at = buffer_at + rows.offset
        self._many.encode(*args, rows.numel, rows.group, slots_at, used)
        kernels.clear_rest(slots_at, used, rows.slot)

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
        """Decode what has arrived: the results of what `hold` has taken; see `Transfer.finish`.

        Raises:
            WireError: a payload is corrupted.
        """
        if self._arrived is None:
            return {}
        begin = time.perf_counter()
        last, at, flags = self._arrived
        outs_at = self._held_at()[last.owner] + 4 * last.start
        bad = self._many.decode(at, flags, outs_at, last.numel, np.float32(scale), last.adds)
        if bad >= 0:
            name = list(self._numbers_of(self.held))[last.owner[bad]]
            raise WireError(
                f"exchange of {name!r}, received by rank {self.transfers[name].position}: an index or count lies "
                "outside of its group"
            )
        if keep and self._keeps:
            self._turn()
        for name in self.held:
            self.transfers[name].end(keep)
        self._note("finish", time.perf_counter() - begin)
        results = self._flats
        self.forget()
        return results

    def _turn(self) -> None:
        """The new residuals are final."""
        numbers = self._numbers_of(self.held)
        which = None if len(numbers) == len(self.transfers) else list(numbers.values())
        self._residuals.turn(which)
        for name, i in numbers.items():
            self.transfers[name].residual = self._residuals.now[i]
        if not self._of_owner.is_empty:
            self._sums.turn(which)
            for name, i in numbers.items():
                transfer = self.transfers[name]
                if transfer.owned is not None:
                    transfer.owner_residual = self._sums.now[i]

    def _ready_residuals(self) -> list[int]:
        """See to it that the residuals of what is held lie here, wherever they come from; their numbers."""
        self._residuals.make()
        numbers = self._numbers_of(self.held)
        for name, i in numbers.items():
            transfer = self.transfers[name]
            if transfer.residual is not self._residuals.now[i]:
                transfer.residual = self._residuals.take_over(i, transfer.residual)
        return list(numbers.values())

    def _ready_owner_residuals(self, numbers: Mapping[str, int]) -> Numbers:
        """The same of what this rank owes of its sums; their addresses."""
        for name, i in numbers.items():
            transfer = self.transfers[name]
            if transfer.owner_residual is not self._sums.now[i]:
                transfer.owner_residual = self._sums.take_over(i, transfer.owner_residual)
        return self._sums.now_at[list(numbers.values())]

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

    def _numbers_of(self, names: Collection[str]) -> dict[str, int]:
        """These tensors, with their numbers, in the order of the bucket."""
        if len(names) == len(self.transfers):
            return self._numbers
        return {name: i for name, i in self._numbers.items() if name in names}

    def _held_at(self) -> Numbers:
        return np.array([self.held[name] for name in self._numbers_of(self.held)], np.int64)

    def _checked(self, received: Bytes, rows: _Rows) -> tuple[Numbers, npt.NDArray[np.uint8] | None]:
        """Addresses of payloads, and what they say of themselves; None if one is damaged."""
        at = kernels.address_of(received) + rows.offset
        flags = np.empty(at.size, np.uint8)
        bad = kernels.check(at, rows.slot, wire.VERSION, self._many.codec, rows.numel, flags)
        return at, flags if bad < 0 else None

    def forget(self) -> None:
        """The step has ended."""
        self.held, self._flats, self._arrived, self._received = {}, {}, None, np.empty(0, np.uint8)


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

    @property
    def is_empty(self) -> bool:
        return not self._values.size

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
