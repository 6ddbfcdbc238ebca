"""Find out whether this Horovod can exchange compressed gradients, and what is missing.

As one process it starts horovodrun and mpirun on this host, for a moment, since what lies on PATH may not work. Started
by one of them, it tries the collectives that exchanges need, with real ranks. Then rank 0 prints all that it found, and
each other rank prints what is missing where it runs. The exit code is 1 if anything is missing.

With --json rank 0 prints "missing" (whether anything is, on any rank), "rank" and "findings", each with "what",
"found", "verdict" ("ok", "note" or "MISSING") and "remedy", empty where all is well; the others print to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from itertools import chain
from typing import Any

import numpy as np

from hvd_compress import (
    BF16,
    QSGD,
    Adaptive,
    Blockwise,
    EFSignSGD,
    Natural,
    OneBit,
    Percentile,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    __version__,
)
from hvd_compress.cli.finding import MISSING, NOTE, OK, Finding, last_line
from hvd_compress.cli.json_output import add_json_argument, print_json, working
from hvd_compress.cli.launchers import Built, attempt, launchers
from hvd_compress.cli.ranks import OpenRanks, is_launched, launched, open_ranks
from hvd_compress.compressors import Compressor
from hvd_compress.errors import MissingError
from hvd_compress.kernels.jit import unkept
from hvd_compress.loopback import Loopback
from hvd_compress.missing import BUILD

__all__ = ["HELP", "Finding", "add_arguments", "run"]

HELP = "find out whether this Horovod can do it, and what is missing"

# the oldest versions that are known to work
_LEAST = {"torch": (2, 1), "tensorflow": (2, 15), "keras": (2, 15), "horovod": (0, 28), "numpy": (1, 26)}
# ranks of the first framework that works are started: torch takes a third as long
_DISTRIBUTIONS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly")}
_BUILD = f"build Horovod for it, and install it: {BUILD}"
# each line that it prints as JSON counts even if the next step crashes
_PROBE = """
import ctypes, json, os, re, sys
print(json.dumps({{"broken": "importing it ends the process"}}), flush=True)
try:
    import {0}
except Exception as error:
    print(json.dumps({{"broken": type(error).__name__ + ": " + str(error).partition(chr(10))[0]}}))
    sys.exit(1)
print(json.dumps({{"broken": "", "version": {0}.__version__}}), flush=True)
import horovod
try:
    with open(os.path.join(os.path.dirname(horovod.__file__), "metadata.json")) as file:
        print(json.dumps({{"built_for": json.load(file)["{1}"]}}), flush=True)
except (OSError, KeyError, ValueError):
    pass
