"""Starts real ranks, ends them when they have been silent for too long, and collects what each of them reports."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.cases import Thorough
from tests.parallel.rank import SHOWN

ROOT = Path(__file__).parents[2]
PROGRAMS = ("tests.parallel.rank", "tests.faults.rank")
BIN = Path(sys.executable).parent
_TORCH = {
    "adagrad": "test_adagrad",
    "buckets": "test_buckets",
    "resuming": "test_resuming",
    "habits": "test_habits",
    "functions": "test_functions",
    "interface": "test_interface",
    "parameter_server": "test_parameter_server",
    "ranks": "test_ranks",
    "training": "test_training",
    "values": "test_values",
}
_OF_TWO = {
    **{topic: _TORCH[topic] for topic in ("resuming", "habits", "functions", "interface")},
    "choosing": "test_choosing",
}
_TENSORFLOW = {
    "ranks_tensorflow": "test_ranks",
    "tensorflow_adagrad": "test_adagrad",
    "tensorflow_values": "test_tensorflow",
    "parameter_server_tensorflow": "test_parameter_server",
}
# What topics share a start if the test files that ask for them are run together. Most of a short start is the import of
# a framework on each rank, and was 40 % of the time of all. The tests that ask for one start are all marked alike: else
# two of `make test`, `test-rest` and `test-exhaustive` would both make it.
TOGETHER: dict[tuple[int, str], tuple[dict[str, str], ...]] = {
    (2, "mpi"): (
        {
            # first: optimizers that others leave behind are asked, too, whether they are ready
            "python_calls": "test_python_calls",
            **_TORCH,
            "choosing": "test_choosing",
            "cli": "test_cli",
            "diloco": "test_diloco",
            "ddp_and_horovod": "test_ddp_and_horovod",
            # last: a case leaves more operations under way on one rank, and unnamed ones of others are numbered
            "momentum": "test_momentum",
        },
        {**_TENSORFLOW, "choosing_tensorflow": "test_choosing", "tensorflow_eventgrad": "test_eventgrad"},
    ),
    (2, "gloo"): (
        {"ranks": "test_ranks", "async_gloo": "test_async_server", "frameworks": "test_frameworks"},
        {topic: file for topic, file in _TORCH.items() if topic != "ranks"},
        {**_TENSORFLOW, "tensorflow_eventgrad": "test_eventgrad"},
    ),
    (2, "horovodrun-mpi"): (
        _OF_TWO,
        {**_TENSORFLOW, "choosing_tensorflow": "test_choosing"},
        {"tensorflow_uneven": "test_tensorflow_uneven"},
    ),
    (2, "torchrun"): ({"ddp": "test_ddp", "ddp_diloco": "test_ddp"},),
    (3, "gloo"): ({"process_sets": "test_process_sets", "replicas": "test_replicas"},),
    (4, "mpi"): (
        {**{topic: file for topic, file in _TORCH.items() if topic not in _OF_TWO}, "momentum": "test_momentum"},
        _OF_TWO,
        {**_TENSORFLOW, "choosing_tensorflow": "test_choosing"},
    ),
}
WITNESSES_STARTS = {(2, "mpi"), (2, "gloo"), (3, "gloo"), (2, "torchrun")}
"""Of what is shown by several starts, these leave cases that are `Thorough` to the others."""
FOLLOWING_START = (2, "horovodrun-mpi")
"""Of topics that share it, this start has the cases that are `Thorough` only: the same ranks have shown the others over
MPI, and a launcher that ends at `mpirun` changes nothing in them."""
selected: set[str] = set()  # the test files of this session; see conftest.py
LIMIT_SECONDS_IN_ALL = 1500.0
_TAIL = 4000
_SECONDS_TO_LOOK = 5.0
_SECONDS_FOR_STACKS = 5.0
_SECONDS_TO_END = 15.0
_SECONDS_TO_FOLLOW = 10.0


def is_left_out(file: str, case: object, ranks: int, launcher: str) -> bool:
    """Tell whether a start with so many ranks and this launcher leaves a case of a test file out."""
    if not isinstance(case, str):
        return False  # a test without cases
    if (ranks, launcher) == FOLLOWING_START:
        return not isinstance(case, Thorough) and any(file in family.values() for family in TOGETHER[FOLLOWING_START])
    return (ranks, launcher) in WITNESSES_STARTS and isinstance(case, Thorough)


def thorough(*values: Any) -> Any:
    """Parameters of a test that `make test` leaves out: a start that shows again what another one has shown."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def exhaustive(*values: Any) -> Any:
    """Parameters of a test that `make test-rest` leaves out, too: a setting whose parts others have shown apart."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


STARTS = [(2, "mpi"), thorough(4, "mpi"), exhaustive(2, "gloo")]
"""Of most topics. While a rank of Horovod waits for another one, Gloo's thread asks for bytes that it has no place for
yet, again and again: the same cases took 60 seconds over MPI and 200 over Gloo, 120 of them in system calls."""
STARTS_OF_TWO = [(2, "mpi"), thorough(2, "horovodrun-mpi"), exhaustive(4, "mpi"), exhaustive(2, "gloo")]
"""Of topics to which more ranks add little, and take long on two cores. The second one leaves no cases out."""


def _mpirun(ranks: int) -> list[str]:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", "--oversubscribe", "--bind-to", "none", *as_root, "-np", str(ranks)]


def _horovodrun_mpi(ranks: int) -> list[str]:
    as_root = " --allow-run-as-root" if os.geteuid() == 0 else ""
    return ["horovodrun", "-np", str(ranks), "--mpi", f"--mpi-args=--oversubscribe{as_root}"]


LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "gloo": lambda ranks: ["horovodrun", "-np", str(ranks), "--gloo"],
    "mpi": _mpirun,
    "horovodrun-mpi": _horovodrun_mpi,
    "torchrun": lambda ranks: ["torchrun", "--standalone", "--no-python", "--nproc-per-node", str(ranks)],
}


@dataclass(frozen=True)
class Outcome:
    """How a start went.

    Args:
        ranks: that were asked for.
        returncode: of the launcher; None if it was ended at the time limit.
        seconds: that it took.
        ended: when, in seconds of `time.time()`.
        output: of the launcher, and what each rank has written to stderr.
        reports: for each rank that reported, its lines in order.
        left: ranks that still ran a while after the launcher had ended; they have been ended since.
        last: the last line of each rank that reported any, of whichever topic.
    """

    ranks: int
    returncode: int | None
    seconds: float
    ended: float
    output: str = field(repr=False)
    reports: dict[int, list[dict[str, Any]]] = field(repr=False)
    left: list[int]
    last: dict[int, dict[str, Any]] = field(repr=False)

    def part(self, topic: str) -> Outcome:
        """The same without the cases of other topics."""
        reports = {r: [t for t in lines if t.get("topic", topic) == topic] for r, lines in self.reports.items()}
        return replace(self, reports=reports)

    def of(self, case: str) -> dict[int, dict[str, Any]]:
        """What each rank says of a case that has ended there."""
        return {r: line for r, lines in self.reports.items() for line in lines if line.get("case") == case}

    def value(self, key: str) -> dict[int, Any]:
        """What each rank reported under a key."""
        return {r: line[key] for r, lines in self.reports.items() for line in lines if key in line}

    def check_ended_well(self) -> None:
        """Fail unless all ranks started, reported their end, and the launcher returned 0."""
        assert self.returncode == 0, self.describe("the start failed")
        assert set(self.value("end")) == set(range(self.ranks)), self.describe("not every rank reported its end")

    def check(self, case: str) -> None:
        """Fail unless all ranks report that the case has passed."""
        found = self.of(case)
        failed = "\n".join(f"rank {r}:\n{f['error']}" for r, f in sorted(found.items()) if f["error"])
        assert not failed, f"{case} failed\n{failed}"
        missing = sorted(set(range(self.ranks)) - set(found))
        assert not missing, self.describe(f"{case} did not end on ranks {missing}")

    def describe(self, problem: str) -> str:
        """The problem, where each rank stood, and the last lines of all."""
        how = "ended at its time limit" if self.returncode is None else f"returned {self.returncode}"
        stood = [f"rank {r}: {self.last.get(r, 'started')}" for r in sorted(self.reports)]
        lines = [f"{problem}; launcher {how} after {self.seconds:.0f} s", *stood, self.output[-_TAIL:]]
        return "\n".join(lines)


def run(
    topic: str,
    ranks: int,
    launcher: str,
    *arguments: str,
    limit_seconds: float = 200.0,
    environment: Mapping[str, str] | None = None,
    program: str = "tests.parallel.rank",
) -> Outcome:
    """Run a topic of a program on real ranks, until no rank has reported for `limit_seconds`.

    The program is one of `PROGRAMS`; the topics of the first are the files of `tests/parallel/workers/`.
    """
    command = LAUNCHERS[launcher](ranks)
    environment = {**_environment(), **(environment or {})}
    starter = shutil.which(command[0], path=environment["PATH"])
    if starter is None:
        pytest.fail(f"{command[0]} is not on PATH; `make setup` installs it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [starter, *command[1:], sys.executable, "-m", program, topic, name, *arguments]
        begin = time.monotonic()
        with (folder / "output").open("wb") as output:
            # a session of its own: a time limit ends this start and nothing else
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                returncode = _wait(process, limit_seconds, folder)
                seconds, ended = time.monotonic() - begin, time.time()
            finally:
                left = _end_ranks(folder)
        reports = {int(f.stem): [json.loads(t) for t in f.read_text().splitlines()] for f in folder.glob("*.jsonl")}
        stacks = "".join(f"\nrank {f.stem} stood at\n{f.read_text()}" for f in sorted(folder.glob("*.stack")))
        told = "".join(
            f"\nstderr of rank {f.stem}\n{f.read_text(errors='replace')}" for f in sorted(folder.glob("*.err"))
        )
        text = (folder / "output").read_text(errors="replace") + told + (stacks if returncode is None else "")
        last = {rank: lines[-1] for rank, lines in reports.items() if lines}
        return Outcome(ranks, returncode, seconds, ended, text, reports, left, last)


def launched(topic: str, ranks: int, launcher: str, **environment: str) -> Outcome:
    """The outcome of a worker's whole list of cases; started once per session and environment."""
    families = () if environment else TOGETHER.get((ranks, launcher), ())
    family = next((family for family in families if topic in family), {})
    asked = [other for other, file in family.items() if other == topic or file in selected]
    follows = bool(asked) and (ranks, launcher) == FOLLOWING_START
    shown = "thorough" if follows else "witnesses" if (ranks, launcher) in WITNESSES_STARTS else "all"
    outcome = _started("+".join(asked) or topic, ranks, launcher, **{SHOWN: shown}, **environment)
    return outcome.part(topic) if asked else outcome


