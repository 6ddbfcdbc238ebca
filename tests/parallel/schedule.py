"""Divides tests among processes by the starts of ranks that they ask for."""

from __future__ import annotations

import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

from tests.parallel.launch import TOGETHER

# the first parameters of a test: a number of ranks or another word, and the launcher
_START = re.compile(r"\[(?:(\w*)-)?(gloo|mpi|horovodrun-mpi|torchrun)[]-]")
# where the parameters do not say which start a test asks for
_EACH_STARTS_ITS_OWN = {
    "test_async_server",
    "test_elastic",
    "test_elastic_averaging",
    "test_elastic_compression",
    "test_ending",
    "test_examples",
    "test_guides",
    "test_keras",
    "test_resize",
    "test_tensorflow",
}


class ByStart(LoadScopeScheduling):
    """Hands all tests that one start of ranks serves to one process, since another would make that start again."""

    def _split_scope(self, nodeid: str) -> str:
        return start_of(nodeid)


def start_of(nodeid: str) -> str:
    """Name the start that a test asks for, or what keeps it from running beside other tests of its kind.

    Example:
        >>> start_of("tests/parallel/test_values.py::test_values[2-gloo-a]")
        '2-gloo 0'
    """
    path, _, test = nodeid.partition("::")
    file = Path(path).stem
    if "cluster" in nodeid:
        return "cluster"  # a machine has one virtual cluster at a time
    found = _START.search(test)
    if found is None:
        return nodeid if file in _EACH_STARTS_ITS_OWN else file
    framework = "tensorflow" if "tensorflow" in nodeid else "torch"
    ranks, launcher = found.groups()
    families = TOGETHER.get((int(ranks), launcher), ()) if ranks and ranks.isdigit() else ()
    for number, family in enumerate(families):
        if file in (of for topic, of in family.items() if ("tensorflow" in topic) == (framework == "tensorflow")):
            return f"{ranks}-{launcher} {number}"
    return f"{file} {framework} {ranks}-{launcher}"
