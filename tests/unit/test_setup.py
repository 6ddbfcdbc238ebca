"""What `make setup` and the demo download and say: pins with hashes, lines of a log that a person can read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRESS = ROOT / "ci" / "progress.py"
LOCKED = [file for file in sorted((ROOT / "ci").glob("requirements*.txt")) if file.name != "requirements-torch.txt"]


@pytest.mark.parametrize("requirements", LOCKED, ids=lambda file: file.name)
def test_lock_holds_the_pins_with_hashes(requirements: Path) -> None:
    pins = re.findall(r"^([^\s#;]+==[^\s#;]+)", requirements.read_text(), re.M)
    locked = dict(
        re.findall(r"^(\S+==\S+)[^\n]*\\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", _lock(requirements), re.M)
    )
    assert list(locked) == pins, f"run ci/lock.py: {requirements.name} and its .lock differ"


def _lock(requirements: Path) -> str:
    return requirements.with_suffix(".lock").read_text()


def progress(*arguments: str, locale: str = "C") -> str:
    done = subprocess.run(
        [sys.executable, "-I", str(PROGRESS), *arguments], capture_output=True, timeout=60, env={"LC_ALL": locale}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()  # raises if a character was cut


def now(log: Path, text: str, *, first: int = 1, site: Path | None = None) -> str:
    log.write_text(text)
    return progress("now", str(log), str(first), str(site or log.parent), "0").strip()


class TestProgress:
    def test_what_pip_does_now(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert now(log, "Collecting numpy==2.4.6\n  Using cached metadata") == "collecting numpy==2.4.6"
        assert now(log, "Collecting a\n  Downloading https://x.example/a-1.whl (3 MB)\n") == "downloading a-1.whl"
        assert now(log, "Collecting a\n$ next command\n", first=2) == ""

    def test_how_many_packages_are_installed(self, tmp_path: Path) -> None:
        site = tmp_path / "site"
        (site / "a-1.dist-info").mkdir(parents=True)
        text = "Collecting c\nInstalling collected packages: a, b, c\n  Successfully uninstalled setuptools-1\n"
        assert now(tmp_path / "log", text, site=site) == "installed 1 of 3 packages"

    @pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
    def test_characters_stay_whole_and_reasons_come_once(self, locale: str, tmp_path: Path) -> None:
        log = tmp_path / "log"
        reason = "ERROR: No matching distribution found for " + "é" * 400
        log.write_text(f"{reason}\n" * 6 + "the end: «é»\n", encoding="utf-8")
        told = progress("failure", str(log), "1", locale=locale)
        assert told.count("No matching distribution") == 1
        assert "the end: " in told
