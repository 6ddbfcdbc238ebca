"""Hold the figures that the papers report, each with its place, beside which ours are put; nothing else holds them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DRYDEN", "DRYDEN_ALONE", "LAM_SPEEDUP", "LAM_TARGET", "Figure"]


class Figure(NamedTuple):
    """Holds a figure of a paper.

    Args:
        value: in the unit that `what` says.
        what: what the figure is.
        source: paper and place.
    """

    value: float
    what: str
    source: str


def _dryden(value: float, place: str = "Table 1") -> Figure:
    return Figure(value, "test accuracy on MNIST after 20 epochs, %", f"Dryden et al. 2016, section 4.4, {place}")


DRYDEN = {
    "normal": _dryden(98.51),
    "one-bit": _dryden(98.49),
    "threshold": _dryden(98.12),
    "adaptive": _dryden(98.53),
}
DRYDEN_ALONE = _dryden(98.09, "text: the best of four models without any communication")
LAM_TARGET = Figure(99.5, "training accuracy that is timed, %", "Lam et al. 2017, section 5, figure 3")
LAM_SPEEDUP = Figure(2.0, "times as fast to that accuracy, 14 machines", "Lam et al. 2017, section 5, figure 3")
