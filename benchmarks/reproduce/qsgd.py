"""Train with QSGD on MNIST and on CIFAR-10: accuracy against bits, and what Elias coding makes of the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from measure import table

from .show import MISSING, Record, all_groups, figure_of, of_seeds, plot_of, said_settings, shown
from .unit import Unit

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["CIFAR", "FORMS", "MNIST", "VERSION", "own_settings", "parts", "plan", "prepared", "work"]

VERSION = 1
NAME = "qsgd"
MNIST, CIFAR = "MNIST", "CIFAR-10"
RATES = {MNIST: 0.1, CIFAR: 0.05}
BITS = (1, 2, 4, 8)
DENSE = 32
ELIAS = "elias"
_FOUR = {"ranks": 4, "mnist_batch": 32, "cifar_batch": 8, "mnist_width": 128}
_ALL = {"mnist_train": 60000, "mnist_test": 10000, "cifar_train": 10000, "cifar_test": 2000}
FORMS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_FOUR, "ranks": 2, "mnist_epochs": 1, "mnist_train": 640, "mnist_test": 100, "cifar_epochs": 1,
        "cifar_train": 64, "cifar_test": 20,
    },
    "short": {**_FOUR, **_ALL, "mnist_epochs": 5, "cifar_epochs": 12},
    "full": {**_FOUR, **_ALL, "mnist_epochs": 20, "cifar_epochs": 30},
}  # fmt: skip


def plan(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Unit]:
    """List all trainings; those of one seed come before those of the next."""
    return [
        _unit(data, bits, coding, seed, settings)
        for seed in seeds
        for data in (MNIST, CIFAR)
        for bits, coding in [(DENSE, None), *((b, c) for b in BITS for c in (None, ELIAS))]
    ]


def own_settings(data: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings that belong to a data set."""
    prefix = {MNIST: "mnist_", CIFAR: "cifar_"}[data]
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def _unit(data: str, bits: int, coding: str | None, seed: int, settings: Mapping[str, Any]) -> Unit:
    own = own_settings(data, settings)
    label = label_of(data, bits, coding)
    given = {**own, "data": data, "bits": bits, "coding": coding, "seed": seed}
    return Unit(NAME, VERSION, label, given, settings["ranks"], own["epochs"])


def label_of(data: str, bits: int, coding: str | None) -> str:
    """Say how a training is called.

    Example:
        >>> label_of("MNIST", 4, "elias")
        'MNIST, 4 bits, Elias coded'
    """
    return f"{data}, {bits} bits" + (", Elias coded" if coding else "")


# -- in the ranks ---------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Make one training."""
    from hvd_compress import QSGD, NoCompression

    from .training import learn, wrapped

    data, network, sgd = prepared(settings)
    if settings["bits"] == DENSE:
        optimizer = wrapped(sgd, network, NoCompression())
    else:
        # every rank sends its gradient to all others, as in the paper: it is rounded once
        qsgd = QSGD(bits=settings["bits"], coding=settings["coding"], seed=settings["seed"])
        optimizer = wrapped(sgd, network, qsgd, exchange="allgather")
    return learn(settings, network, optimizer, data, checkpoint)


