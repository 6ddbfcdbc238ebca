"""Schedule Adam with compressed momentum: how long it warms up, and after which steps its variance may be renewed.

Source: Lu et al., 0/1 Adam (arXiv 2202.06009, 2022), section 5: intervals that double after some renewals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_compress.compressors.settings import check_int

__all__ = ["Renewals"]


@dataclass(frozen=True)
class Renewals:
    """Tells whether a step belongs to the warm-up, and whether a later step may renew Adam's variance (a renewal).

    After the warm-up every second step is a renewal, then every fourth, and so on: the interval doubles after
    `renewals` of them. The paper begins with an interval of 1, which is a warm-up.

    Args:
        warmup_steps: steps of the warm-up.
        renewals: how many are made before the interval doubles; 16 in the paper's experiments.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> from hvd_compress.schedules import Renewals
        >>> schedule = Renewals(warmup_steps=3, renewals=2)
        >>> [step for step in range(32) if schedule.is_due(step)]
        [4, 6, 10, 14, 22, 30]
    """

    warmup_steps: int
    renewals: int = 16

    _MOST: ClassVar[int] = 2**31 - 1

    def __post_init__(self) -> None:
        # one gradient at least: a variance of zeros has nothing to divide by
        check_int(self, "warmup_steps", self.warmup_steps, 1, self._MOST)
        check_int(self, "renewals", self.renewals, 1, self._MOST)

    def is_warming(self, steps: int) -> bool:
        """Whether the step after `steps` others belongs to the warm-up."""
        return steps < self.warmup_steps

    def is_due(self, steps: int) -> bool:
        """Whether the step after `steps` others is a renewal."""
        number = steps - self.warmup_steps + 1
        if number < 1:
            return False
        doublings = ((number - 1) // self.renewals + 2).bit_length() - 2
        begin = self.renewals * (2 ** (doublings + 1) - 2)
        return bool((number - begin) % 2 ** (doublings + 1) == 0)
