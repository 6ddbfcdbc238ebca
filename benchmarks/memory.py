"""Measure memory beside Horovod's, and the cost of a step against the number of elements and of tensors.

    python benchmarks/memory.py [--short] [--ranks 2] [--layers 6] [--seconds 20]

Peak memory (VmHWM of the largest rank) is that of a process of its own for each candidate: bias-free layers of
4096x4096 that learn three steps with plain SGD. A second, small network tells what does not grow with the network:
Numba and its compiled kernels, most of all. The cost of a step is what communication adds to it, in the same ranks
and rounds. Both run on this machine without links: nothing waits for a network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measure import ALONE, FP16, FP32, Aim, Spread, picture, table
from places import Progress, local, parsed, parser_of, start

PEAK_NAMES = [FP32, FP16, "one-bit", "adaptive(64)", "top-k 1 %", "QSGD 4 bits"]
SHORT_PEAK_NAMES = [FP32, "one-bit"]
COST_NAMES = [ALONE, FP32, "one-bit", "adaptive(64)"]
WIDTH, SMALL_WIDTH = 4096, 64
ELEMENTS, SHORT_ELEMENTS = [10**5, 10**6, 10**7, 10**8], [10**5, 10**6, 10**7]
TOTAL, TENSORS, SHORT_TENSORS = 2**24, [1, 4, 16, 64, 256, 1024], [1, 32, 1024]
TURN = 0.1  # seconds of a candidate's turn in a round
KB = 1024


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import horovod.torch as horovod

    horovod.init()
    (_peak if "candidate" in task else _cost)(task)


def _peak(task: dict[str, Any]) -> None:
    # nothing of hvd_compress may be loaded while plain Horovod is measured
    import horovod.torch as horovod
    import torch

    name, width = task["candidate"], task["width"]
    network = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(task["layers"])))
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=1e-3)
    if name in (FP32, FP16):
        stock = horovod.Compression.none if name == FP32 else horovod.Compression.fp16
        optimizer = horovod.DistributedOptimizer(optimizer, network.named_parameters(), compression=stock)
    else:
        from candidates import COMPRESSORS

        import hvd_compress.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters(), compression=COMPRESSORS[name])
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.ones(1, width)).sum().backward()
        optimizer.step()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peaks = horovod.allgather(torch.tensor([float(status["VmHWM"].split()[0]) * KB]), name="benchmarks.peaks")
    if horovod.rank() == 0:
        numel = sum(p.numel() for p in network.parameters())
        outcome = {"bytes": float(peaks.max()), "numel": numel, "residual_bytes": _residual_bytes(optimizer)}
        Path(task["result"]).write_text(json.dumps(outcome))
    horovod.barrier()


def _residual_bytes(optimizer: Any) -> int:
    """Return the bytes of what this rank owes, in both hops."""
    if not hasattr(optimizer, "compression_state_dict"):
        return 0
    state = optimizer.compression_state_dict()
    owed = [entry["values"] for kind in ("residuals", "owner_residuals") for entry in state[kind].values()]
    return sum(values.nbytes for values in owed)


def _cost(task: dict[str, Any]) -> None:
    import ranks as r

    points = []
    for elements, tensors in task["points"]:
        actions = {name: _step(name, elements, tensors) for name in task["candidates"]}
        samples = r.rounds(actions, task["seconds"], task["least"], turn=TURN)
        points.append({"elements": elements, "tensors": tensors, "rows": samples})
        r.done(f"{elements} elements, {tensors} tensors")
    r.deliver(task, points)


def _step(name: str, elements: int, tensors: int) -> Any:
    import torch
    from candidates import compression_of

    import hvd_compress.torch as hvd

    width = elements // tensors
    parameters = [torch.nn.Parameter(torch.zeros(width)) for _ in range(tensors)]
    gradient = torch.randn(width, generator=torch.Generator().manual_seed(hvd.rank()))
    optimizer: Any = torch.optim.SGD(parameters, lr=1e-3)
    if name != ALONE:
        named = [(f"{name}.{elements}.{tensors}.{i}", p) for i, p in enumerate(parameters)]
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression_of(name))

    def step(number: int) -> None:
        optimizer.zero_grad()
        torch.stack([(p * gradient).sum() for p in parameters]).sum().backward()
        optimizer.step()

    return step


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    names = SHORT_PEAK_NAMES if options.short else PEAK_NAMES
    elements, tensors = (SHORT_ELEMENTS, SHORT_TENSORS) if options.short else (ELEMENTS, TENSORS)
    points = [(n, 1) for n in elements] + [(TOTAL, n) for n in tensors]
    result: dict[str, Any] = {"ranks": options.ranks, "peaks": {name: {"small": [], "large": []} for name in names}}
    result["residual_bytes"] = {}
    with Progress("memory", options.repeats * len(names) * 2 + len(points)) as progress:
        here = local(options.ranks, progress)
        for _ in range(options.repeats):
            for name in names:
                for kind, width in (("small", SMALL_WIDTH), ("large", WIDTH)):
                    task = {"candidate": name, "width": width, "layers": options.layers}
                    outcome = here.run(__file__, task)
                    result["peaks"][name][kind].append(outcome["bytes"])
                    result["numel"] = outcome["numel"]
                    result["residual_bytes"][name] = outcome["residual_bytes"] / outcome["numel"]
                    progress.advance(f"peak of {name}")
        task = {"points": points, "candidates": COST_NAMES, "seconds": options.seconds, "least": options.least}
        result["cost"] = here.run(__file__, task)
    return result


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="fewer candidates and rounds", each="point of the cost")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6, help="of 16.8 million parameters each")
    parser.add_argument("--repeats", type=int, help="of each peak")
    return parsed(parser, given, seconds=(1.0, 20.0), least=(3, 7), repeats=(1, 3))


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def beyond_residuals(result: dict[str, Any], name: str, fixed: bool) -> Spread:
    """Return the bytes per element over plain Horovod's peak and the residuals, with or without what does not grow."""
    peaks = result["peaks"]
    values = []
    for i, large in enumerate(peaks[name]["large"]):
        more = large - peaks[FP32]["large"][i]
        if not fixed:
            more -= peaks[name]["small"][i] - peaks[FP32]["small"][i]
        values.append(more / result["numel"] - result["residual_bytes"][name])
    return Spread.of(values)


