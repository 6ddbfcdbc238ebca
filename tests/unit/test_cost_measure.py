"""What a measurement asks of Horovod: here a fake one, whose ranks say what the tests want them to say."""

from __future__ import annotations

import socket
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_compress import OneBit
from hvd_compress.cost import HorovodCollectives, Network, measure, network_of, slowest_speeds
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Hosts


class Tensor:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def numpy(self) -> np.ndarray:
        return self.array


def host_numbers(monkeypatch: pytest.MonkeyPatch, ranks: list[tuple[str, int, int, int]]) -> list[list[int]]:
    """On each rank: host numbers, where rank i is given its (host's name, local rank, cross rank, local size)."""
    told: list[np.ndarray] = []

    mine = SimpleNamespace(size=lambda: len(ranks), rank=lambda: len(found), process_set_id=1)

    def gather(tensor: Tensor, name: str, process_set: Any) -> Tensor:
        assert process_set is mine
        told.append(tensor.array)
        return Tensor(np.concatenate(told if len(told) == len(ranks) else everyone))

    found: list[list[int]] = []
    for name, local_rank, cross_rank, local_size in ranks:
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        everyone = [np.array([[zlib.crc32(n.encode()), a, b, c]], np.int64) for n, a, b, c in ranks]
        hvd: Any = SimpleNamespace(
            local_rank=lambda r=local_rank: r, cross_rank=lambda r=cross_rank: r, local_size=lambda s=local_size: s,
            allgather=gather, __name__="horovod.fake",
        )  # fmt: skip
        found.append(HorovodCollectives(hvd, Tensor, mine).host_numbers())
    # what ranks said of themselves is what the test took them to say
    np.testing.assert_array_equal(np.concatenate(told), np.concatenate(everyone))
    return found


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

    name, ranks, position = "horovod.fake, process set 7", 2, 0

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
