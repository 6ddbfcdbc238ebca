"""Compile the kernels of devices for a GPU that there is not: the interpreter, in which they are tested, takes more.

    python -m tests.compiled [--all] [ID ...]

Takes compressors by their ids, all by default: the first row of the contract of each, or --all rows. Prints the kernels
of each, and fails with Triton's error where one does not compile. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from hvd_compress.compressors import Compressor, Key, tables
from hvd_compress.kernels import table
from hvd_compress.kernels.cuda import start
from hvd_compress.kernels.cuda.launch import Launch
from tests.contract.rows import ROWS

TARGET = GPUTarget("cuda", 90, 32)
TABLES = [([(8, 4096)], "float32"), ([(8, 4096)], "bfloat16"), ([(5, 700), (3, 700)], "float32")]


class NoGpu:
    """A driver of Triton that can tell its target, and launch nothing."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Nothing(dict[Any, Any]):
    """Forgets compiled kernels, which would be launched when they are wanted again."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def launch_of(compressor: Compressor, shapes: list[tuple[int, ...]], group: int, feedback: bool, kind: str) -> Launch:
    """Return a table with addresses of nothing."""
    numels = [int(np.prod(shape)) for shape in shapes]
    rows = np.zeros((len(numels), table.COLUMNS), np.int64)
    rows[:, table.NUMEL], rows[:, table.GROUP], rows[:, table.DIMENSIONS] = numels, group, 1
    rows[:, table.LIMIT] = [compressor.limit_of(n, group) for n in numels]
    rows[:, table.ROOM] = [compressor.capacity(n, group) for n in numels]
    rows[:, table.X] = rows[:, table.PAYLOAD] = 1 << 20
    rows[:, table.GRADIENT] = (1 << 20) * feedback
    if compressor.draws:
        tables.fill_keys(rows, lambda i: Key(step=i))
    launch = Launch(rows, torch.from_numpy, lambda count, kind: torch.empty(count, dtype=getattr(torch, kind)))
    launch.place(rows, kind, feedback)
    return launch


def compile_all(compressor: Compressor) -> set[str]:
    """Compile what encodes, checks and decodes tables of a compressor; returns the names of the kernels."""
    names = set()

    def compiling(kernel: Any, grid: Any) -> Any:
        names.add(kernel.__name__)
        return lambda *arguments, **options: kernel.run(*arguments, grid=grid, warmup=True, **options)

    JITFunction.__getitem__ = compiling
    for shapes, kind in TABLES:
        group = compressor.group_of(shapes[0])
        kernels = compressor.device_kernels(group)
        kernels.encode(launch_of(compressor, shapes, group, compressor.feedback, kind))
        read = launch_of(compressor, shapes, group, False, kind)
        read.check(compressor.codec)
        kernels.verify(read)
        kernels.decode(read, 0.5, False)
    return names


def _group(compressor: Compressor) -> int:
    return compressor.group_of(TABLES[0][0][0])


def main(arguments: list[str]) -> int:
    """Compile the kernels of the compressors that are asked for."""
    ids = [argument for argument in arguments if argument != "--all"]
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: nothing is compiled", file=sys.stderr)
        return 2
    triton.runtime.driver.set_active(NoGpu())
    start._compiled = Nothing()
    of_rows = [row.compressor for row in ROWS if row.compressor.device_kernels(_group(row.compressor)) is not None]
    for compressor in of_rows if "--all" in arguments else {c.id: c for c in reversed(of_rows)}.values():
        if not ids or compressor.id in ids:
            print(f"{compressor!r}: {' '.join(sorted(compile_all(compressor)))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
