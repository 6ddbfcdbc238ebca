"""The moments of Adam for one variable as functions of tensors, of any framework: nothing here knows ranks or steps.

`hvd_compress._torch.moments` computes the same in place; the two are tested against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_compress._keras.arithmetic import Arithmetic
from hvd_compress.engine.momentum import most_counted

__all__ = ["Betas", "Moments"]

Tensor = Any


@dataclass(frozen=True)
class Betas:
    """What Adam is told.

    Args:
        first: decay of the momentum for each step.
        second: decay of the variance for each gradient.
        epsilon: added to the root of the variance.
    """

    first: float
    second: float
    epsilon: float


class Moments(NamedTuple):
    """What Adam keeps of one variable at one step.

    Args:
        using: the framework's functions.
        betas: settings.
        momentum: the first moment, not corrected.
        variance: the second moment, not corrected.
        seen: how many gradients the variance has seen.
    """

    using: Arithmetic
    betas: Betas
    momentum: Tensor
    variance: Tensor
    seen: Any

    def scale(self) -> Tensor:
        """What momentum is divided by: root of the corrected variance, and epsilon."""
        correction = self.using.correction(self.betas.second, self.seen, self.variance)
        return self.using.root(self.variance / correction) + self.betas.epsilon

    def unseen(self) -> Tensor:
        """Where elements have no variance."""
        return self.variance == 0.0

    def with_gradient(self, gradient: Tensor) -> Moments:
        """Momentum and variance after an averaged gradient."""
        beta = self.betas.second
        variance = beta * self.variance + (1.0 - beta) * gradient * gradient
        return self._replace(momentum=self._grown(gradient), variance=variance, seen=self.seen + 1)

    def with_late_gradient(self, gradient: Tensor) -> Moments:
        """Momentum after an averaged gradient; only elements without a variance take one, the square of that."""
        correction = self.using.correction(self.betas.second, self.seen, self.variance)
        late = gradient * gradient * correction
        variance = self.using.where(self.unseen(), late, self.variance)
        return self._replace(momentum=self._grown(gradient), variance=variance)

    def direction(self, gradient: Tensor) -> Tensor:
        """This rank's next momentum divided by its scale; 0 where there is no variance.

        Returns:
            Values that are not finite throughout if the gradient has one that is not.
        """
        scale, beta = self.scale(), self.betas.first
        counted = self.using.clipped(gradient / scale, most_counted(self.betas.second))
        mine = counted * (1.0 - beta) + self.momentum * beta / scale
        # neither the bound nor the mask may hide what is not finite
        return self.masked(mine) + self.using.spoiled(gradient)

    def masked(self, update: Tensor) -> Tensor:
        """An update that is 0 where there is no variance."""
        return self.using.where(self.unseen(), self.using.nothing(update), update)

    def _grown(self, gradient: Tensor) -> Tensor:
        return self.betas.first * self.momentum + (1.0 - self.betas.first) * gradient
