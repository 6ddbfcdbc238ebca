"""Try DASO as in its paper (Coquelin et al. 2021): accuracy and time against B and S, and its whole schedule.

    python benchmarks/daso.py [--short] [--only grid times schedule] [--seeds 0 1 2]

The grid trains a small network on MNIST with fixed B and S, on 2 nodes of 2 ranks and 4 of 2, and tests the mean of the
parameters. Times are of 784-W-W-10 on 2 virtual hosts with 2 ranks each. The schedule, with warm-up, cycles and
cool-down, is trained there against Horovod's fp32 and fp16; accuracy is tested, untimed, after every 30 steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from measure import ALONE, FP16, FP32, Aim, Spread, merged, picture, ratios, read, table, write
from places import Progress, local, parsed, parser_of, place, rates_or_unlimited, start

PER_NODE = 2
BATCH, RATE, MOMENTUM = 32, 0.05, 0.9
DASO, DASO_ADAPTIVE = "DASO", "DASO, adaptive(64)"
DASO_4 = f"{DASO}, S = 4"
SCHEDULED = (FP32, FP16, DASO, DASO_4, DASO_ADAPTIVE)
# Table 2 of the paper: (B, S): top-1 accuracy on 32 and on 128 GPUs, hours on 32 and on 128
PAPER = {
    (1, 0): (76.7715, 76.5416, 4.5606, 1.2064), (1, 1): (76.0859, 74.9233, 4.2545, 1.1556),
    (2, 0): (76.8828, 76.3027, 4.0365, 1.0769), (2, 1): (75.8086, 74.8936, 3.8943, 1.0427),
    (2, 2): (75.9238, 75.0854, 3.8919, 1.0450), (4, 0): (76.4258, 74.3478, 3.6984, 0.9775),
    (4, 1): (75.8262, 73.2962, 3.6560, 1.0142), (4, 2): (75.5020, 71.9570, 3.7191, 0.9843),
    (4, 4): (75.7070, 73.8560, 3.7064, 0.9784), (8, 0): (75.2598, 69.2732, 3.4922, 0.9078),
    (8, 4): (74.6113, 65.4733, 3.5259, 0.9170), (8, 8): (75.2637, 69.6655, 3.5770, 0.9302),
    (16, 0): (73.1348, 58.5397, 3.3235, 0.8585), (16, 4): (73.1758, 56.8865, 3.3417, 0.8590),
    (16, 8): (73.2148, 54.5323, 3.3934, 0.8724), (16, 16): (74.2129, 62.3692, 3.4828, 0.8933),
    (32, 0): (70.7480, 43.6855, 3.2224, 0.8231), (32, 4): (70.2773, 44.0639, 3.2302, 0.8247),
    (32, 16): (69.5781, 41.2458, 3.2969, 0.8430), (32, 32): (72.5488, 50.9539, 3.4083, 0.8656),
}  # fmt: skip
SHORT_PAIRS = ((1, 0), (4, 0), (4, 1), (4, 4), (32, 0), (32, 32))
STEPS_OF_EPOCH, EPOCHS, SCHEDULE_BATCH = 30, 16, 16


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import ranks as r

    import hvd_compress.torch as hvd

    hvd.init(process_sets=hvd.daso_process_sets(task.get("ranks_per_node")))
    if task["part"] == "grid":
        data = _images(None)
        results = []
        for skips, wait in task["pairs"]:
            found = _learn_fixed(skips, wait, task, data)
            results.append({"skips": skips, "wait": wait, "seed": task["seed"], "nodes": task["nodes"], **found})
            r.done(f"{task['nodes']} nodes, B={skips}, S={wait}, seed {task['seed']}")
        r.deliver(task, results)
    elif task["part"] == "times":
        rows = r.rounds(_timed(task), task["seconds"], task["least"])
        r.done(task["label"])
        r.deliver(task, rows)
    else:
        data = _images(None)
        found = {}
        # in the reverse order for every second seed: the machine may become slower or faster meanwhile
        for name in SCHEDULED if task["seed"] % 2 == 0 else SCHEDULED[::-1]:
            found[name] = _learn_by_schedule(name, task, data)
            r.done(f"{task['label']}, {name}")
        r.deliver(task, found)


def _images(limit: int | None) -> Any:
    import networks
    import torch

    import hvd_compress.torch as hvd

    data = networks.mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, None, limit)
    return tuple(torch.from_numpy(a) for a in data[:4]), data.source


def _deal(number: int, seed: int, epoch: int, batch: int = BATCH) -> Any:
    import networks

    import hvd_compress.torch as hvd

    return networks.mnist_data.deal(number, batch, hvd.rank(), hvd.size(), seed, epoch)


def _network(width: int, seed: int) -> Any:
    import networks
    import torch

    torch.manual_seed(seed)
    return networks.mlp(width, 784, hidden=2)


def _sgd(network: Any) -> Any:
    import torch

    return torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM)


def _accuracy(network: Any, x: Any, y: Any) -> float:
    import torch

    network.eval()
    with torch.no_grad():
        right = (network(x).argmax(dim=1) == y).double().mean()
    network.train()
    return 100 * float(right)


def _learn_fixed(skips: int, wait: int, task: dict[str, Any], data: Any) -> dict[str, Any]:
    """Train without phases; returns the accuracy of the mean of all parameters."""
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import NoCompression

    (x, y, test_x, test_y), source = data
    network = _network(task["width"], task["seed"])
    optimizer = hvd.DASO(
        _sgd(network), network.named_parameters(), global_skips=skips, batches_to_wait=wait, patience=None,
        blocking_compression=NoCompression(), ranks_per_node=PER_NODE,
    )  # fmt: skip
    losses = []
    begin = time.perf_counter()
    for epoch in range(task["epochs"]):
        for rows in _deal(len(y), task["seed"], epoch)[: task["steps"]]:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    seconds = time.perf_counter() - begin
    last = torch.tensor([mean(losses[-len(losses) // task["epochs"] :])])
    optimizer.epoch_end()
    return {
        "accuracy": _accuracy(network, test_x, test_y),
        "loss": float(hvd.allreduce(last, name="benchmarks.loss")),
        "seconds": seconds,
        "source": source,
    }


def _timed(task: dict[str, Any]) -> dict[str, Any]:
    """Time as many steps of each candidate as the longest cycle has."""
    import networks
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import Adaptive, NoCompression

    (x, y, _, _), _ = _images(6000)
    order = _deal(len(y), 0, 0)
    actions = {}

    def add(name: str, wrap: Any) -> None:
        network = _network(task["width"], 0)
        # parameters' names become names of collectives, which candidates must not share
        named = [(f"{name}/{parameter}", p) for parameter, p in network.named_parameters()]
        optimizer = wrap(_sgd(network), named)

        def steps(number: int) -> None:
            for i in range(task["cycle"]):
                rows = order[(number + i) % len(order)]
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimizer.step()

        actions[name] = steps

    add(ALONE, lambda sgd, named: sgd)
    for name in (FP32, FP16):
        compression = getattr(networks.horovod.Compression, {FP32: "none", FP16: "fp16"}[name])
        add(name, lambda sgd, named, c=compression: networks.horovod.DistributedOptimizer(sgd, named, compression=c))
    raw = {"patience": None, "blocking_compression": NoCompression()}
    for skips, wait in task["pairs"]:
        settings = {"global_skips": skips, "batches_to_wait": wait, **raw}
        add(f"{skips},{wait}", lambda sgd, named, s=settings: hvd.DASO(sgd, named, **s))
    settings = {"global_skips": 4, "batches_to_wait": 1, "compression": Adaptive(64), **raw}
    add(DASO_ADAPTIVE, lambda sgd, named: hvd.DASO(sgd, named, **settings))
    add(f"{DASO}, rotate", lambda sgd, named: hvd.DASO(sgd, named, form="rotate", **raw))
    return actions


def _learn_by_schedule(name: str, task: dict[str, Any], data: Any) -> dict[str, Any]:
    """Train; returns the accuracies after every epoch, and the seconds of the slowest rank until then."""
    import networks
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import Adaptive, NoCompression

    (x, y, test_x, test_y), _ = data
    network = _network(task["width"], task["seed"])
    sgd, named = _sgd(network), [(f"{name}/{n}", p) for n, p in network.named_parameters()]
    if name in (FP32, FP16):
        compression = getattr(networks.horovod.Compression, {FP32: "none", FP16: "fp16"}[name])
        optimizer = networks.horovod.DistributedOptimizer(sgd, named, compression=compression)
    else:
        optimizer = hvd.DASO(
            sgd, named, total_epochs=EPOCHS, warmup_epochs=1, cooldown_epochs=1, steps_per_epoch=STEPS_OF_EPOCH,
            compression=Adaptive(64) if name == DASO_ADAPTIVE else NoCompression(),
            batches_to_wait=4 if name == DASO_4 else 1,
        )  # fmt: skip
    batches = [rows for epoch in range(4) for rows in _deal(len(y), task["seed"], epoch, SCHEDULE_BATCH)]
    seconds, accuracies, losses = [], [], []
    spent = 0.0
    for epoch in range(EPOCHS):
        hvd.barrier()
        begin = time.perf_counter()
        for rows in batches[epoch * STEPS_OF_EPOCH : (epoch + 1) * STEPS_OF_EPOCH]:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        if name not in (FP32, FP16):
            optimizer.epoch_end(mean(losses[-STEPS_OF_EPOCH:]))
        spent += time.perf_counter() - begin
        seconds.append(float(hvd.allgather(torch.tensor([spent]), name="benchmarks.spent").max()))
        # each rank tests a share: all have the same parameters now
        share = slice(hvd.rank(), None, hvd.size())
        mine = torch.tensor([_accuracy(network, test_x[share], test_y[share])], dtype=torch.float64)
        accuracies.append(float(hvd.allreduce(mine, name="benchmarks.accuracy")))
    trace = optimizer.daso_stats()["epochs"] if name not in (FP32, FP16) else []
    return {"seconds": seconds, "accuracies": accuracies, "trace": trace}


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result = read("daso") or {}
    result.pop("machine", None)
    result.pop("command", None)
    pairs = list(SHORT_PAIRS if options.short else PAPER)
    if "grid" in options.only:
        _measure_grid(options, pairs, result)
    rates = rates_or_unlimited(options.rates)
    if "times" in options.only:
        settings = {"width": options.width, "cycle": options.largest_b}
        pairs = [pair for pair in pairs if pair[0] <= options.largest_b]
        with Progress("daso, times", len(rates)) as progress, place(2, progress, PER_NODE) as here:
            for rate in rates:
                task = {
                    "part": "times", "pairs": pairs, "seconds": options.seconds, "least": options.least, "label": rate,
                    **settings,
                }  # fmt: skip
                found = {"rate": rate, **settings, "rows": here.run(__file__, task, rate)}
                result["times"] = _sorted(result.get("times", []), found, ("rate",))
    if "schedule" in options.only:
        units = len(rates) * len(options.seeds) * len(SCHEDULED)
        with Progress("daso, schedule", units) as progress, place(2, progress, PER_NODE) as here:
            for seed in options.seeds:
                for rate in rates:
                    task = {"part": "schedule", "seed": seed, "width": options.schedule_width, "label": rate}
                    found = {
                        "rate": rate, "seed": seed, "width": options.schedule_width,
                        "rows": here.run(__file__, task, rate),
                    }  # fmt: skip
                    result["schedule"] = _sorted(result.get("schedule", []), found, ("rate", "seed"))
                    # minutes of work must not be lost with the last ones
                    write("daso", result)
    return result


def _sorted(before: list[dict[str, Any]], found: dict[str, Any], keys: Sequence[str]) -> list[dict[str, Any]]:
    return sorted(merged(before, [found], keys), key=lambda case: [case[key] for key in keys])


def _measure_grid(options: argparse.Namespace, pairs: list[tuple[int, int]], result: dict[str, Any]) -> None:
    described = {"epochs": options.epochs, "steps": options.steps, "grid_width": options.grid_width}
    result |= {**described, "grid": []}
    with Progress("daso, grid", len(options.nodes) * len(options.seeds) * len(pairs)) as progress:
        for seed in options.seeds:
            for nodes in options.nodes:
                task = {
                    "part": "grid", "nodes": nodes, "ranks_per_node": PER_NODE, "seed": seed, "pairs": pairs,
                    "width": options.grid_width, "epochs": options.epochs, "steps": options.steps,
                }  # fmt: skip
                result["grid"] += local(nodes * PER_NODE, progress).run(__file__, task)
                write("daso", result)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="few pairs of B and S, one seed, one link, no times of pairs", each="link")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--nodes", nargs="+", type=int, help="of the grid, each of two ranks")
    parser.add_argument("--epochs", type=int, help="of the grid")
    parser.add_argument("--steps", type=int, help="at most, of each epoch of the grid")
    parser.add_argument("--rates", nargs="+")
    parser.add_argument("--grid-width", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024, help="of the network that is timed")
    parser.add_argument("--largest-b", type=int, help="that is timed; the mean of as many steps is taken")
    parser.add_argument("--schedule-width", type=int)
    parser.add_argument("--only", nargs="+", choices=("grid", "times", "schedule"))
    return parsed(
        parser, given, seeds=([0], [0, 1, 2]), nodes=([2], [2, 4]), epochs=(1, 2), steps=(120, 500),
        rates=(["1gbit"], ["100mbit", "1gbit"]), seconds=(4.0, 120.0), least=(3, 5), largest_b=(8, 32),
        schedule_width=(256, 1024), only=(("grid", "schedule"), ("grid", "times", "schedule")),
    )  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    parts = ["## DASO", "", "After Coquelin et al. 2021."]
    if result.get("grid"):
        parts += ["", "### B and S (table 2)", "", *_grid(result)]
    if result.get("times"):
        parts += ["", "### Time of a step", "", *_times(result)]
    if result.get("schedule"):
        parts += ["", "### The whole schedule", "", *_schedule(result)]
    return "\n".join(parts)


def _grid(result: dict[str, Any]) -> list[str]:
    rows = result["grid"]
    nodes = sorted({row["nodes"] for row in rows})
    lines: list[list[object]] = []
    for skips, wait in dict.fromkeys((row["skips"], row["wait"]) for row in rows):
        cells: list[object] = [skips, wait]
        for count in nodes:
            mine = [row for row in rows if (row["nodes"], row["skips"], row["wait"]) == (count, skips, wait)]
            cells += [_of_seeds([row["accuracy"] for row in mine]), f"{mean(row['loss'] for row in mine):.4f}"]
        few, many, hours, hours_many = PAPER[skips, wait]
        lines.append([*cells, f"{few:.1f}, {many:.1f}", f"{hours:.2f}, {hours_many:.2f}"])
    head = ["B", "S"]
    for count in nodes:
        head += [f"{count} nodes: accuracy, %", "loss"]
    head += ["the paper's: accuracy, % (8, 32 nodes)", "hours"]
    width, seeds = result["grid_width"], len({row["seed"] for row in rows})
    said = (
        f"MNIST, 784-{width}-{width}-10, {PER_NODE} ranks on each node, {BATCH} images a rank and step, SGD "
        f"{RATE} with momentum {MOMENTUM}, {result['epochs']} epochs of at most {result['steps']} steps, fixed B and "
        f"S, no phases; {seeds} seeds: mean, and the extremes in brackets. The loss is that of training in the last "
        "epoch."
    )
    differs = (
        "In the paper S = B is better than 0 < S < B, and for B of 16 and more also than S = 0. Where what was sent "
        "arrives after the batch that sends again, the authors' code sends before it merges; ours sends what is merged."
    )
    return [
        said,
        "",
        table(head, lines),
        "",
        *_trends(rows, nodes),
        "",
        differs,
        "",
        f"{BANDS} On the right each line is one run.",
        "",
        _figure(result),
    ]


def _of_seeds(values: list[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _mean_loss(rows: list[dict[str, Any]], nodes: int, skips: int, wait: int) -> float | None:
    found = _losses(rows, nodes, skips, wait)
    return mean(found) if found else None


def _losses(rows: list[dict[str, Any]], nodes: int, skips: int, wait: int) -> list[float]:
    return [row["loss"] for row in rows if (row["nodes"], row["skips"], row["wait"]) == (nodes, skips, wait)]


def _trends(rows: list[dict[str, Any]], nodes: list[int]) -> list[str]:
    """Write the paper's three trends, in its figures and in ours."""
    said = []
    pairs = {(row["skips"], row["wait"]) for row in rows}
    for count in nodes:
        by_b = [(b, _mean_loss(rows, count, b, 0)) for b in sorted({b for b, s in pairs if s == 0})]
        losses = ", ".join(f"{loss:.4f}" for _, loss in by_b if loss is not None)
        said.append(f"- {count} nodes, S = 0, B = {', '.join(str(b) for b, _ in by_b)}: loss {losses}.")
        for b in sorted({b for b, s in pairs if s}):
            by_s = [(s, _mean_loss(rows, count, b, s)) for s in sorted(s for other, s in pairs if other == b)]
            losses = ", ".join(f"{loss:.4f}" for _, loss in by_s if loss is not None)
            said.append(f"- {count} nodes, B = {b}, S = {', '.join(str(s) for s, _ in by_s)}: loss {losses}.")
    for where, column in (("8 nodes", 0), ("32 nodes", 1)):
        at_zero = [f"{PAPER[b, 0][column]:.1f}" for b in (1, 2, 4, 8, 16, 32)]
        said.append(f"- The paper, {where}, S = 0, B = 1 to 32: accuracy {', '.join(at_zero)} %.")
    return said


