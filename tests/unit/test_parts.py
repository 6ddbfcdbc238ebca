"""`make test`, `test-rest` and `test-exhaustive` together run every test once, and every case in some start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parallel.launch import LAUNCHERS

ROOT = Path(__file__).parents[2]
# stands in for Python, and notes what it is to run
NOTE = """#!{python}
import json, sys
with open({file!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""
# one session after the other: frameworks are imported once
COLLECT = """
import json, sys
import pytest

class Collected:
    def __init__(self):
        self.ids, self.others = [], []

    def pytest_deselected(self, items):
        self.others += [item.nodeid for item in items]

    def pytest_collection_finish(self, session):
        self.ids = [item.nodeid for item in session.items]

found = []
for arguments in json.loads(sys.argv[1]):
    collected = Collected()
    code = pytest.main([*arguments, "--collect-only", "-qqq", "-p", "no:cacheprovider"], plugins=[collected])
    assert code == 0, (code, arguments)
    found.append([collected.ids, collected.others])
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
"""


def sessions_of(folder: Path, *part: str) -> list[list[str]]:
    """The arguments of each call of pytest that `ci/test.sh` makes for a part."""
    noted, python = folder / f"noted-{'-'.join(part)}", folder / "python"
    python.write_text(NOTE.format(python=sys.executable, file=str(noted)))
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "ci/test.sh", *part], cwd=ROOT, check=True, timeout=60, env=environment)
    commands = [json.loads(line) for line in noted.read_text().splitlines()]
    assert all(command[:2] == ["-m", "pytest"] for command in commands)
    # one of them runs beside the others; here tests of one process come first, then elastic runs, then other ranks
    return sorted((command[2:] for command in commands), key=_place)


def _place(arguments: list[str]) -> int:
    if "--ignore" in arguments:
        return 0
    return 1 if "tests/parallel" not in arguments else 2


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
def test_all_parts_together_are_all_tests_once(tmp_path: Path) -> None:
    of_parts = [sessions_of(tmp_path, *part) for part in ([], ["rest"], ["exhaustive"])]
    # those of one process first: in this order the frameworks that they import get along in one process
    sessions = [arguments for sessions in zip(*of_parts, strict=True) for arguments in sessions]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(sessions), str(tmp_path / "found")],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found = json.loads((tmp_path / "found").read_text())
    done_once = sum((Counter(ids) for ids, _ in found), Counter())
    # a session of each kind looks at all tests of its kind
    everything = sum((Counter(found[i][0] + found[i][1]) for i in range(0, len(found), len(of_parts))), Counter())
    # `Thorough` cases are no tests of one start, which another start of the same cases makes up for
    elsewhere = {_without_start(name) for name in done_once}
    left_out = [name for name in everything - done_once if _without_start(name) not in elsewhere]
    assert left_out == []
    assert done_once <= everything
    assert set(everything.values()) == {1}
    assert all(ids for ids, _ in found)


def _without_start(name: str) -> str:
    """The id of a test without the number of ranks and the launcher."""
    return re.sub(rf"\[(?:\d+-)?(?:{'|'.join(LAUNCHERS)})-", "[", name)
