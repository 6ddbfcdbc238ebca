"""The hierarchical exchange on two virtual hosts: its results, and what really travels between them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from cluster import Cluster, unavailable

from tests.parallel.launch import ROOT

RANKS_PER_HOST = 2
LAUNCHERS = ("mpi", "gloo")

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}"),
    pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize(("topic", "launcher"), [("hierarchical", "mpi"), ("hierarchical_tensorflow", "gloo")])
def test_hosts_of_their_own(cluster: Cluster, topic: str, launcher: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parallel.rank", topic, str(tmp_path)]
    cluster.run(command, ranks_per_host=RANKS_PER_HOST, launcher=launcher, timeout=240.0)
    for rank in range(4):
        lines = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()]
        failed = {line["case"]: line["error"] for line in lines if line.get("error")}
        assert not failed, f"rank {rank}: {failed}"
        assert lines[0] == {"size": 4}
        assert lines[-1] == {"end": True}
        assert "the_optimizer_is_the_loopback[onebit]" in str(lines) or "the_tape_is_the_loopback[onebit]" in str(lines)


def sent_with(cluster: Cluster, exchange: str, launcher: str) -> list[int]:
    """Bytes that each host has sent; checked against what the ranks have counted."""
    command = [sys.executable, "tests/parallel/workers/cluster_hierarchical.py", exchange]
    outcome = cluster.run(
        command, ranks_per_host=RANKS_PER_HOST, launcher=launcher, timeout=200.0, env={"HOROVOD_CYCLE_TIME": "50"}
    )
    told = [json.loads(text.splitlines()[-1]) for text in outcome.stdout]
    assert len({rank["digest"] for rank in told}) == 1
    for host in range(2) if exchange == "hierarchical" else ():
        of_host = told[host * RANKS_PER_HOST : (host + 1) * RANKS_PER_HOST]
        counted = sum(rank["bytes_sent"] for rank in of_host)
        # TCP's headers and acknowledgements, and what Horovod says in every cycle (of ms, hence few here)
        assert counted <= outcome.sent[host] <= 1.5 * counted, (counted, outcome.sent)
        # what is summed up inside a host stays there
        assert sum(rank["bytes_sent_inside"] for rank in of_host) > 10 * outcome.sent[host]
    return outcome.sent


def test_bytes_between_hosts_are_those_that_are_counted(cluster: Cluster) -> None:
    hierarchical = max(max(sent_with(cluster, "hierarchical", launcher)) for launcher in LAUNCHERS)
    assert hierarchical < 0.1 * min(sent_with(cluster, "dense", "mpi"))
    assert hierarchical < 0.8 * min(sent_with(cluster, "two_phase", "mpi"))