def added_seconds(point: dict[str, Any], name: str) -> Spread:
    """Return what communication adds to a step."""
    rows = point["rows"]
    return Spread.of([s - a for s, a in zip(rows[name]["seconds"], rows[ALONE]["seconds"], strict=True)])


def aims(result: dict[str, Any]) -> list[Aim]:
    return [
        Aim(
            f"memory of {result['numel'] / 1e6:.0f} million parameters, {result['ranks']} ranks: {name}, bytes per "
            f"element "
            "beyond plain Horovod and the residuals",
            "≤",
            0.5,
            beyond_residuals(result, name, fixed=True),
        )
        for name in result["peaks"]
        if name in ("one-bit", "adaptive(64)")
    ]


def section(result: dict[str, Any]) -> str:
    peaks = result["peaks"]
    lines = []
    for name in peaks:
        fixed = median(peaks[name]["small"]) - median(peaks[FP32]["small"])
        cells = ["", "", ""]
        if name != FP32:
            cells = [f"{fixed / 1e6:.0f}", *map(str, (beyond_residuals(result, name, f) for f in (True, False)))]
        lines.append([name, f"{median(peaks[name]['large']) / 1e9:.2f}", *cells])
    head = ["", "peak, GB", "fixed, MB", "bytes per element beyond the residuals", "the same without what is fixed"]
    return "\n".join(
        [
            "## Memory, and cost of a step",
            "",
            f"Peak memory of a rank, {result['ranks']} ranks, {result['numel'] / 1e6:.0f} million parameters. "
            "Residuals take 4 bytes per element, and in two phases 4 more for each element that a rank owns. "
            "*Fixed* is what a network of a few thousand "
            "parameters takes more than with plain Horovod: Numba, LLVM and the compiled kernels.",
            "",
            table(head, lines),
            "",
            "Left: the bars of the table, with the extremes as thick lines. Right: what communication adds to a step "
            "where nothing waits for a network, against the number of elements in one tensor. "
            f"{TOTAL:,} elements in 1 to 1024 tensors take {_range_of_tensors(result)}.",
            "",
            _plot(result),
        ]
    )


def _range_of_tensors(result: dict[str, Any]) -> str:
    said = []
    for name in COST_NAMES:
        if name != ALONE:
            all_of_it = [added_seconds(p, name).median for p in result["cost"] if p["elements"] == TOTAL]
            said.append(f"{1000 * min(all_of_it):.0f} to {1000 * max(all_of_it):.0f} ms with {name}")
    return ", ".join(said)


def _plot(result: dict[str, Any]) -> str:
    import matplotlib.pyplot as plt
    from candidates import style
    from drawing import label_ends, line, thin

    figure, (peaks, costs) = plt.subplots(1, 2, figsize=(12, 4.2))
    figure.subplots_adjust(left=0.1, right=0.9, top=0.92, bottom=0.14, wspace=0.25)
    names = list(result["peaks"])
    for place, name in enumerate(names):
        spread = Spread.of([peak / 1e9 for peak in result["peaks"][name]["large"]])
        colour = style(name)["color"]
        peaks.barh(place, spread.median, color=colour, alpha=0.35)
        peaks.plot([spread.low, spread.high], [place, place], color=colour, linewidth=3)
        owed = result["residual_bytes"][name] * result["numel"] / 1e9
        note = f"{spread.median:.2f}" + (f", of which residuals {owed:.2f}" if owed else "")
        peaks.text(spread.high + 0.03, place, note, va="center", fontsize=8.5)
    peaks.set_yticks(range(len(names)), names)
    peaks.invert_yaxis()
    peaks.set(xlabel="GB", xlim=(0, 2.6))
    peaks.set_title(f"Peak memory of a rank, {result['numel'] / 1e6:.0f} million parameters", loc="left", fontsize=10)
    of_elements = sorted((p for p in result["cost"] if p["tensors"] == 1), key=lambda p: p["elements"])
    for name in COST_NAMES:
        if name != ALONE:
            line(costs, [p["elements"] for p in of_elements], [added_seconds(p, name) for p in of_elements], name)
    costs.set(xscale="log", yscale="log", xlabel="elements in one tensor", ylabel="s")
    costs.set_title("What communication adds to a step, in one machine", loc="left", fontsize=10)
    for panel in (peaks, costs):
        thin(panel)
    label_ends(costs)
    return picture(figure, "memory")


if __name__ == "__main__":
    main()
