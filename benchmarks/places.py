"""Start ranks on the virtual cluster, or on this machine alone where that cannot be had."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
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
    "Place",
    "Progress",
    "local",
    "parsed",
    "parser_of",
    "place",
    "rates_to_be_had",
    "start",
]

UNLIMITED = "unlimited"
DONE = "unit done:"  # what a rank writes when a unit of the progress bar is complete
Rank = Callable[[dict[str, Any]], None]
Measure = Callable[[argparse.Namespace], dict[str, Any]]
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 1800.0  # how long to wait until another user of the cluster gives it up
LIMIT_SECONDS = 3 * 3600.0
STALL_SECONDS = "120"  # ranks that wait for each other for so long end the run


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
    """Run what a benchmark was started for: its ranks' part, or all of it, whose result is written down."""
    if options.task:
        ranks(json.loads(options.task))
    else:
        write(Path(script).stem, measure(options))


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Draws a bar over units of work, moved by what the first rank writes; keeps other lines for a failure."""

    def __init__(self, title: str, units: int) -> None:
        self._bar = tqdm(total=units, desc=title, unit="case", dynamic_ncols=True, smoothing=0.1)
        self._lines: deque[str] = deque(maxlen=60)

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

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
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update()

    def flush(self) -> None:
        """Do nothing: no line is held back."""

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def tail(self) -> str:
        """Return what the ranks wrote last."""
        return "\n".join(self._lines)


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
        """Return what the ranks of `script --task JSON` deliver; without a cluster, MPI starts them in any case."""
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
            except RunError:
                self._progress.say(self._progress.tail())
                raise
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


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])]),
        "OMP_NUM_THREADS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": STALL_SECONDS,
    }


def _run_here(ranks: int, command: Sequence[str], env: Mapping[str, str], progress: Progress) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # there are more ranks than processors, and one that spins would starve the others
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # else ranks of an interrupted run would go on alone
    with (
        terminated_as_exit(),
        subprocess.Popen(
            ["mpirun", "-np", str(ranks), *options, *root, *command],
            cwd=ROOT,
            env={**os.environ, **env, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                progress.write(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise RunError(f"mpirun returned {process.returncode}")
