"""Hosts are pretended here, so that they can be in any order; `test_cluster_hierarchical.py` has real ones."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.parallel.cases import of_tensorflow
from tests.parallel.launch import exhaustive, launched, thorough

hierarchical_tensorflow = of_tensorflow("hierarchical_tensorflow")

# ranks were started host by host; one on each host in turn; so that Horovod's own numbers of hosts are wrong; on one
STARTS = [("aabb", "mpi"), exhaustive("abab", "gloo"), thorough("abba", "mpi"), thorough("", "mpi")]


@pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
@pytest.mark.parametrize(("hosts", "launcher"), STARTS)
def test_torch(hosts: str, launcher: str) -> None:
    outcome = launched("hierarchical", 4, launcher, HVD_COMPRESS_HOSTS=hosts)
    outcome.check_ended_well()
    names = {line["case"] for line in outcome.reports[0] if "case" in line}
    assert len(names) > 10
    for name in sorted(names):
        outcome.check(name)


@pytest.mark.parametrize("case", hierarchical_tensorflow.cases)
@pytest.mark.parametrize(("hosts", "launcher"), [thorough("aabb", "mpi"), exhaustive("", "mpi")])
def test_tensorflow(hosts: str, launcher: str, case: str) -> None:
    outcome = launched("hierarchical_tensorflow", 4, launcher, HVD_COMPRESS_HOSTS=hosts)
    outcome.check(case)
