"""Measure bytes and time of each mini-batch of a real training: Dryden et al. 2016, figures 3 and 4, against Horovod.

    python benchmarks/minibatch.py [--short] [--hosts 4] [--rate 1gbit] [--width 1024] [--steps 200]

784-W-W-W-10 with ReLU learns MNIST, 10 images a rank and step; each candidate has a network of its own and they take
turns, batch for batch. Bytes and seconds of a layer are the differences of `compression_stats()` from step to step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from candidates import NAMED, style, with_references
from measure import ALONE, FP16, FP32, Spread, picture, table
from places import Progress, parsed, parser_of, place, rates_or_unlimited, start

NAMES = [ALONE, FP32, FP16, "one-bit", "threshold(0.001)", "adaptive(64)"]
BATCH = 10
TIMES = ("encode_seconds", "exchange_seconds", "decode_seconds")


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import networks
    import ranks as r

    import hvd_compress.torch as hvd

    hvd.init()
    batch, features = networks.batches("mlp", BATCH)
    trainings = {
        name: networks.Training(name, networks.network_of("mlp", task["width"], features), batch)
        for name in task["candidates"]
    }
    samples: dict[str, Any] = {name: {"seconds": [], "bytes": [], "stats": []} for name in trainings}
    r.rounds({n: t.step for n, t in trainings.items()}, 0.0, 2)
    per_mark = -(-task["steps"] // task["units"])
    before = {name: training.stats() for name, training in trainings.items()}
    for first in range(0, task["steps"], per_mark):
        for number in range(first, min(first + per_mark, task["steps"])):
            names = list(trainings)
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                seconds, sent = r.sample(trainings[name].step, number)
                after = trainings[name].stats()
                samples[name]["seconds"].append(seconds)
                samples[name]["bytes"].append(sent)
                samples[name]["stats"].append(_difference(before[name], after))
                before[name] = after
        r.done(f"{first + per_mark} mini-batches")
    layers = [name for name, p in trainings[ALONE].network.named_parameters() if p.dim() > 1]
    numel = {name: p.numel() for name, p in trainings[ALONE].network.named_parameters() if p.dim() > 1}
    r.deliver(
        task,
        {
            "features": features,
            "layers": layers,
            "numel": numel,
            "rows": {n: _by_layer(s, layers) for n, s in samples.items()},
        },
    )


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: counters[key] - before[name][key] for key in ("bytes_sent", *TIMES)}
        for name, counters in after.items()
    }


def _by_layer(samples: dict[str, Any], layers: list[str]) -> dict[str, Any]:
    stats = samples.pop("stats")
    if not stats[0]:
        return samples
    return samples | {
        "layers": {
            layer: {key: [step[layer][key] for step in stats] for key in ("bytes_sent", *TIMES)} for layer in layers
        }
    }


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rates = rates_or_unlimited([options.rate])
    setting = {"hosts": options.hosts, "rate": rates[0], "width": options.width, "steps": options.steps, "units": 10}
    with Progress("minibatch", 10) as progress, place(options.hosts, progress) as here:
        outcome = here.run(__file__, {**setting, "candidates": with_references(options.candidates)}, rates[0])
    return {**setting, **outcome}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="fewer mini-batches")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--candidates", nargs="+", choices=NAMED, default=NAMES)
    return parsed(parser, given, width=(1024, 2048), steps=(20, 400))


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    layer = result["layers"][2]
    width, hosts = result["width"], result["hosts"]
    return "\n".join(
        [
            "## Mini-batches of a training",
            "",
            f"After Dryden et al. 2016, figures 3 and 4: {result['features']}-{width}-{width}-{width}-10 learns "
            f"handwritten digits on {hosts} hosts "
            f"at "
            f"{result['rate']}, {BATCH} images a rank; the third layer's weights (`{layer}`). Bytes are those that "
            f"one rank "
            "sends for the layer in one mini-batch. Milliseconds of the layer are from `compression_stats()` on one "
            "rank; "
            "Horovod tells neither of its own allreduces: their bytes are those of a ring. *Adds to the step* is the "
            "whole step less that without "
            "communication in the same round, all layers, on that rank.",
            "",
            _plot(result, layer),
            "",
            _table(result, layer),
        ]
    )


def added_milliseconds(rows: dict[str, Any], name: str) -> list[float]:
    """Return what communication adds to each step."""
    return [1e3 * (s - alone) for s, alone in zip(rows[name]["seconds"], rows[ALONE]["seconds"], strict=True)]


def layer_bytes(result: dict[str, Any], name: str, layer: str) -> list[float]:
    """Return the bytes that a rank sends for a layer in each step; for Horovod's own allreduce, what a ring takes."""
    row = result["rows"][name]
    if "layers" in row:
        return row["layers"][layer]["bytes_sent"]
    itemsize = 2 if name == FP16 else 4
    ring = 2 * (result["hosts"] - 1) / result["hosts"] * itemsize * result["numel"][layer]
    return [ring] * len(row["seconds"])


def _table(result: dict[str, Any], layer: str) -> str:
    lines = []
    for name, row in result["rows"].items():
        if name == ALONE:
            continue
        times: list[Any] = ["", "", ""]
        if "layers" in row:
            times = [Spread.of([1e3 * s for s in row["layers"][layer][key]]) for key in TIMES]
        kilobytes = Spread.of([b / 1e3 for b in layer_bytes(result, name, layer)])
        megabytes = Spread.of([b / 1e6 for b in row["bytes"]])
        lines.append([name, kilobytes, megabytes, *times, Spread.of(added_milliseconds(result["rows"], name))])
    head = [
        "",
        "kB of the layer",
        "MB at the interface, whole step",
        "encode, ms",
        "wait, ms",
        "decode, ms",
        "adds to the step, ms",
    ]
    return table(head, lines)


def _plot(result: dict[str, Any], layer: str) -> str:
    import matplotlib.pyplot as plt
    from drawing import label_ends, thin

    figure, (volume, time) = plt.subplots(1, 2, figsize=(12, 4.2))
    figure.subplots_adjust(left=0.07, right=0.88, top=0.92, bottom=0.13, wspace=0.55)
    for name in result["rows"]:
        if name == ALONE:
            continue
        volume.plot(layer_bytes(result, name, layer), **style(name))
        time.plot(added_milliseconds(result["rows"], name), **style(name))
    volume.set(xlabel="mini-batch", ylabel="bytes", yscale="log")
    volume.set_title(f"Bytes sent for {layer}", loc="left", fontsize=10)
    time.set(xlabel="mini-batch", ylabel="ms", yscale="log", yticks=[20, 50, 100, 200], yticklabels=[20, 50, 100, 200])
    time.minorticks_off()
    time.set_title("What communication adds to a step", loc="left", fontsize=10)
    for panel in (volume, time):
        thin(panel)
        label_ends(panel)
    return picture(figure, "minibatch")


if __name__ == "__main__":
    main()
