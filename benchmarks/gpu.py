"""Time the kernels of a GPU against a copy of the gradient on the device, and against the same in torch operations.

    python benchmarks/gpu.py [--numel 1e4 1e6 16777216 1e8] [--only onebit topk] [--out FILE]

Each compressor encodes, with error feedback where it has it, one tensor in rows of 4096 elements, and as many elements
in 1024 tensors. Times are medians of calls, measured by events on the device while the host is ahead; four sets of
arrays take turns. Residuals and slots are written before each call, so that the cache may hold the end of them, and all
of small ones. "host" is what the host does meanwhile. Every figure is a multiple of the time that a copy of as many
elements takes. The torch operations for Threshold ask for a number of entries, for which the host waits; that counts.
Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

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
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from hvd_compress.compressors import Compressor, Key, tables
from hvd_compress.kernels import table

NUMEL = 1 << 24
_AHEAD = 2_000_000  # cycles of the device
_SETS = 4
_TAU = 2.7
ROW = 4096
MANY = 1024
COMPRESSORS: list[Compressor] = [
    OneBit(),
    QSGD(4),
    QSGD(8),
    QSGD(3),
    BF16(),
    FP16(),
    NoCompression(),
    Adaptive(64),
    Threshold(_TAU),
    TopK(0.01),
    Percentile(90, error_feedback=True),
    EFSignSGD(),
    SignSGD(),
    Natural(),
    TernGrad(),
    Blockwise(),
    Blockwise(bits=4, hadamard=True),
    ChunkedTopK(),
    RandomK(),
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
    """A compressor with gradients of `kind` of these shapes on the device.

    There are several sets of arrays, which take turns.
    """

    def __init__(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]], kind: str = "float32") -> None:
        self.compressor, self.kind = compressor, kind
        group = compressor.group_of(shapes[0])
        kernels = compressor.device_kernels(group)
        assert kernels is not None, compressor
        self.kernels, self.sets = kernels, []
        numels = [int(np.prod(shape)) for shape in shapes]
        self._capacities = [compressor.capacity(n, group) for n in numels]
        self._rows = np.zeros((len(numels), table.COLUMNS), np.int64)
        self._rows[:, table.NUMEL], self._rows[:, table.GROUP] = numels, group
        self._rows[:, table.LIMIT] = [compressor.limit_of(n, group) for n in numels]
        self._rows[:, table.ROOM], self._rows[:, table.DIMENSIONS] = self._capacities, 1
        self._starts = np.cumsum([0, *numels])[:-1]
        tables.fill_keys(self._rows, lambda i: Key(step=i))
        for number in range(_SETS):
            self.sets.append(self._set(number))

    def _set(self, number: int) -> Set:
        generator = torch.Generator(device="cuda").manual_seed(number)
        numel = int(self._rows[:, table.NUMEL].sum())
        flat = torch.randn(numel, device="cuda", generator=generator).to(getattr(torch, self.kind))
        residual = 0.1 * torch.randn(numel, device="cuda", generator=generator)
        slots = torch.zeros(sum(self._capacities), dtype=torch.uint8, device="cuda")
        rows = self._rows.copy()
        rows[:, table.PAYLOAD] = slots.data_ptr() + np.cumsum([0, *self._capacities])[:-1]
        values_at = flat.data_ptr() + flat.element_size() * self._starts
        feedback = self.compressor.feedback
        rows[:, table.X] = residual.data_ptr() + 4 * self._starts if feedback else values_at
        rows[:, table.GRADIENT] = values_at if feedback else 0
        encoding = self._launch(rows, feedback)
        rows[:, table.X], rows[:, table.GRADIENT] = values_at, 0
        return Set(residual, residual.clone(), slots, flat, encoding, self._launch(rows), self._launch(rows, adds=True))

    def _launch(self, rows: np.ndarray[Any, Any], feedback: bool = False, adds: bool = False) -> Any:
        from hvd_compress.kernels.cuda.launch import Launch

        launch = Launch(
            rows,
            lambda values: torch.from_numpy(values).to("cuda"),
            lambda count, kind: torch.empty(count, dtype=getattr(torch, kind), device="cuda"),
        )
        rows = rows.copy()
        rows[:, table.ADD] = adds
        launch.place(rows, self.kind, feedback)
        return launch

    def begin(self, i: int) -> None:
        """Make residual and slots what they are before a step."""
        of = self.sets[i % _SETS]
        of.residual.copy_(of.initial)
        of.slots.zero_()

    def encode(self, i: int) -> None:
        self.kernels.encode(self.sets[i % _SETS].encoding)

    def check(self, i: int) -> None:
        self._check(self.sets[i % _SETS].reading)

    def decode(self, i: int) -> None:
        self.kernels.decode(self.sets[i % _SETS].reading, 0.5, False)

    def add(self, i: int) -> None:
        self.kernels.decode(self.sets[i % _SETS].adding, 0.5, False)

    def _check(self, launch: Any) -> None:
        launch.check(self.compressor.codec)
        self.kernels.verify(launch)

    def run(self) -> dict[str, float]:
        """Time all calls; returns microseconds by name, and the bytes of the payloads."""
        found = {"encode": microseconds(self.encode, self.begin)}
        found["encode host"] = host_microseconds(self.encode, self.begin)
        for i, of in enumerate(self.sets):
            self.begin(i)
            self.encode(i)
            self._check(of.reading)
            self._check(of.adding)
            if bool((of.reading.state[:, 5] < 0).any()):
                raise RuntimeError(f"{self.compressor!r}: its own payload is refused")
        found["bytes"] = float(self.sets[0].reading.state[:, 6].sum())
        found["check"] = microseconds(self.check)
        found["decode"] = microseconds(self.decode)
        found["decode host"] = host_microseconds(self.decode)
        found["decode and add"] = microseconds(self.add)
        return found


class Set(NamedTuple):
    """Arrays of one set, and what kernels are launched with on them."""

    residual: torch.Tensor
    initial: torch.Tensor
    slots: torch.Tensor
    flat: torch.Tensor
    encoding: Any
    reading: Any
    adding: Any


# -- the same arithmetic in torch operations -----------------------------------------------------------------------


def torch_onebit(x: torch.Tensor, r: torch.Tensor) -> None:
    y = (x + r).view(-1, ROW)
    is_positive = y >= 0
    count = is_positive.sum(1)
    positive = (y * is_positive).sum(1) / count.clamp(min=1)
    negative = (y * ~is_positive).sum(1) / (ROW - count).clamp(min=1)
    torch.sub(y, torch.where(is_positive, positive[:, None], negative[:, None]), out=r.view(-1, ROW))
    weights = 2 ** torch.arange(8, device=x.device, dtype=torch.uint8)
    (is_positive.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)


def torch_threshold(x: torch.Tensor, r: torch.Tensor) -> None:
    y = x + r
    sent = y.abs() > _TAU
    sent.nonzero()
    torch.sub(y, torch.where(sent, _TAU * y.sign(), 0.0), out=r)


def torch_adaptive(x: torch.Tensor, r: torch.Tensor) -> None:
    y = (x + r).view(-1, ROW)
    k = ROW // 128
    (upper, above), (lower, below) = y.topk(k, 1), y.topk(k, 1, largest=False)
    y.scatter_add_(1, above, -upper.mean(1, keepdim=True).expand_as(upper))
    y.scatter_add_(1, below, -lower.mean(1, keepdim=True).expand_as(lower))
    r.copy_(y.view(-1))


def torch_topk(x: torch.Tensor, r: torch.Tensor, share: float = 0.01) -> None:
    y = x + r
    places = y.abs().topk(max(1, int(share * y.numel()))).indices
    y[places].clone()
    y[places] = 0
    r.copy_(y)


def torch_percentile(x: torch.Tensor, r: torch.Tensor) -> None:
    torch_topk(x, r, 0.1)


def torch_qsgd(x: torch.Tensor, r: torch.Tensor) -> None:
    rows = x.view(-1, 512)
    norm = rows.norm(dim=1, keepdim=True)
    codes = (rows.abs() * (7 / norm) + torch.rand_like(rows)).to(torch.uint8).clamp_(max=7) | (rows < 0).to(
        torch.uint8
    ) << 3
    codes.view(-1, 2)[:, 0] | codes.view(-1, 2)[:, 1] << 4


IN_TORCH: dict[Compressor, Callable[[torch.Tensor, torch.Tensor], None]] = {
    OneBit(): torch_onebit,
    QSGD(4): torch_qsgd,
    Adaptive(64): torch_adaptive,
    Threshold(_TAU): torch_threshold,
    TopK(0.01): torch_topk,
    Percentile(90, error_feedback=True): torch_percentile,
}


@cache
def torch_microseconds(compressor: Compressor, numel: int) -> float:
    """Time the torch operations, with residuals as they are before a step."""
    x, initial = torch.randn(numel, device="cuda"), 0.1 * torch.randn(numel, device="cuda")
    r = initial.clone()
    return microseconds(lambda i: IN_TORCH[compressor](x, r), lambda i: r.copy_(initial), times=10)


@cache
def copy_microseconds(numel: int) -> float:
    """Time a copy of float32 on the device, once; says what it takes."""
    pairs = [(torch.randn(numel, device="cuda"), torch.empty(numel, device="cuda")) for _ in range(_SETS)]
    copy = microseconds(lambda i: pairs[i % _SETS][1].copy_(pairs[i % _SETS][0]))
    print(f"{numel} float32: a copy takes {copy:.1f} us, {8 * numel / copy / 1e3:.0f} GB/s", flush=True)
    return copy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; prints a line for each compressor, and JSON into the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, nargs="*", default=[NUMEL])
    parser.add_argument("--only", nargs="*", default=[], help="ids of compressors")
    parser.add_argument("--out", help="a JSON file")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": []}
    for asked in map(int, options.numel):
        row = min(ROW, asked)
        many = max(1, min(MANY, asked // (4 * ROW)))
        for compressor in COMPRESSORS:
            if options.only and compressor.id not in options.only:
                continue
            for shapes in [(asked // row, row)], [(asked // row // many, row)] * many:
                # whole rows, in tensors of equal sizes
                numel = sum(rows * of_row for rows, of_row in shapes)
                copy = copy_microseconds(numel)
                compared = compressor in IN_TORCH and row == ROW
                in_torch = torch_microseconds(compressor, numel) if compared else 0.0
                found = Case(compressor, shapes).run()
                run = {"numel": numel, "compressor": repr(compressor), "tensors": len(shapes), "copy": copy}
                results["runs"].append({**run, "torch operations": in_torch, **found})
                calls = ("encode", "check", "decode", "decode and add")
                told = "  ".join(f"{what} {found[what] / copy:5.2f}" for what in calls)
                host = f"host {found['encode host']:4.0f} {found['decode host']:4.0f} us"
                ratios = f"torch {in_torch / found['encode']:5.1f}  1:{4 * numel / found['bytes']:.1f}"
                print(f"{compressor.id:11}{len(shapes):5}  {told}  {host}  {ratios}", flush=True)
                torch.cuda.empty_cache()
                if options.out:
                    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
