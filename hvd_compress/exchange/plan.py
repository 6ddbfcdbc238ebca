"""Sizes, bounds and slots of one tensor's exchange: computed once from shapes, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hvd_compress.compressors import Compressor, TopK

__all__ = ["EXCHANGES", "Plan", "chunk_bounds", "make_plan", "ring_bytes"]

EXCHANGES = ("auto", "two_phase", "allgather")


@dataclass(frozen=True)
class Plan:
    """Who encodes what of a tensor, and how many bytes that can take.

    Args:
        exchange: "two_phase", "allgather", or "dense" where compressing would not save bytes.
        shape: of the tensor.
        ranks: that take part.
        group: elements per group of the compressor.
        bounds: of the chunks, `chunks + 1` element offsets.
        chunk_compressors: the compressor of each chunk.
        slots: the most bytes of each chunk's payload.
    """

    exchange: str
    shape: tuple[int, ...]
    ranks: int
    group: int
    bounds: tuple[int, ...]
    chunk_compressors: tuple[Compressor, ...]
    slots: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.bounds[-1]

    @property
    def slot(self) -> int:
        """Bytes of a slot that holds any chunk's payload."""
        return max(self.slots)

    @property
    def fixed_size(self) -> bool:
        """Whether every payload fills its slot in every step, so that all slots can be equal."""
        return all(c.fixed_size for c in self.chunk_compressors)

    @property
    def collectives(self) -> tuple[str, ...]:
        """Names of the collectives between the stages."""
        return {"two_phase": ("alltoall", "allgather"), "allgather": ("allgather",), "dense": ()}[self.exchange]


def chunk_bounds(numel: int, chunks: int, group: int) -> tuple[int, ...]:
    """Offsets that divide `numel` elements evenly into `chunks`, on group boundaries where there are enough groups."""
    # octets keep bit streams of neighbouring chunks on byte boundaries of the tensor
    unit = next((u for u in (group, 8) if numel >= u * chunks), 1)
    units = -(-numel // unit)
    return (*(min(numel, unit * (i * units // chunks)) for i in range(chunks)), numel)


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends, and receives, in a ring allreduce of `nbytes`."""
    return 2 * (ranks - 1) / ranks * nbytes


def _sent_bytes(plan: Plan) -> float:
    """Bytes that a rank sends in one exchange, at most."""
    others = plan.ranks - 1
    return others * sum(plan.slots) if plan.exchange == "allgather" else 2 * others * plan.slot


def _plan(exchange: str, compressor: Compressor, shape: tuple[int, ...], ranks: int) -> Plan:
    numel = math.prod(shape)
    group = compressor.group_numel(shape)
    bounds = chunk_bounds(numel, ranks, group) if exchange == "two_phase" else (0, numel)
    sizes = [b - a for a, b in pairwise(bounds)]
    parts = tuple(c.for_part(n, numel) if isinstance(c := compressor, TopK) else compressor for n in sizes)
    slots = tuple(part.capacity(n, group) for part, n in zip(parts, sizes, strict=True))
    return Plan(exchange, shape, ranks, group, bounds, parts, slots)


@lru_cache(maxsize=4096)
def make_plan(exchange: str, compressor: Compressor, shape: tuple[int, ...], ranks: int, itemsize: int = 4) -> Plan:
    """The plan for a tensor of `shape` among `ranks`.

    "auto" takes the exchange that sends fewer bytes, `allgather` (one collective, one loss) on a tie, and "dense" if
    neither sends fewer than a ring allreduce of elements of `itemsize` bytes.

    Raises:
        ValueError: unknown exchange.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r}: must be one of {', '.join(map(repr, EXCHANGES))}")
    if exchange != "auto":
        return _plan(exchange, compressor, shape, ranks)
    best = min((_plan(e, compressor, shape, ranks) for e in ("allgather", "two_phase")), key=_sent_bytes)
    if ranks > 1 and _sent_bytes(best) >= ring_bytes(itemsize * math.prod(shape), ranks):
        return Plan("dense", shape, ranks, 1, (0, math.prod(shape)), (), ())
    return best
