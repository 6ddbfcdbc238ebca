"""Write the page of results from the files that the benchmarks have written; no figure is typed by hand.

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

import adam
import allreduce
import auto
import daso
import eventgrad
import links
import memory
import minibatch
import overlap
import rivals
import scaling
import speed
from measure import FEW, RESULTS, Aim, Spread, Verdict, read, table

BENCHMARKS: tuple[ModuleType, ...] = (
    allreduce,
    minibatch,
    scaling,
    auto,
    overlap,
    rivals,
    eventgrad,
    daso,
    adam,
    memory,
    links,
)
MOST_OF_MEMCPY = {"one-bit": 2.2, "threshold": 2.5, "adaptive(64)": 2.5, "qsgd 4 bits": 4.0, "top-k 1 %": 4.0}
MOST_OF_MEMCPY_ADDING, LEAST_OF_TORCH = 1.2, 10.0
MACHINE = ("processor", "cores", "memory_gib", "system", "python", "mpi", "horovod", "torch", "numpy", "numba")


def page(results: dict[ModuleType, dict[str, Any]], kernels: dict[str, Any] | None, gpu: dict[str, Any] | None) -> str:
    """Return the Markdown of all results; saves their plots."""
    aims: list[Aim] = [*_of_all(results, "aims"), *(_kernel_aims(kernels) if kernels else ())]
    verdicts = sorted(_of_all(results, "verdicts"), key=lambda v: -v.faster.median)
    parts = ["# What compression is worth, measured", "", *_answer(verdicts)]
    if picture := speed.section(results[auto], results.get(rivals)) if auto in results else "":
        parts += ["", picture]
    parts += ["", _accuracy(), "", *_how(), "", *_cases(verdicts)]
    for module, result in results.items():
        parts += ["", module.section(result)]
    if kernels:
        parts += ["", _kernels(kernels)]
    if gpu:
        parts += ["", _gpu(gpu)]
    parts += ["", *_conditions(results), "", *_appendix(aims)]
    return "\n".join(parts) + "\n"


def _of_all(results: dict[ModuleType, dict[str, Any]], kind: str) -> Iterable[Any]:
    functions: list[tuple[Callable[[Any], list[Any]], Any]] = [
        (getattr(module, kind), result) for module, result in results.items() if hasattr(module, kind)
    ]
    return chain.from_iterable(function(result) for function, result in functions)


def _answer(verdicts: list[Verdict]) -> list[str]:
    kinds = {kind: [v for v in verdicts if str(v) == kind] for kind in ("pays", "no clear difference", "does not pay")}
    pays, unclear, loses = (len(mine) for mine in kinds.values())
    lines = [
        f"**Compression pays in {pays} of {len(verdicts)} cases.** It does not in {loses}, and makes no clear "
        f"difference in {unclear}. A case is a network on a link, or one matrix."
    ]
    if kinds["pays"]:
        lines.append(f"**It pays on slow links.** Most: {_said(kinds['pays'][0])}.")
    if kinds["does not pay"]:
        lines.append(
            "**It does not pay for small tensors and on fast links.** Use Horovod alone there. Least: "
            f"{_said(kinds['does not pay'][-1])}."
        )
    lines += [
        "**With plain SGD accuracy stays where error feedback is on**, on the small networks that were tried: "
        "[the papers' experiments](../../docs/reproductions.md). With momentum or Adam it may not: "
        "[Accuracy](../../docs/results/accuracy.md), [Adam](#adam).",
        "**Not tried**: large models, long trainings, recurrent networks, real clusters. "
        "[Limits](../../docs/results/limits.md) has the list.",
    ]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _said(verdict: Verdict) -> str:
    return f"{verdict.where}: {verdict.best} is {verdict.faster} times as fast as {verdict.rival}"


def _accuracy() -> str:
    pictures = sorted((RESULTS / "reproduce").glob("methods-*.png"), reverse=True)
    return (
        "Accuracy against bytes, both with the same axes: 4 ranks, plain SGD, 5 epochs of MNIST and 12 of a part of "
        "CIFAR-10. Dots are the medians of 3 seeds, bars their extremes.\n\n"
        + "\n\n".join(f"![accuracy](reproduce/{picture.name})" for picture in pictures)
    )


def _how() -> list[str]:
    return [
        "## How it was measured",
        "",
        "Real Horovod, MPI and TCP run between virtual hosts: network namespaces on one machine, on links of the rate "
        "that is told (`benchmarks/cluster`). Where more ranks run than the machine has processors, all wait for each "
        "other's work too. So cases with many hosts understate what a cluster gains from few bytes, and overstate what "
        "encoding costs.",
        "",
        "Each figure is a ratio of candidates that took turns in the same processes: the median of the rounds, in "
        f"brackets the quartiles, or the extremes of fewer than {FEW} rounds. `make bench` makes this page from the "
        "JSON files beside it.",
    ]


def _cases(verdicts: list[Verdict]) -> list[str]:
    lines = [[v.where, v.best, v.rival, v.faster, v] for v in verdicts]
    return [
        "## Each case",
        "",
        "Each case's fastest compressor against the faster of Horovod's fp32 and fp16. It pays if all of the spread "
        "is above 1, and does not if all of it is below.",
        "",
        table(["case", "fastest compressor", "against", "times as fast", ""], lines),
    ]


def _appendix(aims: list[Aim]) -> list[str]:
    if not aims:
        return []
    rows = [[a.what, f"{a.relation} {a.bound:g}", a.measured, "yes" if a.is_reached else "**no**"] for a in aims]
    missed = sum(not aim.is_reached for aim in aims)
    return [
        "## Appendix: aims of this project",
        "",
        f"What was to be reached before it was measured: {len(aims) - missed} of {len(aims)} aims are reached.",
        "",
        table(["", "aim", "measured", "reached"], rows),
    ]


def _of_one_thread(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the size at which the arithmetic in torch ran too, or of the largest size."""
    rows = [row for row in result["rows"] if row["threads"] == 1]
    compared = [row["numel"] for row in rows if row["encode"]["torch_of_ours"]]
    size = max(compared or [row["numel"] for row in rows])
    return [row for row in rows if row["numel"] == size]


