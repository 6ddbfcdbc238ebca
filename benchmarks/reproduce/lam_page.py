"""Write what the page shows of the repetition of Lam et al. 2017."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from measure import Spread, ratios, table
from places import UNLIMITED

from .lam import BINS, DENSE, DENSE_SERVER, LEARNING, METHODS, NAME, TIMED, TIMES, WIDEST
from .papers import LAM_SPEEDUP, LAM_TARGET
from .show import MISSING, Record, all_groups, figure_of, of_seeds, plot_of, said_settings, shown

_TARGETS = (90.0, 95.0, 98.0, LAM_TARGET.value)  # training accuracy, percent
_LAST = 5
LEARNED = [method for method in TIMED if method in (*METHODS, DENSE_SERVER)]  # the baseline's sums are those of dense

__all__ = ["equal_accuracy", "parts", "passes_to"]


def parts(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Write what the page shows of the records: "learning", "speed", "steps" and "magnitudes"."""
    learning, timed = ([r for r in records if r["settings"]["kind"] == kind] for kind in (LEARNING, TIMES))
    learned, speed, magnitudes = [], [], []
    for settings, rows in all_groups(learning, "ranks"):
        title = f"### {said_settings(settings, ('ranks', 'train', 'batch'))}"
        steps = _steps_of(settings, timed)
        learned += [title, "", _learning(rows), ""]
        speed += [title, "", _speed(settings, rows, steps), "", _curves(settings, rows, steps, folder), ""]
        if rows.get(DENSE):
            watched = rows[DENSE][0]["result"]["watched"]
            magnitudes += [title, "", *_magnitudes(settings, watched, folder), ""]
    tables = [text for record in sorted(timed, key=lambda r: r["ranks"]) for text in (_steps(record), "")]
    texts = {"learning": learned, "speed": speed, "steps": tables, "magnitudes": magnitudes}
    return {key: "\n".join(lines).strip() for key, lines in texts.items()}


def _steps_of(settings: Mapping[str, Any], timed: Sequence[Record]) -> Record | None:
    """Return the steps of as many workers, if possible on limited links, of as many rounds as possible."""
    fitting = [r for r in timed if (r["ranks"], r["settings"]["batch"]) == (settings["ranks"], settings["batch"])]
    return max(
        fitting,
        key=lambda r: (r["settings"]["rate"] != UNLIMITED, len(r["result"]["rows"][DENSE]["seconds"])),
        default=None,
    )


def passes_to(target: float, record: Record) -> float | None:
    """Return the passes over the data until a part of one has that training accuracy; None if it never has."""
    train = record["result"]["train"]
    of_part = 1 / record["settings"]["parts"]
    return next(((i + 1) * of_part for i, accuracy in enumerate(train) if accuracy >= target), None)


def equal_accuracy(rows: Mapping[str, Sequence[Record]]) -> float:
    """Return the paper's training accuracy, or the highest that all trainings have reached if that is lower."""
    best = [max(record["result"]["train"]) for records in rows.values() for record in records]
    return min([LAM_TARGET.value, *best])


def _learning(rows: Mapping[str, list[Record]]) -> str:
    lines: list[list[object]] = []
    for method in METHODS:
        records = rows.get(method, [])
        passes = [[passes_to(target, record) for record in records] for target in _TARGETS]
        reached = [of_seeds([p for p in of_target if p is not None], 2) for of_target in passes]
        tested = [mean(ranks[0] for ranks in record["result"]["test"][-_LAST:]) for record in records]
        lines.append([method, *reached, of_seeds(tested, 1), len(records)])
    head = [
        "", *(f"passes to {target:g} %" for target in _TARGETS),
        f"test accuracy, mean after the last {_LAST} passes, %", "seeds",
    ]  # fmt: skip
    return table(head, lines)


def _seconds(steps: Record | None, method: str) -> float | None:
    if steps is None or method not in steps["result"]["rows"]:
        return None
    return median(steps["result"]["rows"][method]["seconds"])


def _passes(rows: Mapping[str, Sequence[Record]], method: str, target: float) -> list[float]:
    learned = DENSE if method == DENSE_SERVER else method
    found = [passes_to(target, record) for record in rows.get(learned, [])]
    return [passes for passes in found if passes is not None]


def _speed(settings: Mapping[str, Any], rows: Mapping[str, list[Record]], steps: Record | None) -> str:
    target = equal_accuracy(rows)
    steps_of_pass = settings["train"] // (settings["batch"] * settings["ranks"])
    lines: list[list[object]] = []
    for method in LEARNED:
        passes, seconds = _passes(rows, method, target), _seconds(steps, method)
        total = f"{mean(passes) * steps_of_pass * seconds:.0f}" if passes and seconds else ""
        against = [_times_as_fast(rows, steps, method, dense, target) for dense in (DENSE, DENSE_SERVER)]
        lines.append([method, of_seeds(passes, 2), f"{1e3 * seconds:.0f}" if seconds else MISSING, total, *against])
    rate = steps["settings"]["rate"] if steps else "any rate"
    head = [
        "", f"passes to {target:.1f} %", f"ms of a step, {rate}", "s to that accuracy", f"times as fast as {DENSE}",
        f"times as fast as {DENSE_SERVER}",
    ]  # fmt: skip
    return table(head, [*lines, ["paper, 14 machines", "", "", "", "", f"about {LAM_SPEEDUP.value:g}"]])