BANDS = "Lines are the means of the seeds, bands their extremes."


def _figure(result: dict[str, Any]) -> str:
    import matplotlib.pyplot as plt
    from drawing import label_ends, thin

    rows = result["grid"]
    figure, panels = plt.subplots(1, 3, figsize=(16, 4.2))
    figure.subplots_adjust(left=0.05, right=0.9, top=0.92, bottom=0.13, wspace=0.6)
    for row_nodes in sorted({row["nodes"] for row in rows}):
        for kind, style in (("S = 0", "o-"), ("S = B", "s--")):
            pairs = sorted(
                {(r["skips"], r["wait"]) for r in rows if r["wait"] == (0 if kind == "S = 0" else r["skips"])}
            )
            losses = [_losses(rows, row_nodes, b, s) for b, s in pairs]
            at = [b for b, _ in pairs]
            (drawn,) = panels[0].plot(at, list(map(mean, losses)), style, label=f"{row_nodes} nodes, {kind}")
            panels[0].fill_between(
                at, list(map(min, losses)), list(map(max, losses)), color=drawn.get_color(), alpha=0.13, linewidth=0
            )
    panels[0].set(xlabel="B", ylabel="training loss", title="ours, MNIST", xscale="log")
    for column, where in ((0, "8 nodes"), (1, "32 nodes")):
        for kind, style in (("S = 0", "o-"), ("S = B", "s--")):
            pairs = [(b, s) for b, s in PAPER if s == (0 if kind == "S = 0" else b)]
            panels[1].plot([b for b, _ in pairs], [PAPER[p][column] for p in pairs], style, label=f"{where}, {kind}")
    panels[1].set(xlabel="B", ylabel="top-1 accuracy, percent", title="the paper, ImageNet (table 2)", xscale="log")
    for case in result.get("schedule", [])[:1]:
        for name, run in case["rows"].items():
            panels[2].plot(run["seconds"], run["accuracies"], ".-", label=name)
        panels[2].set(xlabel="seconds", ylabel="test accuracy, percent", title=f"whole schedule, {case['rate']}")
        panels[2].set_ylim(bottom=85)
    for panel in panels[:2]:
        panel.set_xticks([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32])
        panel.minorticks_off()
    for panel in panels:
        thin(panel)
        label_ends(panel)
    return picture(figure, "daso")


