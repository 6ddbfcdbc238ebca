"""Fit seconds as a straight line of a size: what one call costs, and what each byte or element adds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

__all__ = ["Line", "fit_line"]


@dataclass(frozen=True)
class Line:
    """Gives seconds by size: `fixed + per_unit * size`.

    Args:
        fixed: seconds, 0 or more.
        per_unit: seconds per byte or element, 0 or more.

    Raises:
        ValueError: negative or not finite.

    Example:
        >>> from hvd_compress.cost import Line
        >>> Line(fixed=0.001, per_unit=1e-9)(1_000_000)
        0.002
    """

    fixed: float = 0.0
    per_unit: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed", "per_unit"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Line({name}={value!r}): must be finite and 0 or more")

    def __call__(self, size: float) -> float:
        return self.fixed + self.per_unit * size

    def slowed(self, factor: float) -> Line:
        """Return the line with `per_unit` times `factor`."""
        return Line(self.fixed, self.per_unit * factor)


def fit_line(points: Iterable[tuple[float, float]]) -> Line:
    """Fit the line of least squared *relative* errors to (size, seconds), with neither part negative.

    A size counts by the mean of those repeats that took at most twice their median: a few disturbed ones do not matter,
    but those of a link that is now faster, now slower do. Errors are relative, so that the smallest and the largest
    size matter alike.

    Raises:
        ValueError: fewer than two different sizes, or seconds that are not above 0.

    Example:
        >>> from hvd_compress.cost import fit_line
        >>> line = fit_line([(10, 3.0), (10, 3.0), (10, 99.0), (20, 5.0)])
        >>> round(line.fixed, 6), round(line.per_unit, 6)
        (1.0, 0.2)
    """
    repeats: dict[float, list[float]] = defaultdict(list)
    for size, seconds in points:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{seconds!r} seconds for size {size!r}: must be above 0")
        repeats[size].append(seconds)
    if len(repeats) < 2:
        raise ValueError(f"a line through sizes {sorted(repeats)}: measure at least two different ones")
    # (fixed + per_unit * size) / seconds = 1 for each size
    typical = {size: fmean(s for s in of_size if s <= 2 * median(of_size)) for size, of_size in repeats.items()}
    rows = [(1 / seconds, size / seconds) for size, seconds in typical.items()]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    candidates = [(a / aa, 0.0), (0.0, b / bb)]
    if determinant > 0:
        candidates.append(((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant))

    def error(line: tuple[float, float]) -> float:
        return sum((line[0] * u + line[1] * v - 1) ** 2 for u, v in rows)

    return Line(*min((c for c in candidates if min(c) >= 0), key=error))
