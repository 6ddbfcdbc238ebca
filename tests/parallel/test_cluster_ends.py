"""However a virtual cluster ends, nothing of it is left."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, ClusterError, unavailable
from cluster.cli import main
from cluster.cluster import remove_leftovers, take_down
from cluster.system import call, exclusive, namespaces, pids_in

from tests.parallel.launch import ROOT, thorough

SECONDS = 60.0
# what was started in the background of a shell inherits that SIGINT is to be ignored
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, "benchmarks")
from cluster import Cluster
with Cluster(hosts=2, rate="1gbit") as cluster:
    cluster.run(["sleep", "1000"], launcher=sys.argv[1])
"""

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with exclusive():
        remove_leftovers()
    yield
    with exclusive():
        left = take_down()
    assert not left


def links_of_the_machine() -> str:
    return call(["ip", "-json", "address", "show"])


def names_of(pids: list[int]) -> list[str]:
    """Names of those that still run; one that waits to be reaped has ended."""
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if after.split()[0] != "Z":
                names.append(before.partition("(")[2])
    return names


@contextlib.contextmanager
def started(launcher: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that runs two ranks on a cluster, and all processes on its hosts."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, launcher], cwd=ROOT, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process, ranks_of(process)
    finally:
        # one that has not ended as it should would keep the cluster from all tests to come
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        pids = pids_in(namespaces())
        if names_of(pids).count("sleep") == 2:
            return pids
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"no ranks within {SECONDS} s: {process.communicate()[1]}")


def test_a_cluster_is_namespaces_of_ours_and_nothing_else() -> None:
    before = links_of_the_machine()
    with Cluster(hosts=2) as cluster:
        assert set(namespaces()) == {"hvdc-switch", "hvdc-head", "hvdc-1", "hvdc-2"}
        assert cluster.rate is None
        assert links_of_the_machine() == before
    assert not namespaces()
    assert links_of_the_machine() == before


def test_an_error_in_the_block_takes_it_down() -> None:
    with pytest.raises(ZeroDivisionError), Cluster(hosts=1, rate="100mbit"):
        raise ZeroDivisionError
    assert not namespaces()


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        thorough(signal.SIGINT, "mpi"),
        thorough(signal.SIGINT, "gloo"),
        (signal.SIGTERM, "mpi"),
        thorough(signal.SIGHUP, "mpi"),
    ],
)
def test_a_signal_ends_ranks_and_cluster(number: signal.Signals, launcher: str) -> None:
    with started(launcher) as (process, pids):
        process.send_signal(number)
        process.communicate(timeout=SECONDS)
        assert process.returncode in (-number, 128 + number)
        assert not namespaces()
        assert not names_of(pids)


@contextlib.contextmanager
def leftovers() -> Iterator[list[int]]:
    """Processes on hosts that a killed process has left."""
    with started("mpi") as (process, pids):
        process.kill()
        process.communicate(timeout=SECONDS)
    assert "sleep" in names_of(pids)
    assert "hvdc-2" in namespaces()
    yield pids
    assert not names_of(pids)


def test_the_next_cluster_removes_what_a_killed_process_has_left() -> None:
    with leftovers(), Cluster(hosts=1):
        assert set(namespaces()) == {"hvdc-switch", "hvdc-head", "hvdc-1"}
    assert not namespaces()


@pytest.mark.thorough
def test_up_and_down_remove_what_a_killed_process_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    with leftovers():
        assert main(["status"]) == 1
        assert main(["up", "--hosts", "1"]) == 0
        assert "hvdc-2" not in namespaces()
        assert main(["down"]) == 0
    capsys.readouterr()
    with leftovers():
        assert main(["down"]) == 0
    assert "removed hvdc-1, hvdc-2, hvdc-head, hvdc-switch" in capsys.readouterr().out
    assert not namespaces()


@pytest.mark.thorough
def test_what_up_makes_stays_until_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--hosts", "2", "--rate", "100mbit"]) == 0
    assert main(["up"]) == 1
    assert "a virtual cluster is up" in capsys.readouterr().err
    with pytest.raises(ClusterError, match=r"a virtual cluster is up; .* down"), Cluster(hosts=1):
        pass
    assert main(["status"]) == 0
    assert "2 hosts on links of 100mbit, 0 processes" in capsys.readouterr().out
    assert main(["run", "-np", "2", "--gloo", "--", "sh", "-c", "echo rank $HOROVOD_RANK"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert {"[0] rank 0", "[1] rank 1"} <= set(told)
    assert [line.split()[0] for line in told[-2:]] == ["hvdc-1", "hvdc-2"]
    assert main(["run", "-np", "9", "--", "true"]) == 1
    assert "9 ranks on 2 hosts" in capsys.readouterr().err
    assert main(["run", "--", "sh", "-c", "echo told once; exit 3"]) == 1
    failed = capsys.readouterr()
    # the first rank to fail ends the other, which may not have spoken
    assert {"[0] told once", "[1] told once"} & set(failed.out.splitlines())
    assert "mpi returned 3" in failed.err
    assert main(["down"]) == 0
    for action in ("status", "run"):
        assert main([action] if action == "status" else [action, "--", "true"]) == 1
        assert "no virtual cluster is up" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "nothing was up\n"


def test_the_folder_is_a_program() -> None:
    command = [sys.executable, "benchmarks/cluster", "status"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (1, "no virtual cluster is up; `up` makes one\n")
