"""Which wrapper parameters belong to: the last one. Wrappers of different kinds never share a torch optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hvd_compress.errors import GradientError, UnsupportedError
from hvd_compress.torch._horovod import refuse_wrapped

if TYPE_CHECKING:
    from hvd_compress.torch._gradients.combiner import Combiner

__all__ = ["check_owner", "check_sole_step", "disown", "in_use", "refuse_retired", "take_over"]

_owners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Wrapped optimizers in use; they have `_owned()`, the ids of their parameters, and `retire()`."""
_kinds: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
"""What torch optimizers were wrapped by."""


def check_owner(by: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError if an optimizer is a wrapper's result, or another kind of wrapper has it already.

    Args:
        by: the kind of wrapper that it is given to now.
        optimizer: to wrap.
    """
    refuse_wrapped(by, optimizer)
    before = _kinds.get(optimizer, by)
    if before != by:
        raise UnsupportedError(
            f"{by} around an optimizer that {before} has wrapped: ranks would exchange gradients and parameters, or "
            f"one of them twice. Use one of the two; where {by} takes its place, make a torch optimizer anew"
        )


def check_sole_step(by: str, optimizer: torch.optim.Optimizer) -> None:
    """Do as `check_owner`, and refuse LBFGS, for wrappers whose steps must have one gradient each."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"{by} around LBFGS: it evaluates many points in one step. Use an optimizer with one gradient per step"
        )
    check_owner(by, optimizer)


def disown(optimizer: torch.optim.Optimizer) -> None:
    """Forget what an optimizer was wrapped by."""
    _kinds.pop(optimizer, None)


def take_over(owner: Any, parameters: Iterable[torch.Tensor], by: str, optimizer: torch.optim.Optimizer) -> None:
    """Let a wrapped optimizer be the one that exchanges its parameters; others that have some of them are retired.

    A notebook wraps the same model again, and a scheduler keeps the old optimizer alive.

    Args:
        owner: the wrapped optimizer.
        parameters: those that take gradients.
        by: the kind of wrapper.
        optimizer: that was wrapped.
    """
    _kinds[optimizer] = by
    mine = set(map(id, parameters))
    for other in list(_owners):
        if other is not owner and not mine.isdisjoint(other._owned()):
            _owners.discard(other)
            other.retire()
    _owners.add(owner)


def in_use() -> list[Combiner]:
    """Return what combines gradients, in the order in which optimizers were wrapped, which is that of all ranks."""
    combiners = [owner._combiner for owner in _owners if hasattr(owner, "_combiner")]
    return sorted([c for c in combiners if c.is_hooked], key=attrgetter("wrapping.number"))


def refuse_retired() -> NoReturn:
    """Raise GradientError for an optimizer whose parameters another one has taken over."""
    raise GradientError(
        "these parameters were given to another DistributedOptimizer, or another wrapper, after this one: use that "
        "one, and make a new torch optimizer to wrap where you want this one back"
    )
