"""Say what the accuracy table consists of: compressors, optimizers, networks, sizes, and what is tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Blockwise,
    ChunkedTopK,
    EFSignSGD,
    Natural,
    NoCompression,
    OneBit,
    Percentile,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from hvd_compress.compressors import Compressor

__all__ = [
    "AS_GOOD",
    "COMPRESSORS",
    "CORRECTED",
    "DENSE",
    "FORMS",
    "MIN_NUMEL",
    "MOMENTUM",
    "NETWORKS",
    "OPTIMIZERS",
    "RANKS",
    "SEEDS",
    "SIGNS",
    "THRESHOLD",
    "TOP_K",
    "TUNING_SEED",
    "Cell",
    "Row",
    "all_cells",
    "badness",
    "candidates",
    "cell_of",
    "chosen",
    "cut",
]

DENSE, SIGNS, THRESHOLD, TOP_K = "NoCompression()", "SignSGD()", "Threshold(tau)", "TopK(0.01)"
NETWORKS = ("MLP", "ResNet", "transformer")
OPTIMIZERS = ("SGD", "Adam")
CORRECTED = {"DGC": 0.0, "DGC, warm-up": 0.1}
"""Share of all steps in which `hvd.DGC` sends more. It is SGD with momentum, compressed by TOP_K alone."""
SEEDS = (0, 1, 2)
RANKS, MOMENTUM = 2, 0.9
MIN_NUMEL = 256  # with the default most tensors of such small networks would go uncompressed
TUNING_SEED = 100  # must not be one of the table

COMPRESSORS: dict[str, Callable[[float | None], Compressor]] = {
    THRESHOLD: lambda tau: Threshold(tau=tau),
    **{
        repr_of: lambda _, made=made: made
        for repr_of, made in {
            DENSE: NoCompression(),
            "FP16()": FP16(),
            "BF16()": BF16(),
            "OneBit()": OneBit(),
            'OneBit(error_feedback="float8")': OneBit(error_feedback="float8"),
            "Adaptive(64)": Adaptive(pi=64),
            'Adaptive(64, error_feedback="float8")': Adaptive(pi=64, error_feedback="float8"),
            TOP_K: TopK(0.01),
            'TopK(0.01, error_feedback="float8")': TopK(0.01, error_feedback="float8"),
            "ChunkedTopK()": ChunkedTopK(),
            "RandomK(0.01)": RandomK(0.01),
            "Percentile(90)": Percentile(90),
            "Percentile(99)": Percentile(99),
            "Percentile(90, error_feedback=True)": Percentile(90, error_feedback=True),
            'Percentile(90, error_feedback="float8")': Percentile(90, error_feedback="float8"),
            "PowerSGD(1)": PowerSGD(rank=1),
            "PowerSGD(2)": PowerSGD(rank=2),
            "PowerSGD(4)": PowerSGD(rank=4),
            "QSGD(8)": QSGD(bits=8),
            "QSGD(4)": QSGD(bits=4),
            "QSGD(2)": QSGD(bits=2),
            "Blockwise(8)": Blockwise(bits=8),
            "Blockwise(4)": Blockwise(bits=4),
            "Blockwise(4, hadamard=True)": Blockwise(bits=4, hadamard=True),
            "EFSignSGD()": EFSignSGD(),
            "TernGrad()": TernGrad(),
            "Natural()": Natural(),
            SIGNS: SignSGD(),
        }.items()
    },
}
"""What makes each compressor, given its tuned setting; only `Threshold` has one."""

FORMS: dict[str, dict[str, Any]] = {
    "tiny": {
        "images": 256, "tested": 64, "batch": 8, "warm_up": 1, "context": 16, "sequences": 2, "held_out": 4,
        "steps": {"MLP": 4, "ResNet": 2, "transformer": 2},
    },
    "full": {
        "images": 60000, "tested": 2000, "batch": 32, "warm_up": 20, "context": 64, "sequences": 8, "held_out": 128,
        "steps": {"MLP": 600, "ResNet": 150, "transformer": 250},
    },
}  # fmt: skip

AS_GOOD = {"MLP": 0.5, "ResNet": 0.5, "transformer": 0.02}
"""Points of accuracy, or nats a byte, by which results have to differ to be called worse."""

# the grids from which rates and tau are taken; a best value at the end of its grid is a reason to make it longer
_DENSE_RATES = {"SGD": (0.01, 0.03, 0.1, 0.3, 1.0), "Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
_SIGN_RATES = {"SGD": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3), "Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
_TAUS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


class Cell(NamedTuple):
    """Names one training.

    Args:
        compressor: one of `COMPRESSORS`.
        optimizer: one of `OPTIMIZERS` or `CORRECTED`.
        network: one of `NETWORKS`.
        seed: of parameters and of what is drawn from the data.
        rate: the learning rate at its highest.
        tau: of `Threshold`; None for the others.
    """

    compressor: str
    optimizer: str
    network: str
    seed: int
    rate: float
    tau: float | None = None


Row = Mapping[str, Any]
"""The fields of a cell, and its result."""


def candidates(tuned: Sequence[Row]) -> list[Cell]:
    """List the trainings that tune; those of `Threshold` need the rates that were found before."""
    cells = [
        Cell(compressor, optimizer, network, TUNING_SEED, rate)
        for compressor, rates in ((DENSE, _DENSE_RATES), (SIGNS, _SIGN_RATES))
        for network, optimizer in product(NETWORKS, OPTIMIZERS)
        for rate in rates[optimizer]
    ]
    if {cell_of(row) for row in tuned} >= set(cells):
        cells += [
            Cell(THRESHOLD, optimizer, network, TUNING_SEED, _best(tuned, DENSE, optimizer, network)["rate"], tau)
            for network, optimizer in product(NETWORKS, OPTIMIZERS)
            for tau in _TAUS
        ]
    return cells


def all_cells(tuned: Sequence[Row]) -> list[Cell]:
    """List the trainings of the table; those of one seed come before those of the next, so that a cut run has some."""
    cells = []
    for seed, network in product(SEEDS, NETWORKS):
        for optimizer, compressor in product(OPTIMIZERS, COMPRESSORS):
            best = chosen(tuned, compressor, optimizer, network)
            cells.append(Cell(compressor, optimizer, network, seed, best["rate"], best["tau"]))
        rate = chosen(tuned, TOP_K, "SGD", network)["rate"]
        cells += [Cell(TOP_K, optimizer, network, seed, rate) for optimizer in CORRECTED]
    return cells


def chosen(tuned: Sequence[Row], compressor: str, optimizer: str, network: str) -> Row:
    """Return the tuned rate and tau of a compressor: its own where it has some, else those of dense.

    Raises:
        ValueError: nothing is recorded that tells.
    """
    own = compressor if compressor in (SIGNS, THRESHOLD) else DENSE
    return _best(tuned, own, optimizer, network)


def _best(tuned: Sequence[Row], compressor: str, optimizer: str, network: str) -> Row:
    wanted = (compressor, optimizer, network)
    rows = [row for row in tuned if (row["compressor"], row["optimizer"], row["network"]) == wanted]
    if not rows:
        raise ValueError(f"nothing is tuned for {', '.join(wanted)}: run benchmarks/accuracy.py --tune first")
    most = min(map(badness, rows)) + AS_GOOD[network]
    good = [row for row in rows if badness(row) <= most]
    # a tau is larger to send less
    return max(good, key=lambda row: row["tau"]) if compressor == THRESHOLD else min(good, key=lambda row: row["rate"])


def badness(row: Row) -> float:
    """Return a loss, or an accuracy with its sign changed: less is better, and infinity is not finite."""
    if row["test"] is None:
        return float("inf")
    return row["test"] if row["network"] == "transformer" else -row["test"]


def cell_of(row: Row) -> Cell:
    """Return the cell whose result a row holds."""
    return Cell(*(row[field] for field in Cell._fields))


def cut(cells: Iterable[Cell], words: Sequence[str]) -> list[Cell]:
    """Keep the cells of which each word names the compressor, optimizer, network or seed, as in "Adam" or "seed=0".

    Example:
        >>> cells = [Cell("OneBit()", "Adam", "MLP", 0, 1e-3), Cell("FP16()", "Adam", "MLP", 1, 1e-3)]
        >>> [cell.compressor for cell in cut(cells, ["Adam", "seed=1"])]
        ['FP16()']
    """
    found = list(cells)
    for word in words:
        found = [c for c in found if word in (c.compressor, c.optimizer, c.network, f"seed={c.seed}")]
    return found
