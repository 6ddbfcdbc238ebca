"""Make one run: start the ranks, watch, end and read them."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .errors import ClusterError, RunError
from .system import end_processes, pids_in, uninterrupted
from .topology import CONTROL, DATA, HEAD, HEAD_ADDRESS

__all__ = ["LAUNCHERS", "TCP_FLAGS", "WITHOUT_PUT", "Run", "Writer", "environment_of", "launch", "launcher_command"]

LAUNCHERS = ("mpi", "gloo")
# how Open MPI uses TCP, and all that it does by default but "put"
TCP_FLAGS, WITHOUT_PUT = "OMPI_MCA_btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma"
_HERE = Path(__file__).resolve().parent
_ENTER = _HERE / "enter.sh"
# Open MPI's own forwarding loses what a rank has written last if another one ends before that is read
_OWN_FILES = 'exec "$@" >"$0/$OMPI_COMM_WORLD_RANK.out" 2>"$0/$OMPI_COMM_WORLD_RANK.err"'
_TAIL = 3000
_SECONDS_FOR_STACKS = 5.0
_POLL_SECONDS = 0.05


class Writer(Protocol):
    """Takes lines, as a text file does."""

    def write(self, text: str, /) -> object:
        """Take some lines."""

    def flush(self) -> object:
        """Hold nothing back."""


@dataclass(frozen=True)
class Run:
    """Says how a run went.

    Args:
        seconds: from the start of the launcher to its end.
        stdout: what each rank wrote there.
        stderr: the same.
        sent: bytes that each host's link to the switch carried away; only ranks on other hosts receive them.
        received: bytes that each link brought.
    """

    seconds: float
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


def environment_of(base: Mapping[str, str], extra: Mapping[str, str] | None) -> dict[str, str]:
    """Make the environment of launcher and ranks.

    One thread each, stacks on a fatal signal, both directions of a link at once, this Python's tools on PATH.

    Example:
        >>> environment_of({"PATH": "/bin", "OMP_NUM_THREADS": "2"}, {"A": "b"})["OMP_NUM_THREADS"]
        '2'
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # with "put", the default, a receiver's request waits behind all that it sends itself, and a link's directions
        # take turns: an allreduce fills half of it
        TCP_FLAGS: WITHOUT_PUT,
    }
    environment = {**defaults, **base, **(extra or {})}
    # Open MPI splits the path of its agent at blanks: it gets a name to look for instead
    folders = (str(Path(sys.executable).parent), environment.get("PATH", os.defpath), str(_HERE))
    return {**environment, "PATH": os.pathsep.join(folders)}