def prepared(settings: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return data, network and plain optimizer of a training."""
    import networks
    import torch

    from .data import cifar, mnist
    from .nets import from_seed, quick

    if settings["data"] == MNIST:
        data = mnist(settings["train"], settings["test"])
        features = data.train_x.shape[1]
        network = from_seed(lambda: networks.mlp(settings["width"], features, hidden=2), settings["seed"])
    else:
        data = cifar(settings["train"], settings["test"])
        network = from_seed(quick, settings["seed"])
    return data, network, torch.optim.SGD(network.parameters(), RATES[settings["data"]])


# -- the page -------------------------------------------------------------------------------------------------------


def parts(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Write what the page shows of the records: "results"."""
    found = []
    for settings, rows in all_groups(records, "train"):
        data = settings["data"]
        name = plot_of(NAME, settings, data.lower())
        title = f"### {data}: {said_settings(settings, ('epochs', 'train', 'batch', 'ranks'))}"
        found += [title, "", _table(data, rows), "", _plot(data, rows, folder, name), ""]
    return {"results": "\n".join(found).strip()}


def _table(data: str, rows: Mapping[str, list[Record]]) -> str:
    lines: list[list[object]] = []
    for bits in (*BITS, DENSE):
        plain, coded = (rows.get(label_of(data, bits, coding), []) for coding in (None, ELIAS))
        dense = 4e-3 * (plain or coded)[0]["result"]["parameters"] if plain or coded else 0.0
        kilobytes, fewer = _bytes(plain, bits), _bytes(coded, bits)
        lines.append(
            [
                bits if bits != DENSE else "32 (Horovod fp32)",
                of_seeds([_accuracy(record) for record in plain], 2),
                f"{kilobytes:.1f}" if kilobytes else "",
                f"{dense / kilobytes:.1f}" if kilobytes else "",
                *(_of_coding(plain, coded, fewer, dense) if bits != DENSE else ["", "", ""]),
                len(plain),
            ]
        )
    head = [
        "bits", "test accuracy, %", "kB of a gradient", "times fewer than fp32", "kB, Elias coded",
        "times fewer than fp32", "coded training the same", "seeds",
    ]  # fmt: skip
    return table(head, lines)


def _of_coding(plain: Sequence[Record], coded: Sequence[Record], kilobytes: float, dense: float) -> list[object]:
    if not coded:
        return [MISSING, "", ""]
    digests = {record["settings"]["seed"]: record["result"]["digest"] for record in plain}
    pairs = [(r["result"]["digest"], digests[r["settings"]["seed"]]) for r in coded if r["settings"]["seed"] in digests]
    same = "yes, bit by bit" if all(a == b for a, b in pairs) else "**no**"
    return [f"{kilobytes:.1f}", f"{dense / kilobytes:.1f}", same if pairs else ""]


def _accuracy(record: Record) -> float:
    return record["result"]["test"][-1][0]


def _bytes(records: Sequence[Record], bits: int) -> float:
    """Return the kilobytes of one rank's encoded gradient, the mean of steps, ranks and seeds; 0 without records."""
    if not records:
        return 0.0
    if bits == DENSE:
        return 4e-3 * records[0]["result"]["parameters"]
    # a ring passes each payload on to all other ranks
    return mean(
        mean(record["result"]["bytes_sent"]) / record["result"]["steps"] / (record["ranks"] - 1) / 1e3
        for record in records
    )


def _plot(data: str, rows: Mapping[str, list[Record]], folder: Path, name: str) -> str:
    from drawing import label_ends, thin

    with figure_of(folder, name, panels=2) as (accuracy, size):
        for coding, style in ((None, "o-"), (ELIAS, "s--")):
            found = [(bits, rows.get(label_of(data, bits, coding), [])) for bits in (*BITS, DENSE)]
            found = [(bits, records) for bits, records in found if records]
            if not found:
                continue
            bits = [b for b, _ in found]
            if coding is None:
                of_seed = [[_accuracy(record) for record in records] for _, records in found]
                middle = [mean(values) for values in of_seed]
                spread = [
                    [m - min(v) for m, v in zip(middle, of_seed, strict=True)],
                    [max(v) - m for m, v in zip(middle, of_seed, strict=True)],
                ]
                accuracy.errorbar(bits, middle, yerr=spread, fmt=style, capsize=3)
            size.plot(bits, [_bytes(records, b) for b, records in found], style, label=coding or "not coded")
        for panel in (accuracy, size):
            panel.set_xscale("log", base=2)
            panel.set_xticks([*BITS, DENSE], [*map(str, BITS), "32"])
        accuracy.set(xlabel="bits", ylabel="test accuracy, %")
        accuracy.set_title(f"{data}: bars are the extremes of the seeds", loc="left", fontsize=10)
        size.set(xlabel="bits", ylabel="kB of one gradient", yscale="log")
        for panel in (accuracy, size):
            thin(panel)
        label_ends(size)
    return shown(name)