@functools.cache
def _started(topics: str, ranks: int, launcher: str, **environment: str) -> Outcome:
    return run(topics, ranks, launcher, environment=environment)


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        # a rank has two threads that want a core, and one that waits for a message would spin on it
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # a rank that joins others on a busy machine imports frameworks for longer than 30 seconds, Horovod's limit
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "40",
        # a rank that waits for a collective which another never starts is an error after this, not a hang
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    }


def _wait(process: subprocess.Popen[bytes], limit_seconds: float, folder: Path) -> int | None:
    begin = time.time()
    try:
        while time.time() - begin < LIMIT_SECONDS_IN_ALL:
            if time.time() - max([begin, *(f.stat().st_mtime for f in folder.glob("*.jsonl"))]) > limit_seconds:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_SECONDS_TO_LOOK)
        _ask_for_stacks(folder)
    finally:
        if process.poll() is None:
            _end(process)
    return None


def _end_ranks(folder: Path) -> list[int]:
    """Give the ranks a while to follow their launcher; those that do not are returned, and ended."""
    deadline = time.monotonic() + _SECONDS_TO_FOLLOW
    while (left := [r for r, pid in _pids(folder).items() if _is_rank(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for rank in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pids(folder)[rank], signal.SIGKILL)
    return left


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)  # horovodrun and mpirun end their ranks on this
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ask_for_stacks(folder: Path) -> None:
    for pid in _pids(folder).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + _SECONDS_FOR_STACKS
    while time.monotonic() < deadline and not all(f.stat().st_size for f in folder.glob("*.stack")):
        time.sleep(0.1)


def _is_rank(pid: int) -> bool:
    # the number may have gone to another process, and a rank that waits to be reaped has ended
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and any(p.encode() in _command_of(pid) for p in PROGRAMS)
    return False


def _command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _pids(folder: Path) -> dict[int, int]:
    return {int(f.stem): int(f.read_text()) for f in folder.glob("*.pid")}
