"""Write what the page shows of the small transformer that Adam trains by every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from measure import Spread, ratios, table

from .gpt import FORMS, LEARNING, NAME, TIMES, plan
from .gpt_methods import DENSE, METHODS
from .show import MISSING, Record, all_groups, beside, complete, figure_of, of_seeds, plot_of, shown
from .unit import Unit

__all__ = ["parts"]

# at most six lines in a panel
_DRAWN = (DENSE, "one-bit", "top-k 1 %", "DeMo", "DiLoCo", "SparseLoCo")
_AVERAGING = ("D-PSGD", "DASO", "DiLoCo", "DiLoCo, one-bit", "DiLoCo, adaptive(64)", "SparseLoCo")
_NEAR = 2.0  # percent above the dense loss that a method may end and still count as equal
Rows = Mapping[str, list[Record]]


def parts(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Write what the page shows of the records: "learning", "steps" and "recorded"."""
    learning, timed = ([r for r in records if r["settings"]["kind"] == kind] for kind in (LEARNING, TIMES))
    learned = []
    for settings, rows in _groups(learning):
        name = plot_of(NAME, settings, "loss")
        learned += [_title(settings, rows), "", _run_on(rows), "", _table(rows), "", _nearest(rows), ""]
        learned += [_plot(rows, folder, name), "", _averaging(settings, rows, timed), ""]
    steps = [text for record in timed for text in (_steps(record), "")]
    return {
        "learning": "\n".join(learned).strip(),
        "steps": "\n".join(steps).strip(),
        "recorded": _recorded(records),
    }


def _groups(records: Sequence[Record]) -> list[tuple[dict[str, Any], dict[str, list[Record]]]]:
    """Group trainings that may be compared: of equal settings, on the same text and the same device."""
    marked = [
        {**r, "settings": {**r["settings"], "text": r["result"]["data"], "card": r["result"]["device"]}}
        for r in records
    ]  # fmt: skip
    return all_groups(marked, "steps")


def _title(settings: Mapping[str, Any], rows: Rows) -> str:
    size = next(iter(rows.values()))[0]["result"]["parameters"] / 1e6
    tokens = settings["steps"] * settings["batch"] * settings["context"] * settings["ranks"] / 1e6
    return (
        f"### {size:.1f} million parameters, {settings['ranks']} ranks, {settings['steps']:,} steps, "
        f"{tokens:.1f} million bytes of text"
    )


def _run_on(rows: Rows) -> str:
    """Say where trainings ran, how they computed, and from which text they learned."""
    records = [record for of_method in rows.values() for record in of_method]
    settings, ranks = records[0]["settings"], records[0]["ranks"]
    card = settings["card"]
    if card == "CPU":
        card = " / ".join(sorted({f"{r['machine']['processor']}, {r['machine']['cores']} cores" for r in records}))
    precision = {"fp32": "float32", "bf16": "bfloat16 by autocast, with float32 parameters and gradients"}
    torch = " / ".join(sorted({r["machine"]["torch"] for r in records}))
    how = precision[settings["precision"]]
    said = [
        f"Run on: {card}, {ranks} ranks on one machine; {how}; torch {torch}.",
        f"Learning rate {settings['learning_rate']:g}.",
        f"CompressedAdam begins with {settings['adam_warm_up']} uncompressed steps.",
        f"Text: {settings['text']}.",
    ]
    return " ".join(said)


def _table(rows: Rows) -> str:
    lines = []
    for method, records in complete(rows, list(METHODS)):
        dense = rows.get(DENSE, []) if method != DENSE else []
        losses, sent = ([of(r) for r in records] for of in (_loss, _bytes))
        lines.append(
            [
                method,
                of_seeds(losses, 3),
                of_seeds(_above(records, dense), 1, sign=True) if dense and records else "",
                _megabytes(mean(sent)) if sent else "",
                _times(_fewer(records, dense, _bytes)),
                _times(_fewer(records, dense, _last_bytes)),
                len(records),
            ]
        )
    head = [
        "", "loss on text held out, nats a byte", f"above {DENSE}, %", "MB a rank sent in all", "times fewer, in all",
        "times fewer, at the end", "seeds",
    ]  # fmt: skip
    return table(head, lines)


def _loss(record: Record) -> float:
    return float(record["result"]["test"][-1])


def _bytes(record: Record) -> float:
    """Return the bytes of a rank in all steps, the mean of ranks."""
    return float(record["result"]["bytes"][-1])


def _last_bytes(record: Record) -> float:
    """Return the bytes of a rank since the loss was measured last before the end: there no warm-up is in them."""
    before, after = [0.0, *record["result"]["bytes"]][-2:]
    return float(after - before)


def _above(records: Sequence[Record], dense: Sequence[Record]) -> list[float]:
    """Return by how many percent each seed's loss is above that of the dense training of the same seed."""
    losses = [_loss(record) for record in records]
    return [100 * (loss / _loss(of) - 1) for loss, of in beside(records, losses, dense)]


def _fewer(records: Sequence[Record], dense: Sequence[Record], of: Callable[[Record], float]) -> list[float]:
    """Return how many times fewer bytes each seed has sent than the dense training of the same seed."""
    return [of(other) / nbytes for nbytes, other in beside(records, [of(r) for r in records], dense) if nbytes]


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f}"


