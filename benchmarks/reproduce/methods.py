"""Train the methods of all papers on the same two networks, to choose between them: no paper compares them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from measure import table

from .qsgd import CIFAR, FORMS, MNIST, own_settings, prepared
from .show import MISSING, Record, all_groups, complete, figure_of, of_seeds, plot_of, said_settings, shown
from .unit import Unit

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["FORMS", "VERSION", "parts", "plan", "work"]

VERSION = 1
NAME = "methods"
FP32 = "Horovod fp32"
METHODS = (
    FP32, "Horovod fp16", "QSGD, 4 bits, Elias coded", "Percentile(90)", "Percentile(90), error feedback", "top-k 1 %",
    "one-bit", "adaptive(64)", "adaptive(64), Golomb coded",
)  # fmt: skip
_LAST = 3  # the last epochs, whose mean accuracy counts, since that of a single one is a matter of chance


def plan(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Unit]:
    """List all trainings; those of one seed come before those of the next."""
    return [
        Unit(
            NAME, VERSION, f"{data}, {method}",
            {**own_settings(data, settings), "data": data, "method": method, "seed": seed},
            settings["ranks"], own_settings(data, settings)["epochs"],
        )
        for seed in seeds
        for data in (MNIST, CIFAR)
        for method in METHODS
    ]  # fmt: skip


# -- in the ranks ---------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Make one training, over the exchange that `DistributedOptimizer` takes by itself."""
    from hvd_compress import FP16, QSGD, Adaptive, NoCompression, OneBit, Percentile, TopK

    from .training import learn, wrapped

    found = dict(
        zip(
            METHODS,
            (
                NoCompression(), FP16(), QSGD(bits=4, coding="elias", seed=settings["seed"]), Percentile(90),
                Percentile(90, error_feedback=True), TopK(ratio=0.01), OneBit(), Adaptive(pi=64),
                Adaptive(pi=64, coding="golomb"),
            ),
            strict=True,
        )
    )  # fmt: skip
    data, network, sgd = prepared(settings)
    return learn(settings, network, wrapped(sgd, network, found[settings["method"]]), data, checkpoint)


# -- the page -------------------------------------------------------------------------------------------------------


def parts(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Write what the page shows of the records: "results"."""
    found = []
    for settings, rows in all_groups(records, "train"):
        data = settings["data"]
        name = plot_of(NAME, settings, data.lower())
        title = f"### {data}: {said_settings(settings, ('epochs', 'train', 'batch', 'ranks'))}"
        mine = {method: rows.get(f"{data}, {method}", []) for method in METHODS}
        found += [title, "", _table(mine), "", _plot(data, mine, folder, name), ""]
    return {"results": "\n".join(found).strip()}


def _table(rows: Mapping[str, list[Record]]) -> str:
    dense = _kilobytes(rows[FP32])
    lines: list[list[object]] = []
    for method, records in complete(rows, METHODS):
        accuracy = of_seeds([_accuracy(record) for record in records], 1)
        sent = _kilobytes(records)
        fewer = f"{dense / sent:.1f}" if dense and sent else ""
        lines.append([method, accuracy, f"{sent:.1f}" if sent else "", fewer, len(records)])
    head = [
        "",
        f"test accuracy, mean after the last {_LAST} epochs, %",
        "kB a rank sends in a step",
        "times fewer",
        "seeds",
    ]
    return table(head, lines)


def _accuracy(record: Record) -> float:
    return mean(of_ranks[0] for of_ranks in record["result"]["test"][-_LAST:])


def _kilobytes(records: Sequence[Record]) -> float:
    """Return the kilobytes of a rank in a step, the mean of steps, ranks and seeds; 0 without records."""
    sent = [mean(record["result"]["bytes_sent"]) / record["result"]["steps"] / 1e3 for record in records]
    return mean(sent) if sent else 0.0


def _plot(data: str, rows: Mapping[str, list[Record]], folder: Path, name: str) -> str:
    """Draw the accuracy against fp32's over the bytes saved; all data have the same axes, and bars are the seeds."""
    from drawing import label_points, thin
    from measure import Spread

    if not rows[FP32]:
        return f"A plot beside {FP32}: {MISSING}."
    dense, kilobytes = mean(_accuracy(record) for record in rows[FP32]), _kilobytes(rows[FP32])
    points = []
    with figure_of(folder, name) as panel:
        for method, records in rows.items():
            if records and method != FP32:
                spread = Spread.of([_accuracy(record) - dense for record in records])
                fewer = kilobytes / _kilobytes(records)
                lengths = [[spread.median - spread.low], [spread.high - spread.median]]
                (drawn, *_) = panel.errorbar([fewer], [spread.median], yerr=lengths, fmt="o", capsize=2)
                points.append((fewer, spread.median, method.removeprefix("Horovod "), drawn.get_color()))
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(xscale="log", xlim=(1.6, 90), ylim=(-13.5, 6.5), xticks=[2, 5, 10, 20, 50])
        panel.set(xticklabels=[2, 5, 10, 20, 50], xlabel="times fewer bytes than fp32")
        panel.set(ylabel="points of accuracy above fp32")
        panel.set_title(f"{data}: fp32 reaches {dense:.1f} %", loc="left", fontsize=10)
        panel.minorticks_off()
        thin(panel)
        label_points(panel, points)
    return shown(name)
