"""Measure what a thread for the kernels is worth while backward runs elsewhere, as on an accelerator.

    python benchmarks/overlap.py [--short] [--layers 12] [--width 2048] [--layer-ms 4]

Two ranks on two cores leave no core for such a thread while backward computes. So backward only waits here, as a
process does whose accelerator computes, and hands out gradients of a square layer that lie ready: a copy of them, as if
they came from the device. Kernels then run in the hooks, which holds the backward pass up, or on the thread.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from measure import ALONE, Aim, Spread, ratios, table
from places import Progress, parsed, parser_of, place, start

COMPRESSED = ("one-bit", "adaptive(64)")
WHERE = {"in the hooks": "0", "on a thread": "1"}
VARIABLE = "HVD_COMPRESS_KERNEL_THREAD"


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import ranks as r

    import hvd_compress.torch as hvd

    hvd.init()
    setting = (task["layers"], task["width"], task["layer_ms"] / 1e3)
    actions = {ALONE: _training(None, *setting)}
    for name in COMPRESSED:
        for where, value in WHERE.items():
            # it is read when an optimizer is wrapped
            os.environ[VARIABLE] = value
            actions[f"{name}, {where}"] = _training(name, *setting)
    rows = r.rounds(actions, task["seconds"], task["least"])
    r.done(task["label"])
    r.deliver(task, rows)


def _training(name: str | None, layers: int, width: int, seconds: float) -> Any:
    """Make a step of a network whose backward pass waits in each layer."""
    import torch
    from candidates import compression_of

    import hvd_compress.torch as hvd

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, ready: torch.Tensor) -> torch.Tensor:
            context.ready = ready
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            time.sleep(seconds)
            return gradient, context.ready.clone(), None

    generator = torch.Generator().manual_seed(hvd.rank())
    ready = torch.randn(width, width, generator=generator)
    weights = [torch.nn.Parameter(torch.zeros(width, width)) for _ in range(layers)]
    optimizer: Any = torch.optim.SGD(weights, lr=0.01)
    if name is not None:
        named = [(f"{name}.{os.environ[VARIABLE]}.{i}", weight) for i, weight in enumerate(weights)]
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression_of(name))
    first = torch.zeros(1, requires_grad=True)

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = first
        for weight in weights:
            x = Elsewhere.apply(x, weight, ready)
        x.sum().backward()
        optimizer.step()

    return step


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    setting = {"layers": options.layers, "width": options.width, "layer_ms": options.layer_ms}
    with Progress("overlap", 1) as progress, place(2, progress) as here:
        task = {**setting, "seconds": options.seconds, "least": options.least, "label": "overlap"}
        return {**setting, "rows": here.run(__file__, task)}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="fewer rounds", each="network")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layer-ms", type=float, default=4.0, help="that backward waits in each layer")
    return parsed(parser, given, seconds=(6.0, 40.0), least=(5, 8))


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    rows, numel = result["rows"], result["layers"] * result["width"] ** 2
    alone = rows[ALONE]["seconds"]
    lines = [
        [name, *(Spread.of(ratios(rows[f"{name}, {where}"]["seconds"], alone)) for where in WHERE), gain(result, name)]
        for name in COMPRESSED
    ]
    return "\n".join(
        [
            "## A thread for the kernels",
            "",
            f"{result['layers']} layers, {numel / 1e6:.0f} million parameters, 2 hosts without a limit. Backward waits "
            f"{result['layer_ms']:g} ms in each layer, as for an accelerator, and leaves its core to the thread. Times "
            "the step without communication, in the same rounds.",
            "",
            table(["", *WHERE, "times as fast on a thread"], lines),
        ]
    )


def gain(result: dict[str, Any], name: str) -> Spread:
    """Return how many times as fast a step is where kernels have a thread of their own."""
    hooks, thread = (result["rows"][f"{name}, {where}"]["seconds"] for where in WHERE)
    return Spread.of(ratios(hooks, thread))


def aims(result: dict[str, Any]) -> list[Aim]:
    return [
        Aim(
            f"kernels on a thread, backward elsewhere: {name}, times as fast as in the hooks",
            ">",
            1.0,
            gain(result, name),
        )
        for name in COMPRESSED
    ]


if __name__ == "__main__":
    main()
