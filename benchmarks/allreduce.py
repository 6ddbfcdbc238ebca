"""Time the allreduce of square float32 matrices between virtual hosts: Dryden et al. 2016, figure 2, against Horovod.

    python benchmarks/allreduce.py [--short] [--hosts 2 4 8] [--rates 100mbit 1gbit] [--sizes 64 4096] [--seconds 30]

Entries are uniform in [-4, 4] and new in each call, as in the paper; error feedback is on. All candidates take turns
in the same ranks, short ones several times in a turn, as in a training. "torch ..." is the same arithmetic in torch
expressions, exchanged by Horovod's allgather (baselines.py), which is how the libraries of the field do it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from candidates import COMPRESSORS, compression_of
from measure import DENSE, FP16, FP32, Aim, Spread, Verdict, picture, ratios, table, verdict
from places import Progress, parsed, parser_of, place, rates_or_unlimited, start

BASELINES = {"torch, one-bit": "OneBit", "torch, top-k 1 %": "TopK"}
NAMES = [*DENSE, *(name for name in COMPRESSORS if name != "threshold(0.001)"), *BASELINES]
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
RATES = ["100mbit", "1gbit", "10gbit", "unlimited"]
# most of the time on a slow link goes to those that send most
FEW_BYTES = [name for name in NAMES if name not in ("percentile 90", "QSGD 4 bits", "threshold", *BASELINES)]
# (hosts, rates, largest size, candidates)
LONG = [(2, RATES, 16384, NAMES), (4, RATES, 8192, NAMES), (8, RATES, 4096, NAMES)]
SHORT = [(4, ["100mbit"], 4096, FEW_BYTES), (4, ["1gbit"], 4096, [*FEW_BYTES, "torch, one-bit"])]
SHORT_SIZES = [256, 4096]
TURN = 0.25  # seconds of a candidate's turn in a round
SPARE = 1000  # start positions in the memory that matrices share
RANK_BYTES = 1.2e9  # memory of a process that has loaded everything


def needed_bytes(size: int, hosts: int, candidates: int) -> float:
    """Return the memory for one size on all ranks: matrix, copy, what receives it, and the candidates' residuals."""
    return hosts * (RANK_BYTES + 4 * size**2 * (5 + candidates * (1 + 1 / hosts)))


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import ranks as r
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress.torch._functions import forget_residuals

    hvd.init()
    generator = torch.Generator().manual_seed(hvd.rank())
    cells = []
    for size in task["sizes"]:
        values = torch.empty(size * size + SPARE).uniform_(-4, 4, generator=generator)

        def matrix(number: int, values: torch.Tensor = values, size: int = size) -> torch.Tensor:
            return values[number % SPARE :][: size * size].view(size, size)

        actions = {name: _action(name, size, matrix) for name in task["candidates"]}
        cells.append({"size": size, "rows": r.rounds(actions, task["seconds"], task["least"], turn=TURN)})
        forget_residuals()
        r.done(f"{task['label']}, {size}x{size}")
    r.deliver(task, cells)


def _action(name: str, size: int, matrix: Callable[[int], Any]) -> Callable[[int], object]:
    import hvd_compress.torch as hvd

    label = f"{name}.{size}"
    if name in BASELINES:
        import baselines

        method = getattr(baselines, BASELINES[name])()
        return lambda number: gathered(method, matrix(number), label)
    compression = compression_of(name)
    return lambda number: hvd.allreduce(matrix(number), name=label, compression=compression)


def gathered(method: Any, gradient: Any, name: str) -> Any:
    """Average, by Horovod's allgather, what a method of baselines.py sends; its sizes do not vary."""
    import horovod.torch as hvd

    tensors, ctx = method.compress(gradient, name)
    handles = [hvd.allgather_async(tensor, name=f"{name}.{i}") for i, tensor in enumerate(tensors)]
    parts = [hvd.synchronize(handle).chunk(hvd.size()) for handle in handles]
    total = sum(method.decompress(list(sent), ctx) for sent in zip(*parts, strict=True))
    return total / hvd.size()


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import psutil

    sizes = options.sizes
    asked = [(hosts, options.rates, max(sizes), NAMES) for hosts in options.hosts or []]
    asked = asked or (SHORT if options.short else LONG)
    cases = [(hosts, rates_or_unlimited(rates), *others) for hosts, rates, *others in asked]
    result: dict[str, Any] = {"compressors": {n: repr(c) for n, c in COMPRESSORS.items()}, "runs": [], "left_out": []}
    units = sum(len(rates) * sum(size <= most for size in sizes) for _, rates, most, _ in cases)
    with Progress("allreduce", units) as progress:
        for hosts, rates, most, names in cases:
            candidates = options.candidates or names
            with place(hosts, progress) as here:
                for rate in rates:
                    wanted = [size for size in sizes if size <= most]
                    room = psutil.virtual_memory().available
                    fitting = [n for n in wanted if needed_bytes(n, hosts, len(candidates)) < room]
                    for size in [n for n in wanted if n not in fitting]:
                        result["left_out"].append({"hosts": hosts, "rate": rate, "size": size, "reason": "memory"})
                        progress.say(f"{size}x{size} on {hosts} hosts is left out: it takes more memory than is free")
                    task = {
                        "sizes": fitting,
                        "candidates": candidates,
                        "seconds": options.seconds,
                        "least": options.least,
                        "label": f"{hosts} hosts, {rate}",
                    }
                    cells = here.run(__file__, task, rate)
                    result["runs"].append({"hosts": hosts, "rate": rate, "cells": cells})
    return result


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="some minutes", each="size")
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--candidates", nargs="+", choices=NAMES)
    return parsed(parser, given, seconds=(2.0, 30.0), least=(3, 5), sizes=(SHORT_SIZES, SIZES))


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    parts = [
        "## Allreduce of one matrix",
        "",
        "After Dryden et al. 2016, figure 2: square float32 matrices, uniform in [-4, 4], new in each call, error "
        "feedback on. "
        "Numbers are how many times faster than Horovod a candidate is, within the same round, and how many times "
        "fewer "
        "bytes left the network interface of a rank: the median. Above 1 it pays.",
        "",
        _plot(result),
    ]
    for run in result["runs"]:
        cell = max(run["cells"], key=lambda cell: cell["size"])
        rounds = len(cell["rows"][FP32]["seconds"])
        head = f"{cell['size']}x{cell['size']}, {run['hosts']} hosts, {run['rate']}, {rounds} rounds"
        parts += ["", f"### {head}", "", _table(cell["rows"])]
    crossings = [_crossing(run) for run in result["runs"]]
    parts += ["", "### From which size on it pays", "", _crossing_text(), "", table(*_crossings(crossings))]
    for left in result["left_out"]:
        parts.append(
            f"\nLeft out for want of memory: {left['size']}x{left['size']}, {left['hosts']} hosts, {left['rate']}."
        )
    return "\n".join(parts)


