"""Draw lines with their spread, and write each line's name at its end, so that no legend hides anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from candidates import style
from measure import Spread

__all__ = ["across", "label_ends", "label_points", "line", "thin"]

_APART = 0.052  # of the height of a panel: the least distance of two names


def line(panel: Any, x: Sequence[float], spreads: Sequence[Spread], name: str, **how: Any) -> None:
    """Draw medians, and a band from the low to the high ends."""
    looks = {"marker": "o", "markersize": 3.5, **style(name), **how}
    (drawn,) = panel.plot(x, [s.median for s in spreads], **looks)
    panel.fill_between(
        x, [s.low for s in spreads], [s.high for s in spreads], color=drawn.get_color(), alpha=0.13, linewidth=0
    )


def across(seeds: Sequence[Sequence[float]]) -> list[Spread]:
    """Return the spread of the seeds at each place of their curves, of those that have come so far.

    Example:
        >>> [str(spread) for spread in across([[1.0, 2.0], [3.0]])]
        ['2.0 (1.0–3.0)', '2.0 (2.0–2.0)']
    """
    return [Spread.of(seed[i] for seed in seeds if i < len(seed)) for i in range(max(map(len, seeds)))]


def label_ends(panel: Any, size: float = 8.5, *, height: float = _APART, short: bool = False) -> None:
    """Write each line's label to the right of its end, in its colour, apart from the others; draw all lines before."""
    panel.figure.canvas.draw()
    to_axes = panel.transAxes.inverted()
    ends = []
    for drawn in panel.get_lines():
        label = str(drawn.get_label())
        if label.startswith("_"):
            continue
        last = (drawn.get_xdata()[-1], drawn.get_ydata()[-1])
        ends.append([to_axes.transform(panel.transData.transform(last)), label, drawn.get_color()])
    ends.sort(key=lambda end: end[0][1])
    heights = _apart([float(end[0][1]) for end in ends], height)
    for (point, label, colour), y in zip(ends, heights, strict=True):
        text = label.removeprefix("Horovod ") if short else label
        panel.annotate(
            text,
            (point[0], point[1]),
            (1.03, y),
            "axes fraction",
            "axes fraction",
            color=colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops=_leader(colour),
        )


def label_points(panel: Any, points: Sequence[tuple[float, float, str, Any]], size: float = 8.0) -> None:
    """Write the name of each point (x, y, name, colour) in a column to the right of the panel, with a thin leader."""
    panel.figure.canvas.draw()
    to_axes = panel.transAxes.inverted()
    places = [to_axes.transform(panel.transData.transform((x, y))) for x, y, _, _ in points]
    order = sorted(range(len(points)), key=lambda i: places[i][1])
    heights = _apart([float(places[i][1]) for i in order], 0.068)
    for i, y in zip(order, heights, strict=True):
        _, _, name, colour = points[i]
        panel.annotate(
            name,
            tuple(places[i]),
            (1.03, y),
            "axes fraction",
            "axes fraction",
            color=colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops=_leader(colour),
        )


def _leader(colour: Any) -> dict[str, Any]:
    """Return how to draw the line from a name, at the left of its first letter, to what it names."""
    return {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "relpos": (0.0, 0.5)}


def _apart(wanted: Sequence[float], least: float) -> list[float]:
    """Move ascending places apart, each group around the middle of what its members want.

    Example:
        >>> [round(place, 3) for place in _apart([0.5, 0.5, 0.9], 0.1)]
        [0.45, 0.55, 0.9]
    """
    groups: list[list[float]] = []
    for place in wanted:
        groups.append([place])
        while len(groups) > 1 and _low(groups[-1], least) < _high(groups[-2], least) + least:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_low(group, least) + i * least for group in groups for i in range(len(group))]


def _low(group: Sequence[float], least: float) -> float:
    return sum(group) / len(group) - (len(group) - 1) * least / 2


def _high(group: Sequence[float], least: float) -> float:
    return _low(group, least) + (len(group) - 1) * least


def thin(panel: Any) -> None:
    """Leave out what carries no figure."""
    panel.grid(alpha=0.25)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
