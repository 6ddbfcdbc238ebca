"""What a measurement asks of ranks: here of some that say what the tests want them to say."""

from __future__ import annotations

import socket
from threading import local
from typing import Any

import pytest

from hvd_compress import OneBit, ThreadRanks
from hvd_compress.cost import Network, measure, network_of, slowest_speeds
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Hosts
from hvd_compress.ranks import OnHost


class Told(ThreadRanks):
    """Ranks with the places that a test gives them: (host's name, local rank, cross rank, local size)."""

    places: list[tuple[str, int, int, int]]

    def on_host(self) -> OnHost:
        return OnHost(*self.places[self.position][1:])


def host_numbers(monkeypatch: pytest.MonkeyPatch, ranks: list[tuple[str, int, int, int]]) -> list[list[int]]:
    """On each rank: host numbers."""
    here = local()

    def program(told: ThreadRanks) -> list[int]:
        here.name = ranks[told.position][0]
        return told.host_numbers()

    monkeypatch.setattr(socket, "gethostname", lambda: here.name)
    monkeypatch.setattr(Told, "places", ranks, raising=False)
    return Told.run_all(len(ranks), program)


# started host by host; one host after the other; and so that Horovod gives rank 0's number to rank 2 on another host
ORDERS = {
    "slot": [("a", 0, 0, 2), ("a", 1, 0, 2), ("b", 0, 1, 2), ("b", 1, 1, 2)],
    "node": [("a", 0, 0, 2), ("b", 0, 1, 2), ("a", 1, 0, 2), ("b", 1, 1, 2)],
    "mixed": [("a", 0, 0, 2), ("b", 0, 1, 2), ("b", 1, 0, 2), ("a", 1, 1, 2)],
    "a set with one rank of each, of uneven hosts": [("a", 1, 0, 3), ("b", 0, 1, 1)],
}


@pytest.mark.parametrize("ranks", ORDERS.values(), ids=ORDERS)
def test_hosts_are_told_apart_by_name(monkeypatch: pytest.MonkeyPatch, ranks: list) -> None:
    found = host_numbers(monkeypatch, ranks)
    assert all(numbers == found[0] for numbers in found)
    assert Hosts.of_names(found[0]) == Hosts.of_names([name for name, *_ in ranks])


def test_hosts_of_one_name_are_told_apart_by_horovods_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [("box", 0, 0, 2), ("box", 1, 0, 2), ("box", 0, 1, 2), ("box", 1, 1, 2)]
    assert host_numbers(monkeypatch, ranks) == [[0, 0, 1, 1]] * 4


def test_uneven_hosts_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [("box", 0, 0, 2), ("box", 1, 0, 2), ("box", 0, 1, 1)]
    with pytest.raises(UnsupportedError, match=r"hosts with \[1, 2\] ranks.*two_phase"):
        host_numbers(monkeypatch, ranks)


class Others:
    """Collectives of two ranks, the other of which says what the test wants it to say, or the same as this one."""

    name, size, position = "7", 2, 0

    def __init__(self) -> None:
        self.remembered: float | None = None

    def maximum(self, values: list[float]) -> list[float]:
        if self.remembered is None:
            return values
        return [max(values[0], self.remembered), max(values[1], -self.remembered)]


def test_a_network_is_measured_again_if_a_rank_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Network.on_paper(bandwidth, 1e-4, 2) for bandwidth in (1e9, 2e9, 3e9)]
    following = iter(made)
    monkeypatch.setattr(measure, "_known", {})
    monkeypatch.setattr(measure, "measure_network", lambda *_: next(following))
    others: Any = Others()
    assert network_of(others, with_hosts=False) is made[0]
    assert network_of(others, with_hosts=False) is made[0]
    others.remembered = -1.0  # it was started later
    assert network_of(others, with_hosts=False) is made[1]
    others.remembered = made[0].link.alltoall.per_unit  # it measured among other ranks
    assert network_of(others, with_hosts=False) is made[2]
    others.remembered = None
    assert network_of(others, with_hosts=False) is made[2]


def test_the_slowest_rank_says_how_fast_kernels_are() -> None:
    class Slower(Others):
        def maximum(self, values: list[float]) -> list[float]:
            return [v + 1.0 for v in values]

    others: Any = Slower()
    (speed,) = slowest_speeds([OneBit()], others).values()
    # two numbers are those of this rank and one more
    assert min(speed.numbers()) >= 1.0
