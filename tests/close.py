"""How near residuals have to be to what they were before a step that was taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["check_taken_back"]


def check_taken_back(
    after: Any, before: Any, largest: float, times: int = 1, dtype: npt.DTypeLike = np.float32
) -> None:
    """Fail unless arrays, or nested lists and dicts of them, are equal but for the rounding that `take_back` states.

    Args:
        after: what is there now; None stands for no array.
        before: what was there.
        largest: no gradient, residual or decoded value of the steps was larger than this.
        times: how many steps were taken back.
        dtype: of the residuals.
    """
    if isinstance(before, dict):
        assert after.keys() == before.keys()
        for key in before:
            check_taken_back(after[key], before[key], largest, times, dtype)
    elif isinstance(before, list | tuple):
        assert len(after) == len(before)
        for one, other in zip(after, before, strict=True):
            check_taken_back(one, other, largest, times, dtype)
    else:
        # a residual that was made by a step that was taken back is nothing
        none = np.zeros(1, dtype)
        one, other = (none if x is None else np.asarray(x, np.float64) for x in (after, before))
        assert np.isfinite(one).all()
        bound = times * largest * 2 * float(np.finfo(dtype).eps)
        worst = float(np.abs(one - other).max(initial=0.0))
        assert worst <= bound, f"off by {worst}, at most {bound} is rounding"
