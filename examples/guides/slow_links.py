"""How long one exchange takes on this network: as Horovod sends it, and compressed.

    horovodrun -np 2 --gloo python examples/guides/slow_links.py

Candidates take turns, so that a drift of the machine meets all of them. The figures are those of your network, now.
"""

from __future__ import annotations

import time
from statistics import median

import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive, OneBit

CANDIDATES = {"float32": None, "fp16": hvd.Compression.fp16, "one-bit": OneBit(), "adaptive": Adaptive(pi=64)}


def seconds(name: str, gradient: torch.Tensor) -> float:
    begin = time.perf_counter()
    hvd.allreduce(gradient, name=name, compression=CANDIDATES[name] or hvd.Compression.none)
    return time.perf_counter() - begin


def main(rounds: int = 5) -> None:
    hvd.init()
    gradient = torch.randn(1024, 1024)
    for name in CANDIDATES:
        seconds(name, gradient)  # the first call compiles kernels
    taken = [[seconds(name, gradient) for name in CANDIDATES] for _ in range(rounds)]
    if hvd.rank() == 0:
        for name, column in zip(CANDIDATES, zip(*taken, strict=True), strict=True):
            low, middle, high = (1000 * value for value in (min(column), median(column), max(column)))
            print(f"{name:10}{middle:8.2f} ms ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
