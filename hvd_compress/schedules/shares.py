"""Schedule the share of a tensor that is sent while a training warms up.

Source: Lin et al., Deep Gradient Compression (arXiv 1712.01887, 2018), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.compressors.settings import check_int

__all__ = ["Shares"]


@dataclass(frozen=True)
class Shares:
    """Tells which share of the entries is sent after a number of steps.

    Args:
        steps: of the warm-up; 0 for none.
        shares: in (0, 1), one after the other for equal numbers of steps.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> from hvd_compress.schedules import Shares
        >>> [Shares(4, (0.25, 0.05)).at(steps) for steps in range(6)]
        [0.25, 0.25, 0.05, 0.05, None, None]
    """

    steps: int
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        check_int(self, "steps", self.steps, 0, 2**31 - 1)
        if not self.shares or not all(0.0 < share < 1.0 for share in self.shares):
            raise ValueError(f"Shares(shares={self.shares!r}): must be some numbers greater than 0 and less than 1")

    def at(self, steps: int) -> float | None:
        """The share after so many steps; None once the warm-up is over."""
        return self.shares[steps * len(self.shares) // self.steps] if steps < self.steps else None
