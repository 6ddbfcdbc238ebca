from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import cluster.launch
import pytest
from cluster.errors import ClusterError
from cluster.launch import environment_of, launch, launcher_command

ROOT = Path(__file__).parents[2]
# each rank has ended before the next one is started
SHORT_RANKS = """
import os, subprocess, sys
sys.path.insert(0, "benchmarks")
from cluster import gloo

class Ended(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

subprocess.Popen = Ended
gloo.ENTER = sys.argv[1]
sys.exit(gloo.main(*sys.argv[2:]))
"""
SLOTS = [("hvdc-1", 2), ("hvdc-2", 1)]


def test_mpirun_reaches_all_hosts_over_their_links_only() -> None:
    command = launcher_command("mpi", SLOTS, Path("/folder"), ["python", "x y.py"])
    settings = {command[i + 1]: command[i + 2] for i, word in enumerate(command) if word == "--mca"}
    assert command[0] == "mpirun"
    assert command[command.index("-H") + 1] == "hvdc-1:2,hvdc-2:1"
    assert command[command.index("-np") + 1] == "3"
    assert command[command.index("--bind-to") + 1] == "none"
    assert settings["btl_tcp_if_include"] == "eth0"
    assert settings["oob_tcp_if_include"] == "ctl0"
    assert settings["btl"] == "tcp,vader,self"
    assert command[-3:] == ["/folder", "python", "x y.py"]


def test_what_open_mpi_calls_in_place_of_ssh_can_be_executed() -> None:
    command = launcher_command("mpi", SLOTS, Path("/folder"), ["true"])
    agent = command[command.index("plm_rsh_agent") + 1]
    assert " " not in agent
    found = Path(environment_of({"PATH": "/bin"}, None)["PATH"].split(os.pathsep)[-1]) / agent
    assert found.stat().st_mode & stat.S_IXUSR


def test_gloo_is_told_where_ranks_and_the_rendezvous_are() -> None:
    command = launcher_command("gloo", SLOTS, Path("/folder"), ["python", "x.py"])
    assert command[2:] == ["/folder", "10.78.0.254", "eth0", "hvdc-1:2,hvdc-2:1", "python", "x.py"]


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_of_gloo_that_end_at_once_are_waited_for(tmp_path: Path, code: int) -> None:
    enter = tmp_path / "enter.sh"
    enter.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    enter.chmod(0o755)
    of_rank = ["sh", "-c", f"echo rank $HOROVOD_RANK; test $HOROVOD_RANK = 0 || exit {code}"]
    arguments = [str(enter), str(tmp_path), "127.0.0.1", "lo", "hvdc-1:2,hvdc-2:1", *of_rank]
    done = subprocess.run([sys.executable, "-c", SHORT_RANKS, *arguments], cwd=ROOT, timeout=100, check=False)
    assert done.returncode == code
    assert [(tmp_path / f"{rank}.out").read_text() for rank in range(3)] == ["rank 0\n", "rank 1\n", "rank 2\n"]


def test_each_rank_of_mpi_writes_to_files_of_its_own(tmp_path: Path) -> None:
    command = launcher_command("mpi", SLOTS, tmp_path, ["sh", "-c", 'echo "$0"; echo told >&2', "a  b"])
    of_rank = command[command.index("sh") :]
    subprocess.run(of_rank, env={"PATH": os.environ["PATH"], "OMPI_COMM_WORLD_RANK": "3"}, check=True)
    assert (tmp_path / "3.out").read_text() == "a  b\n"
    assert (tmp_path / "3.err").read_text() == "told\n"


def test_launchers_and_commands_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="launcher 'ssh': give one of mpi, gloo"):
        launcher_command("ssh", SLOTS, Path("/folder"), ["true"])
    with pytest.raises(ValueError, match="no command to run"):
        launcher_command("gloo", SLOTS, Path("/folder"), [])


def test_ranks_have_one_thread_unless_something_else_is_asked_for() -> None:
    assert environment_of({"PATH": "/bin"}, None)["OMP_NUM_THREADS"] == "1"
    assert "put" not in environment_of({"PATH": "/bin"}, None)["OMPI_MCA_btl_tcp_flags"]
    assert environment_of({"OMP_NUM_THREADS": "2"}, None)["OMP_NUM_THREADS"] == "2"
    assert environment_of({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "mpirun is not on PATH; install Open MPI 4, or take the launcher gloo"),
        ("mpirun (Open MPI) 5.0.1", r"calls itself 'mpirun \(Open MPI\) 5.0.1'; Open MPI 4 is supported"),
        ("", "calls itself 'nothing'"),
    ],
)
def test_an_mpi_that_is_not_known_to_work_is_refused(tmp_path: Path, version: str | None, said: str) -> None:
    if version is not None:
        program = tmp_path / "mpirun"
        program.write_text(f"#!/bin/sh\nprintf '{version}'\n")
        program.chmod(0o755)
    with pytest.raises(ClusterError, match=said):
        launch("mpi", SLOTS, tmp_path, ["true"], 1.0, {"PATH": str(tmp_path)})


def test_the_versions_that_are_supported_pass(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n")
    program.chmod(0o755)
    cluster.launch._check_mpi(str(tmp_path))
