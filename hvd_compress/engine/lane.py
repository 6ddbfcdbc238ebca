"""Take one tensor of one rank through its steps: the stages of `Transfer`, and what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor
from hvd_compress.engine.counters import Counters
from hvd_compress.errors import WireError
from hvd_compress.exchange import Accumulator, Hosts, Plan, Transfer, aligned_empty, ring_bytes
from hvd_compress.kernels.common import norm

__all__ = ["Lane"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Lane(Transfer):
    """A `Transfer` that counts bytes and seconds and names the tensor in errors.

    Args:
        name: of the tensor, the same on all ranks; it keys the randomness.
        plan: sizes, the same on all ranks.
        compressor: of the whole tensor.
        position: of this rank among those that take part.
        hosts: of the ranks, for a hierarchical exchange.
        itemsize: bytes per element of the uncompressed gradient, for the statistics.
        accumulator: of the elements that this rank owns, for AdaGrad.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        compressor: Compressor,
        position: int,
        hosts: Hosts | None = None,
        itemsize: int = 4,
        accumulator: Accumulator | None = None,
    ) -> None:
        super().__init__(name, plan, compressor, position, hosts, accumulator)
        self.counters = Counters()
        self._dense_bytes = ring_bytes(plan.numel * itemsize, plan.ranks)

    # -- stages --------------------------------------------------------------------------------------------------

    def _encode(self, x: Array, slots: Sequence[Bytes]) -> list[int]:
        begin = time.perf_counter()
        used = super()._encode(x, slots)
        self._count_sent(used)
        self.counters.encode_seconds += time.perf_counter() - begin
        return used

    def skip(self, slots: Sequence[Bytes]) -> list[int]:
        used = super().skip(slots)
        self._count_sent(used)
        return used

    def reduce(self, payloads: Sequence[Bytes], slot: Bytes) -> int:
        begin = time.perf_counter()
        self._count_received(payloads)
        try:
            used = super().reduce(payloads, slot)
        except WireError as error:
            raise self._named(error) from error
        self.counters.bytes_sent += (len(payloads) - 1) * (slot.size if self.plan.fixed_answers else used)
        self.counters.encode_seconds += time.perf_counter() - begin
        return used

    def arrive(self, payloads: Sequence[Bytes]) -> bool:
        if self.hosts is None and self.plan.fixed_answers:
            self.note("arrive", 1, 0.0)
        elif self.plan.exchange == "allgather":
            self._count_received(payloads)
        else:
            others = {chunk for chunk, _ in self.sent_chunks} - {self.chunk}
            numbers = [chunk for chunk, _ in self.plan.chunks]
            sizes = [p.size for chunk, p in zip(numbers, payloads, strict=True) if chunk in others]
            self.counters.bytes_received += sum(sizes)
            self._count_inside(numbers, payloads)
        try:
            return super().arrive(payloads)
        except WireError as error:
            raise self._named(error) from error

    def finish(self, keep: bool, scale: float) -> Array | None:
        begin = time.perf_counter()
        try:
            result = super().finish(keep, scale)
        except WireError as error:
            raise self._named(error) from error
        if result is not None:
            self.note("finish", 1, time.perf_counter() - begin)
        return result

    def note(self, stage: str, times: int, seconds: float) -> None:
        counters = self.counters
        if stage == "encode":
            counters.bytes_sent += times * self._full_hop
            counters.encode_seconds += seconds
        elif stage == "reduce":
            counters.bytes_received += times * self._full_sums
            counters.bytes_sent += times * self._full_sums
            counters.encode_seconds += seconds
        elif stage == "arrive":
            counters.bytes_received += times * self._full_answers
        else:
            counters.steps += times
            counters.dense_bytes += times * self._dense_bytes
            counters.decode_seconds += seconds

    # -- what is owed --------------------------------------------------------------------------------------------

    def is_owing(self) -> bool:
        """Tell whether this rank still owes anything of this tensor."""
        return any(r.any() for r in self._debts())

    def inherit(self, other: Lane) -> None:
        """Take over the step number and residuals of a lane of the same tensor with another compressor or plan.

        A lane that keeps no residuals takes none: they are debts then (`Ledger.inherit`), and would count twice.
        """
        self.step = other.step
        if not self.keeps_residual:
            return
        if other.residual is not None or other.pending is not None:
            self.take_residual(other.whole_residual())
        if other.owner_residual is not None and other.owned is not None:
            self.take_owed(other.owned.start, other.owner_residual)

    def take_residual(self, values: Array) -> None:
        """Take over a residual of all elements, and its memory."""
        self.residual, self.pending = None, None
        if self.shard == slice(0, values.size):
            self.residual = values
        elif values.any():
            self.pending = values

    def take_owed(self, start: int, values: Array) -> None:
        """Take over an owner's residual of the elements from `start`, in units of the sum, whoever owns them now."""
        # with AdaGrad owners owe updates: what is owed in units of the sum has to go with the next gradients
        if self.accumulator is None and self.owned == slice(start, start + values.size):
            self.owner_residual = values
            return
        # both kinds of residual are in units of the sum
        whole = self.whole_residual(values.dtype)
        whole[start : start + values.size] += values
        self.take_residual(whole)

    def whole_residual(self, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return what this rank owes as a sender, of all elements: the residual itself, or a new array."""
        residual, pending = self.residual, self.pending
        if residual is not None and residual.size == self.plan.numel:
            return residual
        known = pending if residual is None else residual
        whole = aligned_empty(self.plan.numel, dtype if known is None else known.dtype)
        whole[...] = 0 if pending is None else pending
        if residual is not None:
            whole[self.shard] += residual
        return whole

    def all_owed(self) -> Array:
        """Return all that this rank owes, as a sender and as an owner; may use the residuals' memory for it."""
        owed = self.whole_residual()
        if self.owner_residual is not None and self.owned is not None:
            owed[self.owned] += self.owner_residual
        return owed

    def _debts(self) -> list[Array]:
        return [r for r in (self.residual, self.pending, self.owner_residual) if r is not None]

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, which are in units of scaled gradients; updates have no scale."""
        for owed in (self.residual, self.pending, self.owner_residual if self.accumulator is None else None):
            if owed is not None:
                owed *= factor

    def residual_norm(self) -> float:
        """Compute the Euclidean norm of what this rank still owes."""
        return math.hypot(*(norm(owed) for owed in self._debts()))

    # -- counting ------------------------------------------------------------------------------------------------

    def _count_sent(self, used: Sequence[int]) -> None:
        self.counters.bytes_sent += self._full_hop if self.plan.fixed_size else self._hop(used)

    def _hop(self, sizes: Sequence[int]) -> int:
        """Count the bytes that go to other ranks, from the bytes of each payload that this rank encodes."""
        if self.plan.exchange == "allgather":
            return (self.plan.ranks - 1) * sum(sizes)
        numbers = [chunk for chunk, _ in self.sent_chunks]
        return sum(size for chunk, size in zip(numbers, sizes, strict=True) if chunk != self.chunk)

    @cached_property
    def _full_hop(self) -> int:
        """Count the bytes that go to other ranks if every payload fills its slot."""
        return self._hop([self.plan.slots[chunk] for chunk, _ in self.sent_chunks])

    @cached_property
    def _full_sums(self) -> int:
        """Count the bytes that this rank gets, or sends, as the owner of a chunk if every payload fills its slot."""
        return 0 if self.owned is None else (self.plan.ranks - 1) * self.plan.slots[self.chunk]

    @cached_property
    def _full_answers(self) -> int:
        """Count the bytes of sums that this rank gets from others if every payload fills its slot."""
        return self._hop([self.plan.answer_slots[chunk] for chunk, _ in self.sent_chunks])

    def _count_received(self, of_ranks: Sequence[Bytes]) -> None:
        sizes = [payload.size for payload in of_ranks]
        own = self.position if self.hosts is None else sorted(self.hosts.between(self.position)).index(self.position)
        self.counters.bytes_received += sum(sizes) - sizes[own]

    def _count_inside(self, numbers: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Count what a hierarchical exchange has sent to the ranks of this host."""
        if self.hosts is None or self._gradient is None:
            return
        others = self.hosts.per_host - 1
        shard = {chunk for chunk, _ in self.sent_chunks}
        passed_on = sum(p.size for chunk, p in zip(numbers, payloads, strict=True) if chunk in shard)
        uncompressed = self._gradient.nbytes - self._gradient[self.shard].nbytes
        self.counters.bytes_sent_inside += uncompressed + others * passed_on

    def _named(self, error: WireError) -> WireError:
        return WireError(f"exchange of {self.name!r}, received by rank {self.position}: {error}")
