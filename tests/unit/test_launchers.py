"""Launchers that `check` starts: real ones where they are installed, and scripts that fail as real ones have."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from hvd_compress.cli import check, launchers
from hvd_compress.cli.finding import MISSING, NOTE, OK, Finding
from hvd_compress.cli.launchers import Built, attempt

BOTH = Built("torch", mpi=True, gloo=True, library="Open MPI v4.1.8")
OF_MPI4PY = launchers._OF_MPI4PY
NO_SSH = """The value of the MCA parameter "plm_rsh_agent" was set to a path
that could not be found:
"""
RUN = f"""
case "$*" in *--version*) echo "mpirun (Open MPI) 4.1.8"; exit;; esac
while [ "$1" != {sys.executable} ]; do [ "$1" = -np ] && n=$2; shift; done
"""


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder on PATH, with a horovodrun that starts ranks, which is the environment's own."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    own = script(tmp_path / "horovodrun", "exit 0")
    monkeypatch.setattr(launchers, "_own_horovodrun", lambda: own if own.exists() else None)
    # instead of Horovod and mpi4py, whose ranks take seconds
    for program in ("_OF_HOROVOD", "_OF_MPI4PY"):
        monkeypatch.setattr(launchers, program, "import os; print('ranks=%s.' % os.environ['SIZE'])")
    return tmp_path


def found(built: Built = BOTH) -> dict[str, Finding]:
    return {finding.what: finding for finding in launchers.launchers(built)}


class TestMpirun:
    def test_starts_ranks(self, folder: Path) -> None:
        script(folder / "mpirun", RUN + 'for i in $(seq $n); do SIZE=$n "$@"; done')
        line = found()["mpirun"]
        assert line.verdict == OK
        assert "Open MPI 4.1.8" in line.found
        assert ("--allow-run-as-root" in line.found) == (os.geteuid() == 0)

    def test_that_needs_ssh(self, folder: Path) -> None:
        text = f"[ \"$OMPI_MCA_plm\" = isolated ] || {{ echo '----'; echo '{NO_SSH}' >&2; exit 243; }}"
        script(folder / "mpirun", RUN + text)
        line = found()["mpirun"]
        assert line.verdict == NOTE
        assert "without ssh" in line.found
        assert "export OMPI_MCA_plm=isolated" in line.remedy
        assert "horovodrun --gloo" in line.remedy
        # what does not help is not named
        script(folder / "mpirun", RUN + f"echo '{NO_SSH}'; exit 243")
        assert "isolated" not in found()["mpirun"].remedy
        assert "--gloo" not in found(Built("torch", mpi=True, gloo=False))["mpirun"].remedy

    def test_of_another_mpi(self, folder: Path) -> None:
        script(folder / "mpirun", RUN + 'for i in $(seq $n); do SIZE=1 "$@"; done')
        line = found()["mpirun"]
        assert line.verdict == NOTE
        assert "do not find each other" in line.found
        assert "the mpirun of Horovod's Open MPI v4.1.8" in line.remedy
        assert "hvd-compress build-horovod" in line.remedy
        assert "mpi4py" not in found()

    def test_whose_ranks_fail(self, folder: Path) -> None:
        script(folder / "mpirun", RUN + '[ $n = 1 ] || { echo "no such transport"; exit 3; }')
        assert "no such transport" in found()["mpirun"].found

    def test_of_hydra_is_called_so(self, folder: Path) -> None:
        text = RUN.replace("mpirun (Open MPI) 4.1.8", "HYDRA build details:\\n    Version:    4.3.2")
        script(folder / "mpirun", text.replace("echo", "printf") + 'for i in $(seq $n); do SIZE=$n "$@"; done')
        line = found()["mpirun"]
        assert line.verdict == OK
        assert line.found.endswith("Hydra 4.3.2")

    @pytest.mark.parametrize("text", ["sleep 60", RUN + "sleep 60"])
    def test_that_hangs(self, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launchers, "_START_SECONDS", 0.5)
        script(folder / "mpirun", text)
        begin = time.monotonic()
        line = found()["mpirun"]
        assert time.monotonic() - begin < 30
        assert line.verdict == NOTE
        assert "does not end within 0.5 s" in line.found
        assert line.remedy

    def test_that_cannot_be_run(self, folder: Path) -> None:
        script(folder / "mpirun", "").write_text("no program")
        line = found()["mpirun"]
        assert line.verdict == NOTE
        assert "cannot be run" in line.found

    def test_that_is_not_there(self, folder: Path) -> None:
        line = found()["mpirun"]
        assert (line.found, line.verdict) == ("not on PATH", NOTE)
        assert "Open MPI v4.1.8" in line.remedy
        assert "horovodrun --gloo" in line.remedy
        assert "not needed" in found(Built("torch", mpi=False, gloo=True))["mpirun"].remedy

    def test_beside_a_horovod_without_mpi(self, folder: Path) -> None:
        script(folder / "mpirun", RUN)
        line = found(Built("torch", mpi=False, gloo=True))["mpirun"]
        assert line.verdict == NOTE
        assert "built without MPI" in line.found
        assert "horovodrun --gloo" in line.remedy

    @pytest.mark.skipif(
        not (Path(sys.prefix) / "bin" / "mpirun").exists(),
        reason="no Open MPI of the package index in this environment",
    )
    @pytest.mark.parametrize("agents", ["ssh : rsh : false", "ssh : rsh"])
    def test_a_real_one_without_ssh(self, agents: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for tool in ("sh", "false", "env", "uname", "hostname"):
            if place := shutil.which(tool):
                (folder / tool).symlink_to(place)
        (folder / "mpirun").symlink_to(Path(sys.prefix) / "bin" / "mpirun")
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", agents)
        monkeypatch.setenv("OPAL_PREFIX", sys.prefix + "/.")
        for program in ("_OF_HOROVOD", "_OF_MPI4PY"):
            monkeypatch.setattr(launchers, program, OF_MPI4PY)
        lines = found()
        if agents.endswith("false"):
            assert lines["mpirun"].verdict == lines["mpi4py"].verdict == OK, lines
        else:
            assert "export OMPI_MCA_plm=isolated" in lines["mpirun"].remedy


class TestMpi4py:
    @pytest.fixture(autouse=True)
    def mpirun(self, folder: Path) -> None:
        script(folder / "mpirun", RUN + 'for i in $(seq $n); do SIZE=$n "$@"; done')

    def test_of_horovods_mpi(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launchers.metadata, "version", {"mpi4py": "4.1.2"}.__getitem__)
        assert found()["mpi4py"] == Finding("mpi4py", "4.1.2", OK)

    def test_of_another_mpi(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launchers.metadata, "version", {"mpi4py": "4.1.2"}.__getitem__)
        line = found(Built("torch", True, True, libraries=("/a/libmpi.so.40", "/b/libmpi.so.12")))["mpi4py"]
        assert line.verdict == NOTE
        assert line.remedy == "export MPI4PY_LIBMPI=/a/libmpi.so.40"
        monkeypatch.setattr(launchers, "_OF_MPI4PY", "print('ranks=1.')")
        assert "do not find each other" in found()["mpi4py"].found

    def test_that_is_not_there(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def version(name: str) -> str:
            raise launchers.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(launchers.metadata, "version", version)
        line = found()["mpi4py"]
        assert line.verdict == NOTE
        assert 'pip install "hvd_compress[mpi]"' in line.remedy


class TestHorovodrun:
    def test_starts_ranks(self, folder: Path) -> None:
        assert found()["horovodrun"] == Finding("horovodrun", str(folder / "horovodrun"), OK)

    def test_that_is_not_on_path(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        line = found()["horovodrun"]
        assert (line.verdict, line.found) == (NOTE, f"{folder}/horovodrun, not on PATH")
        assert f"put {folder} first on PATH" in line.remedy

    def test_of_another_environment(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = script(tmp_path_factory.mktemp("other") / "horovodrun", "exit 0")
        monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
        line = found()["horovodrun"]
        assert (line.verdict, line.found) == (NOTE, f"{other}, of another environment")
        assert f"put {folder} first on PATH" in line.remedy

    def test_with_a_home_that_cannot_be_written(self, folder: Path) -> None:
        text = (
            '[ "$1" = --disable-cache ] || { echo "Traceback (most recent call last):"; echo "OSError: no"; exit 1; }'
        )
        script(folder / "horovodrun", text)
        line = found()["horovodrun"]
        assert (line.verdict, line.found) == (NOTE, f"{folder}/horovodrun: OSError: no")
        assert "--disable-cache" in line.remedy

    @pytest.mark.parametrize("module", [True, False])
    def test_that_is_missing(self, module: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "horovodrun").unlink()
        monkeypatch.setattr(launchers.sys, "executable", str(script(folder / "python", f"exit {1 - module}")))
        lines = found()
        assert lines["horovodrun"].verdict == NOTE
        assert ("python -m horovod.runner.launch" in lines["horovodrun"].remedy) == module
        assert "hvd-compress build-horovod" in lines["horovodrun"].remedy
        assert ("launcher" in lines) == (not module)

    def test_the_one_of_this_environment(self) -> None:
        pytest.importorskip("horovod", reason="this environment has no Horovod")
        assert launchers._own_horovodrun() == Path(sys.executable).parent / "horovodrun"


def test_nothing_that_starts_ranks_is_missing(folder: Path) -> None:
    script(folder / "horovodrun", "echo broken; exit 1")
    (folder / "python").symlink_to(sys.executable)
    only_mpi = Built("torch", mpi=True, gloo=False, library="Open MPI v4.1.8")
    lines = found(only_mpi)
    # the module horovod.runner.launch uses mpirun too
    assert lines["launcher"].verdict == MISSING
    assert "the mpirun of Horovod's Open MPI v4.1.8" in lines["mpirun"].remedy


def test_what_a_launcher_started_goes_on_starting_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(check, "_version", {"horovod": "0.28.1", "torch": "2.13.0"}.get)
    monkeypatch.setattr(check, "_probe", lambda _: {"mpi": True, "gloo": True, "nccl": False})
    monkeypatch.setattr(check, "launchers", lambda _: pytest.fail("ranks were started by ranks"))
    assert [f.what for f in check._horovod()] == ["horovod", "torch", "horovod.torch", "tensorflow"]


def test_an_attempt_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    outcome = attempt(["/bin/sh", "-c", f"sleep 60 & echo $! > {told}; wait"], 3.0)
    assert (outcome.code, outcome.is_good) == (None, False)
    status = Path(f"/proc/{told.read_text().strip()}/status")
    for _ in range(100):
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.1)
    pytest.fail("what the command had started still runs")


def test_opal_prefix_of_the_hook_is_not_for_other_mpis(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/sh", "-c", "echo ${OPAL_PREFIX-unset} ${HOROVOD_CONTROLLER-unset}"]
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("OPAL_PREFIX", sys.prefix)
    assert attempt(command, 10).text.split() == ["unset", "unset"]
    monkeypatch.setenv("OPAL_PREFIX", "/opt/mpi")
    assert attempt(command, 10).text.split() == ["/opt/mpi", "unset"]
