"""Speed of the kernels of a GPU: each against a copy of the gradient on the device, and against torch operations.

    python benchmarks/gpu.py                    all compressors, 16.8 million elements, and tables of 1024 tensors
    python benchmarks/gpu.py --numel 1e4 1e8    other sizes, for the page

Needs a CUDA device. Times are medians of launches timed by events, with inputs that change places so that the
second-level cache holds none of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress import BF16, FP16, QSGD, Adaptive, NoCompression, OneBit, Percentile, Threshold, TopK
from hvd_compress.compressors import Compressor, Key, tables
from hvd_compress.kernels import table

NUMEL = 1 << 24
_AHEAD = 1_000_000  # cycles of the device
ROW = 4096
MANY = 1024
COMPRESSORS: list[Compressor] = [
    OneBit(),
    Threshold(2.7),
    QSGD(4),
    QSGD(8),
    QSGD(3),
    Adaptive(64),
    TopK(0.01),
    Percentile(90, error_feedback=True),
    BF16(),
    FP16(),
    NoCompression(),
]


def microseconds(work: Callable[[int], Any], before: Callable[[int], Any] = bool, times: int = 30) -> float:
    """Time `work`, which is given the number of the call, on the device; `before` is not timed."""
    for i in range(3):
        before(i)
        work(i)
    torch.cuda.synchronize()
    found = []
    for i in range(times):
        before(i)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # the host gets ahead meanwhile: launches are timed apart
        torch.cuda._sleep(_AHEAD)
        begin.record()
        work(i)
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end))
    return statistics.median(found)


def host_microseconds(work: Callable[[int], Any], before: Callable[[int], Any] = bool, times: int = 30) -> float:
    """Time what the host does until `work` returns; `before` is not timed."""
    found = []
    for i in range(times + 3):
        before(i)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work(i)
        found.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(found[3:])


class Case:
    """A compressor with tensors of these sizes on the device, `copies` times."""

    def __init__(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]], kind: str = "float32", copies: int = 4):
        from hvd_compress.kernels.cuda.launch import Launch

        self.compressor = compressor
        group = compressor.group_of(shapes[0])
        kernels = compressor.device_kernels(group)
        assert kernels is not None, compressor
        self.kernels, self.kind = kernels, kind
        numels = [int(np.prod(shape)) for shape in shapes]
        self.gradients, self.launches, self.keep = [], [], []
        generator = torch.Generator(device="cuda").manual_seed(0)
        for _ in range(copies):
            flat = torch.randn(sum(numels), device="cuda", generator=generator).to(getattr(torch, kind))
            residual = 0.1 * torch.randn(sum(numels), device="cuda", generator=generator)
            capacities = [compressor.capacity(n, group) for n in numels]
            slots = torch.zeros(sum(capacities) + 8, dtype=torch.uint8, device="cuda")
            rows = np.zeros((len(numels), table.COLUMNS), np.int64)
            starts, places = np.cumsum([0, *numels])[:-1], np.cumsum([0, *capacities])[:-1]
            rows[:, table.NUMEL], rows[:, table.GROUP], rows[:, table.ROOM] = numels, group, capacities
            rows[:, table.LIMIT] = [compressor.limit_of(n, group) for n in numels]
            rows[:, table.DIMENSIONS] = 1
            rows[:, table.PAYLOAD] = slots.data_ptr() + places
            size = flat.element_size()
            if compressor.feedback:
                rows[:, table.X] = residual.data_ptr() + 4 * starts
                rows[:, table.GRADIENT] = flat.data_ptr() + size * starts
            else:
                rows[:, table.X] = flat.data_ptr() + size * starts
            tables.fill_keys(rows, lambda i: Key(step=i))
            launch = Launch(rows, self._upload, self._empty)
            launch.place(rows, kind, compressor.feedback)
            decoding = rows.copy()
            decoding[:, table.X], decoding[:, table.GRADIENT] = flat.data_ptr() + size * starts, 0
            reading = Launch(decoding, self._upload, self._empty)
            reading.place(decoding, kind, False)
            adding = Launch(decoding, self._upload, self._empty)
            decoding[:, table.ADD] = 1
            adding.place(decoding, kind, False)
            self.launches.append((launch, reading, adding))
            self.keep.append((flat, residual, slots, residual.clone()))

    @staticmethod
    def _upload(values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values).to("cuda")

    @staticmethod
    def _empty(count: int, kind: str) -> torch.Tensor:
        return torch.empty(count, dtype=getattr(torch, kind), device="cuda")

    def encode(self, i: int) -> None:
        self.kernels.encode(self.launches[i % len(self.launches)][0])

    def begin(self, i: int) -> None:
        """Make residual and slots what they are before a step."""
        _, residual, slots, initial = self.keep[i % len(self.keep)]
        residual.copy_(initial)
        slots.zero_()

    def check(self, i: int) -> None:
        reading = self.launches[i % len(self.launches)][1]
        reading.check(self.compressor.codec)
        self.kernels.verify(reading)

    def decode(self, i: int) -> None:
        self.kernels.decode(self.launches[i % len(self.launches)][1], 0.5, False)

    def add(self, i: int) -> None:
        self.kernels.decode(self.launches[i % len(self.launches)][2], 0.5, False)

    def run(self) -> dict[str, float]:
        found = {"encode": microseconds(self.encode, self.begin), "encode host": host_microseconds(self.encode, self.begin)}
        for i in range(len(self.launches)):
            self.begin(i)
            self.encode(i)
        found["payload"] = float(self.launches[0][0].state.cpu()[:, 6].sum())
        for i in range(len(self.launches)):
            self.check(i)
            _, reading, adding = self.launches[i]
            adding.check(self.compressor.codec)
            self.kernels.verify(adding)
            assert bool((reading.state[:, 5] >= 0).all()), f"{self.compressor!r}: its own payload is refused"
        found["check"] = microseconds(self.check)
        found["decode"] = microseconds(self.decode)
        found["decode host"] = host_microseconds(self.decode)
        found["decode and add"] = microseconds(self.add)
        return found


def copy_microseconds(numel: int) -> float:
    """Time a copy of float32 on the device."""
    pairs = [(torch.randn(numel, device="cuda"), torch.empty(numel, device="cuda")) for _ in range(4)]
    return microseconds(lambda i: pairs[i % 4][1].copy_(pairs[i % 4][0]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; prints a line for each compressor, and JSON into the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, nargs="*", default=[NUMEL])
    parser.add_argument("--only", nargs="*", default=[], help="ids of compressors")
    parser.add_argument("--out", help="a JSON file")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": []}
    for numel in map(int, options.numel):
        copy = copy_microseconds(numel)
        print(f"{numel} float32: a copy takes {copy:.1f} us, {8 * numel / copy / 1e3:.0f} GB/s", flush=True)
        many = max(1, min(MANY, numel // (4 * ROW)))
        for compressor in COMPRESSORS:
            if options.only and compressor.id not in options.only:
                continue
            for name, shapes in (
                ("one", [(max(1, numel // ROW), min(ROW, numel))]),
                ("many", [(numel // many // ROW or 1, min(ROW, numel))] * many),
            ):
                try:
                    found = Case(compressor, shapes).run()
                except Exception as error:  # noqa: BLE001 - the others are wanted
                    print(f"{compressor!r} {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
                    continue
                results["runs"].append({"numel": numel, "compressor": repr(compressor), "tensors": len(shapes), "copy": copy} | found)
                told = "  ".join(
                    f"{what} {found[what] / copy:5.2f}" for what in ("encode", "check", "decode", "decode and add")
                )
                hosts = f"host {found['encode host']:4.0f} {found['decode host']:4.0f} us"
                print(f"{compressor.id:11}{len(shapes):5}  {told}  {hosts}  1:{4 * numel / found['payload']:.1f}", flush=True)
                torch.cuda.empty_cache()
    if options.out:
        with open(options.out, "w") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