import horovod.{0}.mpi_ops
import horovod.{0} as hvd
built = {{"mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built())}}
print(json.dumps(built), flush=True)
if "{0}" == "torch":
    from hvd_compress._torch.device import why_not
    print(json.dumps({{"host_because": why_not() or ""}}), flush=True)
def loaded():
    with open("/proc/self/maps") as maps:
        return sorted({{os.path.realpath(line.split()[-1]) for line in maps if re.search(r"/libmpi(ch)?[.]so", line)}})
libraries = loaded() if built["mpi"] else []
if libraries:
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(libraries[0]).MPI_Get_library_version(text, ctypes.byref(length))
    print(json.dumps({{"library": text.value.decode(errors="replace"), "libraries": libraries}}), flush=True)
    try:
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except Exception:
        pass
    libraries += [library for library in loaded() if library not in libraries]
    print(json.dumps({{"libraries": libraries}}), flush=True)
"""
# what Horovod's list of versions calls them
_BUILT_FOR = {"torch": "pytorch", "tensorflow": "tensorflow"}
_PROBE_SECONDS = 120
_TCP_FLAGS, _USUAL_TCP_FLAGS = "OMPI_MCA_btl_tcp_flags", "send,put,inplace,need-ack,need-csum,hetero-rdma"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line: only --json, since it looks at everything."""
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print a line for each finding as soon as it is found; returns the same exit code on all ranks."""
    rank, opened = launched("rank"), None
    show = _Lines(rank, options.json)
    with working(options.json):
        # other ranks of a host would find the same, and compete for its cores
        looks = not is_launched() or launched("local rank") == 0
        for finding in chain(_here(), _horovod(), _kernels()) if looks else ():
            show(finding)
        if is_launched():
            try:
                opened = open_ranks()
            except MissingError as error:
                show(Finding("ranks", str(error), MISSING, _BUILD))
        else:
            show(Finding("ranks", "one process", NOTE, "horovodrun -np 2 --gloo hvd-compress check tries real ones"))
        for finding in () if opened is None else _with_ranks(opened):
            show(finding)
        missing = any(f.verdict == MISSING for f in show.findings)
        if opened is not None:
            missing = any(opened.ranks.maximum([float(missing)]))
    if rank == 0 and options.json:
        print_json({"missing": missing, "rank": rank, "findings": [asdict(f) for f in show.findings]})
    elif rank == 0:
        print("Something is missing." if missing else "All that is needed is here.", flush=True)
    return int(missing)


class _Lines:
    """Prints findings as they come: all on rank 0, elsewhere those of what is missing.

    Args:
        rank: the rank that prints.
        as_json: whether rank 0 keeps them for JSON instead.
    """

    def __init__(self, rank: int, as_json: bool) -> None:
        self.findings: list[Finding] = []
        self._rank, self._as_json, self._begun = rank, as_json, False

    def __call__(self, finding: Finding) -> None:
        """Keep a finding, and print it."""
        self.findings.append(finding)
        if self._as_json if self._rank == 0 else finding.verdict != MISSING:
            return
        if not self._begun:
            where = f" of rank {self._rank}" if is_launched() else ""
            _print_line(f"what{where}", "found", "verdict", "remedy")
            self._begun = True
        _print_line(finding.what, finding.found, finding.verdict, finding.remedy)


def _print_line(what: str, found: str, verdict: str, remedy: str) -> None:
    # nearly all findings fit these widths: to wait for the longest would show nothing for half a minute
    print(f"{what:<18}  {found:<44}  {verdict:<7}  {remedy}".rstrip(), flush=True)


def _here() -> Iterator[Finding]:
    """Look at Python, packages and processors."""
    yield Finding("hvd_compress", f"{__version__}, Python {platform.python_version()}", OK)
    yield Finding("numpy", np.__version__, *_age("numpy", np.__version__))
    cores, local = len(os.sched_getaffinity(0)), launched("local size")
    enough = cores >= local
    # Open MPI's mpirun binds each rank to one core
    more = (
        "start fewer ranks per host, or give them more cores (mpirun --bind-to none): kernels and backward share them"
    )
    remedy = "" if enough else more
    yield Finding("cores", f"{cores} for {local} rank{'s' * (local > 1)} on this host", OK if enough else NOTE, remedy)


def _horovod() -> Iterator[Finding]:
    """Look at Horovod, the frameworks, whether they fit each other, and what starts ranks."""
    installed = {f: next(filter(_version, names), None) for f, names in _DISTRIBUTIONS.items()}
    build = (
        _BUILD if any(installed.values()) else f"pip install torch, or tensorflow, then build Horovod for it: {BUILD}"
    )
    version = _version("horovod")
    if version is None:
        yield Finding("horovod", "not installed", MISSING, build)
    else:
        yield Finding("horovod", version, *_age("horovod", version))
    able: list[Built] = []
    for framework, distribution in installed.items():
        if distribution is None:
            yield Finding(framework, "not installed", NOTE, "")
        elif version is None:
            found = _version(distribution) or ""
            yield Finding(framework, found, *_age(framework, found))
        else:
            yield from _framework(framework, distribution, able)
    keras = _version("keras")
    if keras is not None:
        yield Finding("keras", keras, *_age("keras", keras))
    if version is not None and not able:
        yield Finding("framework", "none that Horovod works with", MISSING, build)
    elif able and not is_launched():
        # what has started these processes can start ranks
        yield from launchers(able[0])


def _framework(framework: str, distribution: str, able: list[Built]) -> Iterator[Finding]:
    """Look at a framework and its Horovod; one that can be imported is added to `able`."""
    version, probed = _version(distribution) or "", _probe(framework)
    if isinstance(probed, dict) and probed.get("broken"):
        remedy = f"install it again: pip install --force-reinstall {distribution}"
        yield Finding(framework, f"{version}, cannot be loaded: {probed['broken']}", NOTE, remedy)
        return
    yield Finding(framework, version, *_age(framework, version))
    what = f"horovod.{framework}"
    if isinstance(probed, str):
        # the edge of another framework may be all that is wanted; without any, the last finding says so
        yield Finding(what, probed, NOTE, _BUILD)
        return
    built = Built(framework, probed["mpi"], probed["gloo"], _library(probed), tuple(probed.get("libraries", ())))
    able.append(built)
    parts = [name for name in ("mpi", "gloo", "nccl") if probed[name]]
    found = f"built with {', '.join(parts) or 'neither mpi nor gloo'}"
    other = _other_version(framework, probed)
    if not built.mpi and not built.gloo:
        yield Finding(what, found, MISSING, _BUILD)
    else:
        yield Finding(what, f"{found}, {other}" if other else found, NOTE if other else OK, _BUILD if other else "")
    if (reason := probed.get("host_because")) is not None:
        yield Finding("GPU", f"compressed in host memory: {reason}" if reason else "gradients are compressed there", OK)


def _library(probed: Mapping[str, Any]) -> str:
    """Return the name and version of an MPI library, without whoever has packed it."""
    return str(probed.get("library", "")).partition(",")[0].partition("\n")[0].strip()


def _other_version(framework: str, told: Mapping[str, Any]) -> str:
    """Say that the framework has changed since Horovod was built; returns nothing if it has not."""
    built_for, version = told.get("built_for"), told.get("version")
    return "" if built_for in (None, version) else f"for {framework} {built_for}, but here is {version}"


_COMPRESSORS: tuple[Compressor, ...] = (
    *(OneBit(), Adaptive(), TopK(), Percentile(), QSGD(), Threshold(tau=2.0), BF16()),
    *(EFSignSGD(), Blockwise(), TernGrad(), Natural(), SignSGD()),
)


def _kernels() -> Iterator[Finding]:
    """Check that Numba compiles, and that every compressor's payload can be read again."""
    version = _version("numba") or "not installed"
    gradients = [np.random.default_rng(rank).standard_normal((64, 512)).astype(np.float32) for rank in range(2)]
    for compressor in _COMPRESSORS:
        try:
            first, second = Loopback(2, compressor).allreduce(gradients)
        except Exception as error:  # the user is told whatever a broken Numba or LLVM raises
            reason = f"{type(error).__name__}: {last_line(str(error))}"
            remedy = "reinstall numba; a folder for its cache must be writable (NUMBA_CACHE_DIR)"
            yield Finding("kernels", f"numba {version}, {compressor!r}: {reason}", MISSING, remedy)
            return
        if first.tobytes() != second.tobytes() or not np.isfinite(first).all():
            yield Finding("wire", f"{compressor!r}: ranks decode different values", MISSING, "report this as a bug")
            return
    found = f"numba {version}, all compressors encode and decode"
    if unkept:
        remedy = "export NUMBA_CACHE_DIR as a folder that can be written, so that not each process compiles them anew"
        yield Finding("kernels", f"{found}; they are not kept: {unkept[0]}", NOTE, remedy)
    else:
        yield Finding("kernels", found, OK)


def _with_ranks(opened: OpenRanks) -> Iterator[Finding]:
    """Run the two collectives of an exchange, with values that can only be right."""
    started, ranks = launched("size"), opened.ranks
    size, position = ranks.size, ranks.position
    if size != started:
        remedy = "start them with the mpirun of the MPI that Horovod was built with, or with horovodrun --gloo"
        yield Finding("ranks", f"{started} were started, but do not find each other", MISSING, remedy)
        return
    yield Finding("ranks", f"{size}, {opened.per_host} per host, horovod.{opened.framework}", OK)
    if size > ranks.on_host().size:
        yield from _between_hosts(os.environ)
    # rank r sends to rank i i + 1 bytes of value 16 r + i
    sent = np.concatenate([np.full(i + 1, (16 * position + i) % 251, np.uint8) for i in range(size)])
    received = ranks.run("alltoall", "hvd_compress.cli.check.alltoall", sent, [i + 1 for i in range(size)])
    expected = [(16 * sender + position) % 251 for sender in range(size) for _ in range(position + 1)]
    yield _verdict("alltoall", received.tolist() == expected)
    mine = np.full(position + 1, position % 251, np.uint8)
    gathered = ranks.run("allgather", "hvd_compress.cli.check.allgather", mine)
    yield _verdict("allgather", gathered.tolist() == [r % 251 for r in range(size) for _ in range(r + 1)])


def _between_hosts(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Look at Open MPI over TCP, where a request waits behind what is sent: see docs/guides/slow-links.md."""
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return
    given = environment.get(_TCP_FLAGS, _USUAL_TCP_FLAGS)
    # flags may be a number, in which only Open MPI knows the bit for put
    is_named = not given.isdigit()
    flags = (given if is_named else _USUAL_TCP_FLAGS).split(",")
    if "put" not in flags:
        yield Finding("Open MPI over TCP", "without put", OK)
        return
    remedy = f"where links are slow, try {_TCP_FLAGS}={','.join(flag for flag in flags if flag != 'put')}"
    yield Finding("Open MPI over TCP", "with put" if is_named else f"flags {given}", NOTE, remedy)


def _verdict(collective: str, right: bool) -> Finding:
    remedy = "" if right else "this Horovod moves wrong bytes; " + _BUILD
    return Finding(collective, "right" if right else "wrong values", OK if right else MISSING, remedy)


def _probe(framework: str) -> dict[str, Any] | str:
    """Find out what horovod.<framework> was built with, or why it cannot be imported.

    A dict with "broken" says why the framework itself cannot be imported.
    """
    # in a process of its own: a Horovod that was built for another version of the framework may crash
    program = _PROBE.format(framework, _BUILT_FOR[framework])
    # unbuffered, so that what it prints comes before the traceback that ends it, from Python 3.13 on too
    outcome = attempt([sys.executable, "-u", "-c", program], _PROBE_SECONDS)
    told: dict[str, Any] = {}
    said = []
    for line in outcome.text.splitlines():
        try:
            told.update(json.loads(line))
        except (TypeError, ValueError):
            said.append(line)
    # what follows "gloo" may crash where two MPIs meet; starting ranks shows that
    if outcome.is_good or "gloo" in told or (told.get("broken") and outcome.code is not None):
        return told
    if outcome.code is None:
        return f"cannot be imported within {_PROBE_SECONDS} s"
    if "has not been built" in outcome.text:
        return "built without it"
    if other := _other_version(framework, told):
        return f"built {other}"
    return last_line("\n".join(said)) or f"importing it ends with {outcome.code}"


def _age(name: str, version: str) -> tuple[str, str]:
    """Compare a version with the oldest one that is known to work; returns verdict and remedy."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers >= _LEAST[name]:
        return OK, ""
    least = ".".join(map(str, _LEAST[name]))
    return NOTE, f"{least} and later are known to work"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
