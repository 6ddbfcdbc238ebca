"""Keep account of one tensor on one rank: what it still owes, and what its exchanges have cost."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, Key
from hvd_compress.exchange.adagrad import Accumulator
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.plan import Plan, ring_bytes
from hvd_compress.memory import HOST, Memory, aligned_empty

__all__ = ["GRADIENTS", "INSIDE", "SUMS", "Account"]

Array = npt.NDArray[Any]

# hops, by which keys differ: of payloads of gradients, of sums, and of those that stay inside of a host. 2 and 3 are
# those of residuals that are rounded
GRADIENTS, SUMS, INSIDE = 0, 1, 4


class Account:
    """Holds what is kept of a tensor from one step to the next.

    Args:
        name: of the tensor, the same on all ranks; it keys the randomness.
        plan: sizes and bounds, equal on all ranks.
        compressor: of the whole tensor.
        position: of this rank among those that take part.
        hosts: of the ranks, for a hierarchical exchange.
        itemsize: bytes per element of the uncompressed gradient, for the statistics.
        accumulator: of the elements that this rank owns; with it, results are AdaGrad's updates.
        memory: where its gradients come from, and its residuals lie.
    """

    rests: ClassVar[bool] = False
    """Whether residuals are floats only while payloads are made."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        compressor: Compressor,
        position: int,
        hosts: Hosts | None = None,
        itemsize: int = 4,
        accumulator: Accumulator | None = None,
        memory: Memory = HOST,
    ) -> None:
        self.name = name
        self.memory = memory
        self.plan = plan
        self.position = position
        self.hosts = hosts
        self.chunk = position if hosts is None else hosts.chunk_of(position)
        """The chunk that this rank owns."""
        self.inside = plan.exchange.inside_of(compressor)
        """What compresses inside of this host; None if nothing does."""
        self.keeps_residual = compressor.feedback
        """Whether error feedback is on for the elements in `shard`."""
        self.keeps_pending = self.inside is not None and self.inside.feedback
        """Whether it is on for what is sent to other ranks of this host."""
        self.owner_keeps_residual = any(answer.feedback for answer in plan.answer_compressors)
        """Whether it is on for sums."""
        self.residual: Any = None
        """Of the elements in `shard`: an array of `memory`, or None."""
        self.owner_residual: Any = None
        """Of the elements in `owned`, likewise: in units of the sum, with an accumulator in units of the update."""
        self.factor: Array | None = None
        """What the next step begins with, where factors are summed: float32, of shape (r, m), the same on all ranks."""
        self.pending: Array | None = None
        """What is owed of all elements, and goes with the next gradient: a hierarchical rank keeps residuals of its
        shard only. Where gradients are compressed inside of a host, it is the residual of the other shards."""
        self.accumulator = accumulator
        self.step = 0
        self.counters = Counters()
        self.dense_bytes = ring_bytes(plan.numel * itemsize, plan.ranks)
        """What one allreduce of the uncompressed gradient would send."""
        self._seed = compressor.seed

    @cached_property
    def owned(self) -> slice | None:
        """The elements whose sum this rank makes; None if there are none."""
        if not self.plan.exchange.has_owners:
            return None
        return next((part for chunk, part in self.plan.chunks if chunk == self.chunk), None)

    @cached_property
    def shard(self) -> slice:
        """The elements that this rank encodes: all, or in a hierarchical exchange its share of its host's sum."""
        if self.hosts is None:
            return slice(0, self.plan.numel)
        return self.shard_of(self.position)

    def shard_of(self, position: int) -> slice:
        """Return the elements that a rank of this host encodes in a hierarchical exchange."""
        if self.hosts is None:
            raise RuntimeError(f"the exchange of {self.name!r} is not hierarchical: it has no shards")
        chunks = self.hosts.shard_of(position)
        return slice(self.plan.bounds[chunks.start], self.plan.bounds[chunks.stop])

    @cached_property
    def sent_chunks(self) -> list[tuple[int, slice]]:
        """The number and elements of each chunk that this rank encodes and that has a payload."""
        wanted = range(len(self.plan.slots)) if self.hosts is None else self.hosts.shard_of(self.position)
        return [(chunk, part) for chunk, part in self.plan.chunks if chunk in wanted]

    def key_of(self, hop: int, chunk: int) -> Key:
        """Return what random choices depend on in this step and hop, such as `GRADIENTS`."""
        seed = self.inside.seed if hop == INSIDE and self.inside is not None else self._seed
        return Key(seed, self.name, self.step, self.position, hop, chunk)

    # -- residuals -----------------------------------------------------------------------------------------------

    def fit_residual(self, kind: str) -> Any:
        """Return the residual in a type, given by name; zeros if there is none yet."""
        self.residual = self._fitted(self.residual, self.shard, kind)
        return self.residual

    def fit_owner_residual(self, kind: str) -> Any:
        """Return the owner's residual, of the sums of `owned`, in a type."""
        self.owner_residual = self._fitted(self.owner_residual, self.owned or slice(0, 0), kind)
        return self.owner_residual

    def fit_pending(self, kind: str) -> Any:
        """Return what is pending, of all elements, in a type; zeros if there is nothing yet."""
        self.pending = self._fitted(self.pending, slice(0, self.plan.numel), kind)
        return self.pending

    def _fitted(self, residual: Any, part: slice, kind: str) -> Any:
        if residual is None:
            # complete before anybody sees it: statistics may be asked for on another thread
            return self.memory.zeros(part.stop - part.start, kind)
        if self.memory.kind_of(residual) == kind:
            return residual
        # the model has been converted to another type since
        return self.memory.from_host(self.memory.to_host(residual).astype(kind))

    @property
    def may_owe(self) -> bool:
        """Whether this rank keeps, as a sender, what it owes of this tensor."""
        return self.keeps_residual or self.keeps_pending

    def is_owing(self) -> bool:
        """Tell whether this rank still owes anything of this tensor."""
        return any(r.any() for r in self._debts())

    def inherit(self, other: Account) -> None:
        """Take over the step number and residuals of an account of the same tensor with another compressor or plan.

        One that keeps no residuals takes none: they are debts then (`Ledger.inherit`), and would count twice.
        """
        self.step = other.step
        if self.plan.chunk_compressors == other.plan.chunk_compressors:
            self.factor = other.factor
        if not self.may_owe:
            return
        if other.residual is not None or other.pending is not None:
            self.take_residual(other.whole_residual())
        if other.owner_residual is not None and other.owned is not None:
            self.take_owed(other.owned.start, other.memory.to_host(other.owner_residual))

    def take_residual(self, values: Array) -> None:
        """Take over a residual of all elements, given on the host, and its memory."""
        self.residual, self.pending = None, None
        if self.keeps_residual and self.shard == slice(0, values.size):
            self.residual = self.memory.from_host(values)
            return
        if self.keeps_residual:
            # where it was when it was saved: a sum in another order would be rounded in another way
            self.residual = self.memory.from_host(values[self.shard].copy())
            values[self.shard] = 0
        if values.any():
            self.pending = values

    def take_owed(self, start: int, values: Array) -> None:
        """Take over an owner's residual of the elements from `start`, in units of the sum, whoever owns them now."""
        # with AdaGrad owners owe updates: what is owed in units of the sum has to go with the next gradients. So it has
        # to where answers leave nothing out: an owner would never send it
        is_kept = self.accumulator is None and self.owner_keeps_residual
        if is_kept and self.owned == slice(start, start + values.size):
            self.owner_residual = self.memory.from_host(values)
            return
        # both kinds of residual are in units of the sum
        whole = self.whole_residual(values.dtype)
        whole[start : start + values.size] += values
        self.take_residual(whole)

    def whole_residual(self, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return, on the host, what this rank owes as a sender of all elements: the residual itself, or a new array."""
        residual, pending = None if self.residual is None else self.memory.to_host(self.residual), self.pending
        if residual is not None and pending is None and residual.size == self.plan.numel:
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
            owed[self.owned] += self.memory.to_host(self.owner_residual)
        return owed

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, which are in units of scaled gradients; updates have no scale."""
        self.residual = self._times(self.residual, factor)
        if self.pending is not None:
            HOST.multiply(self.pending, factor)
        if self.accumulator is None:
            self.owner_residual = self._times(self.owner_residual, factor)

    def _times(self, residual: Any, factor: float) -> Any:
        if residual is not None:
            self.memory.multiply(residual, factor)
        return residual

    def residual_norm(self) -> float:
        """Compute the Euclidean norm of what this rank still owes."""
        debts = [self.memory.norm(r) for r in (self.residual, self.owner_residual) if r is not None]
        return math.hypot(*debts, 0.0 if self.pending is None else HOST.norm(self.pending))

    def _debts(self) -> list[Array]:
        debts = [self.memory.to_host(r) for r in (self.residual, self.owner_residual) if r is not None]
        return debts if self.pending is None else [*debts, self.pending]
