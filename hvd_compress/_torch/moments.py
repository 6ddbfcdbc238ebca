"""The moments of Adam for one parameter, and the arithmetic of a step: nothing here knows ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hvd_compress.engine.momentum import most_counted

__all__ = ["Moments", "add_update", "direction", "gradient_of", "move"]


class Moments(NamedTuple):
    """What Adam keeps of one parameter.

    Args:
        parameter: that is trained.
        group: its options, as torch.optim keeps them: lr, betas, eps, weight_decay.
        state: step (steps made), variance_steps (gradients that the variance has seen), exp_avg, exp_avg_sq.
    """

    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[str, Any]

    @property
    def steps(self) -> int:
        """Steps made with this parameter."""
        return int(self.state["step"])

    @property
    def momentum(self) -> torch.Tensor:
        """The first moment, not corrected."""
        tensor: torch.Tensor = self.state["exp_avg"]
        return tensor

    @property
    def variance(self) -> torch.Tensor:
        """The second moment, not corrected."""
        tensor: torch.Tensor = self.state["exp_avg_sq"]
        return tensor

    @property
    def _correction(self) -> float:
        return 1.0 - float(self.group["betas"][1]) ** int(self.state["variance_steps"])

    def scale(self) -> torch.Tensor:
        """What momentum is divided by: root of the corrected variance, and eps."""
        return self.variance.div(self._correction or 1.0).sqrt_().add_(self.group["eps"])

    def take_gradient(self, gradient: torch.Tensor, is_frozen: bool) -> None:
        """Update momentum and variance with an averaged gradient.

        Args:
            gradient: of the parameter's shape.
            is_frozen: whether only elements without a variance take one: the square of this gradient, corrected.
        """
        beta1, beta2 = self.group["betas"]
        self.momentum.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        if is_frozen:
            late = gradient.square().mul_(self._correction)
            self.variance.add_(torch.where(self.variance == 0, late, 0.0))
            return
        self.variance.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        self.state["variance_steps"] += 1


def gradient_of(p: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Write a parameter's gradient, or zeros, to a buffer, and return that."""
    if p.grad is None:
        return buffer.zero_()
    return buffer.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)


def direction(m: Moments, gradient: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
    """This rank's next momentum divided by its scale, written over the gradient.

    Args:
        m: whose momentum ranks share.
        gradient: of this rank.
        unseen: where elements have no variance; there it is 0. None where all have one.

    Returns:
        Values that are not finite throughout if the gradient has one that is not.
    """
    beta1, beta2 = m.group["betas"]
    bound = most_counted(beta2)
    # neither the bound nor the mask may hide what is not finite; 0 · inf is NaN
    spoiled = gradient.abs().amax() * 0.0 if gradient.numel() else 0.0
    scale = m.scale()
    gradient.div_(scale).clamp_(-bound, bound).mul_(1.0 - beta1).addcdiv_(m.momentum, scale, value=beta1)
    if unseen is not None:
        gradient.masked_fill_(unseen, 0.0)
    return gradient.add_(spoiled)


def add_update(m: Moments, update: torch.Tensor) -> None:
    """Count a step, and move the parameter by momentum divided by its scale, with AdamW's decay before."""
    m.state["step"] += 1
    move(m.parameter, m.group, update, 1.0 - float(m.group["betas"][0]) ** m.steps)


def move(p: torch.Tensor, group: dict[str, Any], update: torch.Tensor, divisor: float = 1.0) -> None:
    """Move a parameter against an update by the learning rate, with AdamW's decay before.

    Args:
        p: the parameter.
        group: its options: lr and weight_decay.
        update: of the parameter's shape.
        divisor: of the update.
    """
    rate = float(group["lr"])
    if group["weight_decay"]:
        p.mul_(1.0 - rate * group["weight_decay"])
    p.add_(update.to(p.dtype), alpha=-rate / divisor)
