"""Time a step against hosts, layer width and network: Dryden et al. 2016, figures 5 and 6, against Horovod.

    python benchmarks/scaling.py [--short] [--rate 1gbit] [--seconds 60]

The step without communication, Horovod's own exchanges and the compressed ones take turns in the same ranks, each
with a network of its own. The paper's networks learn MNIST, 784-W-W-W-10 with ReLU, 10 images a rank and step; the
convolutional one is ResNet-50 with 44 channels in place of 64, on random images of 32x32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from candidates import NAMED, with_references
from measure import ALONE, FP16, FP32, Aim, Spread, Verdict, picture, ratios, table, verdict
from places import Progress, parsed, parser_of, place, rates_or_unlimited, start

NAMES = [ALONE, FP32, FP16, "one-bit", "adaptive(64)", "top-k 1 %"]
MNIST_IMAGES = 60_000
BATCH = 10
RESNET = ("resnet", 44, 4)
TIMES = ("encode_seconds", "exchange_seconds", "decode_seconds")
# what runs with each number of hosts: (kind, width, batch)
LONG = {
    2: [("mlp", 256, BATCH), ("mlp", 512, BATCH), ("mlp", 1024, BATCH), ("mlp", 2048, BATCH), ("mlp", 4096, BATCH),
        RESNET],
    4: [("mlp", 256, BATCH), ("mlp", 1024, BATCH), ("mlp", 4096, BATCH), RESNET],
    8: [("mlp", 1024, BATCH), RESNET],
}  # fmt: skip
SHORT = {
    2: [("mlp", 256, BATCH), ("mlp", 4096, BATCH), RESNET],
}


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import networks
    import ranks as r

    import hvd_compress.torch as hvd

    hvd.init()
    cells = []
    for kind, width, batch_size in task["networks"]:
        batch, features = networks.batches(kind, batch_size)
        trainings = {
            name: networks.Training(name, networks.network_of(kind, width, features), batch)
            for name in task["candidates"]
        }
        operations = {}
        for name, training in trainings.items():
            training.step(0)
            with r.counted_operations() as counts:
                training.step(1)
            operations[name] = dict(counts)
        before = {name: _totals(training.stats()) for name, training in trainings.items()}
        samples = r.rounds({n: t.step for n, t in trainings.items()}, task["seconds"], task["least"])
        steps = len(samples[ALONE]["seconds"]) + 1
        for name, training in trainings.items():
            after = _totals(training.stats())
            parts = {key: (after[key] - before[name][key]) / steps for key in after}
            samples[name] |= {"operations": operations[name], "parts": parts}  # type: ignore[dict-item]
        parameters = list(trainings[ALONE].network.parameters())
        cells.append(
            {
                "network": kind,
                "width": width,
                "batch": batch_size,
                "features": features,
                "tensors": len(parameters),
                "parameters": sum(p.numel() for p in parameters),
                "rows": samples,
            }
        )
        del trainings
        r.done(f"{task['label']}, {kind} {width}")
    r.deliver(task, cells)


def _totals(stats: dict[str, Any]) -> dict[str, float]:
    return {key: sum(counters[key] for counters in stats.values()) for key in TIMES} if stats else {}


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cases: dict[int, list[Any]] = SHORT if options.short else LONG
    if options.hosts:
        networks = [("mlp", width, BATCH) for width in options.widths]
        cases = {hosts: [*networks, *([RESNET] if options.resnet else [])] for hosts in options.hosts}
    result: dict[str, Any] = {"runs": []}
    rates = rates_or_unlimited([options.rate])
    with Progress("scaling", sum(map(len, cases.values()))) as progress:
        for hosts, networks in cases.items():
            with place(hosts, progress) as here:
                task = {
                    "networks": networks,
                    "candidates": with_references(options.candidates),
                    "seconds": options.seconds,
                    "least": options.least,
                    "label": f"{hosts} hosts, {rates[0]}",
                }
                result["runs"].append({"hosts": hosts, "rate": rates[0], "cells": here.run(__file__, task, rates[0])})
    return result


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="fewer networks and rounds", each="network")
    parser.add_argument("--hosts", type=int, nargs="+", help="with the networks that are given")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096], help="of the fully connected network")
    parser.add_argument("--resnet", action="store_true", help="the convolutional network too")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--candidates", nargs="+", choices=NAMED, default=NAMES)
    return parsed(parser, given, seconds=(4.0, 60.0), least=(3, 8))


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    parts = [
        "## Training steps",
        "",
        "After Dryden et al. 2016, figures 5 and 6. *Alone* is the step without communication, in the same ranks and "
        "rounds. "
        "*Times alone* is how much longer a step takes; near 1 the network is no longer felt. Operations are those "
        "that one "
        "rank hands to Horovod in a step, before Horovod fuses its allreduces. The last three columns are "
        "milliseconds of a step on one rank in encoding (both hops), waiting and decoding, from `compression_stats()`.",
        "",
        _plot(result),
    ]
    for run in result["runs"]:
        for cell in run["cells"]:
            parts += ["", f"### {title(run, cell)}", "", _table(cell["rows"])]
    return "\n".join(parts)


def title(run: dict[str, Any], cell: dict[str, Any]) -> str:
    networks = {"mlp": "{1}-{0}-{0}-{0}-10", "resnet": "ResNet-50 with {0} channels"}
    name = networks[cell["network"]].format(cell["width"], cell["features"])
    where = f"{run['hosts']} hosts, {run['rate']}"
    return f"{name}, {cell['tensors']} tensors, {cell['parameters'] / 1e6:.1f} million parameters: {where}"


def slowdown(rows: dict[str, Any], name: str, than: str = ALONE) -> Spread:
    """Return how many times as long a step takes as with another candidate, in the rounds of one cell."""
    return Spread.of(ratios(rows[name]["seconds"], rows[than]["seconds"]))


def aims(result: dict[str, Any]) -> list[Aim]:
    found = []
    for run in result["runs"]:
        for cell in run["cells"] if (run["hosts"], run["rate"]) == (2, "1gbit") else []:
            rows, where = cell["rows"], title(run, cell)
            for name in (n for n in rows if n in ("one-bit", "adaptive(64)")):
                if cell["network"] == "resnet":
                    found.append(Aim(f"{where}: {name}, times as fast as fp16", ">", 1.0, slowdown(rows, FP16, name)))
                    operations = float(sum(rows[name]["operations"].values()))
                    found.append(Aim(f"{where}: {name}, collectives a step", "≤", 10.0, Spread.of([operations])))
                elif cell["width"] == 4096:
                    found.append(Aim(f"{where}: {name}, times the step alone", "≤", 2.0, slowdown(rows, name)))
    return found


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    return [verdict(f"step, {title(run, cell)}", cell["rows"]) for run in result["runs"] for cell in run["cells"]]


def _table(rows: dict[str, Any]) -> str:
    lines = []
    for name, row in rows.items():
        operations = sum(row["operations"].values())
        milliseconds = [f"{1e3 * row['parts'][key]:.1f}" if row["parts"] else "" for key in TIMES]
        faster = [slowdown(rows, than, name) if name != ALONE else "" for than in (FP32, FP16)]
        lines.append([name, slowdown(rows, name), *faster, operations, *milliseconds])
    head = ["", "times alone", "times as fast as fp32", "as fp16", "operations", "encode", "wait", "decode"]
    return table(head, lines)


def epoch_seconds(rows: dict[str, Any], name: str, batch: int, hosts: int) -> Spread:
    """Return the seconds for all of MNIST at the measured time of a step."""
    return Spread.of([MNIST_IMAGES / batch / hosts * seconds for seconds in rows[name]["seconds"]])


def _plot(result: dict[str, Any]) -> str:
    import matplotlib.pyplot as plt
    from drawing import label_ends, line, thin
    from matplotlib.ticker import LogLocator

    figure, (by_hosts, by_width) = plt.subplots(1, 2, figsize=(12, 4.2))
    figure.subplots_adjust(left=0.07, right=0.89, top=0.92, bottom=0.13, wspace=0.5)
    networks = [(run, cell) for run in result["runs"] for cell in run["cells"] if cell["network"] == "mlp"]
    for panel, key in ((by_hosts, "hosts"), (by_width, "width")):
        points = [(run, cell) for run, cell in networks if _belongs(result, key, run, cell)]
        for name in points[0][1]["rows"] if points else []:
            x = [{**run, **cell}[key] for run, cell in points]
            if key == "hosts":
                y = [epoch_seconds(cell["rows"], name, cell["batch"], run["hosts"]) for run, cell in points]
            else:
                y = [Spread.of(cell["rows"][name]["seconds"]) for _, cell in points]
            line(panel, x, y, name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(ticks := sorted({{**run, **cell}[key] for run, cell in points}), ticks)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if panel is by_hosts else (1,)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        thin(panel)
    by_hosts.set(xlabel="hosts, which share the machine's processors", ylabel="seconds for an epoch of MNIST")
    by_width.set(xlabel="neurons per layer", ylabel="seconds for a step")
    by_hosts.set_title(f"An epoch, {_common_width(result)} neurons per layer", loc="left", fontsize=10)
    by_width.set_title(f"A step, {result['runs'][0]['hosts']} hosts", loc="left", fontsize=10)
    for panel in (by_hosts, by_width):
        label_ends(panel)
    return picture(figure, "scaling")


def _common_width(result: dict[str, Any]) -> int | None:
    """Return the width that ran on the most numbers of hosts."""
    widths = [cell["width"] for run in result["runs"] for cell in run["cells"] if cell["network"] == "mlp"]
    return max(widths, key=widths.count, default=None)


def _belongs(result: dict[str, Any], key: str, run: dict[str, Any], cell: dict[str, Any]) -> bool:
    return cell["width"] == _common_width(result) if key == "hosts" else run is result["runs"][0]


if __name__ == "__main__":
    main()
