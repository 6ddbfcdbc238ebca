"""Send tensors that are too small to compress beside compressed ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy.typing as npt

from hvd_compress.compressors import Compressor
from hvd_compress.exchange.account import Account
from hvd_compress.exchange.adagrad import Accumulator
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.plan import Plan
from hvd_compress.exchange.raw import Raw
from hvd_compress.memory import HOST, Memory

__all__ = ["Pack"]

Array = npt.NDArray[Any]


class Pack:
    """Lays tensors too small to compress into one buffer, which travels uncompressed as one payload.

    Nothing is owed of them. A value that is not finite stays one, where a compressor would give up the whole tensor.

    Args:
        name: of the pack, the same on all ranks.
        members: {name: shape} of float32 tensors.
        plan: of all elements together, see `shape_of`.
        position: of this rank among those that take part.
        hosts: of the ranks, for a hierarchical exchange.
        accumulator: of all elements, for AdaGrad, which every rank applies to the sums.
        memory: of the bucket.
    """

    compressor: ClassVar[Compressor] = Raw()
    """The compressor that the plan of a pack is made for."""

    def __init__(
        self,
        name: str,
        members: Mapping[str, tuple[int, ...]],
        plan: Plan,
        position: int,
        hosts: Hosts | None = None,
        accumulator: Accumulator | None = None,
        memory: Memory = HOST,
    ) -> None:
        self.name = name
        self.memory = memory
        self.account = Account(name, plan, self.compressor, position, hosts, memory=memory)
        self.accumulator = accumulator
        self.shapes = dict(members)
        self._places: dict[str, slice] = {}
        at = 0
        for member, shape in members.items():
            self._places[member] = slice(at, at + math.prod(shape))
            at += math.prod(shape)
        self.buffer = memory.zeros(at, "float32")
        self._missing = set(members)

    @staticmethod
    def shape_of(members: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape that the plan of a pack is made for."""
        return (sum(map(math.prod, members.values())),)

    @property
    def members(self) -> list[str]:
        """The names of the tensors in the pack."""
        return list(self._places)

    def place(self, member: str) -> slice:
        """Return where a member's elements lie in the buffer."""
        return self._places[member]

    def part(self, member: str) -> Any:
        """Return a member's elements in the buffer: its gradient until all have come, its sum after the exchange."""
        return self.buffer[self._places[member]]

    def put(self, member: str, values: Any) -> bool:
        """Copy a flat gradient into the buffer, or zeros for None; returns whether all members are here."""
        if values is None:
            self.memory.clear(self.part(member))
        else:
            self.memory.copy_all([self.part(member)], [values])
        self._missing.discard(member)
        return not self._missing

    def put_all(self, values: Mapping[str, Any]) -> bool:
        """Do as `put`, for flat gradients of the memory of the bucket."""
        self.memory.copy_all([self.part(member) for member in values], list(values.values()))
        self._missing -= values.keys()
        return not self._missing

    def share(self, member: str) -> float:
        """Return the share of the pack's bytes and seconds that the member has to bear."""
        return len(self.part(member)) / len(self.buffer)

    def arrive(self) -> Callable[[], bool]:
        """Take the sum that was decoded into the buffer; returns what tells whether it is finite, and may wait."""
        if self.accumulator is None:
            return self.memory.all_finite(self.buffer)
        is_finite = self.accumulator.precondition(self.buffer)
        return lambda: is_finite

    def finish(self, keep: bool, scale: float) -> None:
        """End the step: make the sum what members get."""
        self.memory.multiply(self.buffer, scale if self.accumulator is None else self.accumulator.loss_scale)
        self._end(keep)

    def abandon(self) -> None:
        """Forget a step in flight."""
        self._end(keep=False)

    def _end(self, keep: bool) -> None:
        if self.accumulator is not None:
            self.accumulator.settle(keep)
        self._missing = set(self._places)
