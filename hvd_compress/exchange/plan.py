"""Compute the sizes, bounds and slots of an exchange once from shapes, with equal results on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from hvd_compress.compressors import Compressor
from hvd_compress.exchange.parameter_server import EXCHANGE, ParameterServer

__all__ = [
    "COLLECTIVES",
    "EXCHANGES",
    "Plan",
    "checked_exchange",
    "chunk_bounds",
    "make_plan",
    "plan_together",
    "ring_bytes",
    "saves_bytes",
]

EXCHANGES = ("auto", "two_phase", "allgather", "hierarchical", EXCHANGE)

# What a collective costs besides its bytes, in bytes: between the 80 kB at which four ranks broke even on links of
# 1 Gbit/s, and the 10 kB of 100 Mbit/s. Auto measures the link instead.
COLLECTIVE_BYTES = 2**15

# what follows each stage; all but "allgather" and "broadcast" are alltoalls of Horovod, some of them with empty parts
COLLECTIVES = {
    "two_phase": ("alltoall", "allgather"),
    "allgather": ("allgather",),
    "hierarchical": ("scatter_inside", "alltoall", "gather_between", "gather_inside"),
    EXCHANGE: ("alltoall", "broadcast"),
    "dense": (),
}


@dataclass(frozen=True)
class Plan:
    """Says which rank encodes which elements of a tensor, and how many bytes that can take.

    Args:
        exchange: "two_phase", "allgather", "hierarchical", "parameter_server", or "dense" where compressing would not
            save bytes.
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

    exchange: str
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
        return COLLECTIVES[self.exchange]