def _times(factors: Sequence[float]) -> str:
    return f"{mean(factors):,.1f}" if factors else ""


def _nearest(rows: Rows) -> str:
    """Name the method of the fewest bytes whose loss is near the dense one's with all seeds."""
    dense = rows.get(DENSE, [])
    found = []
    for method, records in rows.items():
        above = _above(records, dense)
        if method != DENSE and above and max(above) <= _NEAR:
            found.append((mean(_fewer(records, dense, _bytes)), method, above))
    if not found:
        return f"No method is within {_NEAR:g} % of the loss of {DENSE} with all seeds."
    fewer, method, above = max(found)
    return (
        f"The fewest bytes within {_NEAR:g} % of the loss of {DENSE} with all seeds: **{method}**, {fewer:,.1f} times "
        f"fewer, {of_seeds(above, 1, sign=True)} % above."
    )


def _averaging(settings: Mapping[str, Any], rows: Rows, timed: Sequence[Record]) -> str:
    """Write the table of the methods whose ranks train alone and average parameters; with times where there are."""
    clocks = [r for r in timed if r["ranks"] == settings["ranks"] and _same_network(r["settings"], settings)]
    dense = rows.get(DENSE, [])
    lines: list[list[object]] = []
    for method, records in complete(rows, _AVERAGING):
        lines.append(
            [
                method,
                of_seeds([_loss(record) for record in records], 3),
                of_seeds(_above(records, dense), 1, sign=True) if dense and records else "",
                _times(_fewer(records, dense, _bytes)),
                *(_milliseconds(record, method) for record in clocks),
            ]
        )
    rates = [f"a step at {record['settings']['rate']}, ms" for record in clocks]
    head = ["ranks that train alone", "loss, nats a byte", f"above {DENSE}, %", "times fewer bytes", *rates]
    said = [] if clocks else ["", "**Not measured:** how long their steps take on slow links."]
    return "\n".join([table(head, lines), *said])


def _same_network(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(some[key] == others[key] for key in ("width", "layers", "heads", "batch", "context", "sync"))


def _milliseconds(record: Record, method: str) -> str:
    rows, steps = record["result"]["rows"], record["result"]["steps"]
    return str(Spread.of([1e3 * s / steps for s in rows[method]["seconds"]])) if method in rows else MISSING


def _plot(rows: Rows, folder: Path, name: str) -> str:
    from drawing import label_ends, line, thin

    with figure_of(folder, name, panels=2) as panels:
        for i, method in enumerate(_DRAWN):
            records = rows.get(method, [])
            if not records:
                continue
            losses = [_mean_and_extremes(at) for at in zip(*(r["result"]["test"] for r in records), strict=True)]
            sent = [mean(at) / 1e6 for at in zip(*(r["result"]["bytes"] for r in records), strict=True)]
            for panel, x in zip(panels, (records[0]["result"]["step"], sent), strict=True):
                line(panel, x, losses, method, color=f"C{i}", linestyle="-")
        by_steps, by_bytes = panels
        by_steps.set(xlabel="steps", ylabel="loss on text held out, nats a byte")
        by_bytes.set(xlabel="MB that a rank has sent", xscale="log", ylim=by_steps.get_ylim())
        for panel in panels:
            thin(panel)
            label_ends(panel)
    return shown(name)


def _mean_and_extremes(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(mean(values), min(values), max(values))


def _steps(record: Record) -> str:
    """Write the table of the steps that were timed in turns."""
    seconds = {m: record["result"]["rows"][m]["seconds"] for m in METHODS if m in record["result"]["rows"]}
    lines: list[list[object]] = [
        [method, _milliseconds(record, method), Spread.of(ratios(seconds[DENSE], mine))]
        for method, mine in seconds.items()
    ]
    head = [f"{record['ranks']} ranks, {record['settings']['rate']}", "a step, ms", f"times as fast as {DENSE}"]
    return table(head, lines)


def _recorded(records: Sequence[Record]) -> str:
    """Write how much of each form was run: trainings by ranks with their seeds, and timings by rates of links."""
    known = {record["key"] for record in records}
    lines: list[list[object]] = []
    for form, settings in FORMS.items():
        if form == "tiny":
            continue
        most = 1 + max((r["settings"].get("seed", 0) for r in records), default=0)
        units = plan(settings, range(most))
        for what, mine in _kinds(units).items():
            found = [unit for unit in mine if unit.key in known]
            seeds = len({unit.settings["seed"] for unit in found if "seed" in unit.settings})
            of = len({unit.label for unit in mine})
            done = len({unit.label for unit in found})
            said = f"{done} of {of}" if done == of else f"**{done} of {of}**"
            lines.append([form, what, said, seeds or ""])
    return table(["form", "what", "recorded", "seeds"], lines)


def _kinds(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    kinds: dict[str, list[Unit]] = {}
    for unit in units:
        rate = f" at {unit.rate}" if unit.rate else ""
        what = f"methods trained by {unit.ranks} ranks" if not rate else f"steps of {unit.ranks} ranks timed{rate}"
        kinds.setdefault(what, []).append(unit)
    return kinds
