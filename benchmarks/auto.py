"""Find out whether `Auto` finds the fastest way, and whether `advise` foresees what each way takes.

    python benchmarks/auto.py [--short] [--hosts 2 4] [--rates 100mbit unlimited] [--widths 256 4096] [--add]

Networks 784-W-W-W-10 learn MNIST, 10 images a rank and step. When `Auto` has made its choice, it takes turns with the
step without communication, Horovod's own optimizers and each of its candidates, all in the same ranks. What steps of
the candidates take is foretold as `hvd-compress advise` does under horovodrun: from the measured link, kernels and step
without communication, and by trials on made-up gradients unless these take long. Where chance hides whether Auto is
slower than it may be, rounds go on for some minutes more. `--add` keeps the record's other cases.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from candidates import style
from measure import (
    ALONE,
    AUTO,
    DENSE,
    OWN_DENSE,
    Aim,
    Spread,
    machine,
    median_interval,
    merged,
    picture,
    ratios,
    read,
    table,
    write,
)
from places import UNLIMITED, Progress, parsed, parser_of, place, rates_or_unlimited, start

CANDIDATES = (*OWN_DENSE, "one-bit", "adaptive(64)")
FIXED = (*DENSE, *CANDIDATES)
AGAIN = "one-bit, again"  # what differs between it and the same candidate is chance
NAMES = [ALONE, *FIXED, AGAIN, AUTO]
BATCH = 10
MNIST_FEATURES = 784  # where MNIST is not to be had, digits of fewer pixels are learnt
RATES = ("100mbit", "1gbit", "10gbit", UNLIMITED)
SHORT_RATES = ("1gbit",)
WIDTHS = (256, 1024, 4096)
MOST_LOSS = 1.05  # how many times as long as the fastest Auto may take
WITHIN = 0.25  # share of what was measured by which a prediction may be off
MOST_STEPS, LOOKED_AT = 6000, 10  # Auto chooses within so many steps; it is asked after each so many


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import networks
    import ranks as r

    import hvd_compress.torch as hvd

    hvd.init()
    batch, features = networks.batches("mlp", BATCH)
    cells = []
    foreseen = _Foreseen()
    for width in task["widths"]:
        trainings = {
            n: networks.Training("one-bit" if n == AGAIN else n, networks.network_of("mlp", width, features), batch)
            for n in NAMES
        }
        steps = _until_chosen(trainings[AUTO])
        samples = r.rounds(
            {n: t.step for n, t in trainings.items()}, task["seconds"], task["least"], turn=task["turn"],
            undecided=lambda rows: is_undecided({"rows": rows}), more_seconds=task["undecided"],
        )  # fmt: skip
        alone = median(samples[ALONE]["seconds"])
        shapes = [tuple(p.shape) for p in trainings[ALONE].network.parameters()]
        cell = {
            "width": width,
            "features": features,
            "parameters": sum(p.numel() for p in trainings[ALONE].network.parameters()),
            "rows": samples,
            "steps until chosen": steps,
            "auto": trainings[AUTO].optimizer.compression_stats()["auto"],
        }
        del trainings
        gc.collect()  # optimizers are part of cycles, and trials take memory of their own
        cells.append({**cell, "predicted": foreseen.seconds(shapes, alone), "measured": foreseen.measured})
        r.done(f"{task['label']}, {width}")
    r.deliver(task, cells)


def _until_chosen(training: Any) -> int:
    """Let Auto learn until it has tried what it wants to; returns how many steps that took."""
    for number in range(MOST_STEPS):
        training.step(number)
        # not after each step: the norms that are among it would make the ranks wait for each other
        if number % LOOKED_AT == 0 and training.optimizer.compression_stats()["auto"]["committed"]:
            return number + 1
    raise RuntimeError(f"Auto has not chosen after {MOST_STEPS} steps")


class _Foreseen:
    """Holds what `advise` says under horovodrun, by the names of the benchmark."""

    def __init__(self) -> None:
        from candidates import compression_of

        from hvd_compress.cli.ranks import open_ranks
        from hvd_compress.cost import measure_network, slowest_speeds

        self._compressors = {name: compression_of(name) for name in CANDIDATES}
        self._opened = open_ranks()
        self._network = measure_network(self._opened.ranks)
        computing = [c for name, c in self._compressors.items() if name != CANDIDATES[0]]
        self._speeds = slowest_speeds(computing, self._opened.ranks)

    @property
    def measured(self) -> dict[str, Any]:
        """Return what the predictions were made from."""
        speeds = {name: self._speeds[c].numbers() for name, c in self._compressors.items() if c in self._speeds}
        return {"link": self._network.link.get_config(), "core": dict(self._network.core), "speeds": speeds}

    def seconds(self, shapes: Sequence[tuple[int, ...]], alone: float) -> dict[str, float]:
        """Predict the seconds of a step that takes `alone` without communication."""
        from hvd_compress.cli.advise import tried
        from hvd_compress.cli.predict import predict

        taken = {compressor: self._exchange_of(compressor, shapes) for compressor in self._compressors.values()}
        rows = predict(shapes, self._network, self._speeds, alone)
        rows = tried([row for row in rows if row.exchange == taken[row.compressor]], self._opened, shapes, alone)
        seconds = {row.compressor: row.seconds for row in rows}
        return {name: seconds[compressor] for name, compressor in self._compressors.items()}

    def _exchange_of(self, compressor: Any, shapes: Sequence[tuple[int, ...]]) -> str:
        """Return the exchange that `DistributedOptimizer` takes by itself, for the largest bucket."""
        from hvd_compress.cost import Speed
        from hvd_compress.engine import Routing, Tensor, bucket_work

        if compressor.reducible:
            return "dense"
        routing = Routing(compressor)
        tensors = {str(i): Tensor(str(i), shape) for i, shape in enumerate(shapes)}
        buckets = [
            [tensors[name] for name in names] for names in routing.divided(tensors.values(), self._opened.ranks.size)
        ]
        largest = max(buckets, key=lambda bucket: sum(math.prod(tensor.shape) for tensor in bucket))
        work = bucket_work(largest, compressor, routing, self._network, Speed())
        assert work is not None
        return work.exchange.id


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    before = (read("auto") or {}).get("cells", []) if options.add else []
    result, found = {"cells": before}, []
    made = "{date}, {commit}".format_map(machine())
    rates = rates_or_unlimited(options.rates)
    with Progress("auto", len(options.hosts) * len(rates) * len(options.widths)) as progress:
        for hosts in options.hosts:
            with place(hosts, progress) as here:
                for rate in rates:
                    task = {
                        "widths": options.widths,
                        "seconds": options.seconds,
                        "least": options.least,
                        "undecided": options.undecided,
                        "turn": options.turn,
                        "label": f"{hosts} hosts, {rate}",
                    }
                    cells = here.run(__file__, task, rate)
                    found += [{"hosts": hosts, "rate": rate, **cell, "made": made} for cell in cells]
                    result = {"cells": merged(before, found, ("hosts", "rate", "width", "features"))}
                    # an hour's work must not be lost with the last minutes
                    write("auto", result)
    return result


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="2 hosts, one link and network, fewer rounds", each="network")
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--rates", nargs="+")
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--undecided", type=float, help="more seconds where chance hides whether Auto is slower")
    parser.add_argument("--turn", type=float, help="seconds of each candidate's turn in a round")
    parser.add_argument("--add", action="store_true", help="to the record, instead of beginning a new one")
    return parsed(
        parser,
        given,
        hosts=([2], [2, 4]),
        rates=(SHORT_RATES, RATES),
        widths=([1024], WIDTHS),
        seconds=(8.0, 60.0),
        least=(3, 6),
        undecided=(20.0, 400.0),
        # training makes no pauses, and a turn's first steps are slower than others
        turn=(0.25, 0.5),
    )


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    head = ["", *FIXED, "the fastest", "Auto's choice", "after steps", "rounds", "recorded", "Auto, times the fastest"]
    head += [f"{AGAIN}, times one-bit"]
    head += [f"{name}, foretold of measured" for name in CANDIDATES]
    lines = []
    for cell in result["cells"]:
        rows, least = cell["rows"], fastest(cell)
        shown = [Spread.of(ratios(rows[name]["seconds"], rows[ALONE]["seconds"])) for name in FIXED]
        line = [_title(cell), *shown, least, cell["auto"]["configuration"], cell["steps until chosen"]]
        line += [len(rows[AUTO]["seconds"]), cell["made"]]
        lines.append([*line, loss(cell), chance(cell), *(f"{foresight(cell, name):.2f}" for name in CANDIDATES)])
    return "\n".join(
        [
            "## Auto and advise",
            "",
            f"{_networks(result)}, {BATCH} images a rank and step. The first columns are times the step without "
            "communication, in the same ranks and rounds. `Auto` chose among float32, float16, "
            f"{' and '.join(CANDIDATES[2:])}; *after steps* is how many it took to try them. *Again* is the same "
            "candidate a second time: how far it is from 1 is chance. Which one is the fastest is told by half of the "
            "rounds, and Auto compared with it in the other half; rounds went on for some minutes where chance hid "
            "whether it was more than 5 % slower. The last columns are what "
            "`hvd-compress advise` foretells of a step, divided by what it took.",
            "",
            _plot(result),
            "",
            table(head, lines),
        ]
    )


def fastest(cell: dict[str, Any]) -> str:
    """Return the fastest of all but Auto."""
    return min(FIXED, key=lambda name: median(cell["rows"][name]["seconds"]))


def losses(cell: dict[str, Any]) -> list[float]:
    """Return how many times as long a step takes with Auto as with the fastest of the others, in each round.

    The other half of the rounds tells which one is the fastest: the luckiest one of a round is not.
    """
    seconds = {name: cell["rows"][name]["seconds"] for name in (*FIXED, AUTO)}
    found: list[float] = []
    for mine, other in ((0, 1), (1, 0)):
        best = min(FIXED, key=lambda name: median(seconds[name][other::2]))
        found += ratios(seconds[AUTO][mine::2], seconds[best][mine::2])
    return found


def loss(cell: dict[str, Any]) -> Spread:
    """Return the median of `losses`, with its spread."""
    return Spread.of(losses(cell))


def is_slower(cell: dict[str, Any]) -> bool:
    """Tell whether Auto takes longer than it may, beyond chance."""
    low, _ = median_interval(losses(cell))
    return low > MOST_LOSS


def is_undecided(cell: dict[str, Any]) -> bool:
    """Tell whether chance hides if Auto takes longer than it may."""
    low, high = median_interval(losses(cell))
    return low <= MOST_LOSS < high


def chance(cell: dict[str, Any]) -> Spread:
    """Return how many times as long one-bit takes as itself."""
    return Spread.of(ratios(cell["rows"][AGAIN]["seconds"], cell["rows"]["one-bit"]["seconds"]))


def foresight(cell: dict[str, Any], name: str) -> float:
    """Return the predicted over the measured seconds of a step."""
    predicted: float = cell["predicted"][name]
    return predicted / median(cell["rows"][name]["seconds"])


def is_wrong(cell: dict[str, Any], name: str) -> bool:
    """Tell whether a prediction is further off than it may be, beyond the chance of what was measured."""
    low, high = median_interval(cell["rows"][name]["seconds"])
    predicted: float = cell["predicted"][name]
    return not (1 - WITHIN) * low <= predicted <= (1 + WITHIN) * high


def aims(result: dict[str, Any]) -> list[Aim]:
    cells = result["cells"]
    worst = max((loss(cell) for cell in cells), default=None)
    if worst is None:
        return []
    close = [abs(foresight(cell, name) - 1) <= WITHIN for cell in cells for name in CANDIDATES]
    share = Spread.of([sum(close) / len(close)])
    slower = Spread.of([sum(map(is_slower, cells))])
    wrong = Spread.of([sum(is_wrong(cell, name) for cell in cells for name in CANDIDATES)])
    return [
        Aim(f"Auto, times the fastest of the others, the worst of {len(cells)} cases", "≤", MOST_LOSS, worst),
        Aim(
            f"Auto, of {len(cells)} cases those more than {MOST_LOSS - 1:.0%} slower beyond chance (95 %)",
            "≤",
            0,
            slower,
        ),
        Aim(f"advise, share of {len(close)} predictions within {WITHIN:.0%}", "≥", 1.0, share),
        Aim(
            f"advise, of {len(close)} predictions those not within {WITHIN:.0%} beyond the chance of what was measured "
            "(95 %)",
            "≤",
            0,
            wrong,
        ),
    ]


def _networks(result: dict[str, Any]) -> str:
    return " and ".join(
        f"{features}-W-W-W-10 on {'MNIST' if features == MNIST_FEATURES else 'smaller digits, without MNIST'}"
        for features in sorted({cell["features"] for cell in result["cells"]}, reverse=True)
    )


def _title(cell: dict[str, Any]) -> str:
    other = "" if cell["features"] == MNIST_FEATURES else f", {cell['features']} features"
    return f"{cell['hosts']} hosts, {cell['rate']}, W={cell['width']}{other}"


def _plot(result: dict[str, Any]) -> str:
    import matplotlib.pyplot as plt
    from drawing import thin

    figure, (of_auto, of_advise) = plt.subplots(1, 2, figsize=(12, 5.6))
    figure.subplots_adjust(bottom=0.19, wspace=0.2)
    cells = result["cells"]
    losses = [loss(cell) for cell in cells]
    middles = [spread.median for spread in losses]
    lengths = [[s.median - s.low for s in losses], [s.high - s.median for s in losses]]
    of_auto.errorbar(middles, range(len(cells)), xerr=lengths, fmt="o", color="black", ecolor="0.7")
    of_auto.set_yticks(range(len(cells)), [_title(cell) for cell in cells], fontsize=7)
    luck = [chance(cell).median for cell in cells]
    of_auto.plot(luck, range(len(cells)), "x", color="tab:blue")
    of_auto.invert_yaxis()
    of_auto.axvline(1, color="0.8")
    of_auto.axvline(1.05, color="tab:red", linestyle=":")
    of_auto.set(xlabel="seconds of a step, times those of the fastest other")
    of_auto.set_title("Black: Auto. Blue: the same candidate twice, which is chance", loc="left", fontsize=10)
    of_auto.text(1.052, len(cells) - 0.3, "5 % slower", color="tab:red", fontsize=8, va="bottom")
    for name in CANDIDATES:
        x = [median(cell["rows"][name]["seconds"]) for cell in cells]
        of_advise.plot(x, [cell["predicted"][name] for cell in cells], ".", **{**style(name), "linestyle": ""})
    ends = [median(cell["rows"][name]["seconds"]) for cell in cells for name in CANDIDATES]
    ends = [min(ends), max(ends)]
    for factor, dashes in ((1.0, "-"), (1 - WITHIN, ":"), (1 + WITHIN, ":")):
        of_advise.plot(ends, [factor * end for end in ends], dashes, color="0.7")
    of_advise.set(xscale="log", yscale="log", xlabel="seconds of a step, measured", ylabel="predicted")
    of_advise.set_title(f"Dotted: {100 * WITHIN:.0f} % more and less than measured", loc="left", fontsize=10)
    # the points lie on each other, so that names beside them would lead nowhere
    figure.legend(*of_advise.get_legend_handles_labels(), loc="lower right", ncols=4, fontsize=8, frameon=False)
    for panel in (of_auto, of_advise):
        thin(panel)
    return picture(figure, "auto")


if __name__ == "__main__":
    main()
