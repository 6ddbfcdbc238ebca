"""Time all kernels on this machine now, on one thread, against a copy of the gradient in the same run.

With --json: "kernels", each with "compressor" (its repr), "bytes_per_element" and, for "encode", "decode" and
"decode_and_add", "gb_per_second" (of float32 gradient) and "copies" (the time against that of copying it); null where
other work on the machine has spoiled the time.
"""

from __future__ import annotations

import argparse
from typing import Any

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Blockwise,
    EFSignSGD,
    Natural,
    OneBit,
    Percentile,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from hvd_compress.cli.json_output import add_json_argument, print_json
from hvd_compress.cli.table import short, table
from hvd_compress.compressors import Compressor
from hvd_compress.cost import Speed, copy_speed, speed_of

__all__ = ["HELP", "add_arguments", "run"]

HELP = "time the kernels on this machine"

_CASES: tuple[Compressor, ...] = (
    OneBit(),
    OneBit(sample=128),
    # volume and speed depend on how many values exceed tau: here 1 in 64
    Threshold(tau=1.0),
    Adaptive(),
    TopK(),
    Percentile(),
    QSGD(bits=1),
    QSGD(bits=2),
    QSGD(bits=4),
    QSGD(bits=8),
    SignSGD(),
    EFSignSGD(),
    TernGrad(),
    Natural(),
    Blockwise(),
    Blockwise(bits=4),
    Blockwise(bits=4, hadamard=True),
    BF16(),
    FP16(),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line: only --json, since it always times the same."""
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the table, or JSON."""
    copy = copy_speed().per_unit
    speeds = {short(compressor): speed_of(compressor) for compressor in _CASES}
    if options.json:
        print_json({"kernels": [_fields(name, speed, copy) for name, speed in speeds.items()]})
        return 0
    rows = []
    for name, speed in speeds.items():
        cells = [_cell(kernel.per_unit, copy) for kernel in (speed.encode, speed.decode, speed.add)]
        rows.append([name, f"{speed.bytes_per_element:.3f}", *cells])
    print("GB of float32 gradient per second, and in brackets the time against that of copying it")
    print(table(["compressor", "bytes/element", "encode", "decode", "decode and add"], rows))
    return 0


def _fields(name: str, speed: Speed, copy: float) -> dict[str, Any]:
    kernels = {"encode": speed.encode, "decode": speed.decode, "decode_and_add": speed.add}
    return {
        "compressor": name,
        "bytes_per_element": speed.bytes_per_element,
        **{
            kernel: {
                "gb_per_second": 4e-9 / line.per_unit if line.per_unit and copy else None,
                "copies": line.per_unit / copy if line.per_unit and copy else None,
            }
            for kernel, line in kernels.items()
        },
    }


def _cell(seconds: float, copy: float) -> str:
    """Write the GB of float32 per second, and how many copies would take as long, from the seconds of an element."""
    # other work on the machine can make a large array seem to take no longer than a small one
    return f"{4e-9 / seconds:.1f} ({seconds / copy:.1f}x)" if seconds and copy else "too noisy to tell"
