"""Repeat table 1 and figure 3 of Dryden et al. 2016: MNIST, three wide layers, AdaGrad, four replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from measure import table

from .papers import DRYDEN, DRYDEN_ALONE, Figure
from .show import MISSING, Record, all_groups, beside, complete, figure_of, of_seeds, plot_of, said_settings, shown
from .unit import Unit

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["FORMS", "VERSION", "parts", "plan", "work"]

VERSION = 1
NAME = "dryden"
NORMAL, ONE_BIT, THRESHOLD, ADAPTIVE, ALONE = "normal", "one-bit", "threshold", "adaptive", "no communication"
METHODS = (NORMAL, ONE_BIT, THRESHOLD, ADAPTIVE, ALONE)
PAPER: dict[str, Figure] = {**DRYDEN, ALONE: DRYDEN_ALONE}
_PAPERS_OWN = {"ranks": 4, "batch": 10, "train": 60000, "test": 10000}
FORMS: dict[str, dict[str, Any]] = {
    "tiny": {"width": 16, "epochs": 2, "ranks": 2, "batch": 10, "train": 400, "test": 100},
    "short": {"width": 1024, "epochs": 5, **_PAPERS_OWN},
    "full": {"width": 4096, "epochs": 20, **_PAPERS_OWN},
}
RATE, EPSILON = 0.005, 1e-8  # the learning rate is the paper's; epsilon is not in it
TAU, PI, SAMPLE = 0.001, 64, 128  # the paper's, but for the size of one-bit's sample, which it does not tell
LAYER = "4.weight"  # the third fully connected layer, as in the figure
OF_ALL = "mean of all ranks"
# mini-batches whose bytes are kept: stretches, which show what differs from one to the next, and some between them
_STRETCH, _PERIOD, _EVERY = 200, 2500, 50


def plan(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Unit]:
    """List all trainings; those of one seed come before those of the next."""
    own = {key: value for key, value in settings.items() if key != "ranks"}
    return [
        Unit(NAME, VERSION, method, {**own, "method": method, "seed": seed}, settings["ranks"], settings["epochs"])
        for seed in seeds
        for method in METHODS
    ]


# -- in the ranks ---------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Make one training."""
    import networks
    from torch.optim import SGD, Adagrad

    from hvd_compress import AdaGrad, Adaptive, NoCompression, OneBit, Threshold

    from .data import mnist
    from .nets import from_seed
    from .training import learn, wrapped

    data = mnist(settings["train"], settings["test"])
    features = data.train_x.shape[1]
    network = from_seed(lambda: networks.mlp(settings["width"], features), settings["seed"])
    adagrad = Adagrad(network.parameters(), RATE, eps=EPSILON, fused=True)
    method = settings["method"]
    if method == ALONE:
        return learn(settings, network, adagrad, data, checkpoint)
    if method == ONE_BIT:
        # the only one of the paper's methods with AdaGrad inside its allreduce
        sgd = SGD(network.parameters(), RATE)
        optimizer = wrapped(sgd, network, OneBit(sample=SAMPLE), adagrad=AdaGrad(EPSILON))
    else:
        compression = {NORMAL: NoCompression(), THRESHOLD: Threshold(TAU), ADAPTIVE: Adaptive(pi=PI)}[method]
        optimizer = wrapped(adagrad, network, compression, exchange="two_phase")
    volume = Volume(optimizer)
    result = learn(settings, network, optimizer, data, checkpoint, observer=volume)
    return {**result, "watched": volume.of_all_ranks()}


class Volume:
    """Counts the bytes that are sent for the layer of the figure, in single mini-batches."""

    def __init__(self, optimizer: Any) -> None:
        self.found: dict[str, Any] = {"step": [], "bytes": []}
        self._optimizer = optimizer
        self._before = 0

    def begin(self, step: int, x: Any, y: Any) -> None:
        """Before a step."""
        if _is_kept(step):
            self._before = self._sent()

    def end(self, step: int) -> None:
        """After it."""
        if _is_kept(step):
            self.found["step"].append(step)
            self.found["bytes"].append(self._sent() - self._before)

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the mean of all ranks, as one may own most of the layer and answer the others; a collective call."""
        import horovod.torch as horovod
        import torch

        mine = torch.tensor(self.found["bytes"], dtype=torch.float64)
        return {**self.found, "bytes": horovod.allreduce(mine, name="reproduce.volume").tolist(), "of": OF_ALL}

    def _sent(self) -> int:
        return self._optimizer.compression_stats()["tensors"][LAYER]["bytes_sent"]


def _is_kept(step: int) -> bool:
    return step % _PERIOD < _STRETCH or step % _EVERY == 0


# -- the page -------------------------------------------------------------------------------------------------------


def parts(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Write what the page shows of the records: "accuracy" and "volume"."""
    accuracy, volume = [], []
    for settings, rows in all_groups(records, "width"):
        title = f"### {said_settings(settings, ('width', 'epochs', 'train', 'batch', 'ranks'))}"
        accuracy += [title, "", _accuracy(rows), "", _curves(rows, folder, plot_of(NAME, settings, "accuracy")), ""]
        watched = {method: [r for r in of_method if _has_volume(r)] for method, of_method in rows.items()}
        if any(watched.values()):
            plot = _volume_plot(watched, folder, plot_of(NAME, settings, "volume"))
            volume += [title, "", _volume(watched), "", plot, ""]
    return {"accuracy": "\n".join(accuracy).strip(), "volume": "\n".join(volume).strip()}


