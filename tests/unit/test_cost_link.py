"""Links: measured, on paper, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvd_compress.cost import COLLECTIVES, Line, LinkSpeed, Network, measure, measure_link, measure_network, sent_bytes
from hvd_compress.exchange import Hosts

TRUTH = {
    "allreduce": Line(1e-3, 1e-8),
    "allreduce_half": Line(1e-3, 5e-8),
    "alltoall": Line(2e-3, 1.5e-8),
    "allgather": Line(1.5e-3, 1e-8),
}


class Clock:
    """Time that passes only when a collective takes it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Fake:
    """Collectives that take what a line says, and now and then much longer."""

    position = 0

    def __init__(self, lines: dict[str, Line], size: int, clock: Clock) -> None:
        self.lines, self.size, self.clock = lines, size, clock
        self.calls: list[tuple[str, int]] = []

    def repeated(
        self, collective: str, name: str, array: np.ndarray, sizes: Sequence[int] | None = None
    ) -> Callable[[], None]:
        # halves are of a collective that is measured apart
        measured = "allreduce_half" if array.dtype == np.float16 else collective
        peers = None if sizes is None else tuple(rank for rank, size in enumerate(sizes) if size)
        assert sizes is None or sum(sizes) == array.size
        return lambda: self.pass_time(measured, array.nbytes, peers)

    def pass_time(self, collective: str, nbytes: int, peers: Sequence[int] | None) -> None:
        self.calls.append((collective, nbytes))
        senders = self.size if peers is None else len(peers)
        seconds = self.lines[collective](sent_bytes(collective, nbytes, senders))
        # the first call of a size, which does not count, and one of the repeats
        disturbed = self.calls.count((collective, nbytes)) in (1, 4)
        self.clock.now += seconds * (10 if disturbed else 1)

    def maximum(self, values: list[float]) -> list[float]:
        return [1.25 * v for v in values]  # another rank waits longer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_measuring_finds_the_lines_of_the_slowest_rank(clock: Clock, ranks: int) -> None:
    link = measure_link(Fake(TRUTH, ranks, clock))
    for name, line in TRUTH.items():
        found: Line = getattr(link, name)
        assert found.fixed == pytest.approx(1.25 * line.fixed, rel=1e-3), name
        assert found.per_unit == pytest.approx(1.25 * line.per_unit, rel=1e-3), name


def test_a_slow_link_is_not_measured_with_large_buffers(clock: Clock) -> None:
    slow = {name: Line(1e-3, 1e-6) for name in COLLECTIVES}
    fast, patient = Fake(TRUTH, 2, clock), Fake(slow, 2, clock)
    measure_link(fast)
    begin = clock.now
    measure_link(patient)
    assert max(nbytes for _, nbytes in patient.calls) < max(nbytes for _, nbytes in fast.calls)
    assert clock.now - begin < 30  # 1 MB/s: the largest buffer alone would take 16 s each time


def test_buffers_divide_by_the_ranks(clock: Clock) -> None:
    fake = Fake(TRUTH, 7, clock)
    measure_link(fake)
    assert all(nbytes > 0 and nbytes % (8 * 7) == 0 for _, nbytes in fake.calls)


def test_one_rank_has_no_link(clock: Clock) -> None:
    with pytest.raises(ValueError, match="two ranks"):
        measure_link(Fake(TRUTH, 1, clock))


class TwoHosts(Fake):
    """Four ranks on two hosts, whose alltoalls are ten times as fast inside a host."""

    def pass_time(self, collective: str, nbytes: int, peers: Sequence[int] | None) -> None:
        # position 0 shares its host with 1, and its index with 2
        assert peers in (None, (0, 1), (0, 2))
        begin = self.clock.now
        super().pass_time(collective, nbytes, peers)
        if peers == (0, 1):
            self.clock.now = begin + (self.clock.now - begin) / 10


def test_links_inside_and_between_hosts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_core", lambda *_: {"alltoall": 0.5})
    network = measure_network(TwoHosts(TRUTH, 4, clock), Hosts.of_names(["a", "a", "b", "b"]))
    assert (network.ranks, network.ranks_per_host, network.hosts, network.core) == (4, 2, 2, {"alltoall": 0.5})
    assert network.inside is not None
    assert network.between is not None
    whole, inside, between = network.link.alltoall, network.inside.alltoall, network.between.alltoall
    assert inside.per_unit == pytest.approx(whole.per_unit / 10, rel=1e-3)
    # both ranks of a host send at once: their bytes together are counted
    assert between.per_unit == pytest.approx(whole.per_unit / 2, rel=1e-3)
    assert network.between.allgather == network.link.allgather


