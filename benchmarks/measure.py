"""Share what the benchmarks need: spreads, ratios within rounds, the record of a machine, and result files."""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import psutil
from cluster.launch import TCP_FLAGS, environment_of

__all__ = [
    "ALONE",
    "AUTO",
    "DENSE",
    "FP16",
    "FP32",
    "OWN_DENSE",
    "RESULTS",
    "Aim",
    "Spread",
    "Verdict",
    "machine",
    "median_interval",
    "merged",
    "picture",
    "ratios",
    "read",
    "rounded",
    "table",
    "verdict",
    "write",
]

ALONE, FP32, FP16, AUTO = "alone", "Horovod fp32", "Horovod fp16", "Auto"
DENSE = (FP32, FP16)
OWN_DENSE = tuple(f"{name}, by hvd_compress" for name in DENSE)

RESULTS = Path(__file__).parent / "results"
LOAD_BEFORE = os.getloadavg()[0]
PACKAGES = ("hvd_compress", "horovod", "torch", "numpy", "numba", "mpi4py")
FEW = 8  # quartiles of fewer repeats would hide what varies
DIGITS = 6  # significant digits in result files; more would be noise and size


class Spread(NamedTuple):
    """Holds the median of repeats and their quartiles, or the extremes where there are fewer than eight.

    Example:
        >>> str(Spread.of([3.0, 1.0, 2.0]))
        '2.0 (1.0–3.0)'
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Make the spread of at least one value."""
        values = list(values)
        if len(values) < FEW:
            return cls(median(values), min(values), max(values))
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)}–{_short(self.high)})"


def _short(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 1 - math.floor(math.log10(abs(value))))}f}"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide round by round; both were measured one after the other, so a drift of the machine cancels.

    Example:
        >>> ratios([4.0, 9.0], [2.0, 3.0])
        [2.0, 3.0]
    """
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_interval(values: Sequence[float], chance: float = 0.05) -> tuple[float, float]:
    """Find two of the values between which the true median lies, but for `chance`, by the binomial distribution.

    Fewer than six values have their extremes, which miss it more often.

    Example:
        >>> median_interval([5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0])
        (2.0, 8.0)
    """
    ordered = sorted(values)
    n = len(ordered)
    outside = 0
    beyond = 0.0
    # the median lies below the k-th value with the probability of fewer than k heads in n throws
    while outside < (n - 1) // 2 and (beyond := beyond + math.comb(n, outside) / 2**n) <= chance / 2:
        outside += 1
    place = max(outside - 1, 0)
    return ordered[place], ordered[n - 1 - place]


class Aim(NamedTuple):
    """Describes a figure that the project wants to reach.

    Args:
        what: what the figure is.
        relation: what the median should be to the bound: "≥", "≤" or ">".
        bound: the bound to reach.
        measured: the figure as measured.
    """

    what: str
    relation: str
    bound: float
    measured: Spread

    @property
    def is_reached(self) -> bool:
        """Tell whether the median is on the right side."""
        compare = {"≥": operator.ge, "≤": operator.le, ">": operator.gt}[self.relation]
        return compare(self.measured.median, self.bound)


class Verdict(NamedTuple):
    """Compares the fastest compressor of a case with the faster of Horovod's own two ways.

    Args:
        where: the case.
        best: the compressor.
        rival: "Horovod fp32" or "Horovod fp16".
        faster: how many times faster the compressor is, in the rounds.
    """

    where: str
    best: str
    rival: str
    faster: Spread

    def __str__(self) -> str:
        if self.faster.low > 1:
            return "pays"
        return "does not pay" if self.faster.high < 1 else "no clear difference"


def verdict(where: str, rows: Mapping[str, Any]) -> Verdict:
    """Make the verdict on what was measured in one case: {candidate: {"seconds": of each round}}."""
    ours = [name for name in rows if name not in (*DENSE, ALONE) and not name.startswith("torch")]
    best, rival = (min(names, key=lambda name: median(rows[name]["seconds"])) for names in (ours, DENSE))
    return Verdict(where, best, rival, Spread.of(ratios(rows[rival]["seconds"], rows[best]["seconds"])))


def machine() -> dict[str, Any]:
    """Describe where, when and with what this runs."""
    processor = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor[1] if processor else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": round(LOAD_BEFORE, 2),
        "commit": _commit(),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
        "mpi": _mpi(),
        "open_mpi_tcp": environment_of(os.environ, None)[TCP_FLAGS],
        **{package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of the program, and whether its code was changed since; "unknown" outside of a repository."""
    root = RESULTS.parents[1]
    code = ["hvd_compress", "ci", "benchmarks", ":!benchmarks/results"]
    head = _said("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _said("git", "-C", str(root), "status", "--porcelain", "--", *code)
    return f"{head}{', changed' * bool(changed)}" if head else "unknown"


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _mpi() -> str:
    said = _said("mpirun", "--version")
    return said.splitlines()[0] if said else "none"


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Write `content` to `name`.json among the results, with this process' command and what `machine` says."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"command": ["python", f"benchmarks/{name}.py", *sys.argv[1:]], "machine": machine(), **content}
    path.write_text(json.dumps(rounded(record), separators=(",", ":")) + "\n")
    return path


def rounded(value: Any) -> Any:
    """Return the same with as many digits as are worth keeping in a file."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return value


def read(name: str) -> dict[str, Any] | None:
    """Return what `write` has written, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def merged(
    before: Iterable[dict[str, Any]], found: Iterable[dict[str, Any]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Return all cases of a record; those found anew replace what they repeat.

    Example:
        >>> merged([{"n": 1, "s": 5.0}, {"n": 2, "s": 6.0}], [{"n": 1, "s": 4.0}], ["n"])
        [{'n': 1, 's': 4.0}, {'n': 2, 's': 6.0}]
    """
    return list({tuple(case[key] for key in keys): case for case in (*before, *found)}.values())


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a Markdown table; the first column is the name of a row.

    Example:
        >>> print(table(["", "x"], [["a", 1]]))
        | | x |
        |---|---|
        | a | 1 |
    """
    text = ["|" + "|".join(f" {cell} " if str(cell) else " " for cell in line) + "|" for line in [head, *rows]]
    text.insert(1, "|" + "---|" * len(head))
    return "\n".join(text)


def picture(figure: Any, name: str) -> str:
    """Save a figure of Matplotlib among the results; returns the Markdown that shows it."""
    figure.savefig(RESULTS / f"{name}.png", dpi=130, bbox_inches="tight")
    return f"![{name}]({name}.png)"
