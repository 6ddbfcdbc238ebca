"""Long waits: a warning, an end where users have asked for one, and a note on the error that ends them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import logging, threading, time
from hvd_compress.waiting import open_waits, shut_down_by, waiting

logging.basicConfig(format="%(message)s")
ended = threading.Event()
shut_down_by("a framework", ended.set)
try:
    with waiting("for Godot"):
        if not ended.wait({patience}):
            print("nobody ended it")
        raise RuntimeError("the collective failed")
except RuntimeError as error:
    print("notes", getattr(error, "__notes__", []))
print("open", len(open_waits))
"""


def run(patience: float, **variables: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).format(patience=patience)
    environment = {f"HOROVOD_STALL_{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-c", program], env={"PATH": "", **environment, "HOROVOD_RANK": "3"}, text=True,
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip


def test_a_wait_that_is_longer_than_users_allow_is_ended_and_told() -> None:
    done = run(60.0, CHECK_TIME_SECONDS="0.2", SHUTDOWN_TIME_SECONDS="0.6")
    assert "nobody ended it" not in done.stdout
    assert "this rank (3) has waited for" in done.stdout, "the error has a note"
    assert "open 0" in done.stdout
    warned, ended = done.stderr.splitlines()
    assert "for Godot. Some rank is elsewhere" in warned
    assert "Horovod is shut down" in ended


@pytest.mark.parametrize(
    "variables",
    [
        {"CHECK_TIME_SECONDS": "0.2"},
        # Horovod, too, ignores an end that comes before the warning
        {"CHECK_TIME_SECONDS": "0.5", "SHUTDOWN_TIME_SECONDS": "0.4"},
    ],
)
def test_without_a_limit_a_long_wait_is_told_and_goes_on(variables: dict[str, str]) -> None:
    done = run(1.5, **variables)
    assert "nobody ended it" in done.stdout
    assert done.stderr.count("for Godot. Some rank is elsewhere") == 1


def test_a_short_wait_is_not_told() -> None:
    done = run(0.3)
    assert done.stderr == ""
    assert "notes []" in done.stdout
