"""Find out whether horovodrun and mpirun start ranks, by starting some with a time limit: what is on PATH may fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvd_compress.cli.finding import MISSING, NOTE, OK, Finding, last_line
from hvd_compress.missing import BUILD

__all__ = ["Built", "CommandResult", "attempt", "launchers"]

_START_SECONDS, _RANKS_SECONDS, _END_SECONDS = 60.0, 120.0, 5.0
_OF_HOROVOD = "import horovod.{} as hvd; hvd.init(); print('ranks=%d.' % hvd.size(), flush=True); hvd.shutdown()"
_OF_MPI4PY = "from mpi4py import MPI; print('ranks=%d.' % MPI.COMM_WORLD.size, flush=True)"


@dataclass(frozen=True)
class Built:
    """Says what a Horovod that can be imported was built with.

    Args:
        framework: whose Horovod was asked, "torch" or "tensorflow".
        mpi: whether it knows MPI.
        gloo: whether it knows Gloo.
        library: name and version of the MPI library that it loads; empty if that is not known.
        libraries: files of the MPI libraries that a process with Horovod and mpi4py loads, Horovod's first.
    """

    framework: str
    mpi: bool
    gloo: bool
    library: str = ""
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandResult:
    """Says how a command ended.

    Args:
        code: its exit code, or None if it did not end within its time or could not be run.
        text: what it printed, or why it could not be run.
    """

    code: int | None
    text: str

    @property
    def is_good(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        # launchers frame their messages, and say what matters first
        lines = [line.strip() for line in self.text.splitlines() if re.search(r"\w", line)]
        if any(line.startswith("Traceback") for line in lines):
            return last_line(self.text)
        return lines[0] if lines else f"ends with {self.code}"


def attempt(command: Sequence[str], seconds: float, changes: Mapping[str, str] | None = None) -> CommandResult:
    """Run a command without input, for so many seconds at most.

    Args:
        command: program and arguments.
        seconds: after which it is ended.
        changes: of the environment.
    """
    # a file, since whoever holds a pipe open could keep us waiting
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
                env={**_environment(), **(changes or {})},
            )  # fmt: skip
        except OSError as error:
            return CommandResult(None, f"cannot be run: {error.strerror or error}")
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return CommandResult(None, f"does not end within {seconds:g} s")
        printed.seek(0)
        return CommandResult(code, printed.read().decode(errors="replace"))


def _environment() -> dict[str, str]:
    """Make the environment that a shell of this user would have."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")}
    # set by a hook of this environment for its own Open MPI, in Python processes alone
    if environment.get("OPAL_PREFIX") == sys.prefix:
        del environment["OPAL_PREFIX"]
    return {**environment, "TF_CPP_MIN_LOG_LEVEL": "3"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which passes SIGTERM on to the ranks: they are no longer in its group."""
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_)
            process.wait(_END_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def launchers(built: Built) -> Iterator[Finding]:
    """Look at horovodrun, mpirun and mpi4py, a line for each, and one more if nothing starts ranks."""
    line, starts = _horovodrun(built)
    yield line
    mpirun = _Mpirun(built)
    line, starts_too = mpirun.look()
    yield line
    if starts_too:
        yield _mpi4py(built, mpirun)
    if not starts and not starts_too:
        yield Finding("launcher", "nothing here starts ranks", MISSING, f"mend one of the lines above, or {BUILD}")


def _horovodrun(built: Built) -> tuple[Finding, bool]:
    """Look at horovodrun; returns its line, and whether it starts ranks."""
    own, on_path = _own_horovodrun(), shutil.which("horovodrun")
    options = ["-np", "1", "--gloo" if built.gloo else "--mpi", sys.executable, "-c", ""]
    first = CommandResult(None, "not there")
    if own is not None:
        where = f"put {own.parent} first on PATH, as activating this environment does"
        first = attempt([str(own), *options], _START_SECONDS)
        if first.is_good and on_path is None:
            return Finding("horovodrun", f"{own}, not on PATH", NOTE, where), True
        if first.is_good and on_path is not None and not own.samefile(on_path):
            return Finding("horovodrun", f"{on_path}, of another environment", NOTE, where), True
        if first.is_good:
            return Finding("horovodrun", str(own), OK), True
        if attempt([str(own), "--disable-cache", *options], _START_SECONDS).is_good:
            remedy = "horovodrun --disable-cache: it cannot write to .horovod in the home folder"
            return Finding("horovodrun", f"{own}: {first.reason}", NOTE, remedy), True
    found = f"{own or 'horovodrun'}: {first.reason}"
    module = ["-m", "horovod.runner.launch"]
    if attempt([sys.executable, *module, *options], _START_SECONDS).is_good:
        return Finding("horovodrun", found, NOTE, f"python {' '.join(module)} is the same; or {BUILD}"), True
    return Finding("horovodrun", found, NOTE, f"{BUILD} installs it, and what it needs"), False


def _own_horovodrun() -> Path | None:
    """Return the horovodrun that was installed with the Horovod that this Python imports."""
    try:
        files = metadata.distribution("horovod").files or []
    except metadata.PackageNotFoundError:
        return None
    places = (Path(os.path.abspath(file.locate())) for file in files if file.name == "horovodrun")
    return next((place for place in places if place.exists()), None)


class _Mpirun:
    """Tries the mpirun on PATH.

    Args:
        built: Horovod, whose ranks it is to start.
    """

    def __init__(self, built: Built) -> None:
        self._built = built
        self._path = shutil.which("mpirun") or ""
        self._version = attempt([self._path, "--version"], _START_SECONDS) if self._path else CommandResult(None, "")
        self._is_open_mpi = bool(re.search("Open MPI|OpenRTE", self._version.text))
        self._theirs = f"of Horovod's {built.library}" if built.library else "that Horovod was built with"
        self._instead = "; horovodrun --gloo needs no MPI" if built.gloo else ""

    def look(self) -> tuple[Finding, bool]:
        """Look at mpirun; returns its line, and whether it starts ranks of Horovod."""
        built = self._built
        if not self._path:
            return self._absent(), False
        if not self._version.is_good:
            return self._note(self._version.reason, f"install its MPI again{self._instead}"), False
        alone = self.start(1, "")
        if not alone.is_good:
            return self._does_not_start(alone), False
        if not built.mpi:
            remedy = f"start ranks with horovodrun --gloo; where mpicxx is on PATH too, {BUILD} adds MPI"
            return self._note("Horovod was built without MPI, so its ranks would not find each other", remedy), False
        both = self.start(2, _OF_HOROVOD.format(built.framework))
        if both.is_good and _sizes(both) == [2, 2]:
            root = ", as root with --allow-run-as-root" if self._needs_leave() else ""
            return Finding("mpirun", f"{self._path}, {self._name()}{root}", OK), True
        lonely = _sizes(both) == [1, 1]
        reason = "its ranks do not find each other" if lonely else f"ranks of Horovod fail: {both.reason}"
        remedy = f"put the mpirun {self._theirs} first on PATH, or build Horovod for this one: {BUILD}{self._instead}"
        return self._note(f"{self._name()}, {reason}", remedy), False

    def start(self, ranks: int, program: str) -> CommandResult:
        """Start a Python program on this host."""
        return self._start(ranks, program, {})

    def _start(self, ranks: int, program: str, changes: Mapping[str, str]) -> CommandResult:
        flags = ["--allow-run-as-root"] if self._needs_leave() else []
        # so that hosts with one core start two ranks too
        flags += ["--oversubscribe"] if self._is_open_mpi else []
        command = [self._path, *flags, "-np", str(ranks), sys.executable, "-c", program]
        return attempt(command, _RANKS_SECONDS if program else _START_SECONDS, changes)

    def _needs_leave(self) -> bool:
        return self._is_open_mpi and os.geteuid() == 0

    def _name(self) -> str:
        """Say which MPI it belongs to."""
        text = self._version.text
        hydra = re.search(r"HYDRA.*?Version:\s*(\S+)", text, re.S)
        found = f"Hydra {hydra[1]}" if hydra else next(iter(text.strip().splitlines()), "")
        return re.sub(r"^mpirun \((.*)\)", r"\1", found)

    def _note(self, reason: str, remedy: str) -> Finding:
        return Finding("mpirun", f"{self._path}: {reason}", NOTE, remedy)

    def _absent(self) -> Finding:
        built = self._built
        if not built.mpi:
            return Finding("mpirun", "not on PATH", NOTE, "not needed: Horovod was built without MPI")
        return Finding("mpirun", "not on PATH", NOTE, f"put the mpirun {self._theirs} on PATH{self._instead}")

    def _does_not_start(self, alone: CommandResult) -> Finding:
        remedies = ["install its MPI again"]
        reason = alone.reason
        if "plm_rsh_agent" in alone.text:
            reason, remedies = "it starts nothing, not even here, without ssh", ["install ssh"]
        if self._is_open_mpi and self._start(1, "", {"OMPI_MCA_plm": "isolated"}).is_good:
            remedies += ["export OMPI_MCA_plm=isolated, with which it starts ranks of this host"]
        return self._note(reason, f"{', or '.join(remedies)}{self._instead}")


def _mpi4py(built: Built, mpirun: _Mpirun) -> Finding:
    """Check that mpi4py and Horovod load the same MPI: some of our messages go past Horovod."""
    try:
        version = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        remedy = 'needed for transport="mpi" and "one_sided" only: pip install "hvd_compress[mpi]"'
        return Finding("mpi4py", "not installed", NOTE, remedy)
    libraries = built.libraries
    again = f"export MPI4PY_LIBMPI={libraries[0]}" if libraries else "pip install --force-reinstall mpi4py"
    if len(libraries) > 1:
        found = f"{version}, loads {libraries[1]}, but Horovod {libraries[0]}"
        return Finding("mpi4py", found, NOTE, again)
    outcome = mpirun.start(2, _OF_MPI4PY)
    if outcome.is_good and _sizes(outcome) == [2, 2]:
        return Finding("mpi4py", version, OK)
    reason = "its ranks do not find each other" if _sizes(outcome) == [1, 1] else outcome.reason
    return Finding("mpi4py", f"{version}: {reason}", NOTE, again)


def _sizes(outcome: CommandResult) -> list[int]:
    """Return, for each rank, of how many ranks it says it is one."""
    return [int(size) for size in re.findall(r"ranks=(\d+)\.", outcome.text)]
