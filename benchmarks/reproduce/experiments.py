"""List all experiments, and how large each form of them is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import dryden, gpt, gpt_page, lam, lam_page, methods, qsgd, sievert
from .show import Record
from .unit import Unit

__all__ = ["EXPERIMENTS", "SEEDS", "Experiment", "settings_of"]


class Experiment(NamedTuple):
    """Describes a paper's experiment.

    Args:
        version: of its records.
        forms: settings of "tiny", "short" and "full", and of "gpu" where a GPU trains something larger.
        plan: the units of settings and seeds.
        work: what the ranks of a unit do with its settings and checkpoint.
        parts: Markdown by name, of records and the folder for plots.
    """

    version: int
    forms: Mapping[str, dict[str, Any]]
    plan: Callable[[Mapping[str, Any], Sequence[int]], list[Unit]]
    work: Callable[[Mapping[str, Any], Any], dict[str, Any]]
    parts: Callable[[Sequence[Record], Path], dict[str, str]]


EXPERIMENTS = {
    "methods": Experiment(methods.VERSION, methods.FORMS, methods.plan, methods.work, methods.parts),
    "dryden": Experiment(dryden.VERSION, dryden.FORMS, dryden.plan, dryden.work, dryden.parts),
    "lam": Experiment(lam.VERSION, lam.FORMS, lam.plan, lam.work, lam_page.parts),
    "sievert": Experiment(sievert.VERSION, sievert.FORMS, sievert.plan, sievert.work, sievert.parts),
    "qsgd": Experiment(qsgd.VERSION, qsgd.FORMS, qsgd.plan, qsgd.work, qsgd.parts),
    "gpt": Experiment(gpt.VERSION, gpt.FORMS, gpt.plan, gpt.work, gpt_page.parts),
}
SEEDS = {"tiny": 1, "short": 1, "full": 3, "gpu": 1}


def settings_of(experiment: str, form: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a form of an experiment, some of them changed.

    Args:
        experiment: its name.
        form: "tiny", "short", "full" or "gpu".
        changes: NAME=JSON each.

    Raises:
        ValueError: a form that this experiment does not have; a change that is no NAME=JSON, or of a setting that it
            does not have.

    Example:
        >>> settings_of("dryden", "short", ["epochs=20"])["epochs"]
        20
    """
    forms = EXPERIMENTS[experiment].forms
    if form not in forms:
        raise ValueError(f"--{form}: forms of {experiment} are {', '.join(forms)}")
    plain = forms[form]
    settings = dict(plain)
    for change in changes:
        name, _, text = change.partition("=")
        if name not in plain:
            raise ValueError(f"--set {change}: settings of {experiment} are {', '.join(plain)}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text  # a plain word, such as a rate
        if type(value) is not type(plain[name]):
            raise ValueError(f"--set {change}: give something like {name}={json.dumps(plain[name])}")
        settings[name] = value
    return settings
