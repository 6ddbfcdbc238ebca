"""Which ranks share a host, whatever the order in which they were started."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Hosts

# by slot, by node, mixed, one host, one rank per host, names that are no strings
ORDERS: dict[str, Sequence[object]] = {
    "slot": "aabbcc",
    "node": "abcabc",
    "mixed": "abbcac",
    "one-host": "aaaa",
    "one-each": "abcd",
    "numbers": (7, 7, 3, 3, 7, 3),
    "one-rank": "a",
}


@pytest.mark.parametrize("names", ORDERS.values(), ids=ORDERS)
def test_every_order_gives_places_that_fit(names: Sequence[object]) -> None:
    hosts = Hosts.of_names(names)
    ranks = range(len(names))
    assert hosts.count == len(set(names))
    assert hosts.count * hosts.per_host == len(names)
    for rank in ranks:
        assert {names[other] for other in hosts.inside(rank)} == {names[rank]}
        assert len(hosts.inside(rank)) == hosts.per_host
        # one rank on each host, and the same list for all of them
        assert {names[other] for other in hosts.between(rank)} == set(names)
        assert len(hosts.between(rank)) == hosts.count
        assert {hosts.inside(other) for other in hosts.inside(rank)} == {hosts.inside(rank)}
        assert {hosts.between(other) for other in hosts.between(rank)} == {hosts.between(rank)}
        assert set(hosts.inside(rank)) & set(hosts.between(rank)) == {rank}


@pytest.mark.parametrize("names", ORDERS.values(), ids=ORDERS)
def test_each_chunk_has_one_owner_and_shards_are_runs_of_chunks(names: Sequence[object]) -> None:
    hosts = Hosts.of_names(names)
    ranks = range(len(names))
    assert sorted(hosts.chunk_of(rank) for rank in ranks) == list(ranks)
    for rank in ranks:
        # a shard belongs to the ranks of one index, which are one on each host, in the order of the hosts
        assert [hosts.chunk_of(other) for other in hosts.between(rank)] == list(hosts.shard_of(rank))
        # the shards of a host's ranks are the whole tensor, in the order of its ranks
        chunks = [chunk for other in hosts.inside(rank) for chunk in hosts.shard_of(other)]
        assert chunks == list(ranks)


def test_a_mixed_order_by_hand() -> None:
    hosts = Hosts.of_names("abba")
    assert hosts.places == ((0, 0), (1, 0), (1, 1), (0, 1))
    assert [hosts.inside(rank) for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [hosts.between(rank) for rank in range(4)] == [(0, 1), (0, 1), (3, 2), (3, 2)]
    assert [hosts.chunk_of(rank) for rank in range(4)] == [0, 1, 3, 2]


@pytest.mark.parametrize("names", ["aab", "abb", "aabbbcc"])
def test_uneven_hosts_are_refused(names: str) -> None:
    with pytest.raises(UnsupportedError, match=r"ranks per host: all hosts must have equally many.*two_phase") as error:
        Hosts.of_names(names)
    assert f"'a': {names.count('a')}" in str(error.value)