def _parameter_bytes(width: int) -> int:
    return 4 * (785 * width + (width + 1) * width + (width + 1) * 10)


def _times(result: dict[str, Any]) -> list[str]:
    lines: list[list[object]] = []
    for case in result["times"]:
        rows = case["rows"]
        model = _parameter_bytes(case["width"])
        for name in [n for n in rows if n != ALONE]:
            seconds = rows[name]["seconds"]
            against = [Spread.of(ratios(rows[other]["seconds"], seconds)) for other in (FP32, FP16)]
            # both ranks of a host count its interface
            nbytes = [b / case["cycle"] / PER_NODE for b in rows[name]["bytes"]]
            label = "B = {}, S = {}".format(*name.split(",")) if name[0].isdigit() else name
            lines.append(
                [
                    f"{case['rate']}: {label}",
                    *against,
                    Spread.of(ratios(seconds, rows[ALONE]["seconds"])),
                    Spread.of([b / 1e3 for b in nbytes]),
                    f"{mean(nbytes) / model:.4f}",
                ]
            )
    head = [
        "",
        "times as fast as fp32",
        "as fp16",
        "times the step alone",
        "kB between hosts a rank and step",
        "of the model",
    ]
    widths = ", ".join(
        f"W = {case['width']} at {case['rate']} (mean of {case['cycle']} steps)" for case in result["times"]
    )
    said = (
        f"784-W-W-10, {BATCH} images a rank, 2 hosts with {PER_NODE} ranks each; {widths}. "
        "Bytes are counted at the hosts' interfaces. Where no B and S are told they are 4 "
        "and 1."
    )
    return [said, "", table(head, lines)]


