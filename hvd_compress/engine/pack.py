"""Send tensors that are too small to compress beside compressed ones."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor
from hvd_compress.engine.lane import Lane
from hvd_compress.exchange import Accumulator, Hosts, Plan, Raw, aligned_empty

__all__ = ["Pack"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Pack(Lane):
    """Lays tensors too small to compress into one buffer, which travels uncompressed as one payload.

    Args:
        name: of the pack, the same on all ranks.
        members: {name: shape} of float32 tensors.
        plan: of all elements together, see `shape_of`.
        position: of this rank among those that take part.
        hosts: of the ranks, for a hierarchical exchange.
        accumulator_of_all: of all elements, for AdaGrad, which every rank applies to the sums.
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
        accumulator_of_all: Accumulator | None = None,
    ) -> None:
        super().__init__(name, plan, self.compressor, position, hosts)
        self.accumulator_of_all = accumulator_of_all
        self.shapes = dict(members)
        self._places: dict[str, slice] = {}
        at = 0
        for member, shape in members.items():
            self._places[member] = slice(at, at + math.prod(shape))
            at += math.prod(shape)
        self.buffer = aligned_empty(at, np.float32)
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

    def part(self, member: str) -> Array:
        """Return a member's elements in the buffer: its gradient before `encode`, its sum after `finish`."""
        return self.buffer[self._places[member]]

    def put(self, member: str, values: Array | None) -> bool:
        """Copy a flat gradient into the buffer, or zeros for None; returns whether all members are here."""
        self.part(member)[...] = 0 if values is None else values
        self._missing.discard(member)
        return not self._missing

    def share(self, member: str) -> float:
        """Return the share of the pack's bytes and seconds that the member has to bear."""
        return self.part(member).size / self.buffer.size

    def arrive(self, payloads: Sequence[Bytes]) -> bool:
        # nothing is owed of small tensors, so they can be decoded before it is known whether the step is kept; and
        # a value that is not finite stays one, where a compressor would give up the whole tensor
        finite = super().arrive(payloads)
        self._decode(self.buffer, 1.0)
        if self.accumulator_of_all is not None:
            return self.accumulator_of_all.precondition(self.buffer) and finite
        return finite and bool(np.isfinite(self.buffer).all())

    def finish(self, keep: bool, scale: float) -> Array:
        begin = time.perf_counter()
        accumulator = self.accumulator_of_all
        self.buffer *= np.float32(scale if accumulator is None else accumulator.loss_scale)
        if accumulator is not None:
            accumulator.settle(keep)
        self.abandon()
        self.note("finish", 1, time.perf_counter() - begin)
        return self.buffer

    def abandon(self) -> None:
        super().abandon()
        if self.accumulator_of_all is not None:
            self.accumulator_of_all.settle(keep=False)
        self._missing = set(self._places)
