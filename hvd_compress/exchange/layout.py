"""Compute once where each payload lies in the messages of an exchange; ranks differ only in the chunks they own.

A message to an owner, or from one, holds the payloads of its chunks in the order of the tensors. Where all of them have
a fixed size they lie at fixed places; else they follow one another, and state their own lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.errors import WireError
from hvd_compress.exchange.transfer import Transfer

__all__ = ["Layout", "Part"]

Bytes = npt.NDArray[np.uint8]


class Part(NamedTuple):
    """One payload of a message: its tensor, its number among what that tensor's `encode` makes, its slot's bytes."""

    tensor: str
    number: int
    slot: int


class Layout:
    """Describes what the messages of one rank contain.

    Args:
        transfers: of the tensors by name, with plans that were made together; the same order on all ranks.
    """

    def __init__(self, transfers: Mapping[str, Transfer]) -> None:
        self._transfers = transfers
        first: Any = next(iter(transfers.values()))
        self._exchange = first.plan.exchange
        self._ranks, self._position, self._hosts = first.plan.ranks, first.position, first.hosts
        self.fixed_size = all(t.plan.fixed_size for t in transfers.values())
        """Whether every message has the same size in every step."""
        self.fixed_answers = all(t.plan.fixed_answers for t in transfers.values())
        """The same of messages with payloads of sums."""
        self.sent = self._sent()
        """{chunk: its parts} of what this rank sends first, in the order of the receivers."""
        self.last = self._last()
        """The parts of each message that the last collective brings, with the chunk, or rank, that it is of."""
        self.arriving = self._numbered()
        """Which of the last payloads are those of each tensor, in the order of the chunks, or of the ranks."""

    def places(self) -> tuple[int, dict[str, list[slice]]]:
        """The bytes of the first message, and where each tensor's payloads lie in it, in the order of their chunks."""
        places: dict[str, dict[int, slice]] = {name: {} for name in self._transfers}
        at = 0
        # messages are in the order of the ranks, which may differ from the order of their chunks
        for chunk, parts in self.sent.items():
            for name, _, slot in parts:
                places[name][chunk] = slice(at, at + slot)
                at += slot
        return at, {name: [of_tensor[chunk] for chunk in sorted(of_tensor)] for name, of_tensor in places.items()}

    def by_rank(self, sizes: Mapping[int, int]) -> tuple[int, ...] | None:
        """Convert the bytes for each owner of a chunk into bytes for each rank; returns None if all are equal."""
        of_ranks = tuple(sizes[chunk] for chunk in self._chunks_by_rank())
        return None if self.fixed_size and len(set(of_ranks)) == 1 else of_ranks

    @cached_property
    def slots_of_chunks(self) -> Mapping[int, int]:
        """The bytes of all slots of each chunk in the first message."""
        return {chunk: sum(slot for _, _, slot in parts) for chunk, parts in self.sent.items()}

    @cached_property
    def answer_bytes(self) -> int:
        """The most bytes that the last collective brings."""
        return sum(slot for _, parts in self.last for _, _, slot in parts)

    def cut_sent(self, received: Bytes) -> Sequence[Bytes]:
        """Cut the messages of all senders, one after the other, into payloads of this rank's own chunk.

        Raises:
            WireError: fewer or more bytes than these messages have.
        """
        return _cut(received, self._ends_of_sent, self.fixed_size)

    def cut_last(self, received: Bytes) -> Sequence[Bytes]:
        """Cut what the last collective has brought into payloads; see `cut_sent`."""
        return _cut(received, self._ends_of_last, self.fixed_answers)

    @cached_property
    def owned(self) -> list[Part]:
        """The parts of each message that this rank receives as the owner of a chunk."""
        return self.sent[self._position if self._hosts is None else self._hosts.chunk_of(self._position)]

    @cached_property
    def _ends_of_sent(self) -> list[int]:
        return _ends([self.owned] * (self._ranks if self._hosts is None else self._hosts.count))

    @cached_property
    def _ends_of_last(self) -> list[int]:
        return _ends([parts for _, parts in self.last])

    def _sent(self) -> dict[int, list[Part]]:
        if self._exchange == "allgather":
            return {0: self._parts_of(0)}
        return {chunk: self._parts_of(chunk) for chunk in self._chunks_by_rank()}

    def _last(self) -> list[tuple[int, list[Part]]]:
        if self._exchange == "allgather":
            return [(rank, self._parts_of(0)) for rank in range(self._ranks)]
        if self._hosts is None:
            return [(chunk, self._parts_of(chunk, sent=False)) for chunk in range(self._ranks)]
        order = [
            self._hosts.chunk_of(owner)
            for peer in sorted(self._hosts.inside(self._position))
            for owner in sorted(self._hosts.between(peer))
        ]
        return [(chunk, self._parts_of(chunk, sent=False)) for chunk in order]

    def _numbered(self) -> dict[str, list[int]]:
        places = [(of, name) for of, parts in self.last for name, _, _ in parts]
        numbers: dict[str, list[int]] = {name: [] for name in self._transfers}
        for number, (_, name) in sorted(enumerate(places), key=lambda item: item[1][0]):
            numbers[name].append(number)
        return numbers

    def _parts_of(self, chunk: int, sent: bool = True) -> list[Part]:
        parts = []
        for name, transfer in self._transfers.items():
            chunks = [number for number, _ in (transfer.sent_chunks if sent else transfer.plan.chunks)]
            if chunk in chunks:
                slots = transfer.plan.slots if sent else transfer.plan.answer_slots
                parts.append(Part(name, chunks.index(chunk), slots[chunk]))
        return parts

    def _chunks_by_rank(self) -> list[int]:
        return [rank if self._hosts is None else self._hosts.chunk_of(rank) for rank in range(self._ranks)]


class _Slots(Sequence[Bytes]):
    """A sequence of payloads that fill slots of fixed sizes; each is cut out on demand, since most never are."""

    def __init__(self, received: Bytes, ends: Sequence[int]) -> None:
        self._received = received
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        begin = range(len(self))[number]
        return self._received[self._ends[begin] : self._ends[begin + 1]]


def _ends(messages: Sequence[Sequence[Part]]) -> list[int]:
    """Compute where the payloads of these messages begin and end, if each fills its slot."""
    return list(accumulate((slot for parts in messages for _, _, slot in parts), initial=0))


def _cut(received: Bytes, ends: Sequence[int], fixed_size: bool) -> Sequence[Bytes]:
    """Cut the bytes of a collective into payloads; each fills its slot or states its own length."""
    count = len(ends) - 1
    if not fixed_size:
        payloads = wire.frames(received, count)
        if (there := sum(payload.size for payload in payloads)) != received.size:
            raise WireError(f"received {received.size} bytes, {count} payloads take {there} of them")
        return payloads
    if received.size != ends[-1]:
        raise WireError(f"received {received.size} bytes, expected {ends[-1]} in {count} payloads")
    return _Slots(received, ends)
