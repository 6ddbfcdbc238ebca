"""Gradients that ranks have combined, and that no step has used."""

from __future__ import annotations

import torch

__all__ = ["THROWN_AWAY", "Combined"]

THROWN_AWAY = (
    "gradients were combined, and then thrown away without a step, as in the generator's pass through a discriminator. "
    "What was not sent of them stays owed this once. From now on what is owed is copied before each exchange, to go "
    "back to. Save the copies, and the exchange, with model.requires_grad_(False) during such a pass, or "
    "torch.autograd.grad()"
)
_SAMPLE = 64


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
