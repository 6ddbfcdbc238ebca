"""Exchanges by the names that users give them, and the plans of tensors in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from hvd_compress.compressors import Compressor
from hvd_compress.errors import ContractError
from hvd_compress.exchange.kinds import AllGather, Dense, Exchange, FewestBytes, Hierarchical, TwoPhase
from hvd_compress.exchange.parameter_server import ParameterServer
from hvd_compress.exchange.plan import Plan

__all__ = ["EXCHANGES", "checked_exchange", "make_plan", "plan_together"]

EXCHANGES: dict[str, Exchange] = {
    exchange.id: exchange for exchange in (FewestBytes(), TwoPhase(), AllGather(), Hierarchical(), ParameterServer())
}


def checked_exchange(exchange: Any) -> Exchange:
    """Return the exchange that the user gave, or whose name that is.

    Raises:
        ValueError: it is neither.
        ContractError: one of the user's own, whose settings are not the fields of a frozen dataclass.
    """
    if isinstance(exchange, Exchange) and not isinstance(exchange, Dense):
        extra = sorted(vars(exchange).keys() - {field.name for field in fields(exchange)})
        try:
            hash(exchange)
        except TypeError as error:
            extra.append(str(error))
        if extra:
            raise ContractError(
                f"{type(exchange).__name__}: settings have to be fields of a frozen dataclass that can be hashed, such "
                f"as numbers and tuples, or ranks cannot compare them: {', '.join(extra)}"
            )
        return exchange
    found = EXCHANGES.get(exchange) if isinstance(exchange, str) else None
    if found is None:
        known = ", ".join(map(repr, EXCHANGES))
        raise ValueError(
            f"exchange={exchange!r}: must be one of {known}, or an Exchange (no class of them, but an object), such as "
            "ParameterServer(root=1)"
        )
    return found


@lru_cache(maxsize=4096)
def make_plan(
    exchange: str | Exchange, compressor: Compressor, shape: tuple[int, ...], ranks: int, itemsize: int = 4
) -> Plan:
    """Plan the exchange of a tensor of `shape`, with elements of `itemsize` bytes, that goes alone among `ranks`.

    Raises:
        ValueError: unknown exchange.
        UnsupportedError: a root that is none of the ranks.
    """
    return checked_exchange(exchange).alone(compressor, shape, ranks, itemsize)


def plan_together(
    exchange: str | Exchange, tensors: Mapping[str, tuple[tuple[int, ...], Compressor]], ranks: int
) -> dict[str, Plan]:
    """Plan the exchange that tensors, {name: (shape, compressor)}, share among `ranks`; "auto" is never dense then.

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
    return checked_exchange(exchange).together(tensors, ranks)
