"""Names of Keras variables that a saved and loaded model has, too, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["exchanged_name", "not_broadcast", "stable_name", "unique"]


def stable_name(path: str) -> str:
    """Layer and variable of a path, without the models around them, whose names change when a model is loaded.

    Example:
        >>> stable_name("sequential_20/first/kernel")
        'first/kernel'
    """
    return "/".join(path.split("/")[-2:])


def exchanged_name(variable: Any) -> str:
    """What exchanges call a variable of Keras or TensorFlow; empty if nothing names it.

    Example:
        >>> from types import SimpleNamespace
        >>> exchanged_name(SimpleNamespace(path="sequential_20/first/kernel"))
        'first/kernel'
        >>> exchanged_name(SimpleNamespace(name="first/kernel:0"))
        'first/kernel'
    """
    path = getattr(variable, "path", None)
    return stable_name(path) if path else str(variable.name).partition(":")[0]


def unique(names: Sequence[str]) -> list[str]:
    """Names of which those that come again have their position behind them.

    Example:
        >>> unique(["bias", "kernel", "bias"])
        ['bias', 'kernel', 'bias.2']
    """
    found: list[str] = []
    for i, name in enumerate(names):
        other = name
        while other in found or (other != name and other in names):
            other = f"{other}.{i}"
        found.append(other)
    return found


def not_broadcast(name: str, rank: int) -> str:
    """What users are told whose ranks have begun with different variables."""
    return (
        f"variable {name!r} of rank {rank} differs from that of rank 0, and will go on doing so: ranks exchange "
        "gradients only. Give model.fit callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]. In a loop of "
        "your own on TensorFlow, call hvd.broadcast_variables(model.variables, root_rank=0) before the first step or "
        "after it"
    )
