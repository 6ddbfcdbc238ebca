"""Time every compressor's encode and decode against a memcpy of the gradient in the same run.

    python benchmarks/kernels.py [--numel 1000 1000000] [--threads 1 2] [--repeats 7] [--short] [--out DIR]

Encode has error feedback where the compressor has it, as in an exchange, with the update of the residual. Two threads
are two Python threads with half of the elements each, on cores of their own. Times on shared machines drift, so each
repeat takes the best of three of a memcpy and of each call, and ratios are taken within the repeat; medians and
extremes are shown. All memory has been touched before, and the residual is written anew before each call. So arrays
that are larger than the cache are not in it; smaller ones are, for the memcpy too. "Of limit" is the time that a memcpy
takes for as many bytes as the call must move at least, divided by the time of the call: encoding reads the gradient and
the residual and writes the new one, adding reads and writes the cache lines that change; both pass the payload once.

At 4096 x 4096 elements and one thread the same arithmetic in torch expressions (baselines.py) runs in the same repeats.
Their intermediate arrays are so large that the C library asks the system for each and gives it back: most of what they
take is the system's work on fresh pages, as in a training. `MALLOC_MMAP_THRESHOLD_=2000000000
MALLOC_TRIM_THRESHOLD_=8000000000` in the environment of this command keeps the pages, and tells what is left.
DIR gets kernels.json, with all repeats and plain decoding too, and kernels.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")

import baselines
import matplotlib.pyplot as plt
import numpy as np
import torch
from measure import Spread

import hvd_compress
from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Blockwise,
    EFSignSGD,
    Key,
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
from hvd_compress.compressors import Compressor

# tau: 1 in 64 of the corrected values pass, the proportion of Adaptive's default
TAU = 2.7
CASES: dict[str, Compressor] = {
    "one-bit": OneBit(),
    "one-bit, sampled": OneBit(sample=128),
    "threshold": Threshold(tau=TAU),
    "adaptive(64)": Adaptive(pi=64),
    "top-k 1 %": TopK(ratio=0.01),
    "top-k, chunked": TopK(chunk=4096, ratio=1 / 64, value_bits=2),
    "percentile 90": Percentile(90),
    "random-k 1 %": RandomK(ratio=0.01),
    "qsgd 1 bit": QSGD(bits=1),
    "qsgd 2 bits": QSGD(bits=2),
    "qsgd 4 bits": QSGD(bits=4),
    "qsgd 8 bits": QSGD(bits=8),
    "threshold, golomb": Threshold(tau=TAU, coding="golomb"),
    "adaptive, golomb": Adaptive(pi=64, coding="golomb"),
    "top-k, golomb": TopK(ratio=0.01, coding="golomb"),
    "percentile, golomb": Percentile(90, coding="golomb"),
    "qsgd 4, elias": QSGD(bits=4, coding="elias"),
    "ef-signsgd": EFSignSGD(),
    "blockwise 8": Blockwise(),
    "blockwise 4": Blockwise(bits=4),
    "blockwise 4, hadamard": Blockwise(bits=4, hadamard=True),
    "terngrad": TernGrad(),
    "natural": Natural(),
    "signsgd": SignSGD(),
    "bf16": BF16(),
    "fp16": FP16(),
    "none": NoCompression(),
}
# for gradients that are mostly zeros, as those of embeddings and sums of few sparse payloads are
SPARSE: dict[str, Compressor] = {"adaptive, sparse": Adaptive(pi=64), "top-k, sparse": TopK(ratio=0.01)}
SPARSE_SHARE = 0.005  # share of the elements that are not zero
CASES |= SPARSE
BASELINES: dict[str, Callable[[], baselines.Method]] = {
    "one-bit": baselines.OneBit,
    "threshold": lambda: baselines.Threshold(TAU),
    "adaptive(64)": baselines.Adaptive,
    "top-k 1 %": baselines.TopK,
    "percentile 90": baselines.Percentile,
    "qsgd 4 bits": baselines.QSGD,
}
CALLS = ("encode", "decode", "decode_and_add")
SHOWN = ("encode", "decode_and_add")
SQUARE = 4096 * 4096
SIZES = [10**3, 10**4, 10**5, 10**6, 10**7, SQUARE, 10**8]
SHORT_SIZES = [10**5, SQUARE]
CACHE_LINE = 16  # float32
TRIES = 3  # the best of so many counts in a repeat, since other programs interrupt

Times = dict[str, float]


def seconds(function: Callable[[], object], prepare: Callable[[], object], calls: int) -> float:
    """Return the mean seconds of a call, without what prepares it."""
    total = 0.0
    for _ in range(calls):
        prepare()
        begin = time.perf_counter()
        function()
        total += time.perf_counter() - begin
    return total / calls


class Case:
    """Holds one thread's buffers and calls."""

    def __init__(self, compressor: Compressor, gradient: np.ndarray, columns: int) -> None:
        self.compressor = compressor
        self.gradient = gradient
        self.group = compressor.group_numel((max(1, gradient.size // columns), columns))
        self.before = 0.5 * np.roll(gradient, 12345)
        self.memory = self.before.copy()
        self.residual = self.memory if compressor.feedback else None
        self.payload = np.zeros(compressor.capacity(gradient.size, self.group), np.uint8)
        self.out = np.zeros_like(gradient)
        self.nbytes = 0
        self.calls = max(1, 200_000 // gradient.size)
        # compiles, and touches all memory
        for call in (self.encode, self.add, self.decode):
            call()
        lines = self.out[: gradient.size // CACHE_LINE * CACHE_LINE].reshape(-1, CACHE_LINE)
        touched = 4 * CACHE_LINE * np.count_nonzero(lines.any(axis=1))
        numel = gradient.size
        self.least_bytes = {
            "encode": (12 if compressor.feedback else 4) * numel + self.nbytes,
            "decode": 4 * numel + self.nbytes,
            "decode_and_add": 2 * touched + self.nbytes,
        }

    def reset(self) -> None:
        np.copyto(self.memory, self.before)  # encoding renews the residual

    def encode(self) -> None:
        self.nbytes = self.compressor.encode_into(self.gradient, self.residual, self.payload, self.group, Key())

    def decode(self) -> None:
        self.compressor.decode_into(self.payload[: self.nbytes], self.out)

    def add(self) -> None:
        self.compressor.decode_into(self.payload[: self.nbytes], self.out, add=True)

    def times(self) -> Times:
        return {
            name: min(seconds(call, self.reset, self.calls) for _ in range(TRIES))
            for name, call in {
                "memcpy": self.reset,
                "encode": self.encode,
                "decode": self.decode,
                "decode_and_add": self.add,
            }.items()
        }


class Baseline:
    """Holds the same in torch."""

    def __init__(self, method: baselines.Method, gradient: np.ndarray) -> None:
        self.method = method
        self.gradient = torch.from_numpy(gradient)
        self.residual = 0.5 * torch.roll(self.gradient, 12345)
        self.out = torch.zeros_like(self.gradient)
        self.sent: tuple[list[torch.Tensor], torch.Size] = ([], self.gradient.shape)
        for call in (self.reset, self.encode, self.add):
            call()

    def reset(self) -> None:
        self.method.memory["w"] = self.residual

    def encode(self) -> None:
        self.sent = self.method.compress(self.gradient, "w")

    def decode(self) -> None:
        self.method.decompress(*self.sent)

    def add(self) -> None:
        self.out += self.method.decompress(*self.sent)

    def times(self) -> Times:
        calls = (self.encode, self.reset), (self.decode, int), (self.add, int)
        return {name: min(seconds(*call, 1) for _ in range(TRIES)) for name, call in zip(CALLS, calls, strict=True)}


def together(cases: list[Case], cores: list[int]) -> Times:
    """Time one thread for each case; the slowest one counts."""
    results: list[Times] = [{}] * len(cases)
    start = threading.Barrier(len(cases))

    def work(i: int) -> None:
        os.sched_setaffinity(0, {cores[i]})
        start.wait()
        results[i] = cases[i].times()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: max(times[name] for times in results) for name in results[0]}


def measure(name: str, gradient: np.ndarray, threads: int, options: argparse.Namespace) -> dict[str, object]:
    """Make all repeats of one compressor, size and number of threads."""
    cores = sorted(os.sched_getaffinity(0))
    columns = max(1, round(gradient.size**0.5))
    cases = [Case(CASES[name], part, columns) for part in np.array_split(gradient, threads)]
    baseline = None
    if gradient.size == SQUARE and threads == 1 and name in BASELINES:
        baseline = Baseline(BASELINES[name](), gradient)
    runs, torch_runs = [], []
    for _ in range(options.repeats):
        runs.append(together(cases, cores))
        if baseline:
            torch_runs.append(baseline.times())
    row: dict[str, object] = {
        "case": name,
        "compressor": repr(CASES[name]),
        "numel": gradient.size,
        "threads": threads,
        "bytes_per_element": sum(case.nbytes for case in cases) / gradient.size,
        "memcpy_gb_per_s": [4e-9 * gradient.size / run["memcpy"] for run in runs],
    }
    for call in CALLS:
        least = sum(case.least_bytes[call] for case in cases) / (8 * gradient.size)
        ratios = [run[call] / run["memcpy"] for run in runs]
        row[call] = {
            "gb_per_s": [4e-9 * gradient.size / run[call] for run in runs],
            "of_memcpy": ratios,
            "of_the_limit": [least / ratio for ratio in ratios],
            "torch_of_ours": [slow[call] / run[call] for run, slow in zip(runs, torch_runs, strict=False)],
        }
    return row


def spread(values: list[float]) -> str:
    """Write median and extremes, with three digits each."""
    return "{} ({}-{})".format(*(f"{v:#.3g}".rstrip(".") for v in (median(values), min(values), max(values))))


def show(rows: list[dict]) -> None:
    """Print a table for each size and number of threads; the rows are those of one."""
    first = rows[0]
    print(f"\n{first['numel']} float32, threads: {first['threads']}; memcpy ", end="")
    print(f"{spread([v for row in rows for v in row['memcpy_gb_per_s']])} GB/s of gradient")
    print(f"{'':18}{'B/element':>9}" + "".join(f"{call.replace('_', ' '):>60}" for call in SHOWN))
    print(f"{'':27}" + f"{'us':>13}{'GB/s':>8}{'x memcpy':>28}{'of limit':>11}" * len(SHOWN))
    for row in rows:
        line = f"{row['case']:18}{row['bytes_per_element']:9.4f}"
        for call in SHOWN:
            speed = median(row[call]["gb_per_s"])
            line += f"{4e-3 * row['numel'] / speed:13.1f}{speed:8.2f}{spread(row[call]['of_memcpy']):>28}"
            line += f"{100 * median(row[call]['of_the_limit']):9.0f} %"
        print(line)
    for row in rows:
        if row["encode"]["torch_of_ours"]:
            cells = ", ".join(f"{call.replace('_', ' ')} {spread(row[call]['torch_of_ours'])}" for call in SHOWN)
            print(f"torch expressions, times as long: {row['case']}: {cells}", flush=True)


def machine() -> dict[str, object]:
    """Describe where and with what this ran."""
    names = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "name" in line
    ]
    return {
        "processor": next(iter(names), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "hvd_compress": hvd_compress.__version__,
        **{package: version(package) for package in ("numpy", "numba", "llvmlite", "torch")},
    }


DRAWN = ("one-bit", "threshold", "adaptive(64)", "top-k 1 %", "qsgd 4 bits")  # the table has the others


def plot(rows: list[dict], path: Path) -> None:
    """Draw GB/s over the number of elements, a panel for each call and number of threads."""
    from drawing import label_ends, line, thin

    threads = sorted({row["threads"] for row in rows})
    figure, panels = plt.subplots(
        len(threads), 2, figsize=(12, 3.9 * len(threads)), squeeze=False, sharex=True, sharey=True
    )
    figure.subplots_adjust(left=0.06, right=0.9, top=0.95, bottom=0.07, wspace=0.3, hspace=0.2)
    for row_of_panels, count in zip(panels, threads, strict=True):
        for panel, call in zip(row_of_panels, SHOWN, strict=True):
            mine = [row for row in rows if row["threads"] == count]
            for name in DRAWN:
                cases = [row for row in mine if row["case"] == name]
                spreads = [Spread.of(row[call]["gb_per_s"]) for row in cases]
                line(panel, [row["numel"] for row in cases], spreads, name.replace("qsgd", "QSGD"))
            sizes = sorted({row["numel"] for row in mine})
            copies = [[v for row in mine if row["numel"] == n for v in row["memcpy_gb_per_s"]] for n in sizes]
            line(panel, sizes, [Spread.of(c) for c in copies], "memcpy", label="memcpy", color="black", linestyle="--")
            panel.set(xscale="log", yscale="log", yticks=[0.1, 1, 10, 100], yticklabels=[0.1, 1, 10, 100])
            panel.set_title(f"{call.replace('_', ' ')}, {count} thread{'s' * (count > 1)}", loc="left", fontsize=10)
            panel.yaxis.set_tick_params(labelleft=True)
            thin(panel)
    for panel in panels[-1]:
        panel.set_xlabel("elements")
    for row_of_panels in panels:
        row_of_panels[0].set_ylabel("GB/s of float32 gradient")
        for panel in row_of_panels:
            label_ends(panel)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", default=SIZES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--short", action="store_true", help="two sizes, one thread, six cases, three repeats")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.short:
        options.numel, options.threads, options.repeats, options.cases = SHORT_SIZES, [1], 3, list(BASELINES)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    rows: list[dict] = []
    for numel in options.numel:
        gradient = np.random.default_rng(0).standard_normal(numel, dtype=np.float32)
        for threads in options.threads:
            if threads > cores:
                print(f"{threads} threads left out: {cores} cores are there")
                continue
            kept = np.random.default_rng(1).random(numel, dtype=np.float32) < SPARSE_SHARE
            given = {name: gradient * kept if name in SPARSE else gradient for name in options.cases}
            table = [measure(name, given[name], threads, options) for name in options.cases]
            show(table)
            rows += table
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "repeats": options.repeats, "rows": rows}
    (options.out / "kernels.json").write_text(json.dumps(result, indent=1))
    plot(rows, options.out / "kernels.png")
    print(f"\nwritten: {options.out / 'kernels.json'}, {options.out / 'kernels.png'}")


if __name__ == "__main__":
    main()
