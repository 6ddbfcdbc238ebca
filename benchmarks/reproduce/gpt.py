"""Train a small transformer with Adam by every method of the package: what each costs in loss, and saves in bytes.

No paper is repeated here. It answers what the papers' experiments leave open: Adam, and a network that is no stack of
images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from .gpt_methods import METHODS, sent_by, wrapped
from .unit import Unit

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint

__all__ = ["FORMS", "LEARNING", "NAME", "TIMES", "VERSION", "plan", "work"]

VERSION = 1
NAME = "gpt"
LEARNING, TIMES = "learning", "times"
_SIZES = {"batch": 8, "context": 128, "held_out": 64, "sync": 30}
FORMS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_SIZES, "width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 2, "held_out": 4, "steps": 8, "sync": 4,
        "every": 4, "ranks": [2], "rates": ["unlimited"], "rounds": 2,
    },
    "short": {
        **_SIZES, "width": 256, "layers": 3, "heads": 8, "steps": 450, "every": 30, "ranks": [2],
        "rates": ["100mbit", "1gbit"], "rounds": 3,
    },
    "full": {
        **_SIZES, "width": 384, "layers": 4, "heads": 8, "steps": 3000, "every": 60, "ranks": [2, 4],
        "rates": ["100mbit", "1gbit"], "rounds": 8,
    },
}  # fmt: skip
RATE, WARM_UP, LARGEST_NORM = 1e-3, 30, 1.0  # AdamW's learning rate, its first steps, and where gradients are clipped
_FORM = ("width", "layers", "heads", "batch", "context", "sync")


def plan(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Unit]:
    """List all trainings, those of one seed before those of the next, then the times of steps on slow links."""
    shared = {key: settings[key] for key in _FORM}
    learning = {**shared, **{key: settings[key] for key in ("held_out", "steps", "every")}, "kind": LEARNING}
    marks = settings["steps"] // settings["every"]
    trainings = [
        Unit(NAME, VERSION, method, {**learning, "method": method, "seed": seed}, ranks, marks)
        for seed in seeds
        for ranks in settings["ranks"]
        for method in METHODS
    ]  # fmt: skip
    times = {**shared, "kind": TIMES, "rounds": settings["rounds"], "methods": [*METHODS]}
    return trainings + [
        Unit(NAME, VERSION, f"steps at {rate}", {**times, "rate": rate}, ranks, 1)
        for rate in settings["rates"]
        for ranks in settings["ranks"]
    ]


def work(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Make one training, or time all methods' steps; a training is too short to be taken up again."""
    return _learning(settings) if settings["kind"] == LEARNING else _times(settings)


def _learning(settings: Mapping[str, Any]) -> dict[str, Any]:
    import ranks as r
    import torch

    import hvd_compress.torch as hvd

    from .text import drawn, sources
    from .training import all_ranks

    text = sources()
    network = _network(settings, settings["seed"])
    optimizer = wrapped(settings["method"], network, RATE, settings["sync"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings["steps"]))
    share = settings["held_out"] // hvd.size()
    held_out = drawn(text.test, share, settings["context"], [settings["seed"], 1, hvd.rank()])
    found: dict[str, list[float]] = {"train": [], "test": [], "bytes": [], "step": []}
    losses = []
    for step in range(1, settings["steps"] + 1):
        x, y = drawn(text.train, settings["batch"], settings["context"], [settings["seed"], 2, hvd.rank(), step])
        losses.append(_step(network, optimizer, x, y))
        schedule.step()
        if step % settings["every"] == 0:
            if step == settings["steps"] and hasattr(optimizer, "average_parameters"):
                # ranks that have trained alone become one model
                optimizer.average_parameters()
            found["step"].append(step)
            found["train"].append(mean(all_ranks(mean(losses))))
            with torch.no_grad():
                found["test"].append(mean(all_ranks(float(_loss(network, *held_out)))))
            found["bytes"].append(mean(all_ranks(sent_by(optimizer))))
            losses = []
            r.done(f"step {step}: {found['test'][-1]:.3f} nats")
    return {**found, "steps": settings["steps"], "parameters": _parameters(network), "data": text.source}


def _times(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time as many steps as there are from one synchronization to the next, of all methods in turns."""
    import ranks as r

    import hvd_compress.torch as hvd

    from .text import drawn, sources

    text = sources()
    x, y = drawn(text.train, settings["batch"], settings["context"], [hvd.rank()])
    actions = {}
    for method in settings["methods"]:
        network = _network(settings, 0)
        optimizer = wrapped(method, network, RATE, settings["sync"], prefix=f"{method}/")

        def some(_: int, network: Any = network, optimizer: Any = optimizer) -> None:
            for _ in range(settings["sync"]):
                _step(network, optimizer, x, y)

        actions[method] = some
    rows = r.rounds(actions, 0.0, settings["rounds"])
    r.done(f"steps of {hvd.size()} ranks")
    return {"rows": rows, "steps": settings["sync"], "parameters": _parameters(network), "data": text.source}


def _network(settings: Mapping[str, Any], seed: int) -> Any:
    from .nets import from_seed
    from .text import Gpt

    return from_seed(lambda: Gpt(*(settings[key] for key in ("width", "layers", "heads", "context"))), seed)


def _step(network: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    import torch

    optimizer.zero_grad()
    loss = _loss(network, x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), LARGEST_NORM)
    optimizer.step()
    return float(loss.detach())


def _loss(network: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(network(x).flatten(0, 1), y.flatten())


def _rate(step: int, steps: int) -> float:
    """Return the factor on the learning rate: it rises, then falls to a tenth as a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def _parameters(network: Any) -> int:
    return sum(p.numel() for p in network.parameters())
