"""Say which rank encodes which elements of a tensor, and how many bytes that can take, equally on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from hvd_compress.compressors import Compressor

if TYPE_CHECKING:
    from hvd_compress.exchange.kinds import Exchange

__all__ = ["Plan", "chunk_bounds", "cuts_within", "ring_bytes", "saves_bytes", "sent_bytes"]


@dataclass(frozen=True)
class Plan:
    """Says which rank encodes which elements of a tensor, and how many bytes that can take.

    Args:
        exchange: that it is a plan of; `Dense` where compressing would not save bytes.
        shape: of the tensor.
        ranks: that take part.
        group: elements per group of the compressor.
        bounds: of the chunks, `chunks + 1` element offsets; a chunk may be empty.
        chunk_compressors: the compressor of each chunk.
        slots: the most bytes of each chunk's payload; 0 for an empty chunk, which has none.
        answer_compressors: of the sum of each chunk.
        answer_slots: the most bytes of the payload of each chunk's sum.
        root: whose chunk is the whole tensor, with a parameter server.
    """

    exchange: Exchange
    shape: tuple[int, ...]
    ranks: int
    group: int
    bounds: tuple[int, ...]
    chunk_compressors: tuple[Compressor, ...]
    slots: tuple[int, ...]
    answer_compressors: tuple[Compressor, ...]
    answer_slots: tuple[int, ...]
    root: int | None = None

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return self.bounds[-1]

    @cached_property
    def chunks(self) -> tuple[tuple[int, slice], ...]:
        """The number and elements of each chunk that has a payload."""
        return tuple((i, slice(a, b)) for i, (a, b) in enumerate(pairwise(self.bounds)) if self.slots[i])

    @cached_property
    def fixed_size(self) -> bool:
        """Whether every payload fills its slot in every step, so that all steps have messages of equal size."""
        return all(c.fixed_size for c in self.chunk_compressors)

    @cached_property
    def fixed_answers(self) -> bool:
        """Whether the payload of every sum fills its slot in every step."""
        return all(c.fixed_size for c in self.answer_compressors)

    @property
    def collectives(self) -> tuple[str, ...]:
        """The names of the collectives between the stages."""
        return self.exchange.collectives


def chunk_bounds(numel: int, chunks: int, group: int) -> tuple[int, ...]:
    """Divide `numel` elements evenly into `chunks`, on group boundaries where there are enough groups."""
    # octets keep bit streams of neighbouring chunks on byte boundaries of the tensor
    unit = next((u for u in (group, 8) if numel >= u * chunks), 1)
    units = -(-numel // unit)
    return (*(min(numel, unit * (i * units // chunks)) for i in range(chunks)), numel)


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Compute the bytes that each rank sends, and receives, in a ring allreduce of `nbytes`."""
    return 2 * (ranks - 1) / ranks * nbytes


def cuts_within(start: int, numel: int, total: int, chunks: int, group: int) -> tuple[int, ...]:
    """Compute where an even division of `total` elements cuts the `numel` from `start` on, at group boundaries."""
    unit = group if numel >= group * 2 else 8
    cuts = (round((i * total / chunks - start) / unit) * unit for i in range(1, chunks))
    return (0, *(min(max(cut, 0), numel) for cut in cuts), numel)


def sent_bytes(plans: Sequence[Plan]) -> float:
    """Compute the most bytes that a rank sends in one exchange of the tensors of `plans`, which go together."""
    others = plans[0].ranks - 1
    if not plans[0].exchange.has_owners:
        return others * sum(sum(plan.slots) for plan in plans)
    return 2 * others * max(sum(slots) for slots in zip(*(plan.slots for plan in plans), strict=True))


def saves_bytes(plan: Plan, itemsize: int) -> bool:
    """Whether an exchange of this tensor sends fewer bytes than a ring allreduce of elements of `itemsize` bytes.

    Headers do not count: what they cost depends on the size of a tensor alone, which is `min_numel`'s to judge.
    """
    if plan.ranks == 1 or not plan.numel:
        return True
    most = max(
        c.body_bytes(b - a, plan.group) for c, (a, b) in zip(plan.chunk_compressors, pairwise(plan.bounds), strict=True)
    )
    sent = (plan.ranks - 1) * most * (2 if plan.exchange.has_owners else 1)
    return sent < ring_bytes(itemsize * plan.numel, plan.ranks)
