"""The page of results, made of the files that the benchmarks have written; no figure is typed by hand.

python benchmarks/page.py
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from itertools import chain
from types import ModuleType
from typing import Any

import matplotlib

matplotlib.use("Agg")

import allreduce
import memory
import minibatch
import scaling
from measure import RESULTS, Aim, Verdict, read, table

BENCHMARKS: tuple[ModuleType, ...] = (allreduce, minibatch, scaling, memory)
MACHINE = ("processor", "cores", "memory_gib", "system", "python", "mpi", "horovod", "torch", "numpy", "numba")


def page(results: dict[ModuleType, dict[str, Any]], kernels: dict[str, Any] | None) -> str:
    """The Markdown of all results; saves their plots."""
    aims: list[Aim] = list(_of_all(results, "aims"))
    verdicts: list[Verdict] = list(_of_all(results, "verdicts"))
    parts = [
        "# What compression is worth, measured",
        "",
        "Made by `make bench` from the JSON files beside it. Real Horovod, MPI and TCP run between virtual hosts: "
        "network namespaces on "
        "one machine, on links of the rate that is told (`benchmarks/cluster`). All hosts share the processors below, "
        "so with more ranks than cores everybody waits for a core and times are far from those of a real cluster, "
        "most of all on fast "
        "links. Each figure is a ratio of two candidates that took turns in the same processes: the median of the "
        "ratios of the rounds, and in brackets the least and the largest. Times of fewer than ten rounds tell a rough "
        "figure, no more.",
        "",
        *_conclusions(aims, verdicts),
    ]
    for module, result in results.items():
        parts += ["", module.section(result)]
    if kernels:
        parts += ["", _kernels(kernels)]
    parts += ["", *_conditions(results)]
    return "\n".join(parts) + "\n"


def _of_all(results: dict[ModuleType, dict[str, Any]], kind: str) -> Iterable[Any]:
    functions: list[tuple[Callable[[Any], list[Any]], Any]] = [
        (getattr(module, kind), result) for module, result in results.items() if hasattr(module, kind)
    ]
    return chain.from_iterable(function(result) for function, result in functions)


def _conclusions(aims: list[Aim], verdicts: list[Verdict]) -> list[str]:
    counts = {word: sum(str(v) == word for v in verdicts) for word in ("pays", "no clear difference", "does not pay")}
    text = ", ".join(f"{word}: {count}" for word, count in counts.items())
    lines = [[v.where, v.best, v.rival, v.faster, v] for v in sorted(verdicts, key=lambda v: -v.faster.median)]
    head = ["case", "fastest compressor", "against", "times as fast", ""]
    parts = [
        "## What to conclude",
        "",
        f"The fastest compressor of each case against the faster of Horovod's fp32 and fp16. {text}, of "
        f"{len(verdicts)} cases. "
        "It pays if it was faster in every round, and does not if it was slower in every round: use Horovod alone "
        "there.",
        "",
        table(head, lines),
    ]
    if aims:
        rows = [[a.what, f"{a.relation} {a.bound:g}", a.measured, "yes" if a.is_reached else "**no**"] for a in aims]
        parts += ["", "### Aims of this project", "", table(["", "aim", "measured", "reached"], rows)]
    return parts


def _kernels(result: dict[str, Any]) -> str:
    from measure import Spread

    sizes = sorted({row["numel"] for row in result["rows"]})
    rows = [row for row in result["rows"] if row["numel"] == sizes[-1] and row["threads"] == 1]
    calls = ("encode", "decode_and_add")
    lines = []
    for row in rows:
        cells: list[object] = [row["case"], f"{row['bytes_per_element']:.3f}"]
        for call in calls:
            torch = row[call]["torch_of_ours"]
            cells += [Spread.of(row[call]["of_memcpy"]), Spread.of(torch) if torch else ""]
        lines.append(cells)
    head = [
        "",
        "bytes per element",
        "encode, times memcpy",
        "torch's times ours",
        "decode and add, times memcpy",
        "torch's",
    ]
    return "\n".join(
        [
            "## Kernels",
            "",
            f"{sizes[-1]:,} float32 on one thread, encoding with error feedback, against a memcpy of the gradient in "
            f"the same "
            "repeat, and the same arithmetic in torch expressions against ours.",
            "",
            "![kernels](kernels.png)",
            "",
            table(head, lines),
        ]
    )


def _conditions(results: dict[ModuleType, dict[str, Any]]) -> list[str]:
    machines = [result["machine"] for result in results.values()]
    facts = [[key.replace("_", " "), " / ".join(dict.fromkeys(str(m[key]) for m in machines))] for key in MACHINE]
    runs = [
        [f"`{shlex.join(result['command'])}`", result["machine"]["date"], result["machine"]["load_before"]]
        for result in results.values()
    ]
    head = ["command", "date", "load of the machine before"]
    return ["## Where this was measured", "", table(["", ""], facts), "", table(head, runs)]


def main() -> None:
    results = {module: result for module in BENCHMARKS if (result := read(module.__name__)) is not None}
    if not results:
        raise SystemExit(f"no results in {RESULTS}; `make bench` makes some")
    (RESULTS / "README.md").write_text(page(results, read("kernels")))
    print(f"written: {RESULTS / 'README.md'}")


if __name__ == "__main__":
    main()
