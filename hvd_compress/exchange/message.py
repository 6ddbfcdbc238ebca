"""List the payloads of each message of a bucket, once; ranks differ only in the chunks that they own.

A message to an owner, or from one, holds the payloads of its chunks in the order of the tensors. Where all of them have
a fixed size they lie at fixed places; else they follow one another, and state their own lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors import Compressor
from hvd_compress.errors import WireError
from hvd_compress.exchange.account import Account
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.table import Table
from hvd_compress.kernels import table as kernels
from hvd_compress.memory import HOST, Memory

__all__ = ["Message", "Part", "arriving", "made", "owned", "received_inside", "sent", "sent_inside"]

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
# tables of parts of a bucket that are kept for the next step
_MOST_KEPT = 64


class Part(NamedTuple):
    """One payload of a message.

    Args:
        tensor: number of its account in the bucket.
        compressor: that makes it.
        chunk: of the tensor.
        start: of its elements, in the memory that they come from or go to.
        numel: its elements.
        group: elements per group.
        slot: the most bytes that it takes.
        adds: whether it is added to the one before.
        crossings: how often its bytes go between this rank and others.
    """

    tensor: int
    compressor: Compressor
    chunk: int
    start: int
    numel: int
    group: int
    slot: int
    adds: bool
    crossings: int


class Message:
    """Describes one message: which payloads lie where in it.

    Args:
        runs: of parts; each is for one receiver, or of one sender.
        fixed_size: whether each payload fills its slot.
        count: of the tensors of the bucket.
        memory: that their arrays lie in.
    """

    def __init__(self, runs: Iterable[Sequence[Part]], fixed_size: bool, count: int, memory: Memory = HOST) -> None:
        self.memory = memory
        runs = list(runs)
        self.parts = [part for run in runs for part in run]
        self.fixed_size = fixed_size
        self.bounds = np.array([0, *accumulate(map(len, runs))], np.int64)
        """The numbers of the parts at which runs begin and end."""
        self.tensors = np.array([part.tensor for part in self.parts], np.int64)
        self.slots = np.array([part.slot for part in self.parts], np.int64)
        self.crossings = np.array([part.crossings for part in self.parts], np.float64)
        self.ends = np.cumsum(self.slots)
        self.places = self.ends - self.slots
        """Where the slot of each part begins."""
        self.nbytes = int(self.slots.sum())
        """The bytes of all slots."""
        self._count = count
        self.slots_crossing = self.bytes_crossing(self.slots)
        """What `bytes_crossing` returns where each payload fills its slot."""
        self._tables: dict[frozenset[int] | None, list[Table]] = {}

    def bytes_crossing(self, sizes: Numbers) -> npt.NDArray[np.float64]:
        """Return how many bytes of each tensor go between this rank and others, from the bytes of each part."""
        nbytes: npt.NDArray[Any] = np.bincount(self.tensors, self.crossings * sizes, self._count)
        return nbytes

    def sizes_of_runs(self, sizes: Numbers) -> list[int]:
        """Return the bytes of each run, from those of all parts."""
        sums = np.concatenate([[0], np.cumsum(sizes)])[self.bounds]
        return [int(size) for size in np.diff(sums)]

    @cached_property
    def slots_of_runs(self) -> list[int]:
        """The bytes of the slots of each run."""
        return self.sizes_of_runs(self.slots)

    def tables(self, held: Collection[int] | None = None) -> list[Table]:
        """Return the tables of these tensors, by their numbers; of all without them."""
        key = None if held is None else frozenset(held)
        tables = self._tables.get(key)
        if tables is None:
            if len(self._tables) > _MOST_KEPT + len(self.parts):
                # patterns that change in every step
                self._tables.clear()
            chosen = [i for i, part in enumerate(self.parts) if key is None or part.tensor in key]
            # what is added to a tensor comes one after the other, while it is in cache, and in the order of the ranks
            chosen.sort(key=lambda i: self.parts[i].tensor)
            alike: dict[Any, list[int]] = {}
            for i in chosen:
                part = self.parts[i]
                kind = part.compressor, part.compressor.kernels(part.group), part.numel == 0
                alike.setdefault(kind, []).append(i)
            tables = self._tables[key] = [
                Table(kind[0], numbers, self.parts, self.memory) for kind, numbers in alike.items()
            ]
        return tables

    def cut(self, received: Bytes) -> tuple[Numbers, Numbers]:
        """Find the payloads in what has come: where each lies, and how many bytes it may take.

        Raises:
            WireError: fewer or more bytes than this message has, or what is no payload.
        """
        count = len(self.parts)
        at = int(kernels.address_of(received))
        if self.fixed_size:
            if received.size != self.nbytes:
                raise WireError(f"received {received.size} bytes, expected {self.nbytes} in {count} payloads")
            return at + self.places, self.slots
        places, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
        there = int(kernels.cut(at, received.size, places, sizes))
        if there < 0:
            # it says what is wrong
            wire.frames(received, count)
        if there != received.size:
            raise WireError(f"received {received.size} bytes, {count} payloads take {there} of them")
        if (sizes > self.slots).any():
            longest = int(np.argmax(sizes > self.slots))
            raise WireError(
                f"payload {longest} of {count} has {sizes[longest]} bytes, and its tensor takes "
                f"{self.slots[longest]} at most"
            )
        return places, sizes


def sent(accounts: Sequence[Account]) -> Message:
    """Describe what this rank sends first: a run for each rank, or one for all in an allgather."""
    first = accounts[0]
    plan = first.plan

    def run(chunk: int) -> list[Part]:
        parts = []
        for i, account in enumerate(accounts):
            for number, part in account.sent_chunks:
                if number == chunk:
                    crossings = int(chunk != first.chunk) if plan.exchange.has_owners else plan.ranks - 1
                    start = part.start - account.shard.start
                    parts.append(_part(i, account, chunk, start, part, False, crossings))
        return parts

    chunks = _chunks_by_rank(first) if plan.exchange.has_owners else [0]
    return Message(map(run, chunks), all(a.plan.fixed_size for a in accounts), len(accounts), first.memory)


def owned(accounts: Sequence[Account]) -> Message:
    """Describe what this rank receives as the owner of a chunk: a run of each sender."""
    first = accounts[0]
    if not first.plan.exchange.has_owners:
        return Message([], True, len(accounts), first.memory)
    senders = range(first.plan.ranks) if first.hosts is None else sorted(first.hosts.between(first.position))
    runs = [
        [
            _part(i, account, first.chunk, 0, account.owned, number > 0, int(sender != first.position))
            for i, account in enumerate(accounts)
            if account.owned is not None
        ]
        for number, sender in enumerate(senders)
    ]
    return Message(runs, all(a.plan.fixed_size for a in accounts), len(accounts), first.memory)


def made(accounts: Sequence[Account]) -> Message:
    """Describe the payloads of the sums that this rank makes as the owner of a chunk: one run."""
    first = accounts[0]
    others = (first.plan.ranks if first.hosts is None else first.hosts.count) - 1
    run = [
        _part(i, account, first.chunk, 0, account.owned, False, others, is_answer=True)
        for i, account in enumerate(accounts)
        if account.owned is not None
    ]
    return Message([run], all(a.plan.fixed_answers for a in accounts), len(accounts), first.memory)


def arriving(accounts: Sequence[Account]) -> Message:
    """Describe what the last collective brings: a run of each chunk, or of each rank in an allgather."""
    first = accounts[0]
    fixed_size = all(a.plan.fixed_answers for a in accounts)
    if not first.plan.exchange.has_owners:
        return Message(
            [
                [
                    _part(i, account, 0, 0, slice(0, account.plan.numel), rank > 0, int(rank != first.position))
                    for i, account in enumerate(accounts)
                ]
                for rank in range(first.plan.ranks)
            ],
            fixed_size,
            len(accounts),
            first.memory,
        )

    def run(chunk: int) -> list[Part]:
        parts = []
        for i, account in enumerate(accounts):
            for number, part in account.plan.chunks:
                if number == chunk:
                    # sums of other shards come from ranks of this host
                    is_mine = any(number == other for other, _ in account.sent_chunks)
                    crossings = int(is_mine and chunk != account.chunk)
                    parts.append(_part(i, account, chunk, part.start, part, False, crossings, is_answer=True))
        return parts

    return Message(map(run, _chunks_of_last(first)), fixed_size, len(accounts), first.memory)


def sent_inside(accounts: Sequence[Account], hosts: Hosts) -> Message:
    """Describe what this rank sends compressed to others of its host: a run for each rank, with its shard."""
    first = accounts[0]
    others = set(hosts.inside(first.position)) - {first.position}
    runs = [_inside(accounts, hosts, rank) if rank in others else [] for rank in range(first.plan.ranks)]
    return _message_inside(runs, accounts)


def received_inside(accounts: Sequence[Account], hosts: Hosts) -> Message:
    """Describe what others of this host send of this rank's shard: a run of each of them, to be added to its own."""
    position = accounts[0].position
    mine = [part._replace(start=0, adds=True) for part in _inside(accounts, hosts, position)]
    return _message_inside([mine for rank in sorted(hosts.inside(position)) if rank != position], accounts)