def launcher_command(
    launcher: str, slots: Sequence[tuple[str, int]], folder: Path, command: Sequence[str]
) -> list[str]:
    """Return what the head runs to start all ranks; each writes to `<rank>.out` and `.err` in the folder.

    Raises:
        ValueError: no such launcher, or no command.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher {launcher!r}: give one of {', '.join(LAUNCHERS)}")
    if not command:
        raise ValueError("no command to run")
    hosts = ",".join(f"{host}:{ranks}" for host, ranks in slots)
    if launcher == "gloo":
        return [sys.executable, str(_HERE / "gloo.py"), str(folder), HEAD_ADDRESS, DATA, hosts, *command]
    settings = {
        "plm_rsh_agent": _ENTER.name,
        "plm_rsh_no_tree_spawn": "1",  # only the head can start something on a host
        "oob_tcp_if_include": CONTROL,
        "orte_tmpdir_base": str(folder),
        # TCP between hosts, shared memory within one; another transport would find a way around the links
        "pml": "ob1",
        "btl": "tcp,vader,self",
        "btl_tcp_if_include": DATA,
        # each host believes that it has the processors for itself, and its ranks would spin while others wait for one
        "mpi_yield_when_idle": "1",
    }
    options = [word for key, value in settings.items() for word in ("--mca", key, value)]
    ranks = sum(ranks for _, ranks in slots)
    # unbound: each host would pin its first rank to the machine's first core
    start = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", str(ranks), "-H", hosts, *options]
    return [*start, "sh", "-c", _OWN_FILES, str(folder), *command]


def launch(
    launcher: str,
    slots: Sequence[tuple[str, int]],
    folder: Path,
    command: Sequence[str],
    timeout: float,
    environment: Mapping[str, str],
    echo: Writer | None = None,
) -> None:
    """Run the command on all ranks and wait for them; what is left of them afterwards is ended.

    Args:
        launcher: "mpi" or "gloo".
        slots: (host, ranks) of each host.
        folder: of the ranks' output.
        command: of each rank.
        timeout: seconds.
        environment: of launcher and ranks.
        echo: gets the lines that ranks write, while they run.

    Raises:
        RunError: a rank failed, or the time limit came first.
        ClusterError: Open MPI is missing or of a version that is not supported.
    """
    start = launcher_command(launcher, slots, folder, command)
    if launcher == "mpi":
        _check_mpi(environment["PATH"])
    ranks = sum(ranks for _, ranks in slots)
    names = [HEAD, *(host for host, _ in slots)]
    echoes = [_Echo(folder, rank, echo) for rank in range(ranks)] if echo else []
    begin = time.monotonic()
    with (folder / "launcher").open("wb") as output:
        process = subprocess.Popen(
            [str(_ENTER), HEAD, f"exec {shlex.join(start)}"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # this process handles a Ctrl-C in the terminal
        )
    problem = None
    try:
        while process.poll() is None and time.monotonic() < begin + timeout:
            for follower in echoes:
                follower()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        if process.returncode is None:
            problem = f"ended at the time limit of {timeout:g} s"
            _ask_for_stacks(names)
        elif process.returncode:
            problem = f"{launcher} returned {process.returncode} after {time.monotonic() - begin:.1f} s"
    finally:
        with uninterrupted():
            _end(process, names)
        for follower in echoes:
            follower()
    if problem:
        raise RunError(_describe(problem, command, folder, 0 if echo else ranks))


def _end(process: subprocess.Popen[bytes], names: Sequence[str]) -> None:
    # a launcher on its way into its namespace is known by its session alone
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_processes(names)


def _ask_for_stacks(names: Sequence[str]) -> None:
    # PYTHONFAULTHANDLER writes the stacks of all threads on SIGABRT
    ranks = [pid for pid in pids_in(names) if _is_rank(pid)]
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + _SECONDS_FOR_STACKS
    while any(_is_rank(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _is_rank(pid: int) -> bool:
    try:
        names = {entry.split(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    except OSError:
        return False  # it has ended
    return bool(names & {b"OMPI_COMM_WORLD_RANK", b"HOROVOD_RANK"})


def _describe(problem: str, command: Sequence[str], folder: Path, ranks: int) -> str:
    parts = [f"`{shlex.join(command)}`: {problem}", _tail(folder / "launcher")]
    for rank in range(ranks):
        for kind, name in (("out", "stdout"), ("err", "stderr")):
            text = _tail(folder / f"{rank}.{kind}")
            parts += [f"--- {name} of rank {rank}", text] if text else []
    return "\n".join(part for part in parts if part)


def _tail(file: Path) -> str:
    return file.read_text(errors="replace")[-_TAIL:].strip() if file.exists() else ""


@functools.cache
def _check_mpi(path: str) -> None:
    program = shutil.which("mpirun", path=path)
    if program is None:
        raise ClusterError("mpirun is not on PATH; install Open MPI 4, or take the launcher gloo")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    if "(Open MPI) 4." not in told:
        first = told.splitlines()[0] if told else "nothing"
        raise ClusterError(f"{program} calls itself {first!r}; Open MPI 4 is supported. Or take the launcher gloo")


class _Echo:
    """Passes on the whole lines that a rank has written since the last call."""

    def __init__(self, folder: Path, rank: int, to: Writer) -> None:
        self._files = [folder / f"{rank}.{kind}" for kind in ("out", "err")]
        self._read = [0, 0]
        self._rank = rank
        self._to = to

    def __call__(self) -> None:
        for i, file in enumerate(self._files):
            if not file.exists():
                continue
            with file.open("rb") as f:
                f.seek(self._read[i])
                whole = f.read().rpartition(b"\n")[0]
            if whole:
                self._read[i] += len(whole) + 1
                for line in whole.decode(errors="replace").split("\n"):
                    self._to.write(f"[{self._rank}] {line}\n")
                self._to.flush()