def _kernel_aims(result: dict[str, Any]) -> Iterable[Aim]:
    for row in _of_one_thread(result):
        if row["case"] not in MOST_OF_MEMCPY:
            continue
        what = f"kernels, {row['numel']:,} elements: {row['case']}"
        most = {"encode": MOST_OF_MEMCPY[row["case"]], "decode_and_add": MOST_OF_MEMCPY_ADDING}
        for call, bound in most.items():
            said = f"{what}, {call.replace('_', ' ')}"
            yield Aim(f"{said}, times memcpy", "≤", bound, Spread.of(row[call]["of_memcpy"]))
            if row[call]["torch_of_ours"]:
                slower = Spread.of(row[call]["torch_of_ours"])
                yield Aim(f"{said}, times as fast as torch expressions", "≥", LEAST_OF_TORCH, slower)


def _kernels(result: dict[str, Any]) -> str:
    rows = _of_one_thread(result)
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
            f"{rows[0]['numel']:,} float32 on one thread, encoding with error feedback, against a memcpy of the "
            "gradient in the same repeat, and the same arithmetic in torch expressions against ours. Most of what "
            "torch takes is the system's work on fresh memory for intermediate arrays, as in a training; without "
            "that (the head of `benchmarks/kernels.py` tells how) it takes several times as long as ours to encode, "
            "and a few times as long to decode, where memory alone is the limit.",
            "",
            "![kernels](kernels.png)",
            "",
            table(head, lines),
        ]
    )


def _gpu(result: dict[str, Any]) -> str:
    parts = [
        "## Kernels on a GPU",
        "",
        f"One {result['card']}, torch {result['torch']}; encoding with error feedback. Medians of one run of "
        "`benchmarks/gpu.py`, without what the host does meanwhile, which is the last column. GB/s are those of the "
        "gradient that is encoded.",
    ]
    for numel in dict.fromkeys(run["numel"] for run in result["runs"]):
        parts += ["", *_gpu_of([run for run in result["runs"] if run["numel"] == numel])]
    return "\n".join(parts)


def _gpu_of(runs: list[dict[str, Any]]) -> list[str]:
    """Return the text and the table of one number of elements."""
    calls = ("encode", "decode", "decode and add")
    lines = []
    for run in runs:
        cells: list[object] = [f"`{run['compressor']}`", f"{run['tensors']:,}"]
        cells += [f"{run[call] / run['copy']:.2f}" for call in calls]
        # 4 bytes of each element that is encoded
        cells.append(f"{4 * run['numel'] / run['encode'] / 1000:.0f}")
        torch = run["torch operations"]
        cells += [f"{torch / run['encode']:.1f}" if torch else "", f"{run['encode host']:.0f}"]
        lines.append(cells)
    head = [
        "",
        "tensors",
        *(f"{call}, times a copy" for call in calls),
        "encode, GB/s",
        "torch operations, times as long",
        "host, µs",
    ]
    first = runs[0]
    return [
        f"{first['numel']:,} float32 in rows of 4096 elements, in one tensor or in many. A copy of the gradient on the "
        f"device takes {first['copy']:.1f} µs, {8 * first['numel'] / first['copy'] / 1000:.0f} GB/s read and written.",
        "",
        table(head, lines),
    ]


def _conditions(results: dict[ModuleType, dict[str, Any]]) -> list[str]:
    machines = [result["machine"] for result in results.values()]
    facts = [[key.replace("_", " "), " / ".join(dict.fromkeys(str(m[key]) for m in machines))] for key in MACHINE]
    runs = [
        [f"`{shlex.join(result['command'])}`", m["date"], m["load_before"], _open_mpi(m)]
        for result, m in zip(results.values(), machines, strict=True)
    ]
    head = ["command", "date", "load of the machine before", "Open MPI over TCP"]
    return ["## Where this was measured", "", table(["", ""], facts), "", table(head, runs)]


def _open_mpi(machine: dict[str, Any]) -> str:
    # records without the setting are from before it was set to something else than the default
    return "with put, its default" if "put" in machine.get("open_mpi_tcp", "put").split(",") else "without put"


def main() -> None:
    results = {module: result for module in BENCHMARKS if (result := read(module.__name__)) is not None}
    if not results:
        raise SystemExit(f"no results in {RESULTS}; `make bench` makes some")
    (RESULTS / "README.md").write_text(page(results, read("kernels"), read("gpu")))
    print(f"written: {RESULTS / 'README.md'}")


if __name__ == "__main__":
    main()