def _message_inside(runs: Sequence[Sequence[Part]], accounts: Sequence[Account]) -> Message:
    fixed_size = all(part.compressor.fixed_size for run in runs for part in run)
    return Message(runs, fixed_size, len(accounts), accounts[0].memory)


def _inside(accounts: Sequence[Account], hosts: Hosts, rank: int) -> list[Part]:
    """List the payloads for a rank of this host, which have the groups of what compresses them."""
    parts = []
    for i, account in enumerate(accounts):
        shard, plan = account.shard_of(rank), account.plan
        numel = shard.stop - shard.start
        if account.inside is not None and numel:
            compressor, group = account.inside.for_part(numel, plan.numel), account.inside.group_of(plan.shape)
            slot = compressor.capacity(numel, group)
            parts.append(Part(i, compressor, hosts.places[rank][1], shard.start, numel, group, slot, False, 1))
    return parts


def _part(
    number: int,
    account: Account,
    chunk: int,
    start: int,
    elements: slice | None,
    adds: bool,
    crossings: int,
    is_answer: bool = False,
) -> Part:
    plan = account.plan
    compressors, slots = (
        (plan.answer_compressors, plan.answer_slots) if is_answer else (plan.chunk_compressors, plan.slots)
    )
    numel = 0 if elements is None else elements.stop - elements.start
    return Part(number, compressors[chunk], chunk, start, numel, plan.group, slots[chunk], adds, crossings)


def _chunks_by_rank(account: Account) -> list[int]:
    hosts = account.hosts
    return [rank if hosts is None else hosts.chunk_of(rank) for rank in range(account.plan.ranks)]


def _chunks_of_last(account: Account) -> list[int]:
    hosts = account.hosts
    if hosts is None:
        return list(range(account.plan.ranks))
    peers = sorted(hosts.inside(account.position))
    return [hosts.chunk_of(owner) for peer in peers for owner in sorted(hosts.between(peer))]