def _seconds_to(run: dict[str, Any], accuracy: float) -> float | None:
    """Return when the accuracy was reached, by a straight line between two tests."""
    before = (0.0, 10.0)
    for seconds, reached in zip(run["seconds"], run["accuracies"], strict=True):
        if reached >= accuracy:
            share = (accuracy - before[1]) / (reached - before[1])
            return before[0] + share * (seconds - before[0])
        before = seconds, reached
    return None


def _aimed_at(case: dict[str, Any]) -> float:
    """Return the accuracy that all candidates of a case reach."""
    return min(max(run["accuracies"]) for run in case["rows"].values())


def _shares(result: dict[str, Any], rate: str, name: str, of: str) -> list[float]:
    found = []
    for case in result["schedule"]:
        if case["rate"] == rate:
            mine, other = (_seconds_to(case["rows"][n], _aimed_at(case)) for n in (name, of))
            assert mine is not None
            assert other is not None
            found.append(mine / other)
    return found


def _schedule(result: dict[str, Any]) -> list[str]:
    lines: list[list[object]] = []
    rates = list(dict.fromkeys(case["rate"] for case in result["schedule"]))
    for rate in rates:
        cases = [case for case in result["schedule"] if case["rate"] == rate]
        for name in SCHEDULED:
            last = [case["rows"][name]["accuracies"][-1] for case in cases]
            whole = [ratios([c["rows"][name]["seconds"][-1]], [c["rows"][FP16]["seconds"][-1]])[0] for c in cases]
            against = [Spread.of(_shares(result, rate, name, other)) for other in (FP32, FP16)]
            lines.append([f"{rate}: {name}", _of_seeds(last), *against, Spread.of(whole)])
    head = [
        "",
        "accuracy at the end, %",
        "time to the accuracy that all reach, of fp32's",
        "of fp16's",
        "whole, of fp16's",
    ]
    widths = ", ".join(dict.fromkeys(f"W = {case['width']} at {case['rate']}" for case in result["schedule"]))
    targets = [_aimed_at(case) for case in result["schedule"]]
    said = (
        f"784-W-W-10 on MNIST, {widths}, {SCHEDULE_BATCH} images a rank, 2 hosts with {PER_NODE} ranks each; {EPOCHS} "
        f"epochs of {STEPS_OF_EPOCH} steps, of which the first warms up and the last cools down, B = 4, S = 1. The "
        f"accuracy that all reach is {min(targets):.2f} to {max(targets):.2f} %. The paper has 25 to 35 % less time "
        "than Horovod."
    )
    return [said, "", table(head, lines)]


