"""Gradients that ranks have combined, and that no step has used."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hvd_compress.engine import Ledger

__all__ = ["Combined", "KeptAside"]

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
    """Remembers a parameter as it was when its gradient was combined.

    Args:
        p: one that has a gradient; a small one, whose gradient is kept alive.
    """

    def __init__(self, p: torch.Tensor) -> None:
        self._p, self._gradient, self._version, self._values = p, p.grad, p._version, _sample(p)

    def were_thrown_away(self) -> bool:
        """Whether nobody has used the gradient since, and another pass does not add to it."""
        p = self._p
        # optimizers that keep parameters of their own write to these through `data`, which leaves no version
        if p._version != self._version or not torch.equal(_sample(p), self._values):
            return False
        return p.grad is not self._gradient or p.grad is None or not bool(p.grad.any())


def _sample(p: torch.Tensor) -> torch.Tensor:
    return p.detach().reshape(-1)[:_SAMPLE].clone()