def _has_volume(record: Record) -> bool:
    # older records hold what the first rank alone had sent
    return bool((record["result"].get("watched") or {}).get("of") == OF_ALL)


def _accuracy(rows: Mapping[str, list[Record]]) -> str:
    lines: list[list[object]] = []
    for method, records in complete(rows, METHODS):
        paper = PAPER[method]
        ours = [best_of_ranks(record) for record in records]
        sent = [mean(record["result"]["bytes_sent"]) / record["result"]["steps"] / 1e3 for record in records]
        differs = [o - best_of_ranks(normal) for o, normal in beside(records, ours, rows.get(NORMAL, []))]
        lines.append(
            [
                method,
                f"{paper.value:.2f}",
                f"{paper.value - PAPER[NORMAL].value:+.2f}",
                of_seeds(ours, 2),
                of_seeds(differs, 2, sign=True) if differs else "",
                of_seeds(sent, 1) if any(sent) else "0" if records else "",
                len(records),
            ]
        )
    head = [
        "", "paper, 20 epochs, %", "paper, against normal", "here, %", "here, against normal, same seed",
        "kB a rank sends in a step", "seeds",
    ]  # fmt: skip
    return table(head, lines)


def best_of_ranks(record: Record) -> float:
    """Return the test accuracy at the end; of ranks that learned alone, the best one's, as in the paper."""
    return max(record["result"]["test"][-1])


def _curves(rows: Mapping[str, list[Record]], folder: Path, name: str) -> str:
    from drawing import across, label_ends, line, thin

    with figure_of(folder, name) as panel:
        for i, method in enumerate(METHODS):
            of_seeds = [[max(ranks) for ranks in record["result"]["test"]] for record in rows.get(method, [])]
            if of_seeds:
                spreads = across(of_seeds)
                line(panel, range(1, len(spreads) + 1), spreads, method, color=f"C{i}", linestyle="-")
        panel.set(xlabel="epoch", ylabel="test accuracy, %")
        panel.set_title("Test accuracy after each epoch", loc="left", fontsize=10)
        panel.xaxis.get_major_locator().set_params(integer=True)
        thin(panel)
        label_ends(panel)
    return shown(name)


def _volume(rows: Mapping[str, list[Record]]) -> str:
    lines: list[list[object]] = []
    for method, records in complete(rows, METHODS[:-1]):
        lines.append([method, *(volume_figures(records[0]["result"]["watched"]) if records else [MISSING] * 7)])
    head = [
        "", "kB in the first step", "most", "median", "least", "in the last",
        "changes to the next by, %, in the first stretch", "in the last stretch",
    ]  # fmt: skip
    return table(head, lines)


def volume_figures(watched: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the first, most, median (of those at equal distances), least and last; and by how much the volume changes
    from one mini-batch to the next, in the median of the first stretch and of the last.
    """
    import numpy as np

    steps, kilobytes = np.array(watched["step"]), np.array(watched["bytes"]) / 1e3
    middle = np.median(kilobytes[steps % _EVERY == 0])
    figures = [kilobytes[0], kilobytes.max(), middle, kilobytes.min(), kilobytes[-1]]
    follow = np.diff(steps) == 1
    changes = 100 * np.abs(np.diff(kilobytes)) / np.maximum(kilobytes[:-1], 1e-9)
    stretch = steps[:-1] // _PERIOD
    typical = [np.median(changes[follow & (stretch == which)]) for which in (stretch[follow][0], stretch[follow][-1])]
    return [f"{figure:.1f}" for figure in (*figures, *typical)]


def _volume_plot(rows: Mapping[str, list[Record]], folder: Path, name: str) -> str:
    from drawing import label_ends, thin

    with figure_of(folder, name) as panel:
        for method in METHODS[:-1]:
            for record in rows.get(method, [])[:1]:
                watched = record["result"]["watched"]
                kilobytes = [b / 1e3 for b in watched["bytes"]]
                colour = f"C{METHODS.index(method)}"
                panel.plot(watched["step"], kilobytes, color=colour, label=method, linewidth=0.8)
        panel.set(xlabel="mini-batch", ylabel="kB that a rank sends, mean", yscale="log")
        panel.set_title("Third fully connected layer (figure 3 of the paper)", loc="left", fontsize=10)
        thin(panel)
        label_ends(panel)
    return shown(name)
