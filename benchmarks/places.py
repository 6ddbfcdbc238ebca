"""Start ranks on the virtual cluster, or on this machine alone where that cannot be had."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError, RunError, unavailable
from cluster.system import terminated_as_exit
from measure import write
from tqdm import tqdm

__all__ = [
    "UNLIMITED",
    "Part",
    "Place",
    "Progress",
    "local",
    "parsed",
    "parser_of",
    "place",
    "rates_or_unlimited",
    "rates_to_be_had",
    "start",
]

UNLIMITED = "unlimited"
DONE = "unit done:"  # what a rank writes when a unit of the progress bar is complete
LINES_OF_A_PART = 20  # that tell of its failure, beside those of others
Rank = Callable[[dict[str, Any]], None]
Measure = Callable[[argparse.Namespace], dict[str, Any] | None]
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 1800.0  # how long to wait until another user of the cluster gives it up
LIMIT_SECONDS = 3 * 3600.0
STALL_SECONDS = "120"  # ranks that wait for each other for so long end the run
MEETING_SECONDS = "300"  # how long ranks wait for each other at their start, where many starts share the processors
LOG_SECONDS = 10.0  # between two states of the bar where no terminal shows it: each is a line of a log


def parser_of(description: str | None, short: str, each: str | None = None) -> argparse.ArgumentParser:
    """Declare the arguments that all benchmarks with ranks have: `--short`, and `--task` for the ranks that they start.

    Args:
        description: of the benchmark.
        short: what the short form does.
        each: what is measured in rounds; `parsed` fills in their `--seconds` and least number.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help=short)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    if each:
        parser.add_argument("--seconds", type=float, help=f"for each {each}; at least --least rounds are made")
        parser.add_argument("--least", type=int, help="rounds")
    return parser


def parsed(
    parser: argparse.ArgumentParser, given: Sequence[str] | None, **defaults: tuple[Any, Any]
) -> argparse.Namespace:
    """Return the options; those that are not given are taken from (short form, long form)."""
    options = parser.parse_args(given)
    for name, (short, long) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, short if options.short else long)
    return options