@pytest.mark.parametrize("names", [["a", "a", "a"], ["a", "b", "c"]])
def test_a_hierarchy_needs_two_hosts_with_two_ranks(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.setattr(measure, "measure_core", lambda *_: {})
    network = measure_network(Fake(TRUTH, 3, clock), Hosts.of_names(names))
    assert (network.inside, network.between) == (None, None)
    assert network.ranks_per_host == names.count("a")


@pytest.mark.parametrize(
    ("idle", "computed", "slower", "expected"),
    [
        *((100, *case) for case in [(100, 1.0, 0.0), (75, 1.0, 0.25), (100, 2.0, 0.5), (50, 2.0, 1.0), (10, 9.0, 1.0)]),
        (100, 120, 0.9, 0.0),
        # others keep the machine so busy that this rank computes nothing
        *((0, 0, 1.0, 0.0), (0, 0, 2.0, 0.5), (0, 20, 1.0, 0.0), (100, 0, 1.0, 1.0)),
    ],
)
def test_what_collectives_and_computing_take_from_each_other(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, idle: float, computed: float, slower: float, expected: float
) -> None:
    """So many computations a second alone, fewer during a collective, which takes longer than alone."""
    sleeps = []
    clock.sleep = sleeps.append  # type: ignore[attr-defined]

    def computed_during(wait: Callable[[], object]) -> tuple[float, float]:
        begin, before = clock.now, len(sleeps)
        wait()
        return (idle, sleeps[-1]) if len(sleeps) > before else (computed, slower * (clock.now - begin))

    class Alone(Fake):
        def pass_time(self, collective: str, nbytes: int, peers: Sequence[int] | None) -> None:
            self.clock.now += self.lines[collective](sent_bytes(collective, nbytes, self.size))

        def maximum(self, values: list[float]) -> list[float]:
            return values

    monkeypatch.setattr(measure, "_computed_during", computed_during)
    found = measure.measure_core(Alone(TRUTH, 2, clock), LinkSpeed(**TRUTH))
    assert found == pytest.approx(dict.fromkeys(COLLECTIVES, expected), abs=1e-9)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("allreduce", 150.0), ("allreduce_half", 150.0), ("alltoall", 75.0), ("allgather", 300)],
)
def test_sent_bytes_by_hand(collective: str, expected: float) -> None:
    assert sent_bytes(collective, 100, ranks=4) == expected


def samples(*names: str) -> list[tuple[str, float, float]]:
    return [(name, size, TRUTH[name](size)) for name in names for size in (1e4, 1e6, 1e7)]


def test_fit() -> None:
    link = LinkSpeed.fit(samples(*COLLECTIVES))
    assert link.alltoall(5e6) == pytest.approx(2e-3 + 0.075)
    assert link.seconds("allreduce_half", 1e6) == pytest.approx(1e-3 + 0.05)


def test_halves_that_were_not_measured_are_like_the_others() -> None:
    link = LinkSpeed.fit(samples("allreduce", "alltoall", "allgather"))
    assert link.allreduce_half == link.allreduce


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (samples("allreduce", "alltoall"), "allgather"),
        ([*samples(*COLLECTIVES), ("gossip", 1.0, 1.0)], "gossip"),
        ([*samples("allreduce", "alltoall"), ("allgather", 1.0, 1.0)], "allgather"),
        ([*samples(*COLLECTIVES), ("alltoall", 1.0, 0.0)], "above 0"),
    ],
)
def test_fit_says_what_is_missing(given: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinkSpeed.fit(given)


def test_json_round_trip() -> None:
    link = LinkSpeed.fit(samples(*COLLECTIVES))
    assert LinkSpeed.from_config(json.loads(json.dumps(link.get_config()))) == link


@pytest.mark.parametrize("config", [{}, {"alltoall": {"fixed": 1}}, {"x": {}}, dict.fromkeys(COLLECTIVES, 3)])
def test_a_foreign_config_is_refused(config: dict) -> None:
    with pytest.raises(ValueError, match="link"):
        LinkSpeed.from_config(config)


def test_on_paper_by_hand() -> None:
    # of 1538 bytes on the wire 1448 are ours; 1 ms is Horovod's cycle
    link = LinkSpeed.on_paper(bandwidth=1e9, latency=1e-4, ranks=4)
    per_byte = 8 * 1538 / 1448 / 1e9
    assert link.allreduce(1e6) == pytest.approx(1e-3 + 2e-4 + 6e-4 + 1e6 * per_byte)
    assert link.alltoall(1e6) == pytest.approx(1e-3 + 2e-4 + 1e-4 + 1e6 * per_byte)
    assert link.allgather(1e6) == pytest.approx(1e-3 + 2e-4 + 3e-4 + 1e6 * per_byte)


def test_ranks_of_a_host_share_it_in_an_alltoall_only() -> None:
    one, two = LinkSpeed.on_paper(1e9, 0, 4), LinkSpeed.on_paper(1e9, 0, 4, ranks_per_host=2)
    # 2 of a rank's 3 parts leave the host, and there are 2 such ranks
    assert two.alltoall.per_unit == pytest.approx(one.alltoall.per_unit * 4 / 3)
    assert two.allgather == one.allgather
    assert LinkSpeed.on_paper(1e9, 0, 2, ranks_per_host=2).alltoall.per_unit == 0


def test_slowed() -> None:
    network = Network.on_paper(1e9, 1e-4, 8, 4).slowed(10)
    slow = Network.on_paper(1e8, 1e-4, 8, 4)
    assert network.link.alltoall(1e6) == pytest.approx(slow.link.alltoall(1e6))
    assert network.between is not None
    assert slow.between is not None
    assert network.between.allgather(1e6) == pytest.approx(slow.between.allgather(1e6))
    assert network.inside == slow.inside


def test_networks_on_paper() -> None:
    assert Network.on_paper(1e9, 1e-4, 4).bandwidth == pytest.approx(1e9)
    assert Network.on_paper(1e9, 0, 4).inside is None
    assert Network.on_paper(1e9, 0, 8, 2).hosts == 4
    one_host = Network.on_paper(1e6, 0, 4, 4, inside_bandwidth=1e10)
    assert one_host.between is None
    assert one_host.link == one_host.inside


@pytest.mark.parametrize(
    "settings",
    [
        {"bandwidth": 0.0, "latency": 0.0, "ranks": 2},
        {"bandwidth": 1e9, "latency": -1.0, "ranks": 2},
        {"bandwidth": 1e9, "latency": 0.0, "ranks": 0},
        {"bandwidth": 1e9, "latency": 0.0, "ranks": 3, "ranks_per_host": 2},
    ],
)
def test_impossible_links_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Network.on_paper(**settings)


def test_impossible_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        Network(3, LinkSpeed.on_paper(1e9, 0, 3), ranks_per_host=2)
