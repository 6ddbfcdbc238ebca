"""Say which ranks share a host, and which parts of a tensor they own in a hierarchical exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hvd_compress.errors import UnsupportedError

__all__ = ["Hosts"]


@dataclass(frozen=True)
class Hosts:
    """Knows the host of each rank, and the rank's index on that host.

    A tensor has one shard for each index, which all ranks of that index share: in it, each of them owns one chunk. So
    the chunks of a shard lie side by side, and each rank sums up, encodes and keeps residuals of its shard only.

    Args:
        places: (host, index) of each position; equally many ranks on each host.

    Example:
        >>> from hvd_compress.exchange import Hosts
        >>> hosts = Hosts.of_names(["a", "a", "b", "b"])
        >>> hosts.count, hosts.per_host, hosts.inside(2), hosts.between(2), hosts.chunk_of(2)
        (2, 2, (2, 3), (0, 2), 1)
    """

    places: tuple[tuple[int, int], ...]

    @classmethod
    def of_names(cls, names: Sequence[object]) -> Hosts:
        """Make it from one name for each position; ranks on one host have equal names.

        Raises:
            UnsupportedError: hosts with different numbers of ranks.
        """
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        ranks_of = Counter(names)
        if len(set(ranks_of.values())) > 1:
            raise UnsupportedError(
                f"exchange='hierarchical' with {dict(ranks_of)} ranks per host: all hosts must have equally many; "
                "start them so, or use exchange='two_phase'"
            )
        seen: Counter[object] = Counter()
        places = []
        for name in names:
            places.append((numbers[name], seen[name]))
            seen[name] += 1
        return cls(tuple(places))

    @cached_property
    def count(self) -> int:
        """The number of hosts."""
        return 1 + max(host for host, _ in self.places)

    @cached_property
    def per_host(self) -> int:
        """The number of ranks on each host."""
        return len(self.places) // self.count

    def chunk_of(self, position: int) -> int:
        """Return the chunk that a rank owns."""
        host, index = self.places[position]
        return index * self.count + host

    def shard_of(self, position: int) -> range:
        """Return the chunks of a rank's shard, by host."""
        first = self.places[position][1] * self.count
        return range(first, first + self.count)

    def inside(self, position: int) -> tuple[int, ...]:
        """Return the ranks on a rank's host, by index."""
        host = self.places[position][0]
        return tuple(sorted((p for p, place in enumerate(self.places) if place[0] == host), key=self._index))

    def between(self, position: int) -> tuple[int, ...]:
        """Return the ranks that have the same index on each host, by host."""
        index = self.places[position][1]
        return tuple(sorted((p for p, place in enumerate(self.places) if place[1] == index), key=self._host))

    def _index(self, position: int) -> int:
        return self.places[position][1]

    def _host(self, position: int) -> int:
        return self.places[position][0]
