"""Speed of all kernels on this machine now, on one thread, and against a copy of the gradient in the same run."""

from __future__ import annotations

import argparse

from hvd_compress import BF16, FP16, QSGD, Adaptive, OneBit, Percentile, Threshold, TopK
from hvd_compress.cli.table import short, table
from hvd_compress.compressors import Compressor
from hvd_compress.cost import copy_speed, speed_of

__all__ = ["HELP", "add_arguments", "run"]

HELP = "speed of the kernels on this machine"

_CASES: tuple[Compressor, ...] = (
    OneBit(),
    OneBit(sample=128),
    # volume and speed depend on how many values exceed tau; timed with 1 in 64
    Threshold(tau=1.0),
    Adaptive(),
    TopK(),
    Percentile(),
    QSGD(bits=1),
    QSGD(bits=2),
    QSGD(bits=4),
    QSGD(bits=8),
    BF16(),
    FP16(),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: it is always the same."""


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    copy = copy_speed().per_unit
    rows = []
    for compressor in _CASES:
        speed = speed_of(compressor)
        # GB of float32 per second, and how many copies of it that takes
        cells = [f"{4e-9 / s:.1f} ({s / copy:.1f}x)" for s in (speed.encode.per_unit, speed.decode.per_unit)]
        cells.append(f"{4e-9 / speed.add.per_unit:.1f} ({speed.add.per_unit / copy:.1f}x)")
        rows.append([short(compressor), f"{speed.bytes_per_element:.3f}", *cells])
    print("GB of float32 gradient per second, and in brackets the time against that of copying it")
    print(table(["compressor", "bytes/element", "encode", "decode", "decode and add"], rows))
    return 0
