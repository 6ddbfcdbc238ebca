"""Share what the sections of the page need: groups of records, figures of several seeds, plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from .unit import key_of

__all__ = [
    "MISSING",
    "Record",
    "all_groups",
    "beside",
    "complete",
    "figure_of",
    "of_seeds",
    "plot_of",
    "said_settings",
    "shown",
]

Record = dict[str, Any]
Group = tuple[dict[str, Any], dict[str, list[Record]]]
MISSING = "**missing**"
_OF_A_UNIT = ("method", "seed", "bits", "coding")
_SAID = {
    "width": "{:,} wide",
    "epochs": "{:,} epochs",
    "train": "{:,} images",
    "batch": "batches of {} a rank",
    "ranks": "{} ranks",
    "rate": "links of {}",
}


def all_groups(records: Sequence[Record], largest: str) -> list[Group]:
    """Group records that differ in method and seed only, by label; groups of the largest setting come first."""
    groups: dict[str, Group] = {}
    for record in records:
        shared = {key: value for key, value in record["settings"].items() if key not in _OF_A_UNIT}
        shared["ranks"] = record["ranks"]
        group = groups.setdefault(json.dumps(shared, sort_keys=True), (shared, {}))
        group[1].setdefault(record["label"], []).append(record)
    for _, rows in groups.values():
        for of_label in rows.values():
            of_label.sort(key=lambda record: record["settings"].get("seed", 0))
    return sorted(groups.values(), key=lambda group: (group[0][largest], group[0].get("epochs", 0)), reverse=True)


def complete(rows: Mapping[str, list[Record]], labels: Sequence[str]) -> Iterator[tuple[str, list[Record]]]:
    """Return all labels that should be there, and what there is of each."""
    for label in labels:
        yield label, rows.get(label, [])


def of_seeds(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """Return the mean of seeds, with the extremes where there is more than one.

    Example:
        >>> of_seeds([1.0, 2.0], 1), of_seeds([1.0], 1), of_seeds([], 1)
        ('1.5 (1.0–2.0)', '1.0', '**missing**')
    """
    if not values:
        return MISSING
    form = f"{'+' if sign else ''}.{digits}f"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def beside(records: Sequence[Record], values: Sequence[float], others: Sequence[Record]) -> list[tuple[float, Record]]:
    """Pair a value of each record with the record of the same seed among `others`; without one it is left out."""
    of_seed = {record["settings"]["seed"]: record for record in others}
    seeds = [record["settings"]["seed"] for record in records]
    return [(value, of_seed[seed]) for value, seed in zip(values, seeds, strict=True) if seed in of_seed]


def said_settings(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Say some settings in words.

    Example:
        >>> said_settings({"width": 1024, "epochs": 8}, ("width", "epochs"))
        '1,024 wide, 8 epochs'
    """
    return ", ".join(_SAID[key].format(settings[key]) for key in keys)


def plot_of(experiment: str, settings: Mapping[str, Any], kind: str) -> str:
    """Return the name of a group's plot, which no other group has."""
    return f"{experiment}-{kind}-{key_of(experiment, 0, settings)[:6]}"


@contextmanager
def figure_of(folder: Path, name: str, panels: int = 1, rows: int = 1, *, same_axes: bool = False) -> Iterator[Any]:
    """Make a figure to draw into, one panel or an array of them, that is saved at the end."""
    import matplotlib.pyplot as plt

    size = (max(7, 4.2 * panels), 3.8 * rows)
    figure, axes = plt.subplots(rows, panels, figsize=size, layout="constrained", sharex=same_axes, sharey=same_axes)
    try:
        yield axes
        for panel in [axes] if panels == rows == 1 else axes.flat:
            panel.grid(alpha=0.3)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.png", dpi=90)
    finally:
        plt.close(figure)


def shown(name: str) -> str:
    """Return the Markdown that shows a figure; `page` knows the way to its folder."""
    return f"![{name}](<plots>/{name}.png)"
