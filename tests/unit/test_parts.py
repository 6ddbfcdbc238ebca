"""`make test` and `make test-rest` together run every test once, and every case of a worker in some start."""

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

from tests.parallel.schedule import start_of

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
    noted, python = folder / f"noted-{len(part)}", folder / "python"
    python.write_text(NOTE.format(python=sys.executable, file=str(noted)))
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "ci/test.sh", *part], cwd=ROOT, check=True, timeout=60, env=environment)
    commands = [json.loads(line) for line in noted.read_text().splitlines()]
    assert all(command[:2] == ["-m", "pytest"] for command in commands)
    # the two run at once, in any order; here tests of one process come first
    return sorted((command[2:] for command in commands), key=lambda arguments: "--ignore" not in arguments)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
def test_both_parts_together_are_all_tests_once(tmp_path: Path) -> None:
    of_parts = sessions_of(tmp_path), sessions_of(tmp_path, "rest")
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
    everything = sum((Counter(found[i][0] + found[i][1]) for i in (0, -1)), Counter())
    # `Thorough` cases are no tests of one start, which another start of the same cases makes up for
    elsewhere = {_without_start(name) for name in done_once}
    left_out = [name for name in everything - done_once if _without_start(name) not in elsewhere]
    assert left_out == []
    assert done_once <= everything
    assert set(everything.values()) == {1}
    assert all(ids for ids, _ in found)


def _without_start(name: str) -> str:
    """The id of a test without the number of ranks and the launcher."""
    return re.sub(r"\[(?:\d+-)?(?:gloo|mpi|torchrun)-", "[", name)


def ids(file: str, *tests: str) -> list[str]:
    return [f"tests/parallel/{file}.py::{test}" for test in tests]


@pytest.mark.parametrize(
    "served",
    [
        ids("test_training", "test_training[2-gloo-a]") + ids("test_choosing", "test_torch[2-gloo]"),
        ids("test_ranks", "test_ranks_with_tensorflow[4-mpi-a]", "test_every_rank_took_part[4-mpi-ranks_tensorflow]")
        + ids("test_tensorflow", "test_values[4-mpi-b[c]]"),
        ids("test_hierarchical", "test_torch[aabb-mpi-a]", "test_torch[aabb-mpi-b]"),
        ids("test_one_rank", "test_one_rank[a]", "test_it_ended_well"),
        ids("test_cluster", "test_a")
        + ids("test_cluster_ends", "test_b")
        + ids("test_guides", "test_a_virtual_cluster"),
    ],
)
def test_one_process_runs_what_one_start_serves(served: list[str]) -> None:
    assert len({start_of(nodeid) for nodeid in served}) == 1


@pytest.mark.parametrize(
    "each_its_own",
    [
        ids("test_training", "test_training[2-gloo-a]", "test_training[4-mpi-a]"),
        ids("test_choosing", "test_torch[2-gloo]", "test_tensorflow[2-gloo-a]"),
        ids(
            "test_eventgrad",
            "test_eventgrad[2-gloo-a]",
            "test_tensorflow[2-gloo]",
            "test_one_sided[2-horovodrun-mpi-a]",
        ),
        ids("test_hierarchical", "test_torch[aabb-mpi-a]", "test_torch[abab-gloo-a]", "test_tensorflow[aabb-mpi-a]"),
        ids("test_elastic_compression", "test_ranks_come_and_go[auto-replace]", "test_ranks_come_and_go[onebit-join]"),
    ],
)
def test_different_starts_may_run_at_once(each_its_own: list[str]) -> None:
    assert len({start_of(nodeid) for nodeid in each_its_own}) == len(each_its_own)
