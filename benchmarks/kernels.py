"""Speed of every compressor's encode and decode against a memcpy of the gradient, on one core, in one run.

    python benchmarks/kernels.py [--numel 16777216] [--repeats 9] [--json FILE]

Encode is with error feedback where the compressor has it: what the exchange runs, residual update included. Times on
shared machines drift, so each repeat times a memcpy and then each kernel, and ratios are taken within the repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from hvd_compress import BF16, FP16, QSGD, Adaptive, Key, NoCompression, OneBit, Threshold, TopK
from hvd_compress.compressors import Compressor

# tau: 1 in 64 of the corrected values pass, the proportion of Adaptive's default
CASES: dict[str, Compressor] = {
    "one-bit": OneBit(),
    "one-bit, sampled": OneBit(sample=128),
    "threshold": Threshold(tau=2.7),
    "adaptive(64)": Adaptive(pi=64),
    "top-k 1 %": TopK(ratio=0.01),
    "qsgd 1 bit": QSGD(bits=1),
    "qsgd 2 bits": QSGD(bits=2),
    "qsgd 4 bits": QSGD(bits=4),
    "qsgd 8 bits": QSGD(bits=8),
    "bf16": BF16(),
    "fp16": FP16(),
    "none": NoCompression(),
}


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


class Case:
    """The buffers of one compressor, and its two calls."""

    def __init__(self, compressor: Compressor, gradient: np.ndarray) -> None:
        rows = max(1, round(gradient.size**0.5))
        self.compressor = compressor
        self.gradient = gradient
        self.group = compressor.group_numel((rows, gradient.size // rows))
        self.x = gradient.copy()
        self.residual = 0.5 * np.roll(gradient, 12345) if compressor.feedback else None
        self.payload = np.zeros(compressor.capacity(gradient.size, self.group), np.uint8)
        self.out = np.zeros_like(gradient)
        self.nbytes = 0

    def encode(self) -> None:
        self.nbytes = self.compressor.encode_into(self.x, self.residual, self.payload, self.group, Key())

    def decode(self) -> None:
        self.compressor.decode_into(self.payload[: self.nbytes], self.out)

    def add(self) -> None:
        self.compressor.decode_into(self.payload[: self.nbytes], self.out, add=True)

    def times(self) -> tuple[float, float, float]:
        self.x[:] = self.gradient  # encoding spoils it
        return seconds(self.encode), seconds(self.decode), seconds(self.add)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=4096 * 4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    gradient = np.random.default_rng(0).standard_normal(options.numel, dtype=np.float32)
    copy = np.zeros_like(gradient)
    rows = []
    print(f"{options.numel} float32, one core, median of {options.repeats} (spread); x = memcpy of the gradient")
    print(f"{'':18}{'bytes/element':>14}{'encode':>22}{'decode':>22}{'decode and add':>22}")
    for name, compressor in CASES.items():
        case = Case(compressor, gradient)
        case.times()  # compiles
        ratios: list[list[float]] = [[], [], []]
        copies = []
        for _ in range(options.repeats):
            memcpy = min(seconds(lambda: np.copyto(copy, gradient)) for _ in range(3))
            copies.append(memcpy)
            for column, value in zip(ratios, case.times(), strict=True):
                column.append(value / memcpy)
        rows.append(
            {
                "case": name,
                "compressor": repr(compressor),
                "bytes_per_element": case.nbytes / gradient.size,
                "memcpy_seconds": median(copies),
                **{k: sorted(v) for k, v in zip(("encode", "decode", "decode_and_add"), ratios, strict=True)},
            }
        )
        cells = "".join(f"{f'{median(r):.2f}x ({min(r):.2f}-{max(r):.2f})':>22}" for r in ratios)
        print(f"{name:18}{case.nbytes / gradient.size:14.4f}{cells}", flush=True)
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"numel": options.numel, **machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