def chunk_bounds(numel: int, chunks: int, group: int) -> tuple[int, ...]:
    """Divide `numel` elements evenly into `chunks`, on group boundaries where there are enough groups."""
    # octets keep bit streams of neighbouring chunks on byte boundaries of the tensor
    unit = next((u for u in (group, 8) if numel >= u * chunks), 1)
    units = -(-numel // unit)
    return (*(min(numel, unit * (i * units // chunks)) for i in range(chunks)), numel)


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Compute the bytes that each rank sends, and receives, in a ring allreduce of `nbytes`."""
    return 2 * (ranks - 1) / ranks * nbytes


def checked_exchange(exchange: str | ParameterServer) -> str | ParameterServer:
    """Return the exchange that the user gave, with "parameter_server" replaced by a `ParameterServer`.

    Raises:
        ValueError: it names no exchange.
    """
    if isinstance(exchange, ParameterServer):
        return exchange
    if exchange not in EXCHANGES:
        known = ", ".join(map(repr, EXCHANGES))
        raise ValueError(f"exchange={exchange!r}: must be one of {known}, or a ParameterServer")
    return ParameterServer() if exchange == EXCHANGE else exchange


def sent_bytes(plans: Sequence[Plan]) -> float:
    """Compute the most bytes that a rank sends in one exchange of the tensors of `plans`, which go together."""
    others = plans[0].ranks - 1
    if plans[0].exchange == "allgather":
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
    sent = (plan.ranks - 1) * most * (1 if plan.exchange == "allgather" else 2)
    return sent < ring_bytes(itemsize * plan.numel, plan.ranks)


def _priced(plans: Sequence[Plan]) -> float:
    """Compute the cost of an exchange of the tensors of `plans`, in bytes."""
    return sent_bytes(plans) + COLLECTIVE_BYTES * len(plans[0].collectives)


def _plan(
    exchange: str, compressor: Compressor, shape: tuple[int, ...], ranks: int, bounds: tuple[int, ...] | None = None
) -> Plan:
    numel = math.prod(shape)
    group = compressor.group_of(shape)
    if exchange == "allgather":
        bounds = (0, numel)
    elif bounds is None:
        bounds = chunk_bounds(numel, ranks, group)
    sizes = [b - a for a, b in pairwise(bounds)]
    parts = tuple(compressor.for_part(n, numel) if n else compressor for n in sizes)
    # a tensor without elements still has one payload, so that its exchange is not empty
    slots = tuple(part.capacity(n, group) if n or numel == 0 else 0 for part, n in zip(parts, sizes, strict=True))
    return Plan(exchange, shape, ranks, group, bounds, parts, slots, parts, slots)


def _plan_of_root(server: ParameterServer, compressor: Compressor, shape: tuple[int, ...], ranks: int) -> Plan:
    """Plan one chunk of all elements, which the root owns."""
    root, numel = server.root_among(ranks), math.prod(shape)
    answers = server.answers_of(compressor)
    # groups are those of the gradients, whatever the answer is made of
    group = compressor.group_of(shape)

    def at_root(nbytes: int) -> tuple[int, ...]:
        return tuple(nbytes if rank == root else 0 for rank in range(ranks))

    return Plan(
        EXCHANGE, shape, ranks, group, (*(0,) * (root + 1), *(numel,) * (ranks - root)),
        (compressor,) * ranks, at_root(compressor.capacity(numel, group)),
        (answers,) * ranks, at_root(answers.capacity(numel, group)), root,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def make_plan(
    exchange: str | ParameterServer, compressor: Compressor, shape: tuple[int, ...], ranks: int, itemsize: int = 4
) -> Plan:
    """Plan the exchange of a tensor of `shape` that goes alone among `ranks`.

    "auto" takes the exchange that sends fewer bytes, each collective counted as `COLLECTIVE_BYTES` more, and "dense" if
    neither sends fewer than a ring allreduce of elements of `itemsize` bytes.

    Raises:
        ValueError: unknown exchange.
        UnsupportedError: a root that is none of the ranks.
    """
    exchange = checked_exchange(exchange)
    if isinstance(exchange, ParameterServer):
        return _plan_of_root(exchange, compressor, shape, ranks)
    if exchange != "auto":
        return _plan(exchange, compressor, shape, ranks)
    candidates = [[_plan(e, compressor, shape, ranks)] for e in ("allgather", "two_phase")]
    # collectives are left out here: in a bucket the tensor shares them with others
    if ranks > 1 and min(map(sent_bytes, candidates)) >= ring_bytes(itemsize * math.prod(shape), ranks):
        return Plan("dense", shape, ranks, 1, (0, math.prod(shape)), (), (), (), ())
    (best,) = min(candidates, key=_priced)
    return best


def plan_together(
    exchange: str | ParameterServer, tensors: Mapping[str, tuple[tuple[int, ...], Compressor]], ranks: int
) -> dict[str, Plan]:
    """Plan the exchange that tensors, {name: (shape, compressor)}, share among `ranks`.

    In two phases each rank owns an equal run of all elements that share a compressor, so that it decodes and encodes
    few long chunks instead of a short one of every tensor. "auto" is decided for all together, as `make_plan`
    does it for one, but never "dense".

    Raises:
        ValueError: unknown exchange.
        UnsupportedError: a root that is none of the ranks.

    Example:
        >>> from hvd_compress import OneBit
        >>> from hvd_compress.exchange import plan_together
        >>> plans = plan_together("two_phase", {"a": ((64, 512), OneBit()), "b": ((32, 512), OneBit())}, 3)
        >>> {name: plan.bounds for name, plan in plans.items()}
        {'a': (0, 16384, 32768, 32768), 'b': (0, 0, 0, 16384)}
    """
    exchange = checked_exchange(exchange)
    if isinstance(exchange, ParameterServer):
        return {n: _plan_of_root(exchange, compressor, shape, ranks) for n, (shape, compressor) in tensors.items()}
    if exchange != "auto":
        return _plans(exchange, tensors, ranks)
    candidates = [_plans(e, tensors, ranks) for e in ("allgather", "two_phase")]
    return min(candidates, key=lambda plans: _priced(list(plans.values())))


def _plans(exchange: str, tensors: Mapping[str, tuple[tuple[int, ...], Compressor]], ranks: int) -> dict[str, Plan]:
    plans: dict[str, Plan] = {}
    for kind in dict.fromkeys(compressor for _, compressor in tensors.values()):
        alike = {name: shape for name, (shape, compressor) in tensors.items() if compressor == kind}
        if exchange == "allgather" or len(alike) == 1:
            plans |= {name: _plan(exchange, kind, shape, ranks) for name, shape in alike.items()}
            continue
        ends = list(accumulate((math.prod(shape) for shape in alike.values()), initial=0))
        for (name, shape), start in zip(alike.items(), ends, strict=False):
            bounds = _bounds_within(start, math.prod(shape), ends[-1], ranks, kind.group_of(shape))
            plans[name] = _plan(exchange, kind, shape, ranks, bounds)
    return {name: plans[name] for name in tensors}


def _bounds_within(start: int, numel: int, total: int, chunks: int, group: int) -> tuple[int, ...]:
    """Compute where an even division of `total` elements cuts the `numel` from `start` on, at group boundaries."""
    unit = group if numel >= group * 2 else 8
    cuts = (round((i * total / chunks - start) / unit) * unit for i in range(1, chunks))
    return (0, *(min(max(cut, 0), numel) for cut in cuts), numel)
