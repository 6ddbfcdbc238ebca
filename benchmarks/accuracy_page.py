"""Write the page of the accuracy table from its record; no figure is typed by hand."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from statistics import mean
from typing import Any

from accuracy_cells import (
    AS_GOOD,
    COMPRESSORS,
    CORRECTED,
    DENSE,
    FORMS,
    MIN_NUMEL,
    MOMENTUM,
    NETWORKS,
    OPTIMIZERS,
    RANKS,
    SEEDS,
    SIGNS,
    THRESHOLD,
    TOP_K,
    TUNING_SEED,
    Row,
    badness,
    chosen,
)
from measure import table
from reproduce.show import of_seeds

__all__ = ["page"]

_FACTS = ("processor", "cores", "system", "python", "hvd_compress", "horovod", "torch", "numpy", "commit", "date")
_PAIRS = tuple(product(NETWORKS, OPTIMIZERS))
_LOSSY = tuple(name for name in COMPRESSORS if name != DENSE)
_NAMED = 3  # how many compressors a line of the answer names
_FAR_FEWER = 20  # times
_UNITS = {"MLP": "accuracy, %", "ResNet": "accuracy, %", "transformer": "loss, nats a byte"}
_DIGITS = {"MLP": 1, "ResNet": 1, "transformer": 3}


class Results:
    """Answers questions about the rows of a record.

    Args:
        content: of the record.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self._rows = {
            tuple(row[key] for key in ("compressor", "network", "optimizer", "seed")): row for row in content["rows"]
        }

    def of(self, compressor: str, network: str, optimizer: str) -> list[Row]:
        """Return the rows of a compressor, by seed."""
        keys = [(compressor, network, optimizer, seed) for seed in SEEDS]
        return [self._rows[key] for key in keys if key in self._rows]

    def lost(self, compressor: str, network: str, optimizer: str, than: str = "") -> list[float]:
        """Return how much worse each seed ends than dense does, in points or nats; infinity where it is not finite.

        Dense is that of the same optimizer, or of the one that `than` names.
        """
        dense = {row["seed"]: row for row in self.of(DENSE, network, than or optimizer)}
        rows = [row for row in self.of(compressor, network, optimizer) if row["seed"] in dense]
        return [badness(row) - badness(dense[row["seed"]]) if row["test"] is not None else math.inf for row in rows]

    def keeps(self, compressor: str, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the pairs of network and optimizer in which it is as good as dense, in the mean of all seeds."""
        kept = []
        for network, optimizer in pairs:
            lost = self.lost(compressor, network, optimizer)
            if len(lost) >= len(self.seeds) and mean(lost) <= AS_GOOD[network]:
                kept.append((network, optimizer))
        return kept

    def price(self, compressor: str) -> dict[tuple[str, str], float] | None:
        """Return how much worse than dense it is in each pair, in the mean of seeds; None if a training is missing."""
        lost = {pair: self.lost(compressor, *pair) for pair in _PAIRS}
        if any(len(found) < len(self.seeds) for found in lost.values()):
            return None
        return {pair: mean(found) for pair, found in lost.items()}

    def fewer(self, compressor: str, pairs: Sequence[tuple[str, str]] = _PAIRS) -> float:
        """Return how many times fewer bytes than dense it sends in trainings of these pairs, taken together."""
        mine = dense = 0.0
        for pair in pairs:
            rows, others = self.of(compressor, *pair), self.of(DENSE, *pair)
            if rows and others:
                mine += mean(row["bytes"] for row in rows)
                dense += mean(row["bytes"] for row in others)
        return dense / mine if mine else 0.0

    @cached_property
    def seeds(self) -> list[int]:
        """Those of which all trainings are there; the answer needs one, and a cut run may lack the last."""
        counts = Counter(row["seed"] for row in self._rows.values() if row["optimizer"] in OPTIMIZERS)
        return [seed for seed in SEEDS if counts[seed] == len(_PAIRS) * len(COMPRESSORS)]

    @property
    def is_complete(self) -> bool:
        """Whether all trainings of the table are there."""
        return len(self._rows) == self._wanted

    @property
    def _wanted(self) -> int:
        return len(SEEDS) * (len(_PAIRS) * len(COMPRESSORS) + len(NETWORKS) * len(CORRECTED))

    @property
    def said(self) -> str:
        """How much there is of the table."""
        return f"{len(self._rows)} of {self._wanted}"


def page(content: Mapping[str, Any] | None) -> str:
    """Return the Markdown of the record of the full form, or a page that says that there is none."""
    head = ["# Accuracy: every compressor, two optimizers, three networks", ""]
    if content is None or not content["rows"]:
        return "\n".join([*head, *_nothing(content)]) + "\n"
    results = Results(content)
    parts = [*head, *_answer(results), "", *_how(results)]
    for network in NETWORKS:
        parts += ["", f"## {network}", "", _about(results, network), "", _table(results, network)]
    return "\n".join([*parts, "", *_corrected(results), "", *_tuned(content), "", *_conditions(content)]) + "\n"


def _nothing(content: Mapping[str, Any] | None) -> list[str]:
    tuned = "" if content is None or not content["tuning"] else " Learning rates are tuned already."
    command = "`python benchmarks/accuracy.py --jobs N` makes it, on two cores for each of N jobs."
    return [f"**Missing:** the table is not recorded yet.{tuned} {command}"]


# -- which to take --------------------------------------------------------------------------------------------------


def _answer(results: Results) -> list[str]:
    missing = [] if results.is_complete else [f"**Not complete:** {results.said} trainings are recorded.", ""]
    if not results.seeds:
        return missing[:1]
    by_adam, by_sgd = ([pair for pair in _PAIRS if pair[1] == optimizer] for optimizer in ("Adam", "SGD"))
    kept = {name: len(results.keeps(name, _PAIRS)) for name in _LOSSY}
    worst = [f"`{name}`" for name in _LOSSY if kept[name] == min(kept.values())]
    lines = [
        f"**Whatever you train:** {_best(results, _PAIRS)}.",
        f"**With Adam:** {_best(results, by_adam)}.",
        f"**With SGD and momentum:** {_best(results, by_sgd)}.",
        f"**For fewest bytes, at a price:** {_cheapest(results)}.",
        f"**Not without a trial of your own:** {', '.join(worst)}. They were as good as dense in "
        f"{min(kept.values()) or 'none'} of the {len(_PAIRS)} pairs of a network and an optimizer.",
    ]
    return [
        *missing,
        *(f"{number}. {line}" for number, line in enumerate(lines, 1)),
        "",
        f"*As good as dense* means: in the mean of {len(results.seeds)} seeds, at most {AS_GOOD['MLP']:g} points of "
        f"accuracy lower, or {AS_GOOD['transformer']:g} nats a byte of loss higher, than without compression. Lines 1 "
        "to 3 name "
        f"at most {_NAMED} of those that were so with every network, fewest bytes first.",
        "",
        f"**Tried:** small networks, some hundred steps, {RANKS} ranks, rates that suit uncompressed training. Error "
        "feedback sends late what it holds back, and short trainings feel that most. Longer trainings, larger networks "
        "and lower rates were not tried.",
    ]


def _best(results: Results, pairs: Sequence[tuple[str, str]]) -> str:
    """Name the compressors that are as good as dense in all pairs, or in the most, and send fewest bytes."""
    kept = {name: len(results.keeps(name, pairs)) for name in _LOSSY}
    most = max(kept.values())
    if not most:
        return "no compressor was as good as dense with any network"
    names = sorted((n for n in _LOSSY if kept[n] == most), key=lambda n: -results.fewer(n, pairs))[:_NAMED]
    said = ", then ".join(f"`{name}` ({results.fewer(name, pairs):.1f} times fewer bytes)" for name in names)
    if most == len(pairs):
        return said
    return f"none was as good as dense in all of {len(pairs)} cases; in {most} of them were {said}"


def _cheapest(results: Results) -> str:
    """Name the compressor that loses least of those that send far fewer bytes, by its worst pair."""
    prices = {name: results.price(name) for name in _LOSSY if results.fewer(name) >= _FAR_FEWER}
    complete = {name: price for name, price in prices.items() if price is not None and max(price.values()) < math.inf}
    if not complete:
        return f"none that sent {_FAR_FEWER} times fewer bytes ended well in all pairs"
    name = min(complete, key=lambda n: max(lost / AS_GOOD[network] for (network, _), lost in complete[n].items()))
    points = max(lost for (network, _), lost in complete[name].items() if network != "transformer")
    nats = max(lost for (network, _), lost in complete[name].items() if network == "transformer")
    return (
        f"`{name}` lost least of those that sent at least {_FAR_FEWER} times fewer: at most {max(points, 0):.1f} "
        f"points of accuracy and {max(nats, 0):.3f} nats a byte, for {results.fewer(name):.0f} times fewer bytes"
    )


# -- tables ---------------------------------------------------------------------------------------------------------


def _how(results: Results) -> list[str]:
    form = FORMS[results.content["form"]]
    return [
        "## How it was measured",
        "",
        f"{RANKS} ranks of Horovod over Gloo, with {form['batch']} images, or {form['sequences']} stretches of "
        f"{form['context']} bytes of text, a rank and step. The learning rate rises for {form['warm_up']} steps, and "
        f"falls to zero as a line. SGD's momentum is {MOMENTUM:g}. Settings of compressors that are not named are the "
        "defaults, and so is whether they have error feedback.",
        "",
        f"Tensors of fewer than {MIN_NUMEL} elements go uncompressed. The default of `min_numel` would leave out most "
        f"of such small networks. `{SIGNS}` compresses all tensors, as its page asks for.",
        "",
        f"Cells are means of {len(SEEDS)} seeds, in brackets the extremes. Differences are those to dense with the "
        "same seed. Bytes are those that a rank sends in a step, all tensors together, as `compression_stats()` counts "
        "them. They depend on the number of ranks. *Not finite* means that a seed ended in Inf or NaN.",
    ]


def _about(results: Results, network: str) -> str:
    rows = [row for row in results.content["rows"] if row["network"] == network]
    if not rows:
        return "Nothing is recorded."
    form = FORMS[results.content["form"]]
    inner = {
        "MLP": "Two hidden layers of 128 and 64, ReLU",
        "ResNet": "Three bottlenecks with batch normalization, on images of at most 14×14",
        "transformer": "One layer of width 64 that predicts the next byte",
    }[network]
    tested = "on text held out" if network == "transformer" else f"on at most {form['tested']:,} images held out"
    return (
        f"{inner}. {rows[0]['parameters']:,} parameters, {form['steps'][network]} steps. Learned from: "
        f"{rows[0]['data']}. Tested {tested}."
    )


def _table(results: Results, network: str) -> str:
    head = [_UNITS[network]]
    for optimizer in OPTIMIZERS:
        head += [optimizer, "against dense"]
    lines = []
    for name in sorted(COMPRESSORS, key=lambda n: results.fewer(n, [(network, o) for o in OPTIMIZERS])):
        line: list[object] = [f"`{name}`"]
        for optimizer in OPTIMIZERS:
            line += _cells(results, name, network, optimizer)
        pairs = [(network, optimizer) for optimizer in OPTIMIZERS]
        sent = [row["bytes"] / 1000 for pair in pairs for row in results.of(name, *pair)]
        lines.append([*line, f"{mean(sent):.1f}" if sent else "", f"{results.fewer(name, pairs):.1f}" if sent else ""])
    return table([*head, "kB a step", "times fewer"], lines)


def _cells(results: Results, name: str, network: str, optimizer: str, than: str = "") -> list[str]:
    rows, digits = results.of(name, network, optimizer), _DIGITS[network]
    values = [row["test"] for row in rows]
    if None in values:
        return ["not finite", ""]
    sign = 1 if network == "transformer" else -1
    lost = results.lost(name, network, optimizer, than)
    is_against = name != DENSE and lost and math.inf not in lost
    against = of_seeds([sign * value for value in lost], digits + (digits < 2), sign=True) if is_against else ""
    few = "" if len(rows) in (0, len(SEEDS)) else f", {len(rows)} of {len(SEEDS)} seeds"
    return [of_seeds(values, digits) + few, against]


def _corrected(results: Results) -> list[str]:
    lines = [
        [f"{network}: {_UNITS[network]}", *_against_sgd(results, network, optimizer)]
        for network in NETWORKS
        for optimizer in ("SGD", *CORRECTED)
    ]
    share = next(filter(None, CORRECTED.values()))
    return [
        "## Top-k with momentum correction",
        "",
        f"`{TOP_K}` with `DistributedOptimizer` and SGD, as above, and with `hvd.DGC`, which is SGD with momentum that "
        f"is corrected for what is sent late. The last row of three sends more in the first {share:.0%} of the steps.",
        "",
        table(["", "optimizer", "result", "against dense SGD", "times fewer bytes"], lines),
    ]


def _against_sgd(results: Results, network: str, optimizer: str) -> list[object]:
    rows, dense = results.of(TOP_K, network, optimizer), results.of(DENSE, network, "SGD")
    if len(rows) < len(SEEDS) or len(dense) < len(SEEDS):
        return [optimizer, "not recorded", "", ""]
    fewer = mean(row["bytes"] for row in dense) / mean(row["bytes"] for row in rows)
    return [optimizer, *_cells(results, TOP_K, network, optimizer, than="SGD"), f"{fewer:.1f}"]


def _tuned(content: Mapping[str, Any]) -> list[str]:
    lines = []
    for network, optimizer in _PAIRS:
        dense, signs, threshold = (
            chosen(content["tuning"], name, optimizer, network) for name in (DENSE, SIGNS, THRESHOLD)
        )
        lines.append([f"{network}, {optimizer}", f"{dense['rate']:g}", f"{signs['rate']:g}", f"{threshold['tau']:g}"])
    return [
        "## Learning rates",
        "",
        f"One for each network and optimizer, tuned without compression on seed {TUNING_SEED}, which is not in the "
        "table. It is the lowest of those that ended as good as the best one.",
        "",
        f"`{SIGNS}` sends signs without magnitudes, so it has rates of its own, found likewise. The tau of `Threshold` "
        "is the largest of those that ended as good as the best one, at dense's rate.",
        "",
        table(["", "rate", f"rate of `{SIGNS}`", "tau"], lines),
    ]


def _conditions(content: Mapping[str, Any]) -> list[str]:
    runs = content["runs"]
    facts = [
        [key.replace("_", " "), " / ".join(dict.fromkeys(str(run["machine"].get(key, "not recorded")) for run in runs))]
        for key in _FACTS
    ]
    facts.append(["networks on", " / ".join(dict.fromkeys(run["device"] for run in runs))])
    commands = " · ".join(dict.fromkeys(f"`{shlex.join(run['command'])}`" for run in runs))
    return ["## Where this was measured", "", f"{commands}", "", table(["", ""], facts)]
