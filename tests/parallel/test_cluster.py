"""A virtual cluster is what it says: hosts with links of a rate, on which real Horovod finds its ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster, ClusterError, Run, RunError, unavailable
from cluster.cli import main

from tests.parallel.launch import ROOT, thorough

LIMIT_SECONDS = 200.0
NUMEL = 250_000
BYTES = 4 * NUMEL
WAITS = "def waits_for_ever():\n    import time\n    time.sleep(1000)\nwaits_for_ever()"

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=2, rate="1gbit") as cluster:
        yield cluster


def run(cluster: Cluster, worker: str, *arguments: str, **options: Any) -> Run:
    command = [sys.executable, f"tests/parallel/workers/cluster_{worker}.py", *arguments]
    return cluster.run(command, timeout=LIMIT_SECONDS, **options)


@pytest.fixture(autouse=True)
def _in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("launcher", [thorough("mpi"), "gloo"])
def test_horovod_sees_hosts_and_its_bytes_are_counted(cluster: Cluster, launcher: str) -> None:
    outcome = run(cluster, "horovod", str(NUMEL), ranks_per_host=2, launcher=launcher)
    for rank, text in enumerate(outcome.stdout):
        assert json.loads(text) == {
            "rank": rank,
            "size": 4,
            "local_rank": rank % 2,
            "local_size": 2,
            "cross_rank": rank // 2,
            "cross_size": 2,
            "host": f"hvdc-{1 + rank // 2}",
            "sums": [1.0 + 2.0 + 3.0 + 4.0],
        }, outcome.stderr[rank]
    # half of the sums lies with each host, if not more: it sends the other half's summands and its own half's sums
    for sent, received in zip(outcome.sent, outcome.received, strict=True):
        assert BYTES <= sent <= 10 * BYTES
        assert BYTES <= received <= 10 * BYTES
    assert not cluster.pids()


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_ranks_on_one_host_do_not_use_its_link(cluster: Cluster, launcher: str) -> None:
    outcome = run(cluster, "horovod", str(NUMEL), ranks=2, ranks_per_host=2, launcher=launcher)
    told = [json.loads(text) for text in outcome.stdout]
    assert [(t["size"], t["local_size"], t["cross_size"], t["host"]) for t in told] == [(2, 2, 1, "hvdc-1")] * 2
    assert max(outcome.sent) < 1000
    assert max(outcome.received) < 1000


@pytest.mark.thorough
def test_a_link_is_as_slow_as_it_is_told_to_be(cluster: Cluster) -> None:
    number = 4_000_000
    seconds = {}
    for rate, bits in (("20mbit", 20_000_000), ("unlimited", None), ("20mbit", 20_000_000)):
        cluster.set_rate(rate)
        assert cluster.rate == bits
        outcome = run(cluster, "stream", str(number), launcher="gloo")
        seconds[rate] = float(outcome.stdout[0])
        # rank 0 on the first host receives, and acknowledges with little
        assert number <= outcome.sent[1] <= 1.1 * number
        assert number <= outcome.received[0] <= 1.1 * number
        assert outcome.sent[0] <= 0.1 * number
        if bits:
            assert seconds[rate] > 1.4  # the bits alone take 1.6 s, some bytes come before the clock starts
    assert seconds["unlimited"] < seconds["20mbit"] / 2


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_a_rank_that_fails_ends_the_run_and_is_quoted(cluster: Cluster, launcher: str) -> None:
    number = {"mpi": "OMPI_COMM_WORLD_RANK", "gloo": "HOROVOD_RANK"}[launcher]
    script = f'if [ ${number} = 1 ]; then echo "this is wrong" >&2; exit 7; fi; exec sleep 1000'
    with pytest.raises(RunError) as error:
        cluster.run(["sh", "-c", script], launcher=launcher, timeout=LIMIT_SECONDS)
    assert f"{launcher} returned 7" in str(error.value)
    assert "--- stderr of rank 1\nthis is wrong" in str(error.value)
    assert not cluster.pids()


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_a_time_limit_ends_all_ranks_and_says_where_they_were(cluster: Cluster, launcher: str) -> None:
    with pytest.raises(RunError) as error:
        cluster.run([sys.executable, "-c", WAITS], launcher=launcher, timeout=5.0)
    told = str(error.value)
    assert "ended at the time limit of 5 s" in told
    for rank in range(2):
        assert "in waits_for_ever" in told.partition(f"--- stderr of rank {rank}\n")[2].partition("\n---")[0], told
    assert not cluster.pids()


def test_a_second_cluster_is_refused(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError, match=r"process \d+ uses the virtual cluster"), Cluster(hosts=2):
        pass
    assert main(["down"]) == 1
    assert "uses the virtual cluster" in capsys.readouterr().err
    assert cluster.rate is None or cluster.rate > 0  # it is still there
