"""The exchanges of `PowerSGD`: two sums, of which the second one depends on the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from hvd_compress.compressors import Compressor, PowerSGD
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange.kinds import COLLECTIVE_BYTES, AllGather, Exchange, FewestBytes, TwoPhase
from hvd_compress.exchange.plan import Plan, ring_bytes

__all__ = ["MOST_STAGES", "SumOfFactors", "suited"]


@dataclass(frozen=True)
class SumOfFactors(Exchange):
    """Sums the factors of all tensors of a bucket, uncompressed: first all P, then, made of their sums, all Q.

    The user gives the exchange that each of the sums takes, or "auto"; `suited` makes this of it.

    Args:
        ways: the names of the exchanges that the sums of a bucket may take; one, but for "auto".
    """

    id = "factors"
    collectives: ClassVar[tuple[str, ...]] = ()
    has_owners = False

    ways: tuple[str, ...] = (AllGather.id, TwoPhase.id)

    def pays(self, plan: Plan, itemsize: int) -> bool:
        return _factor_numel(plan.shape, plan.chunk_compressors[0]) * 4 < itemsize * plan.numel

    def alone(self, compressor: Compressor, shape: tuple[int, ...], ranks: int, itemsize: int) -> Plan:
        return self.together({"": (shape, compressor)}, ranks)[""]

    def together(self, tensors: Mapping[str, tuple[tuple[int, ...], Compressor]], ranks: int) -> dict[str, Plan]:
        if self.collectives:
            return {name: self.plan(shape, compressor, ranks) for name, (shape, compressor) in tensors.items()}
        nbytes = 4 * sum(_factor_numel(shape, compressor) for shape, compressor in tensors.values())
        chosen = min((_WAYS[way] for way in self.ways), key=lambda way: way.price(nbytes, ranks))
        return {name: chosen.plan(shape, compressor, ranks) for name, (shape, compressor) in tensors.items()}

    def plan(self, shape: tuple[int, ...], compressor: Compressor, ranks: int) -> Plan:
        """Plan the exchange of a tensor, which has no chunks, and no payload of its own."""
        return Plan(self, shape, ranks, 1, (0, math.prod(shape)), (compressor,), (0,), (), ())

    def price(self, nbytes: float, ranks: int) -> float:
        """Compute what a rank sends of factors of so many bytes, with what collectives cost besides."""
        raise NotImplementedError(f"{self!r} is to choose a way")


@dataclass(frozen=True)
class _GatheredFactors(SumOfFactors):
    """Every rank gets the factors of all others."""

    id = "factors, allgather"
    collectives = ("gather_left", "allgather")
    sums: ClassVar[Exchange] = AllGather()

    def price(self, nbytes: float, ranks: int) -> float:
        return (ranks - 1) * nbytes + COLLECTIVE_BYTES * len(self.collectives)


@dataclass(frozen=True)
class _OwnedFactors(SumOfFactors):
    """Each rank sums an equal share, as in a ring allreduce, whose bytes this has."""

    id = "factors, two_phase"
    collectives = ("alltoall", "gather_left", "scatter_right", "allgather")
    sums: ClassVar[Exchange] = TwoPhase()

    def price(self, nbytes: float, ranks: int) -> float:
        return ring_bytes(nbytes, ranks) + COLLECTIVE_BYTES * len(self.collectives)


_WAYS: dict[str, Any] = {AllGather.id: _GatheredFactors(), TwoPhase.id: _OwnedFactors()}

MOST_STAGES = len(_OwnedFactors.collectives)


def _factor_numel(shape: tuple[int, ...], compressor: Compressor) -> int:
    """Return how many numbers are summed for a tensor: those of both factors, or of itself if it is not compressed."""
    if not compressor.sums_factors:
        return math.prod(shape)
    n, m, r = cast(PowerSGD, compressor).matrix_of(shape)
    return r * (n + m)


def suited(exchange: Exchange, compressors: Sequence[Compressor]) -> Exchange:
    """Return the exchange for tensors of these compressors, where the user has given `exchange` for all.

    Raises:
        UnsupportedError: their factors cannot be summed in that.
    """
    factored = next((compressor for compressor in compressors if compressor.sums_factors), None)
    if factored is None or isinstance(exchange, SumOfFactors):
        return exchange
    ways = {FewestBytes: (AllGather.id, TwoPhase.id), AllGather: (AllGather.id,), TwoPhase: (TwoPhase.id,)}
    if type(exchange) not in ways:
        raise UnsupportedError(
            f"{factored!r} with {exchange!r}: ranks sum factors twice in each step, and the second sum depends on the "
            "first. That is built for exchange='auto', 'two_phase' and 'allgather': give one of these"
        )
    return SumOfFactors(ways[type(exchange)])
