"""Gradients that ranks have combined, and that no step has used."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_compress.engine import Ledger

__all__ = ["Combined", "KeptAside", "Steps"]

_THROWN_AWAY = (
    "gradients were combined, and then thrown away without a step, as in the generator's pass through a discriminator. "
    "What was not sent of them stays owed this once. From now on what is owed is copied before each exchange, to go "
    "back to. Save the copies, and the exchange, with model.requires_grad_(False) during such a pass, or "
    "torch.autograd.grad()"
)
_SAMPLE = 64


class KeptAside:
    """Keeps what is owed before each exchange, from when gradients were thrown away for the first time.

    Attributes:
        is_wanted: whether that has happened.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._state: dict[str, Any] | None = None

    def keep(self, ledger: Ledger[Any] | None) -> None:
        """Keep what these books owe now; nothing for None."""
        self._state = ledger.state_dict() if ledger is not None and ledger.owes else None

    def go_back(self, ledger: Ledger[Any]) -> None:
        """Owe what was kept; where nothing was, warn, and keep it from now on."""
        state, self._state = self._state, None
        if state is not None:
            ledger.go_back_to(state)
        elif ledger.may_owe:
            self.is_wanted = True
            warnings.warn(_THROWN_AWAY, stacklevel=2)


class Combined:
    """Remembers parameters as they were when their gradients were combined.

    Args:
        p: one that has a gradient; a small one, whose gradient is kept alive. The next pass reaches it last.
        others: more of them, since a step may leave one as it is.
    """

    def __init__(self, p: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        self._p, self._gradient = p, p.grad
        self._before = [(each, each._version, _sample(each)) for each in (p, *others)]

    def were_thrown_away(self) -> bool:
        """Whether nobody has used the gradients since, and another pass does not add to them."""
        # optimizers that keep parameters of their own write to these through `data`, which leaves no version
        if any(p._version != version for p, version, _ in self._before):
            return False
        if not all(torch.equal(_sample(p), values) for p, _, values in self._before):
            return False
        p = self._p
        return p.grad is not self._gradient or p.grad is None or not bool(p.grad.any())


class Steps:
    """Tells whether an optimizer has stepped with some of these parameters.

    A fused optimizer leaves no version in a parameter, and in 16 bits a short step leaves its value.

    Args:
        parameters: of a model.

    Attributes:
        were_made: whether one has; set it to False, and ask later.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.were_made = False
        self._parameters = {id(p): p for p in parameters}
        _register()
        _alive.add(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameters of an optimizer that has stepped."""
        given = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        self.were_made = self.were_made or any(id(p) in self._parameters for p in given)


_alive: weakref.WeakSet[Steps] = weakref.WeakSet()


@cache
def _register() -> None:
    """Let all optimizers tell of their steps, for good: PyTorch goes through its hooks while others may come or go."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for steps in tuple(_alive):
        steps.note(optimizer)


def _sample(p: torch.Tensor) -> torch.Tensor:
    return p.detach().reshape(-1)[:_SAMPLE].clone()
