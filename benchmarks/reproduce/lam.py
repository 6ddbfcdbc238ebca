"""Repeat figures 3 and 4 of Lam et al. 2017: accuracy against passes and time, and gradients' magnitudes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .unit import Unit

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["DENSE", "DENSE_SERVER", "FORMS", "LEARNING", "METHODS", "TIMES", "VERSION", "plan", "work"]

VERSION = 1
NAME = "lam"
LEARNING, TIMES = "learning", "times"
DENSE, DENSE_SERVER = "dense, allreduce", "dense, parameter server"
PLAIN, FEEDBACK = "Percentile(90)", "Percentile(90), error feedback"
SPARSE_ANSWERS = "Percentile(90), error feedback, sparse answers"  # the package's default, not the paper's
TWO_PHASES = "Percentile(90), error feedback, two phases"  # no server, and sums are sparse too: not the paper's
METHODS = (DENSE, PLAIN, FEEDBACK, TWO_PHASES)
TIMED = (DENSE, DENSE_SERVER, PLAIN, FEEDBACK, SPARSE_ANSWERS, TWO_PHASES)
# a broadcast as a chain of segments: by itself Open MPI may let the root send all of it to one rank after the other
PIPELINED = {
    "coll_tuned_use_dynamic_rules": 1,
    "coll_tuned_bcast_algorithm": 3,
    "coll_tuned_bcast_algorithm_segmentsize": 131072,
}
RATE = 0.05  # learning rate; the paper does not tell its own
AT_PASSES = (0, 1, 5, 10)  # passes whose gradients are drawn as histograms
BINS, WIDEST = 60, 6.0  # number and range of a histogram's bins, in root mean squares of the layer
_SIZES = {"batch": 8, "test": 2000, "parts": 4, "target": 99.5}
FORMS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_SIZES, "workers": [2], "timed": [2], "epochs": 2, "train": 64, "test": 20, "parts": 2,
        "rate": "unlimited", "seconds": 1.0, "least": 2,
    },
    "short": {
        **_SIZES, "workers": [4], "timed": [4, 8], "epochs": 25, "train": 10000, "rate": "500mbit", "seconds": 120.0,
        "least": 8,
    },
    "full": {
        **_SIZES, "workers": [4, 8], "timed": [4, 8], "epochs": 40, "train": 10000, "rate": "500mbit",
        "seconds": 300.0, "least": 12,
    },
}  # fmt: skip


def plan(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Unit]:
    """List the steps that are timed, once, then all trainings; those of one seed come before those of the next."""
    timed = {
        "methods": [*TIMED],
        "mpi": PIPELINED,
        **{key: settings[key] for key in ("batch", "train", "rate", "seconds", "least")},
    }
    units = [
        Unit(NAME, VERSION, f"steps of {workers} workers", {**timed, "kind": TIMES}, workers, 1)
        for workers in settings["timed"]
    ]
    learning = {key: settings[key] for key in ("epochs", "train", *_SIZES)}
    return units + [
        Unit(
            NAME, VERSION, method, {**learning, "kind": LEARNING, "method": method, "seed": seed}, workers,
            settings["epochs"],
        )
        for seed in seeds
        for workers in settings["workers"]
        for method in METHODS
    ]  # fmt: skip


# -- in the ranks ---------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Make one training, or time all methods' steps."""
    return _learning(settings, checkpoint) if settings["kind"] == LEARNING else _times(settings)