def start(script: str, options: argparse.Namespace, ranks: Rank, measure: Measure) -> None:
    """Run what a benchmark was started for: its ranks' part, or all of it, whose result is written down.

    None is no result: a record that is there stays.
    """
    if options.task:
        ranks(json.loads(options.task))
    elif (result := measure(options)) is not None:
        write(Path(script).stem, result)


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Draws a bar over units of work, moved by what the first rank writes; keeps other lines for a failure."""

    def __init__(self, title: str, units: int) -> None:
        often = 0.1 if sys.stderr.isatty() else LOG_SECONDS
        self._bar = tqdm(total=units, desc=title, unit="case", dynamic_ncols=True, smoothing=0.1, mininterval=often)
        self._lines: deque[str] = deque(maxlen=60)
        self._lock = threading.RLock()
        self._running: set[subprocess.Popen[str]] = set()
        self._has_ended = False

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def part(self, name: str) -> Part:
        """Return what takes the lines of one start among several at the same time."""
        return Part(self, name)

    def write(self, text: str) -> int:
        """Take lines, as a text file does."""
        for line in text.splitlines():
            if DONE in line:
                self.advance(line.partition(DONE)[2].strip())
            else:
                self._lines.append(line)
        return len(text)

    def advance(self, what: str) -> None:
        """Count a unit as complete."""
        with self._lock:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update()

    def flush(self) -> None:
        """Do nothing: no line is held back."""

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        with self._lock:
            self._bar.write(text, file=sys.stderr)

    def tail(self) -> str:
        """Return what the ranks wrote last."""
        return "\n".join(self._lines)

    @contextlib.contextmanager
    def watching(self, process: subprocess.Popen[str]) -> Iterator[None]:
        """Let `end` end a process meanwhile."""
        with self._lock:
            self._running.add(process)
            if self._has_ended:
                process.terminate()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        """End all that is watched, now and later: threads that wait for ranks would go on for hours."""
        with self._lock:
            self._has_ended = True
            for process in self._running:
                process.terminate()


class Part(Progress):
    """Moves the bar of all starts by the lines of one, and keeps the other lines of this one for its failure.

    Args:
        whole: has the bar.
        name: of the start, written beside what it has done.
    """

    def __init__(self, whole: Progress, name: str) -> None:
        self._whole, self._name = whole, name
        self._lines = deque(maxlen=200)

    def __exit__(self, *exception: object) -> None:
        """Leave the bar to the whole."""

    def advance(self, what: str) -> None:
        self._whole.advance(f"{self._name}: {what}")

    def say(self, text: str) -> None:
        self._whole.say(f"{self._name}: {text}")

    def tail(self) -> str:
        lines = list(self._lines)
        # behind a rank's error stands the trace of horovodrun, which marks what ranks wrote
        of_ranks = [line for line in lines if "]<std" in line]
        return "\n".join((of_ranks or lines)[-LINES_OF_A_PART:])

    @contextlib.contextmanager
    def watching(self, process: subprocess.Popen[str]) -> Iterator[None]:
        with self._whole.watching(process):
            yield

    def end(self) -> None:
        self._whole.end()


class Place:
    """Starts ranks on a number of hosts.

    Args:
        hosts: how many hosts there are.
        ranks_per_host: how many ranks each of them has.
        cluster: the cluster of these hosts; None for this machine, on which the links are unlimited.
        progress: is told what is complete.
    """

    def __init__(self, hosts: int, ranks_per_host: int, cluster: Cluster | None, progress: Progress) -> None:
        self.hosts = hosts
        self._ranks_per_host = ranks_per_host
        self._cluster = cluster
        self._progress = progress

    def run(
        self,
        script: str,
        task: Mapping[str, Any],
        rate: str = UNLIMITED,
        env: Mapping[str, str] | None = None,
        launcher: str = "mpi",
    ) -> Any:
        """Return what the ranks of `script --task JSON` deliver; without a cluster, MPI starts them where it is there.

        Raises:
            RunError: a rank failed; the message ends with what ranks wrote last.
        """
        env = {**_environment(), **(env or {})}
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, script, "--task", json.dumps({**task, "result": str(result)})]
            try:
                if self._cluster is None:
                    _run_here(self.hosts * self._ranks_per_host, command, env, self._progress)
                else:
                    self._cluster.set_rate(rate)
                    self._cluster.run(
                        command, ranks_per_host=self._ranks_per_host, launcher=launcher, env=env,
                        timeout=LIMIT_SECONDS, echo=self._progress,
                    )  # fmt: skip
            except RunError as error:
                raise RunError("\n".join(part for part in (str(error), self._progress.tail()) if part)) from error
            return json.loads(result.read_text())


@contextlib.contextmanager
def place(hosts: int, progress: Progress, ranks_per_host: int = 1) -> Iterator[Place]:
    """Make virtual hosts, or take this machine in their place; waits while another process has the cluster."""
    if unavailable() is not None:
        yield Place(hosts, ranks_per_host, None, progress)
        return
    with contextlib.ExitStack() as stack:
        yield Place(hosts, ranks_per_host, _entered(stack, hosts, progress), progress)


def _entered(stack: contextlib.ExitStack, hosts: int, progress: Progress) -> Cluster:
    deadline = time.monotonic() + PATIENCE_SECONDS
    told = ""
    while True:
        try:
            return stack.enter_context(Cluster(hosts))
        except ClusterError as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != told:
                told = str(error)
                progress.say(f"waiting: {told}")
            time.sleep(2.0)


def local(ranks: int, progress: Progress) -> Place:
    """Return a place on this machine, without a cluster."""
    return Place(ranks, 1, None, progress)


def rates_to_be_had(rates: Sequence[str]) -> list[str]:
    """Return the rates that this machine can give links; says why the others are left out."""
    reason = unavailable()
    if reason is None:
        return list(rates)
    possible = [rate for rate in rates if rate == UNLIMITED]
    if len(possible) < len(rates):
        print(f"rates of links are left out: {reason}", file=sys.stderr)
    return possible


def rates_or_unlimited(rates: Sequence[str]) -> list[str]:
    """Return those that `rates_to_be_had` does, or that of this machine alone if there are none."""
    return rates_to_be_had(rates) or [UNLIMITED]


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])]),
        "OMP_NUM_THREADS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": STALL_SECONDS,
    }


def _run_here(ranks: int, command: Sequence[str], env: Mapping[str, str], progress: Progress) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    name = "mpirun" if shutil.which("mpirun", path=path) else "horovodrun"
    launcher = _mpirun(ranks) if name == "mpirun" else _horovodrun(ranks)
    # else ranks of an interrupted run would go on alone
    with (
        terminated_as_exit(),
        subprocess.Popen(
            [*launcher, *command],
            cwd=ROOT,
            env={"HOROVOD_GLOO_TIMEOUT_SECONDS": MEETING_SECONDS, **os.environ, **env, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
        progress.watching(process),
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                progress.write(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise RunError(f"{name} returned {process.returncode}")


def _mpirun(ranks: int) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # there are more ranks than processors, and one that spins would starve the others
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return ["mpirun", "-np", str(ranks), *options, *root]


def _horovodrun(ranks: int) -> list[str]:
    # ranks on this machine alone talk over its loopback interface, at ports that are free; starts at the same time
    # would damage the cache that they share
    return [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), "--gloo", "--disable-cache"]
