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
        cells = [_cell(kernel.per_unit, copy) for kernel in (speed.encode, speed.decode, speed.add)]
        rows.append([short(compressor), f"{speed.bytes_per_element:.3f}", *cells])
    print("GB of float32 gradient per second, and in brackets the time against that of copying it")
    print(table(["compressor", "bytes/element", "encode", "decode", "decode and add"], rows))
    return 0


def _cell(seconds: float, copy: float) -> str:
    """GB of float32 per second, and how many copies of it that takes, from the seconds of an element."""
    # other work on the machine can make a large array seem to take no longer than a small one
    return f"{4e-9 / seconds:.1f} ({seconds / copy:.1f}x)" if seconds and copy else "too noisy to tell"
