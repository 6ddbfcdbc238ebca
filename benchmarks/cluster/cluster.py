"""Build, shape, use and take down the cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

from .errors import ClusterError
from .launch import Run, Writer, environment_of, launch
from .links import parse_rate, shape_of
from .system import FOLDER, call, end_processes, exclusive, namespaces, pids_in, terminated_as_exit, uninterrupted
from .topology import (
    DATA,
    PREFIX,
    build_commands,
    host_name,
    host_names,
    host_slots,
    hosts_among,
    link_bytes,
    qdisc_rate,
    shape_commands,
)

__all__ = ["STAYS", "Cluster", "build", "remove_leftovers", "take_down"]

# exists while the cluster was made by `up`, which has no process that could take it down
STAYS = FOLDER / "stays"


@final
class Cluster:
    """Has virtual hosts that exist inside a `with` block, whatever ends it; one at a time on a machine.

    Args:
        hosts: 1 to 64.
        rate: of each host's link in each direction, as "100mbit" or "2.5gbit"; None for an unlimited one.

    Raises:
        ValueError: no such number of hosts, no such rate.
        UnavailableError: no root, or tools or kernel modules are missing; on entering the block.
        ClusterError: another one is up; on entering the block.
    """

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        build_commands(hosts)
        parse_rate(rate)
        self.hosts = hosts
        self._first_rate = rate
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            stack.enter_context(terminated_as_exit())
            stack.enter_context(exclusive())
            remove_leftovers()
            build(self.hosts, self._first_rate)
            stack.callback(take_down)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @classmethod
    @contextlib.contextmanager
    def attached(cls) -> Iterator[Cluster]:
        """Return the cluster that is up, which stays up afterwards.

        Raises:
            UnavailableError: as the class.
            ClusterError: none is up, or another process uses it.
        """
        with terminated_as_exit(), exclusive():
            if not STAYS.exists():
                raise ClusterError("no virtual cluster is up; `up` makes one")
            yield cls(hosts_among(namespaces()))

    @property
    def rate(self) -> int | None:
        """Bits per second of each link; None if unlimited."""
        return qdisc_rate(call(["tc", "-json", "-n", host_name(1), "qdisc", "show", "dev", DATA]))

    def set_rate(self, rate: str | None) -> None:
        """Give all links another rate.

        Raises:
            ValueError: no such rate.
        """
        for command in shape_commands(self.hosts, shape_of(parse_rate(rate))):
            call(command)

    def counters(self) -> list[tuple[int, int]]:
        """Return the bytes (sent, received) of each host's link so far."""
        hosts = map(host_name, range(1, self.hosts + 1))
        return [link_bytes(call(["ip", "-json", "-s", "-n", host, "link", "show", DATA])) for host in hosts]

    def pids(self) -> list[int]:
        """Return the processes that run in the cluster."""
        return pids_in(namespaces())

    def run(
        self,
        command: Sequence[str],
        *,
        ranks: int | None = None,
        ranks_per_host: int = 1,
        launcher: str = "mpi",
        timeout: float = 600.0,
        env: Mapping[str, str] | None = None,
        echo: Writer | None = None,
    ) -> Run:
        """Run a command on all ranks: real Horovod finds `ranks_per_host` of them on each host.

        Args:
            command: of each rank, in the current folder.
            ranks: how many to start; by default as many as the hosts hold.
            ranks_per_host: the most ranks of a host; the first hosts are filled up.
            launcher: "mpi" (Open MPI 4) or "gloo".
            timeout: seconds; after that, all processes are ended.
            env: added to this process' environment; `OMP_NUM_THREADS` is 1 unless it is set somewhere.
            echo: gets the lines that ranks write, while they run.

        Raises:
            ValueError: the ranks do not fit, no such launcher, no command.
            RunError: a rank failed, or the time limit came first.
            ClusterError: there is no Open MPI 4 to launch with.
        """
        ranks = self.hosts * ranks_per_host if ranks is None else ranks
        slots = host_slots(self.hosts, ranks, ranks_per_host)
        environment = environment_of(os.environ, env)
        with _run_folder() as folder:
            before = self.counters()
            begin = time.monotonic()
            launch(launcher, slots, folder, command, timeout, environment, echo)
            seconds = time.monotonic() - begin
            moved = [(s - s0, r - r0) for (s, r), (s0, r0) in zip(self.counters(), before, strict=True)]
            out, err = (
                tuple((folder / f"{i}.{kind}").read_text(errors="replace") for i in range(ranks))
                for kind in ("out", "err")
            )
        return Run(seconds, out, err, tuple(s for s, _ in moved), tuple(r for _, r in moved))


def build(hosts: int, rate: str | None) -> None:
    """Make the namespaces and links; call with `exclusive`, after `remove_leftovers`."""
    commands = [*build_commands(hosts), *shape_commands(hosts, shape_of(parse_rate(rate)))]
    try:
        (FOLDER / "hosts").write_text(host_names(hosts))
        for command in commands:
            call(command)
    except BaseException:
        take_down()
        raise


def remove_leftovers() -> None:
    """Remove what a killed process has left; call with `exclusive`, which shows that the process is no more.

    Raises:
        ClusterError: a cluster is up that was made to stay.
    """
    if STAYS.exists():
        raise ClusterError("a virtual cluster is up; `python benchmarks/cluster down` removes it")
    take_down()


def take_down() -> list[str]:
    """End all processes in our namespaces and remove these; returns their names. Call with `exclusive`."""
    with uninterrupted():
        found = namespaces()
        end_processes(found)
        for name in found:
            call(["ip", "netns", "delete", name])
        for file in (FOLDER / "hosts", STAYS):
            file.unlink(missing_ok=True)
        _clear()
        return found


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    _clear()
    folder = FOLDER / "run"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        with uninterrupted():
            _clear()


def _clear() -> None:
    shutil.rmtree(FOLDER / "run", ignore_errors=True)
    # shared memory of ranks that were killed; Open MPI puts the host's name into its name
    for segment in Path("/dev/shm").glob(f"*.{PREFIX}*"):
        segment.unlink(missing_ok=True)
