#!/usr/bin/env python3
"""Write the .lock files beside ci/requirements*.txt: the same pins, each with the hashes of its files on the index.

    python ci/lock.py        (needs uv: `pip install uv`)

It keeps the hashes of wheels for Linux (x86-64 and Arm, glibc) and for the Pythons that set-up takes. Run it after a
change of a requirements file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CI = Path(__file__).parent
PYTHONS = range(11, 15)  # 3.11 to 3.14
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;#]+)\s*(?P<marker>;[^#]*)?")


class LockError(RuntimeError):
    """Raised for a pin that cannot be locked; the message says which and why."""


def fits(wheel: str) -> bool:
    """Tell whether an environment that set-up can make might install this wheel."""
    python, abi, platform = wheel.removesuffix(".whl").split("-")[-3:]
    if platform != "any" and not re.search(r"manylinux\w*_(?:x86_64|aarch64)", platform):
        return False
    if "py3" in python.split("."):
        return True
    tags = {f"cp3{minor}" for minor in PYTHONS}
    return (bool(tags & set(python.split("."))) and (abi in tags)) or abi == "abi3"


def pins(requirements: Path) -> Iterator[tuple[str, str, str]]:
    """Return name, version and marker of each line; raises LockError for one that pins nothing."""
    for line in requirements.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pin = PIN.match(line)
            if pin is None:
                raise LockError(f"{requirements.name}: not of the form name==version: {line!r}")
            yield pin["name"], pin["version"], (pin["marker"] or "").strip()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes(requirements: Path) -> dict[str, list[str]]:
    """Ask the index for the hashes of each package's wheels that fit."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pylock.toml"
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--universal"]
        command += ["--format", "pylock.toml", "--output-file", str(out), str(requirements)]
        subprocess.run(command, check=True)
        packages: list[dict[str, Any]] = tomllib.loads(out.read_text())["packages"]
    found: dict[str, list[str]] = {}
    for package in packages:
        files = [w["hashes"]["sha256"] for w in package.get("wheels", ()) if fits(w["url"].rpartition("/")[2])]
        if not files and "sdist" in package:
            files = [package["sdist"]["hashes"]["sha256"]]
        found[canonical(package["name"])] = sorted(files)
    return found


def lock(requirements: Path) -> None:
    known = hashes(requirements)
    lines = [f"# Made by ci/lock.py of {requirements.name}; change that one."]
    for name, version, marker in pins(requirements):
        files = known.get(canonical(name))
        if not files:
            raise LockError(f"{requirements.name}: the index has no file of {name} {version} that fits")
        lines += [f"{name}=={version}{' ' * bool(marker)}{marker} \\"]
        lines += [f"    --hash=sha256:{file} \\" for file in files[:-1]] + [f"    --hash=sha256:{files[-1]}"]
    requirements.with_suffix(".lock").write_text("\n".join(lines) + "\n")


def main() -> int:
    for requirements in sorted(CI.glob("requirements*.txt")):
        # torch has no lock, see requirements-torch.txt
        if requirements.name != "requirements-torch.txt":
            lock(requirements)
    return 0


if __name__ == "__main__":
    sys.exit(main())
