"""Write `docs/reproductions.md` from the records and the prose in `page.md`; no figure is typed by hand."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from measure import table
from places import UNLIMITED

from .experiments import EXPERIMENTS, SEEDS, settings_of
from .papers import DRYDEN, DRYDEN_ALONE, LAM_SPEEDUP, LAM_TARGET
from .show import Record
from .store import Store
from .unit import Unit

__all__ = ["filled", "status", "write"]

PROSE = Path(__file__).with_name("page.md")
_MACHINE = ("processor", "cores", "memory_gib", "system", "python", "mpi", "hvd_compress", "horovod", "torch", "numpy")
_PLACE = re.compile(r"\{\{([a-z_.]+)\}\}")


def write(path: Path, store: Store, prose: str | None = None) -> None:
    """Write the page, and its plots beside the records.

    Args:
        path: of the page.
        store: of the records.
        prose: with places for what is made of them, {{dryden.accuracy}}; that of `page.md` if not given.
    """
    texts = {"papers": _papers()}
    everything: dict[str, list[Record]] = {}
    for name, experiment in EXPERIMENTS.items():
        records = everything[name] = store.records(name, experiment.version)
        found = experiment.parts(records, store.folder)
        texts |= {f"{name}.{part}": text or _nothing(name) for part, text in found.items()}
        texts[f"{name}.status"] = status(name, store)
    texts["conditions"] = _conditions(everything)
    plots = Path(os.path.relpath(store.folder, path.parent)).as_posix()
    text = filled(prose or PROSE.read_text(), texts).replace("<plots>", plots)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n")


def filled(prose: str, texts: Mapping[str, str]) -> str:
    """Fill each place of the prose with a text.

    Raises:
        ValueError: a place without a text, or a text without a place: nothing that was measured is to be left out.

    Example:
        >>> filled("Ours: {{accuracy}}.", {"accuracy": "98 %"})
        'Ours: 98 %.'
    """
    places = set(_PLACE.findall(prose))
    if places != set(texts):
        wrong = ", ".join(sorted(places ^ set(texts)))
        raise ValueError(f"{PROSE.name} and what is made of records do not fit each other: {wrong}")
    return _PLACE.sub(lambda place: texts[place[1]], prose)


def status(name: str, store: Store) -> str:
    """Say in words how much of an experiment is recorded."""
    said = []
    for form in ("short", "full", "gpu"):
        if form not in EXPERIMENTS[name].forms:
            continue
        units = EXPERIMENTS[name].plan(settings_of(name, form), range(SEEDS[form]))
        missing = [unit for unit in units if not _is_recorded(unit, store)]
        done = f"{len(units) - len(missing)} of {len(units)} starts of the {form} form are recorded"
        said.append(f"**{done}**" if missing else done)
    return f"{'; '.join(said)}."


def _is_recorded(unit: Unit, store: Store) -> bool:
    if store.read(unit) is not None:
        return True
    return unit.rate is not None and store.read(unit.with_rate(UNLIMITED)) is not None


def _nothing(name: str) -> str:
    return f"**Missing:** nothing is recorded. `python -m benchmarks.reproduce {name}` makes the short form."


def _papers() -> str:
    figures = [*((name, figure) for name, figure in DRYDEN.items()), ("no communication", DRYDEN_ALONE)]
    figures += [("Percentile(90)", LAM_TARGET), ("Percentile(90)", LAM_SPEEDUP)]
    return table(["", "figure", "what", "where"], [[n, f"{f.value:g}", f.what, f.source] for n, f in figures])


def _conditions(everything: Mapping[str, Sequence[Record]]) -> str:
    records = [record for of_experiment in everything.values() for record in of_experiment]
    if not records:
        return "Nothing is recorded."
    facts = [
        [key.replace("_", " "), " / ".join(dict.fromkeys(str(record["machine"][key]) for record in records))]
        for key in _MACHINE
    ]
    runs = []
    for name, of_experiment in everything.items():
        for command in dict.fromkeys(shlex.join(record["command"]) for record in of_experiment):
            made = [record for record in of_experiment if shlex.join(record["command"]) == command]
            dates = sorted({record["machine"]["date"] for record in made})
            minutes = sum(map(_seconds, made)) / 60
            data, commits = (
                " / ".join(dict.fromkeys(found))
                for found in (
                    (record["result"]["data"] for record in made),
                    (record["machine"].get("commit", "not recorded") for record in made),
                )
            )
            busy = f"{max(record['machine']['load_before'] for record in made):.1f}"
            period = " to ".join({dates[0]: 0, dates[-1]: 0})
            runs.append([name, f"`{command}`", len(made), period, f"{minutes:.0f}", busy, commits, data])
    head = ["", "command", "starts of ranks", "date", "minutes", "load before, at most", "commit", "data"]
    return "\n".join([_replicas(records), "", table(["", ""], facts), "", table(head, runs)])


def _seconds(record: Record) -> float:
    """Return the seconds of a start; a resumed one counts what it had learned before, too."""
    learning: list[float] = record["result"].get("seconds", [])
    return float(max([record["seconds"], *learning]))


def _replicas(records: Sequence[Record]) -> str:
    same = [r["result"]["replicas_identical"] for r in records if r["result"].get("replicas_identical") is not None]
    said = f"In {sum(same)} of {len(same)} trainings all ranks held the same bytes in the end."
    return said if all(same) else f"**{said}**"