def _learning(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    import horovod.torch as horovod

    from .data import cifar
    from .nets import cuda_convnet, from_seed
    from .training import learn

    data = cifar(settings["train"], settings["test"])
    network = from_seed(cuda_convnet, settings["seed"])
    optimizer = _optimizer(network, settings["method"])
    steps_of_pass = settings["train"] // (settings["batch"] * horovod.size())
    observer = Magnitudes(network, [passes * steps_of_pass for passes in AT_PASSES])
    return learn(settings, network, optimizer, data, checkpoint, observer=observer, target=settings["target"])


def _optimizer(network: Any, method: str, prefix: str = "") -> Any:
    import torch

    from hvd_compress import NoCompression, ParameterServer, Percentile

    from .training import wrapped

    sgd = torch.optim.SGD(network.parameters(), RATE)
    if method == DENSE:
        return wrapped(sgd, network, NoCompression(), prefix)
    if method == TWO_PHASES:
        return wrapped(sgd, network, Percentile(90, error_feedback=True), prefix, exchange="two_phase")
    compressors = {
        DENSE_SERVER: NoCompression(),
        PLAIN: Percentile(90),
        FEEDBACK: Percentile(90, error_feedback=True),
        SPARSE_ANSWERS: Percentile(90, error_feedback=True),
    }
    # mostly answered with the dense sum, as the paper's master broadcasts the whole model
    answer = "compressed" if method == SPARSE_ANSWERS else "dense"
    return wrapped(sgd, network, compressors[method], prefix, exchange=ParameterServer(answer=answer))


class Magnitudes:
    """Makes histograms of the gradient's magnitudes in each weight, of the first rank's batch before some steps."""

    def __init__(self, network: Any, steps: Sequence[int]) -> None:
        self.found: dict[str, Any] = {"step": [], "layers": {}}
        self._network = network
        self._steps = steps

    def begin(self, step: int, x: Any, y: Any) -> None:
        """Compute gradients apart from those of the step, over which an exchange writes its result."""
        import torch

        if step not in self._steps:
            return
        self.found["step"].append(step)
        weights = {name: p for name, p in self._network.named_parameters() if p.dim() > 1}
        loss = torch.nn.functional.cross_entropy(self._network(x), y)
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            self.found["layers"].setdefault(name, []).append(histogram(gradient.numpy().ravel()))

    def end(self, step: int) -> None:
        """Do nothing after a step."""


def histogram(gradient: Any) -> dict[str, Any]:
    """Return the shares of magnitudes in bins up to some root mean squares, and the largest tenth's of the squares."""
    import numpy as np

    magnitudes = np.abs(gradient.astype(np.float64))
    squares = np.sort(magnitudes**2)
    total = float(squares.sum())
    scale = (total / squares.size) ** 0.5 or 1.0
    counts, _ = np.histogram(magnitudes / scale, bins=BINS, range=(0.0, WIDEST))
    largest = float(squares[-(-9 * squares.size // 10) :].sum())
    return {"counts": (counts / squares.size).tolist(), "largest_tenth": largest / total if total else 0.0}


def _times(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time steps of all methods in turns, each with a network of its own."""
    import horovod.torch as horovod
    import ranks as r
    import torch
    from networks import mnist_data

    from .data import cifar
    from .nets import cuda_convnet, from_seed

    data = cifar(settings["train"], 1)
    order = mnist_data.deal(len(data.train_y), settings["batch"], horovod.rank(), horovod.size(), 0, 0)
    optimizers, steps = {}, {}
    for method in settings["methods"]:
        network = from_seed(cuda_convnet, 0)
        optimizer = _optimizer(network, method, prefix=f"{method}/")

        def step(number: int, network: Any = network, optimizer: Any = optimizer) -> None:
            rows = order[number % len(order)]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(data.train_x[rows]), data.train_y[rows]).backward()
            optimizer.step()

        optimizers[method], steps[method] = optimizer, step
    rows = r.rounds(steps, settings["seconds"], settings["least"])
    r.done(f"steps of {horovod.size()} workers")
    totals = {method: optimizer.compression_stats()["total"] for method, optimizer in optimizers.items()}
    sent = {method: total["bytes_sent"] / max(total["steps"], 1) for method, total in totals.items()}
    return {
        "rows": rows,
        "bytes_sent": horovod.allgather_object(sent, name="reproduce.sent"),
        "data": data.source,
    }
