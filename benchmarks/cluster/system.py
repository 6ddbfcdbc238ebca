"""Ask this machine for what the cluster needs: commands, processes in namespaces, a lock, signals."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from .errors import ClusterError, UnavailableError
from .topology import PREFIX

__all__ = [
    "FOLDER",
    "call",
    "end_processes",
    "exclusive",
    "namespaces",
    "pids_in",
    "terminated_as_exit",
    "unavailable",
    "uninterrupted",
]

FOLDER = Path("/run/hvdc-cluster")
_PROBE = (
    "ip link add name data type bridge && ip link add name a type veth peer name b && "
    "tc qdisc add dev a root tbf rate 1gbit burst 64kb limit 64kb && mount -t sysfs none /sys && "
    "echo probe >/proc/sys/kernel/hostname"
)
_SECONDS_TO_DIE = 10.0
_ENDS = (signal.SIGTERM, signal.SIGHUP)


def unavailable() -> str | None:
    """Say why this process cannot have a virtual cluster; None if it can."""
    if os.geteuid() != 0:
        return "a virtual cluster needs root, to make network namespaces; run this with sudo or in a container as root"
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
    absent = [f"{tool} ({package})" for tool, package in packages.items() if shutil.which(tool) is None]
    if absent:
        return f"a virtual cluster needs {', '.join(absent)} on PATH"
    # a throw-away namespace: what a container forbids or a kernel lacks shows here, and leaves nothing behind
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", _PROBE], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        return (
            "this kernel or container allows no namespaces, bridge, veth or tbf (modules bridge, veth, sch_tbf; "
            f"capability CAP_SYS_ADMIN): {probe.stderr.strip()}"
        )
    return None


def call(command: Sequence[str]) -> str:
    """Run a command; returns what it prints.

    Raises:
        ClusterError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """Return the named network namespaces of ours on this machine."""
    names = (line.split()[0] for line in call(["ip", "netns", "list"]).splitlines() if line)
    return [name for name in names if name.startswith(PREFIX)]


def pids_in(names: Iterable[str]) -> list[int]:
    """Return the processes in the namespaces."""
    return [int(pid) for name in names for pid in call(["ip", "netns", "pids", name]).split()]


def end_processes(names: Sequence[str]) -> None:
    """End all that runs in the namespaces.

    Raises:
        ClusterError: something does not end.
    """
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while pids := pids_in(names):
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {pids} in {', '.join(names)} do not end, although killed")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Be the only user of the virtual cluster on this machine.

    Raises:
        UnavailableError: see `unavailable`.
        ClusterError: another process uses it.
    """
    reason = unavailable()
    if reason:
        raise UnavailableError(reason)
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    with (FOLDER / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ClusterError(
                f"process {lock.read().strip()} uses the virtual cluster; wait for it or end it first"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextlib.contextmanager
def terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM, and the end of the terminal, unwind the stack, so that what was built is taken down.

    A handler of the caller's stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep signals that end a process from cutting a clean-up short: an impatient second Ctrl-C has no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_ENDS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