def aims(result: dict[str, Any]) -> list[Aim]:
    wanted = {"1gbit": {FP32: 6.0, FP16: 3.0}, "100mbit": {FP32: 20.0, FP16: 10.0}}
    return [
        Aim(
            f"allreduce of 4096x4096, 4 hosts, {run['rate']}: {name}, times as fast as {than}",
            "≥",
            least,
            speedups(cell["rows"], name, than),
        )
        for run in result["runs"]
        for cell in run["cells"]
        if run["hosts"] == 4 and cell["size"] == 4096
        for name in ("one-bit", "adaptive(64)")
        if name in cell["rows"]
        for than, least in wanted.get(run["rate"], {}).items()
    ]


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    return [
        verdict(f"allreduce of {cell['size']}x{cell['size']}, {run['hosts']} hosts, {run['rate']}", cell["rows"])
        for run in result["runs"]
        for cell in run["cells"]
    ]


def speedups(rows: dict[str, Any], name: str, than: str) -> Spread:
    """Return how many times faster one is than another candidate, in the rounds of one cell."""
    return Spread.of(ratios(rows[than]["seconds"], rows[name]["seconds"]))


def _table(rows: dict[str, Any]) -> str:
    lines = []
    for name in rows:
        sent = [b for b in rows[name]["bytes"] if b]
        fewer = Spread.of(ratios(rows[FP32]["bytes"], rows[name]["bytes"])) if sent else "not counted"
        lines.append([name, speedups(rows, name, FP32), speedups(rows, name, FP16), fewer])
    return table(["", "times as fast as fp32", "as fp16", "times fewer bytes than fp32"], lines)


def _crossing_text() -> str:
    return (
        "The smallest matrix from which on the median is faster than both fp32 and fp16, at that size and all larger "
        "ones "
        "that were measured."
    )


def _crossing(run: dict[str, Any]) -> dict[str, Any]:
    paying: dict[str, Any] = {"where": f"{run['hosts']} hosts, {run['rate']}"}
    cells = sorted(run["cells"], key=lambda cell: -cell["size"])
    for name in cells[0]["rows"]:
        paying[name] = "none"
        for cell in cells:
            if min(speedups(cell["rows"], name, dense).median for dense in DENSE) <= 1:
                break
            paying[name] = cell["size"]
    return paying


def _crossings(crossings: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    names = [name for name in crossings[0] if name not in ("where", *DENSE)]
    return ["", *(crossing["where"] for crossing in crossings)], [
        [name, *(crossing[name] for crossing in crossings)] for name in names
    ]


DRAWN = (FP16, "one-bit", "adaptive(64)", "top-k 1 %", "QSGD 4 bits, coded")  # the table has the others


def _plot(result: dict[str, Any]) -> str:
    import matplotlib.pyplot as plt
    from drawing import label_ends, line, thin

    runs = result["runs"]
    columns = min(len(runs), 3)
    lines = -(-len(runs) // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False, sharey=True)
    figure.subplots_adjust(left=0.06, right=0.9, top=0.93, bottom=0.09, wspace=0.5, hspace=0.45)
    for panel, run in zip(panels.flat, runs, strict=False):
        sizes = [cell["size"] for cell in run["cells"]]
        for name in DRAWN:
            line(panel, sizes, [speedups(cell["rows"], name, FP32) for cell in run["cells"]], name)
        panel.axhline(1, color="black", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
        panel.minorticks_off()
        panel.set_xticks(sizes, sizes)
        panel.set_title(f"{run['hosts']} hosts, {run['rate']}", loc="left", fontsize=10)
        panel.set(xlabel="height and width of the matrix")
        panel.yaxis.set_tick_params(labelleft=True)
        thin(panel)
    for row in panels:
        row[0].set_ylabel("times as fast as Horovod fp32")
    for panel in panels.flat[len(runs) :]:
        panel.set_axis_off()
    for panel in panels.flat[: len(runs)]:
        label_ends(panel, 7.5, height=0.075)
    return picture(figure, "allreduce")


if __name__ == "__main__":
    main()
