"""What a rank runs: `python -m tests.parallel.rank TOPIC[+TOPIC ...] FOLDER [ARGUMENTS]`.

Topics that are joined run one after the other in one start, the first one saying how that is made. A worker module has
either `cases`, which are run one after the other and reported one by one, or, alone in its start,
`main(report, *arguments)`. `PROCESS_SETS` of the workers are given to `hvd.init`; one whose `FRAMEWORK` is "mpi" or
"distributed" runs without Horovod.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.parallel.cases import Cases, Thorough

SHOWN = "HVD_COMPRESS_TEST_SHOWN"
"""Which cases run: "witnesses", those that are not `Thorough`; "thorough", the others; else all."""


class Report:
    """Lines of JSON from one rank, written at once so that they outlive it."""

    def __init__(self, folder: Path, rank: int) -> None:
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        self._lines = (folder / f"{rank}.jsonl").open("w", buffering=1)
        self._stack = (folder / f"{rank}.stack").open("w")
        # mpirun of Open MPI 4.1 loses what a rank has written last if another one ends before it has read that
        with (folder / f"{rank}.err").open("wb") as errors:
            os.dup2(errors.fileno(), sys.stderr.fileno())
        faulthandler.register(signal.SIGUSR1, self._stack, all_threads=True)

    def __call__(self, **line: Any) -> None:
        self._lines.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close its files."""
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its default would end a rank that has just finished
        self._lines.close()
        self._stack.close()


def run_cases(topic: str, cases: Cases, report: Report, wait_for_all: Callable[[], Any]) -> None:
    """Run all cases on this rank; one that fails does not keep the others from running."""
    left_out = {"witnesses": True, "thorough": False}.get(os.environ.get(SHOWN, "all"))
    for name, case in cases.items():
        if isinstance(name, Thorough) is left_out:
            continue
        report(topic=topic, running=name)
        begin = time.perf_counter()
        error = None
        try:
            case()
        except Exception:
            error = traceback.format_exc()
        report(topic=topic, case=name, error=error, seconds=round(time.perf_counter() - begin, 3))
        wait_for_all()


def be_strict() -> None:
    """Make warnings errors, but for those that others' packages give about themselves."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r".*torch\.jit.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r"builtin type .* has no __module__", category=DeprecationWarning)
    # AutoGraph's trees, from Python 3.13 on; as an error it would end the conversion without a word
    warnings.filterwarnings(
        "ignore", message=r".*unexpected keyword argument '___pyct_anno'", category=DeprecationWarning
    )
    # of a kind that Python hides: what horovod.torch would do in our place
    message = r"optimizer\.step\(\) called without"
    warnings.filterwarnings("ignore", message=message, category=PendingDeprecationWarning)
    # Keras 3 hands torch tensors to NumPy 2, whose __array__ has no copy argument
    warnings.filterwarnings("ignore", message=r"__array__ implementation doesn't accept", category=DeprecationWarning)
    # Keras 2 draws its layers' seeds up to 1e9, a float
    warnings.filterwarnings("ignore", message=r"non-integer arguments to randrange", category=DeprecationWarning)


def main() -> None:
    """Import the worker, start Horovod, run."""
    joined, folder, *arguments = sys.argv[1:]
    be_strict()
    workers = {topic: importlib.import_module(f"tests.parallel.workers.{topic}") for topic in joined.split("+")}
    first = next(iter(workers.values()))
    framework = getattr(first, "FRAMEWORK", "torch")
    own = {"mpi": _Mpi, "distributed": _Distributed}.get(framework)
    hvd: Any = importlib.import_module(f"horovod.{framework}") if own is None else own()
    hvd.init(process_sets=_process_sets(workers.values()))
    with contextlib.closing(Report(Path(folder), hvd.rank())) as report:
        report(size=hvd.size())
        if hasattr(first, "cases"):
            wait_for_all = _barrier(hvd)
            for topic, worker in workers.items():
                # a million objects of frameworks and of the topics before: a collection that looks at them takes half
                # a second, and cases collect
                gc.collect()
                gc.freeze()
                run_cases(topic, worker.cases, report, wait_for_all)
        else:
            first.main(report, *arguments)
        report(end=True)


def _process_sets(workers: Iterable[ModuleType]) -> Any:
    each = [getattr(worker, "PROCESS_SETS", None) or [] for worker in workers]
    if "dynamic" in each:
        return "dynamic"
    return [process_set for one in each for process_set in one] or None


class _Mpi:
    """What is needed of Horovod here, by mpi4py."""

    def init(self, process_sets: None) -> None:
        """Start MPI."""
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size, self.barrier = self._world.Get_rank, self._world.Get_size, self._world.Barrier


class _Distributed:
    """What is needed of Horovod here, by torch.distributed."""

    def init(self, process_sets: None) -> None:
        """Start Gloo."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self.rank, self.size = dist.get_rank, dist.get_world_size
        # by a collective that has no device
        self.barrier = lambda: dist.all_reduce(torch.zeros(1))


def _barrier(hvd: Any) -> Callable[[], Any]:
    if isinstance(hvd, _Mpi | _Distributed):
        return hvd.barrier
    if hvd.__name__ == "horovod.torch":
        import torch

        torch.set_num_threads(1)
        return hvd.barrier
    import numpy as np

    # horovod.tensorflow has no barrier
    return lambda: hvd.allgather(np.zeros(1, np.float32), name="tests.barrier")


if __name__ == "__main__":
    main()
