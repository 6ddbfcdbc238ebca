"""Train a small transformer with Adam by every method of the package: what each costs in loss, and saves in bytes.

No paper is repeated here. It answers what the papers' experiments leave open: Adam, and a network that is no stack of
images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from .gpt_methods import METHODS, Tuning, made_one, sent_by, wrapped
from .unit import Unit

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint

__all__ = ["FORMS", "LEARNING", "NAME", "TIMES", "VERSION", "plan", "work"]

VERSION = 1
NAME = "gpt"
LEARNING, TIMES = "learning", "times"
_SIZES = {
    "batch": 8, "context": 128, "held_out": 64, "sync": 30, "device": "auto", "precision": "fp32",
    "learning_rate": 1e-3, "adam_warm_up": 45, "methods": [*METHODS],
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_SIZES, "width": 64, "layers": 1, "heads": 2, "context": 16, "batch": 2, "held_out": 4, "steps": 8, "sync": 4,
        "every": 4, "adam_warm_up": 2, "ranks": [2], "rates": ["unlimited"], "rounds": 2,
    },
    "short": {
        **_SIZES, "width": 256, "layers": 3, "heads": 8, "steps": 450, "every": 30, "ranks": [2],
        "rates": ["100mbit", "1gbit"], "rounds": 3,
    },
    "full": {
        **_SIZES, "width": 384, "layers": 4, "heads": 8, "steps": 3000, "every": 60, "adam_warm_up": 300,
        "ranks": [2, 4], "rates": ["100mbit", "1gbit"], "rounds": 8,
    },
    "gpu": {
        **_SIZES, "width": 640, "layers": 8, "heads": 10, "context": 256, "batch": 16, "held_out": 256, "steps": 240,
        "every": 30, "precision": "bf16", "learning_rate": 6e-4, "adam_warm_up": 36, "ranks": [2], "rates": [],
        "rounds": 3,
    },
}  # fmt: skip
WARM_UP, LARGEST_NORM = 30, 1.0  # steps in which the learning rate rises, and where gradients are clipped
_FORM = (
    "width", "layers", "heads", "batch", "context", "sync", "device", "precision", "learning_rate", "adam_warm_up",
)  # fmt: skip


def plan(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Unit]:
    """List all trainings, those of one seed before those of the next, then the times of steps on slow links."""
    shared = {key: settings[key] for key in _FORM}
    learning = {**shared, **{key: settings[key] for key in ("held_out", "steps", "every")}, "kind": LEARNING}
    marks = settings["steps"] // settings["every"]
    trainings = [
        Unit(NAME, VERSION, method, {**learning, "method": method, "seed": seed}, ranks, marks)
        for seed in seeds
        for ranks in settings["ranks"]
        for method in settings["methods"]
    ]  # fmt: skip
    times = {**shared, "kind": TIMES, "rounds": settings["rounds"], "methods": settings["methods"]}
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
    from .training import all_ranks, same_on_all_ranks

    text, device = sources(), _device(settings)
    network = _network(settings, settings["seed"], device)
    optimizer = wrapped(settings["method"], network, _tuning(settings))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings["steps"]))
    share = settings["held_out"] // hvd.size()
    held_out = drawn(text.test, share, settings["context"], [settings["seed"], 1, hvd.rank()])
    found: dict[str, list[float]] = {"train": [], "test": [], "bytes": [], "step": []}
    losses = []
    begin = time.perf_counter()
    for step in range(1, settings["steps"] + 1):
        x, y = drawn(text.train, settings["batch"], settings["context"], [settings["seed"], 2, hvd.rank(), step])
        losses.append(_step(settings, network, optimizer, x.to(device), y.to(device)))
        schedule.step()
        if step % settings["every"] == 0:
            found["bytes"].append(mean(all_ranks(sent_by(optimizer))))
            if step == settings["steps"]:
                made_one(optimizer)
            found["step"].append(step)
            found["train"].append(mean(all_ranks(mean(losses))))
            with torch.no_grad():
                test = float(_loss(settings, network, *(rows.to(device) for rows in held_out)))
            found["test"].append(mean(all_ranks(test)))
            losses = []
            r.done(f"step {step}: {found['test'][-1]:.3f} nats")
    seconds = all_ranks(time.perf_counter() - begin)
    facts = _facts(network, device, text.source)
    return {
        **found, **facts, "steps": settings["steps"], "seconds": seconds,
        "replicas_identical": same_on_all_ranks(network),
    }  # fmt: skip


def _times(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time as many steps as there are from one synchronization to the next, of all methods in turns."""
    import ranks as r

    import hvd_compress.torch as hvd

    from .text import drawn, sources

    # the first synchronization is not timed, and takes the warm-up in
    text, device, tuning = sources(), _device(settings), _tuning(settings)._replace(warm_up=1)
    drawn_once = drawn(text.train, settings["batch"], settings["context"], [hvd.rank()])
    x, y = (rows.to(device) for rows in drawn_once)
    actions = {}
    for method in settings["methods"]:
        network = _network(settings, 0, device)
        optimizer = wrapped(method, network, tuning, prefix=f"{method}/")

        def some(_: int, network: Any = network, optimizer: Any = optimizer) -> None:
            for _ in range(settings["sync"]):
                _step(settings, network, optimizer, x, y)

        actions[method] = some
    rows = r.rounds(actions, 0.0, settings["rounds"])
    r.done(f"steps of {hvd.size()} ranks")
    return {"rows": rows, "steps": settings["sync"], **_facts(network, device, text.source)}


def _device(settings: Mapping[str, Any]) -> torch.device:
    """Return where this rank trains: ranks take turns with the GPUs of their machine, which may be one for all."""
    import torch

    import hvd_compress.torch as hvd

    name = settings["device"]
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ValueError(f'device {name!r}: give "auto", "cuda" or "cpu"')
    if not torch.cuda.is_available():
        raise ValueError('device "cuda": PyTorch sees no CUDA device; give "cpu"')
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _facts(network: Any, device: torch.device, source: str) -> dict[str, Any]:
    """Return what a record says of network, text and device; of a GPU also the card, of a CPU only that it is one."""
    import torch

    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"parameters": sum(p.numel() for p in network.parameters()), "data": source, "device": card}


def _network(settings: Mapping[str, Any], seed: int, device: torch.device) -> Any:
    from .nets import from_seed
    from .text import Gpt

    # made on the CPU, whose random numbers are the same everywhere
    made = from_seed(lambda: Gpt(*(settings[key] for key in ("width", "layers", "heads", "context"))), seed)
    return made.to(device)


def _tuning(settings: Mapping[str, Any]) -> Tuning:
    return Tuning(settings["learning_rate"], settings["sync"], settings["adam_warm_up"])


def _step(settings: Mapping[str, Any], network: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    import torch

    optimizer.zero_grad()
    loss = _loss(settings, network, x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), LARGEST_NORM)
    optimizer.step()
    return float(loss.detach())


def _loss(settings: Mapping[str, Any], network: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.autocast(x.device.type, torch.bfloat16, enabled=settings["precision"] == "bf16"):
        return torch.nn.functional.cross_entropy(network(x).flatten(0, 1), y.flatten())


def _rate(step: int, steps: int) -> float:
    """Return the factor on the learning rate: it rises, then falls to a tenth as a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))