def aims(result: dict[str, Any]) -> list[Aim]:
    found = []
    for rate in dict.fromkeys(case["rate"] for case in result.get("schedule", [])):
        for name in (DASO, DASO_4, DASO_ADAPTIVE):
            for other in (FP32, FP16):
                share = Spread.of(_shares(result, rate, name, other))
                found.append(Aim(f"{name}, {rate}: time to equal accuracy, of {other}'s", "≤", 0.5, share))
    for case in result.get("times", []):
        rows = case["rows"]
        if not all(all(rows.get(name, {}).get("bytes", [0])) for name in ("4,1", DASO_ADAPTIVE)):
            continue  # without a cluster nobody counts bytes, and a shorter cycle has no such row
        model = _parameter_bytes(case["width"])
        dense = [b / case["cycle"] / PER_NODE for b in rows["4,1"]["bytes"]]
        most = model * 2 / (PER_NODE * 4)
        said = f"DASO, {case['rate']}, B = 4, S = 1: bytes between hosts a rank and step"
        found.append(
            Aim(f"{said}, of 2 models / (ranks of a node x B)", "≤", 1.0, Spread.of([b / most for b in dense]))
        )
        fewer = ratios(rows["4,1"]["bytes"], rows[DASO_ADAPTIVE]["bytes"])
        found.append(Aim(f"{said}, times fewer with adaptive(64)", "≥", 20.0, Spread.of(fewer)))
    return found


if __name__ == "__main__":
    main()
