"""What a measurement asks of Horovod: here a fake one, whose ranks say what the tests want them to say."""

from __future__ import annotations

import socket
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_compress.cost import HorovodCollectives
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

    def gather(tensor: Tensor, name: str, process_set: str) -> Tensor:
        assert process_set == "mine"
        told.append(tensor.array)
        return Tensor(np.concatenate(told if len(told) == len(ranks) else everyone))

    found = []
    for name, local_rank, cross_rank, local_size in ranks:
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        everyone = [np.array([[zlib.crc32(n.encode()), a, b, c]], np.int64) for n, a, b, c in ranks]
        hvd: Any = SimpleNamespace(
            local_rank=lambda r=local_rank: r, cross_rank=lambda r=cross_rank: r, local_size=lambda s=local_size: s,
            allgather=gather,
        )  # fmt: skip
        found.append(HorovodCollectives(hvd, Tensor, len(ranks), process_set="mine").host_numbers())
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
