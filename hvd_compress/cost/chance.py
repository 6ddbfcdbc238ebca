"""Tell whether one way is slower than another, or turns merely differ by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean

__all__ = ["is_slower"]

_ONCE_MORE = 4.0  # how many times as long a single turn must take to be believed
_CHANCE = 0.02
# how much the logarithm of a turn's ratio varies while nothing is known of it, and for how many turns that counts
_USUAL, _USUAL_TURNS = 0.1, 2


def is_slower(ratios: Sequence[float]) -> bool:
    """Tell whether ratios of seconds lie above 1 by more than chance explains in 2 % of cases.

    The test is Student's t of their logarithms, one-sided. A single ratio may have been disturbed: it counts from 4 on.

    Args:
        ratios: one for each turn of both, above 0.

    Example:
        >>> from hvd_compress.cost.chance import is_slower
        >>> is_slower([1.3, 1.3]), is_slower([1.05, 1.05]), is_slower([1.6, 0.9, 1.3])
        (True, False, False)
    """
    if len(ratios) < 2:
        return bool(ratios) and ratios[0] > _ONCE_MORE
    logarithms = [math.log(ratio) for ratio in ratios]
    mean, freedom = fmean(logarithms), len(ratios) - 1 + _USUAL_TURNS
    # two turns may agree by chance, so how much turns usually differ counts too
    squares = _USUAL_TURNS * _USUAL**2 + sum((x - mean) ** 2 for x in logarithms)
    return mean > _student(freedom) * math.sqrt(squares / freedom / len(ratios))


@cache
def _student(freedom: int) -> float:
    """Return what Student's t exceeds in `_CHANCE` of cases (Abramowitz and Stegun, 26.7.5), within 1 % from 3 on."""
    z = NormalDist().inv_cdf(1 - _CHANCE)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
