"""One tensor on one rank, step after step: the stages of `Transfer`, and what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.engine.counters import Counters
from hvd_compress.errors import WireError
from hvd_compress.exchange import Plan, Transfer, aligned_empty, ring_bytes

__all__ = ["Lane", "Pack"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Lane(Transfer):
    """A `Transfer` that counts bytes and seconds and names the tensor in errors.

    Args:
        name: of the tensor, the same on all ranks; it keys the randomness.
        plan: sizes, the same on all ranks.
        compressor: of the whole tensor.
        position: of this rank among those that take part.
        itemsize: bytes per element of the uncompressed gradient, for the statistics.
    """

    def __init__(self, name: str, plan: Plan, compressor: Compressor, position: int, itemsize: int = 4) -> None:
        super().__init__(name, plan, compressor, position)
        self.counters = Counters()
        self._dense_bytes = ring_bytes(plan.numel * itemsize, plan.ranks)

    # -- stages --------------------------------------------------------------------------------------------------

    def encode(self, x: Array, slots: Sequence[Bytes]) -> list[int]:
        begin = time.perf_counter()
        used = super().encode(x, slots)
        self._count_sent(used, slots)
        self.counters.encode_seconds += time.perf_counter() - begin
        return used

    def skip(self, slots: Sequence[Bytes]) -> list[int]:
        used = super().skip(slots)
        self._count_sent(used, slots)
        return used

    def reduce(self, payloads: Sequence[Bytes], slot: Bytes) -> int:
        begin = time.perf_counter()
        self._count_received(payloads)
        with self._naming_errors():
            used = super().reduce(payloads, slot)
        self.counters.bytes_sent += (self.plan.ranks - 1) * (slot.size if self.plan.fixed_size else used)
        self.counters.encode_seconds += time.perf_counter() - begin
        return used

    def arrive(self, payloads: Sequence[Bytes]) -> bool:
        if self.plan.exchange == "two_phase":
            numbers = [chunk for chunk, _ in self.plan.chunks]
            own = [payload.size for chunk, payload in zip(numbers, payloads, strict=True) if chunk == self.position]
            self.counters.bytes_received += sum(p.size for p in payloads) - sum(own)
        else:
            self._count_received(payloads)
        with self._naming_errors():
            return super().arrive(payloads)

    def finish(self, keep: bool, scale: float) -> Array | None:
        begin = time.perf_counter()
        with self._naming_errors():
            result = super().finish(keep, scale)
        if result is not None:
            self._count_step(begin)
        return result

    # -- what is owed --------------------------------------------------------------------------------------------

    def is_owing(self) -> bool:
        """Whether anything is left of what this rank was to send."""
        return any(r is not None and r.any() for r in (self.residual, self.owner_residual))

    def inherit(self, other: Lane) -> None:
        """Take over the residuals, counters and step of a lane of the same tensor with another compressor or plan."""
        self.counters, self.step = other.counters, other.step
        self.residual = other.residual
        if other.owner_residual is not None and other.owned is not None:
            self.take_owed(other.owned.start, other.owner_residual)

    def take_owed(self, start: int, values: Array) -> None:
        """Take over an owner's residual of the elements from `start`, whoever owns them now."""
        if self.owned == slice(start, start + values.size):
            self.owner_residual = values
            return
        # both kinds of residual are in units of the sum
        if self.residual is None:
            self.residual = aligned_empty(self.plan.numel, values.dtype)
            self.residual[...] = 0
        self.residual[start : start + values.size] += values

    def all_owed(self) -> Array:
        """What this rank owes of the whole tensor; both residuals' memory may be used for it."""
        owed = np.zeros(self.plan.numel, np.float32) if self.residual is None else self.residual
        if self.owner_residual is not None and self.owned is not None:
            owed[self.owned] += self.owner_residual
        return owed

    def rescale(self, factor: float) -> None:
        """Multiply both residuals."""
        for owed in (self.residual, self.owner_residual):
            if owed is not None:
                owed *= factor

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank still owes."""
        owed = [r for r in (self.residual, self.owner_residual) if r is not None]
        # float64 for the sum, without a float64 copy of the residual
        return float(np.sqrt(sum(np.einsum("i,i->", r, r, dtype=np.float64, casting="safe") for r in owed)))

    # -- counting ------------------------------------------------------------------------------------------------

    def _count_sent(self, used: Sequence[int], slots: Sequence[Bytes]) -> None:
        sizes = [slot.size for slot in slots] if self.plan.fixed_size else used
        if self.plan.exchange == "two_phase":
            numbers = [chunk for chunk, _ in self.plan.chunks]
            sent = sum(size for chunk, size in zip(numbers, sizes, strict=True) if chunk != self.position)
        else:
            sent = (self.plan.ranks - 1) * sum(sizes)
        self.counters.bytes_sent += sent

    def _count_received(self, of_ranks: Sequence[Bytes]) -> None:
        sizes = [payload.size for payload in of_ranks]
        self.counters.bytes_received += sum(sizes) - sizes[self.position]

    def _count_step(self, begin: float) -> None:
        self.counters.steps += 1
        self.counters.dense_bytes += self._dense_bytes
        self.counters.decode_seconds += time.perf_counter() - begin

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except WireError as error:
            raise WireError(f"exchange of {self.name!r}, received by rank {self.position}: {error}") from error


class Pack(Lane):
    """Tensors too small to compress, one behind the other in one buffer: they travel as they are, in one payload.

    Args:
        name: of the pack, the same on all ranks.
        members: {name: shape} of float32 tensors.
        plan: of all elements together, see `shape_of`.
        position: of this rank among those that take part.
    """

    def __init__(self, name: str, members: Mapping[str, tuple[int, ...]], plan: Plan, position: int) -> None:
        super().__init__(name, plan, NoCompression(), position)
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
        """What the plan of a pack is made for."""
        return (sum(map(math.prod, members.values())),)

    @property
    def members(self) -> list[str]:
        """Names of the tensors in it."""
        return list(self._places)

    def part(self, member: str) -> Array:
        """A member's elements in the buffer: its gradient before `encode`, its sum after `finish`."""
        return self.buffer[self._places[member]]

    def put(self, member: str, values: Array | None) -> bool:
        """Copy in a gradient (flat), or None for zeros; whether all members are here."""
        self.part(member)[...] = 0 if values is None else values
        self._missing.discard(member)
        return not self._missing

    def share(self, member: str) -> float:
        """What of the pack's bytes and seconds is the member's."""
        return self.part(member).size / self.buffer.size

    def arrive(self, payloads: Sequence[Bytes]) -> bool:
        # nothing is owed of small tensors, so they can be decoded before it is known whether the step is kept; and
        # a value that is not finite stays one, where a compressor would give up the whole tensor
        finite = super().arrive(payloads)
        self._decode(self.buffer, 1.0)
        return finite and bool(np.isfinite(self.buffer).all())

    def finish(self, keep: bool, scale: float) -> Array:
        begin = time.perf_counter()
        self.buffer *= np.float32(scale)
        self.abandon()
        self._count_step(begin)
        return self.buffer

    def abandon(self) -> None:
        super().abandon()
        self._missing = set(self._places)
