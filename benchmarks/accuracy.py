"""Train three small networks with every compressor, by SGD with momentum and by Adam: accuracy, and bytes.

    python benchmarks/accuracy.py --tune                      once for each kind of data: learning rates, tau
    python benchmarks/accuracy.py --jobs 8                    the table: what is missing of it
    python benchmarks/accuracy.py --cells Adam ResNet seed=0  what is missing of these trainings
    python benchmarks/accuracy.py --page-only                 the page, of the record that there is

Two ranks of Horovod, over Gloo, for each training. --jobs many trainings run at once, on two cores each. A result is
written when it is there, and made once: what ends before its time goes on from there. The record holds the results of
one kind of data: MNIST where it can be had, else the digits of scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accuracy_page
from accuracy_cells import FORMS, RANKS, Cell, all_cells, candidates, cell_of, cut
from cluster.system import terminated_as_exit
from measure import RESULTS, machine, rounded

ROOT = Path(__file__).resolve().parents[1]
STALL_SECONDS = "120"  # ranks that wait for each other for so long end the run
DONE = "unit done:"  # what a rank writes before a result
RECORD = RESULTS / "accuracy.json"
PAGE = ROOT / "docs" / "results" / "accuracy.md"
TUNING, TABLE = "tuning", "rows"


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: Mapping[str, Any]) -> None:
    import torch
    from accuracy_training import Trainer

    import hvd_compress.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    train = Trainer(FORMS[task["form"]], task["device"])
    for cell in task["cells"]:
        row = train(Cell(*cell))
        if hvd.rank() == 0:
            print(DONE, json.dumps(rounded(row)), flush=True)


# -- outside --------------------------------------------------------------------------------------------------------


class Record:
    """Keeps the results in a file that is complete at any time.

    Args:
        path: of the file.
        form: one of `FORMS`; the results of others have files of their own.
        device: on which networks are.
        part: TUNING or TABLE.

    Raises:
        SystemExit: there is a file of another form.
    """

    def __init__(self, path: Path, form: str, device: str, part: str) -> None:
        self._path, self._part = path, part
        self._lock = threading.Lock()
        run = {"command": ["python", "benchmarks/accuracy.py", *_said()], "device": device, "machine": machine()}
        self.content = (
            json.loads(path.read_text()) if path.is_file() else {"form": form, "runs": [], TUNING: [], TABLE: []}
        )
        if self.content["form"] != form:
            raise SystemExit(f"{path} is of the {self.content['form']} form: give a --record of its own")
        self.content["runs"].append(run)

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that have no result."""
        made = {cell_of(row) for row in self.content[self._part]}
        return [cell for cell in cells if cell not in made]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a result; raises ValueError where others of its network are of other data."""
        with self._lock:
            rows = self.content[self._part]
            # the text follows from the version of Python, and rates do not follow from that
            told_by = rows if row["network"] == "transformer" else [*rows, *self.content[TUNING]]
            other = next((r for r in told_by if r["network"] == row["network"] and r["data"] != row["data"]), None)
            if other is not None:
                raise ValueError(
                    f"{self._path} is of {other['data']}, and this is {row['data']}: give a --record of its own"
                )
            rows.append(row)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self.content, separators=(",", ":")) + "\n")
            partial.replace(self._path)


def _said() -> list[str]:
    """Return the arguments of this process without the paths, which say nothing to others."""
    given, said = sys.argv[1:], []
    while given:
        word = given.pop(0)
        if word in ("--record", "--page"):
            given = given[1:]
        elif not word.startswith(("--record=", "--page=")):
            said.append(word)
    return said


class Starts:
    """Makes trainings, some at once, and ends all ranks when this process is interrupted.

    Args:
        task: what ranks are told, but for their cells.
        keep: is given each result, on any thread.
    """

    def __init__(self, task: Mapping[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
        self._task, self._keep = task, keep
        self._running: list[subprocess.Popen[str]] = []
        self._is_over = False

    def run(self, cells: Sequence[Cell], jobs: int) -> list[str]:
        """Make trainings, `jobs` at once; returns what has failed, in words.

        Cells are dealt out in turns, so that each start has as many of each network, and others to compile.
        """
        shares = [list(cells[i::jobs]) for i in range(min(jobs, len(cells)))]
        with terminated_as_exit(), ThreadPoolExecutor(max(1, len(shares))) as pool:
            try:
                return [problem for found in pool.map(self._share, shares) for problem in found]
            except BaseException:
                self._is_over = True
                for process in self._running:
                    process.terminate()  # horovodrun ends its ranks
                raise

    def _share(self, cells: list[Cell]) -> list[str]:
        """Make some trainings one after the other; after one that fails, new ranks go on with the next."""
        failed = []
        while cells and not self._is_over:
            made, problem = self._started(cells)
            cells = cells[made:]
            if problem and cells:
                failed.append(f"{', '.join(map(str, cells[0]))}: {problem}")
                cells = cells[1:]
        return failed

    def _started(self, cells: Sequence[Cell]) -> tuple[int, str | None]:
        """Start ranks; returns how many cells they have made, and what they wrote last if they failed."""
        made, lines = 0, deque[str](maxlen=40)
        with tempfile.TemporaryDirectory() as folder:
            given = Path(folder) / "task.json"
            given.write_text(json.dumps({**self._task, "cells": cells}))
            launch = ["-m", "horovod.runner.launch", "-np", str(RANKS), "--gloo", "--network-interface", "lo"]
            command = [sys.executable, *launch, sys.executable, str(Path(__file__).resolve()), "--task", str(given)]
            with subprocess.Popen(
                command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process:
                self._running.append(process)
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        before, mark, row = line.partition(DONE)
                        if mark:
                            self._keep(json.loads(row))
                            made += 1
                        else:
                            lines.append(before)
                except BaseException:
                    process.terminate()
                    raise
        return made, "".join(lines) if process.returncode else None


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    return {
        **os.environ,
        **one_thread,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": STALL_SECONDS,
    }


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--tune", action="store_true", help="find learning rates and tau, on a seed that is not in the table"
    )
    what.add_argument("--page-only", action="store_true", help="make the page of the record that there is")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, each on two cores")
    parser.add_argument("--cells", nargs="+", default=[], metavar="WORD", help="compressor, optimizer, network, seed=N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where networks are")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to try it out; no results")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.tiny and options.record == RECORD:
        parser.error("--tiny shows that all works, and no results: give --record and --page of its own")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Make what is missing, then the page; returns 1 if a training has failed."""
    options = arguments(given)
    if options.task:
        ranks(json.loads(options.task.read_text()))
        return 0
    failed = [] if options.page_only else _made(options)
    content = json.loads(options.record.read_text()) if options.record.is_file() else None
    options.page.write_text(accuracy_page.page(content))
    print(f"written: {options.page}")
    for problem in failed:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if failed else 0


def _made(options: argparse.Namespace) -> list[str]:
    form = "tiny" if options.tiny else "full"
    record = Record(options.record, form, options.device, TUNING if options.tune else TABLE)

    def keep(row: dict[str, Any]) -> None:
        record.add(row)
        print(f"{len(record.content[TUNING if options.tune else TABLE])}: {row}", flush=True)

    starts = Starts({"form": form, "device": options.device}, keep)
    # what is tuned first tells what is tuned next
    plans = [candidates, candidates] if options.tune else [all_cells]
    failed: list[str] = []
    for plan in plans:
        missing = record.missing(cut(plan(record.content[TUNING]), options.cells))
        failed += starts.run(missing, options.jobs)
    return failed


if __name__ == "__main__":
    sys.exit(main())
