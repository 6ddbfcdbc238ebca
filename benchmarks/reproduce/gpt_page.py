"""Write what the page shows of the small transformer that Adam trains by every method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from measure import Spread, ratios, table

from .gpt import LEARNING, NAME, TIMES
from .gpt_methods import DENSE, METHODS
from .show import Record, all_groups, beside, complete, figure_of, of_seeds, plot_of, shown

__all__ = ["parts"]

# at most six lines in a panel
_DRAWN = (DENSE, "one-bit", "top-k 1 %", "DiLoCo", "DeMo", "SparseLoCo")


def parts(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Write what the page shows of the records: "learning" and "steps"."""
    learning, timed = ([r for r in records if r["settings"]["kind"] == kind] for kind in (LEARNING, TIMES))
    learned = []
    for settings, rows in all_groups(learning, "steps"):
        name = plot_of(NAME, settings, "loss")
        learned += [_title(settings, rows), "", _table(rows), "", _plot(rows, folder, name), ""]
    steps = [text for record in timed for text in (_steps(record), "")]
    return {"learning": "\n".join(learned).strip(), "steps": "\n".join(steps).strip()}


def _title(settings: Mapping[str, Any], rows: Mapping[str, list[Record]]) -> str:
    size = next(iter(rows.values()))[0]["result"]["parameters"] / 1e6
    tokens = settings["steps"] * settings["batch"] * settings["context"] * settings["ranks"] / 1e6
    return (
        f"### {size:.1f} million parameters, {settings['ranks']} ranks, {settings['steps']:,} steps, "
        f"{tokens:.1f} million bytes of text"
    )


def _table(rows: Mapping[str, list[Record]]) -> str:
    lines: list[list[object]] = []
    for method, records in complete(rows, list(METHODS)):
        losses, sent = [record["result"]["test"][-1] for record in records], [_bytes(record) for record in records]
        dense = rows.get(DENSE, [])
        against = [100 * (loss / of["result"]["test"][-1] - 1) for loss, of in beside(records, losses, dense)]
        fewer = [_bytes(of) / nbytes for nbytes, of in beside(records, sent, dense)]
        lines.append(
            [
                method,
                of_seeds(losses, 3),
                of_seeds(against, 1, sign=True) if against and method != DENSE else "",
                of_seeds([nbytes / 1e3 for nbytes in sent], 1),
                f"{mean(fewer):,.0f}" if fewer and method != DENSE else "",
                len(records),
            ]
        )
    head = [
        "", "loss on text held out, nats a byte", f"against {DENSE}, %", "kB a rank sends in a step", "times fewer",
        "seeds",
    ]  # fmt: skip
    return table(head, lines)


def _bytes(record: Record) -> float:
    """Return the bytes of a rank in a step, the mean of ranks and steps."""
    return record["result"]["bytes"][-1] / record["result"]["steps"]


def _plot(rows: Mapping[str, list[Record]], folder: Path, name: str) -> str:
    from drawing import label_ends, thin

    with figure_of(folder, name, panels=2) as (by_steps, by_bytes):
        for i, method in enumerate(_DRAWN):
            for number, record in enumerate(rows.get(method, [])):
                result = record["result"]
                how = {"color": f"C{i}", "linewidth": 1.2, "label": f"_{method}" if number else method}
                by_steps.plot(result["step"], result["test"], **{**how, "label": f"_{method}"})
                by_bytes.plot([sent / 1e6 for sent in result["bytes"]], result["test"], **how)
        by_steps.set(xlabel="steps", ylabel="loss on text held out, nats a byte")
        by_bytes.set(xlabel="MB that a rank has sent", xscale="log", ylim=by_steps.get_ylim())
        by_bytes.set_yticklabels([])
        for panel in (by_steps, by_bytes):
            thin(panel)
        label_ends(by_bytes)
    return shown(name)


def _steps(record: Record) -> str:
    """Write the table of the steps that were timed in turns."""
    result, steps = record["result"], record["result"]["steps"]
    seconds = {method: result["rows"][method]["seconds"] for method in METHODS if method in result["rows"]}
    lines: list[list[object]] = [
        [method, Spread.of([1e3 * s / steps for s in mine]), Spread.of(ratios(seconds[DENSE], mine))]
        for method, mine in seconds.items()
    ]
    head = [f"{record['ranks']} ranks, {record['settings']['rate']}", "a step, ms", f"times as fast as {DENSE}"]
    return table(head, lines)
