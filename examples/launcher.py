"""Run one of the MNIST examples on several ranks, pass rank 0's lines on, and return its results."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PREFIX = re.compile(r"\[\d+\]<std(?:out|err)>:")  # horovodrun's, before each line of a rank
BAR_SECONDS_WITHOUT_TERMINAL = 15


class RunError(RuntimeError):
    """Raised when the training failed or took too long; the message holds the end of its output."""


def train(
    ranks: int,
    *arguments: str,
    limit_seconds: float,
    launch: tuple[str, ...] = ("--gloo",),
    script: str = "pytorch_mnist.py",
) -> dict[str, Any]:
    """Return what rank 0 of `script *arguments` reports.

    Raises:
        RunError: the ranks failed, or were ended after `limit_seconds`.
    """
    bin_folder = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "result.json"
        command = [str(bin_folder / "horovodrun"), *launch, "-np", str(ranks)]
        command += [sys.executable, str(Path(__file__).with_name(script)), *arguments, "--json", str(report)]
        environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        # a session of its own, so that the time limit reaches horovodrun and nothing else
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        ) as process:
            try:
                output = _pass_on(process, time.monotonic() + limit_seconds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # horovodrun ends its ranks on this
        if process.returncode != 0 or not report.exists():
            raise RunError(f"{' '.join(command)}\nended with {process.returncode}:\n{output[-4000:]}")
        return json.loads(report.read_text())


def _pass_on(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Show the progress bar of rank 0 until the process closes its output; returns all that came."""
    if process.stdout is None:
        raise ValueError("the process was started without a pipe")
    show = _Bar()
    output: list[str] = []
    pending = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(timeout=max(0.0, deadline - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                process.wait()
                return "".join(output) + pending
            *lines, pending = re.split(r"(?<=[\r\n])", pending + chunk.decode(errors="replace"))
            for line in lines:
                output.append(line)
                show(PREFIX.sub("", line))
    raise RunError(f"no end within the time limit; the last lines:\n{''.join(output)[-4000:]}")


class _Bar:
    """Draws tqdm's line in place on a terminal, and now and then elsewhere."""

    def __init__(self) -> None:
        self.last = 0.0
        self.finished = False

    def __call__(self, line: str) -> None:
        text = line.rstrip("\r\n")
        if self.finished or not re.search(r"\d+%\|", text):
            return
        self.finished = re.search(r" (\d+)/\1 ", text) is not None
        if sys.stdout.isatty():
            print(f"\r{text}", end="\n" if self.finished else "", flush=True)
        elif self.finished or time.monotonic() - self.last > BAR_SECONDS_WITHOUT_TERMINAL:
            self.last = time.monotonic()
            print(text, flush=True)
