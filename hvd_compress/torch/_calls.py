"""The exchanges of named calls of `allreduce`: residuals go from call to call, and from ranks to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvd_compress.compressors import Compressor, from_config
from hvd_compress.engine import CarriedStates, Ledger, Owed, survivor_state
from hvd_compress.fingerprint import Place
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._ranks import TorchRanks

__all__ = [
    "Agreed",
    "CallKey",
    "CarriedCalls",
    "agreed",
    "engine_of",
    "forget_residuals",
    "keep",
    "pay_at_once",
    "states",
]

State = dict[str, Any]


class CallKey(NamedTuple):
    """Of calls that share residuals.

    Args:
        process_set: its name; see `fingerprint.scope_of`.
        tensors: name, shape and type of each.
        compressor: of the call.
    """

    process_set: str
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    compressor: Compressor


class Agreed(NamedTuple):
    """The last call of a name, on which all ranks have agreed, and how its exchange begins.

    Args:
        key: of the call.
        first: the operations that its exchange begins with.
    """

    key: tuple[Any, ...]
    first: list[Place]


agreed: dict[tuple[str, str, int], Agreed] = {}
"""By name, process set and number of ranks."""
_dtypes = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_engines: dict[tuple[CallKey, int], Engine] = {}
"""By the number of ranks, too."""
_owed: dict[CallKey, State] = {}
"""In elastic runs, what is owed of calls that were not made since ranks have come or gone."""


def engine_of(key: CallKey, ranks: int) -> Engine | None:
    """Return what exchanges such calls, if one of them was made."""
    return _engines.get((key, ranks))


def keep(key: CallKey, ranks: int, engine: Engine, averages: bool) -> None:
    """Keep what exchanges such calls, and let it take over what is owed of calls among other ranks.

    Args:
        key: of the calls.
        ranks: that take part.
        engine: new.
        averages: whether the calls average; see `survivor_state` for what residuals are multiplied by then.
    """
    _engines[key, ranks] = engine
    state = _owed.pop(key, None)
    if state is not None:
        factor = ranks / state["size"] if averages else 1.0
        engine.load_state_dict(survivor_state(state, ranks, TorchRanks().position, factor))


def pay_at_once(key: CallKey, tensors: Sequence[torch.Tensor], averages: bool) -> list[torch.Tensor]:
    """Add what is owed of such calls to their tensors, where one rank is left, which sends everything."""
    state = _owed.get(key)
    if state is None:
        return list(tensors)
    owed = survivor_state(state, 1, 0, 1 / state["size"] if averages else 1.0)["residuals"]
    added = []
    for (name, _, _), tensor in zip(key.tensors, tensors, strict=True):
        if name in owed:
            values = torch.from_numpy(owed[name]["values"]).to(tensor.device, tensor.dtype)
            tensor = tensor + values.view(tensor.shape)
        added.append(tensor)
    # a step that is skipped pays nothing
    if all(bool(torch.isfinite(tensor).all()) for tensor in added):
        del _owed[key]
    return added


def states() -> dict[CallKey, State]:
    """What is owed of all named calls, as states with arrays of NumPy."""
    return {**_owed, **{key: Ledger.state_dict(engine) for (key, _), engine in _engines.items()}}


def forget_residuals() -> None:
    """Drop the residuals that named calls of `allreduce` have kept; all ranks must do so at the same point."""
    _engines.clear()
    _owed.clear()


class CarriedCalls(CarriedStates):
    """Of all named calls; see `Carried`."""

    def __init__(self, label: str) -> None:
        super().__init__(label, TorchRanks)

    def _owed(self) -> dict[Any, Owed]:
        return {key: Owed(state) for key, state in states().items()}

    def _go_back(self, owed: dict[Any, Owed]) -> None:
        for engine in _engines.values():
            engine.rest()
        # who joins has agreed on none
        agreed.clear()
        _engines.clear()
        _owed.clear()
        _owed.update({key: one.state for key, one in owed.items()})

    def _said(self, key: Any) -> Any:
        tensors = [[name, list(shape), str(dtype)] for name, shape, dtype in key.tensors]
        return [key.process_set, tensors, key.compressor.get_config()]

    def _heard(self, said: Any) -> CallKey:
        process_set, tensors, config = said
        known = tuple((name, tuple(shape), _dtypes[dtype]) for name, shape, dtype in tensors)
        return CallKey(process_set, known, from_config(config))