def _times_as_fast(
    rows: Mapping[str, list[Record]], steps: Record | None, method: str, dense: str, target: float
) -> str:
    if steps is None or method == dense:
        return ""
    timed = steps["result"]["rows"]
    passes, of_dense = (_passes(rows, name, target) for name in (method, dense))
    if not passes or not of_dense:
        return ""
    factor = mean(of_dense) / mean(passes)
    return str(Spread.of([factor * r for r in ratios(timed[dense]["seconds"], timed[method]["seconds"])]))


def _steps(record: Record) -> str:
    """Write the table of the steps that were timed in turns."""
    result = record["result"]
    timed = {method: result["rows"][method]["seconds"] for method in TIMED if method in result["rows"]}

    def sent_by_others(method: str) -> float:
        return mean(of_rank[method] / 1e3 for of_rank in result["bytes_sent"][1:])

    lines: list[list[object]] = []
    for method, seconds in timed.items():
        against = [Spread.of(ratios(timed[dense], seconds)) for dense in (DENSE, DENSE_SERVER)]
        others = sent_by_others(method)
        fewer = f"{sent_by_others(DENSE_SERVER) / others:.1f}"
        first = f"{result['bytes_sent'][0][method] / 1e3:.0f}"
        lines.append([method, Spread.of([1e3 * s for s in seconds]), *against, first, f"{others:.0f}", fewer])
    head = [
        f"{record['ranks']} workers, {record['settings']['rate']}", "a step, ms", f"times as fast as {DENSE}",
        f"times as fast as {DENSE_SERVER}", "kB from the first rank", "kB from each other",
        f"times fewer than {DENSE_SERVER}",
    ]  # fmt: skip
    return table(head, lines)


def _curves(settings: Mapping[str, Any], rows: Mapping[str, list[Record]], steps: Record | None, folder: Path) -> str:
    from drawing import across, label_ends, line, thin

    name = plot_of(NAME, settings, "accuracy")
    steps_of_pass = settings["train"] // (settings["batch"] * settings["ranks"])
    with figure_of(folder, name, panels=2) as (by_passes, by_time):
        for i, method in enumerate(LEARNED):
            learned = DENSE if method == DENSE_SERVER else method
            of_seeds = [record["result"]["train"] for record in rows.get(learned, [])]
            if not of_seeds:
                continue
            spreads = across(of_seeds)
            passes = [(number + 1) / settings["parts"] for number in range(len(spreads))]
            how = {"color": f"C{i}", "linestyle": "-", "marker": "", "linewidth": 1.2}
            if method in METHODS:
                line(by_passes, passes, spreads, method, **how)
            if seconds := _seconds(steps, method):
                line(by_time, [p * steps_of_pass * seconds for p in passes], spreads, method, **how)
        by_passes.set(xlabel="passes over the data", ylabel="training accuracy, %")
        rate = steps["settings"]["rate"] if steps else "?"
        by_time.set(xlabel=f"seconds at {rate}", ylim=by_passes.get_ylim())
        by_passes.figure.set_size_inches(11, 3.8)
        for panel in (by_passes, by_time):
            thin(panel)
        # the same colours stand for the same methods on the left
        label_ends(by_time)
    return shown(name)


def _magnitudes(settings: Mapping[str, Any], watched: Mapping[str, Any], folder: Path) -> list[str]:
    name = plot_of(NAME, settings, "magnitudes")
    layers, steps = watched["layers"], watched["step"]
    steps_of_pass = max(1, settings["train"] // (settings["batch"] * settings["ranks"]))
    passes = [step // steps_of_pass for step in steps]
    left = [WIDEST * i / BINS for i in range(BINS)]
    with figure_of(folder, name, panels=len(layers), rows=len(steps), same_axes=True) as panels:
        for i, of_pass in enumerate(passes):
            for j, (layer, histograms) in enumerate(layers.items()):
                panel = panels.reshape(len(steps), len(layers))[i, j]
                panel.bar(left, histograms[i]["counts"], width=WIDEST / BINS, align="edge")
                panel.set(title=f"{layer}, {_after(of_pass)}", yscale="log", xlim=(0, WIDEST))
                if j == 0:
                    panel.set_ylabel("share of the values")
                if i == len(steps) - 1:
                    panel.set_xlabel("magnitude / root mean square")
    lines = [
        [f"`{layer}`", *(f"{100 * h['largest_tenth']:.0f}" for h in histograms)] for layer, histograms in layers.items()
    ]
    head = ["share of the squared norm in the largest 10 %, in percent", *map(_after, passes)]
    return [shown(name), "", table(head, lines)]


def _after(passes: int) -> str:
    return f"after {passes} pass{'es' * (passes != 1)}" if passes else "at the start"
