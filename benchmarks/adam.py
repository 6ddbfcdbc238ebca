"""Try Adam with compressed gradients and with compressed momentum: loss after some steps, against dense Adam's.

    python benchmarks/adam.py [--short] [--seeds 0 1 2] [--rates 0.001 0.003] [--steps 256] [--warmup-steps 30]

A network of 64-256-256-8 with ReLU learns what another one of random weights computes; 2 ranks, 32 examples each and
step. Each candidate sees the same data. The loss is that of 4096 other examples after the last step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from measure import Aim, Spread, table
from places import Progress, local, parsed, parser_of, start

RANKS, BATCH, TESTED = 2, 32, 4096
DENSE = "AdamW, uncompressed"
COMPRESSORS = ("one-bit", "adaptive(64)", "top-k 1 %")
GRADIENTS = {name: f"gradients, {name}" for name in COMPRESSORS}
FROZEN = {name: f"momentum, variance frozen, {name}" for name in COMPRESSORS}
RENEWED = {name: f"momentum, variance renewed, {name}" for name in COMPRESSORS}
DEMO = "DeMo, signs, k = 32 of 64 x 64"
SIGNUM = "Signum"
NAMES = (DENSE, *GRADIENTS.values(), *FROZEN.values(), *RENEWED.values(), DEMO, SIGNUM)
MOST_PERCENT = 10.0


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: Mapping[str, Any]) -> None:
    import ranks as r

    import hvd_compress.torch as hvd

    hvd.init()
    rows = []
    for rate, seed in product(task["rates"], task["seeds"]):
        for name, make in _optimizers(rate, task["warmup_steps"]).items():
            rows.append({"name": name, "rate": rate, "seed": seed, **_learned(make, seed, task["steps"])})
            r.done(f"{name}, rate {rate:g}, seed {seed}")
    r.deliver(task, rows)


def _optimizers(rate: float, warmup: int) -> dict[str, Callable[[Any], Any]]:
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import Adaptive, OneBit, TopK

    found = {"one-bit": OneBit(), "adaptive(64)": Adaptive(pi=64), "top-k 1 %": TopK(0.01)}

    def with_gradients(compression: Any) -> Callable[[Any], Any]:
        def make(network: Any) -> Any:
            adamw = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
            return hvd.DistributedOptimizer(adamw, network.named_parameters(), compression=compression)

        return make

    def with_momentum(compression: Any, variance: str) -> Callable[[Any], Any]:
        return lambda network: hvd.CompressedAdam(
            network.named_parameters(), lr=rate, compression=compression, warmup_steps=warmup, variance=variance
        )

    made = {DENSE: with_gradients(hvd.Compression.none)}
    made |= {GRADIENTS[name]: with_gradients(compression) for name, compression in found.items()}
    made |= {FROZEN[name]: with_momentum(compression, "frozen") for name, compression in found.items()}
    made |= {RENEWED[name]: with_momentum(compression, "renewed") for name, compression in found.items()}
    return made | {
        DEMO: lambda network: hvd.DeMo(network.named_parameters(), lr=rate),
        SIGNUM: lambda network: hvd.Signum(network.named_parameters(), lr=rate),
    }


def _learned(make: Callable[[Any], Any], seed: int, steps: int) -> dict[str, Any]:
    import torch

    import hvd_compress.torch as hvd

    teacher, network = _network(1000 + seed), _network(seed)
    optimizer = make(network)
    mine = torch.Generator().manual_seed(RANKS * seed + hvd.rank())
    for _ in range(steps):
        x = torch.randn(BATCH, 64, generator=mine)
        optimizer.zero_grad()
        _loss(network, teacher, x).backward()
        optimizer.step()
    tested = torch.randn(TESTED, 64, generator=torch.Generator().manual_seed(10**6 + seed))
    stats = optimizer.compression_stats()
    sent = stats["total"]["bytes_sent"] + stats.get("uncompressed", {}).get("bytes_sent", 0)
    return {
        "loss": _loss(network, teacher, tested).item(),
        "bytes": sent,
        "uncompressed_steps": sum(stats.get("steps_by_way", {}).get(way, 0) for way in ("warm-up", "renewal")),
    }


def _network(seed: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def _loss(network: Any, teacher: Any, x: Any) -> Any:
    return (network(x) - teacher(x).detach()).square().mean()


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in ("steps", "warmup_steps", "rates", "seeds")}
    with Progress("adam", len(options.rates) * len(options.seeds) * len(NAMES)) as progress:
        return {**settings, "rows": local(RANKS, progress).run(__file__, settings)}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="one learning rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--warmup-steps", type=int, default=30)
    return parsed(parser, given, rates=([1e-3], [1e-3, 3e-3]))


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def _of_all(result: Mapping[str, Any], name: str, rate: float, value: Callable[[Any, Any], float]) -> list[float]:
    """A value of a candidate and dense Adam, for each seed."""
    rows = {(row["name"], row["rate"], row["seed"]): row for row in result["rows"]}
    return [value(rows[name, rate, seed], rows[DENSE, rate, seed]) for seed in result["seeds"]]


def _above(mine: Any, dense: Any) -> float:
    return 100 * (mine["loss"] / dense["loss"] - 1)


def _range(counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return str(counts[0] or "none")
    return f"{min(counts)} to {max(counts)}"


def aims(result: Mapping[str, Any]) -> list[Aim]:
    """How much larger the loss is than dense Adam's."""
    return [
        Aim(
            f"loss above AdamW's after {result['steps']} steps, {name}, rate {rate:g}, in %", "≤", MOST_PERCENT,
            Spread.of(_of_all(result, name, rate, _above)),
        )
        for rate, name in product(result["rates"], [*FROZEN.values(), *RENEWED.values()])
    ]  # fmt: skip


def section(result: dict[str, Any]) -> str:
    """The section of the page of results."""
    lines = []
    for name in NAMES[1:]:
        above = [Spread.of(_of_all(result, name, rate, _above)) for rate in result["rates"]]
        saved = Spread.of(
            [x for rate in result["rates"] for x in _of_all(result, name, rate, lambda m, d: d["bytes"] / m["bytes"])]
        )
        plain = [row["uncompressed_steps"] for row in result["rows"] if row["name"] == name]
        lines.append([name, *above, saved, _range(plain)])
    rates = [f"loss above AdamW's, %, rate {rate:g}" for rate in result["rates"]]
    return "\n".join(
        [
            "## Adam",
            "",
            f"A network of 64-256-256-8 with ReLU learns what another one computes: {RANKS} ranks, {BATCH} examples "
            f"each and step, {result['steps']} steps. The first {result['warmup_steps']} are the warm-up of "
            f"`CompressedAdam`; with a renewed variance its intervals double after 16 renewals. The loss is that of "
            f"{TESTED} other examples. It and bytes are compared with uncompressed AdamW at the same rate and "
            f"seed: medians of {len(result['seeds'])} seeds, and the extremes. Bytes are those of all steps, also of "
            "the uncompressed ones.",
            "",
            table(["what is compressed", *rates, "times fewer bytes", "uncompressed steps"], lines),
        ]
    )


if __name__ == "__main__":
    main()
