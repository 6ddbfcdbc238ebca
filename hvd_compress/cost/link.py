"""Model what a Horovod collective costs on the network at hand: measured, or on paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hvd_compress.cost.line import Line, fit_line

__all__ = ["COLLECTIVES", "LinkSpeed", "Network"]

COLLECTIVES = ("allreduce", "allreduce_half", "alltoall", "allgather")

# Horovod's background thread looks for work once in HOROVOD_CYCLE_TIME, 1 ms by default
_CYCLE_SECONDS = 1e-3
# of the 1538 bytes that a full Ethernet frame takes on the wire, TCP with time stamps carries 1448
_TCP_SHARE = 1448 / 1538
# on one machine the bytes of a measured collective may not show at all
_LEAST_PER_BYTE = 1e-12


@dataclass(frozen=True)
class LinkSpeed:
    """Gives the seconds of each collective by the bytes that one rank sends in it.

    Args:
        allreduce: of float32; 2 (ranks - 1) / ranks times the tensor's bytes are sent.
        allreduce_half: of float16, which Horovod sums in software on a CPU.
        alltoall: (ranks - 1) / ranks times the buffer's bytes are sent.
        allgather: (ranks - 1) times a rank's own bytes are sent.

    Example:
        >>> from hvd_compress.cost import LinkSpeed
        >>> link = LinkSpeed.on_paper(bandwidth=1e9, latency=50e-6, ranks=4)
        >>> link == LinkSpeed.from_config(link.get_config())
        True
        >>> link.allreduce(10_000_000) > 0.08  # 8e7 bits at 1e9 bits per second
        True
    """

    allreduce: Line
    allreduce_half: Line
    alltoall: Line
    allgather: Line

    def seconds(self, collective: str, nbytes: float) -> float:
        """Return the seconds of one of `COLLECTIVES` in which a rank sends `nbytes`."""
        line: Line = getattr(self, collective)
        return line(nbytes)

    def slowed(self, factor: float) -> LinkSpeed:
        """Return this link with `factor` times the seconds per byte, and the same fixed seconds."""
        return LinkSpeed(**{name: getattr(self, name).slowed(factor) for name in COLLECTIVES})

    def get_config(self) -> dict[str, Any]:
        """Return the numbers as a JSON-able dict; `from_config` is the inverse."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LinkSpeed:
        """Make the link of a `get_config`.

        Raises:
            ValueError: a collective is missing, unknown, or its numbers are.
        """
        try:
            return cls(**{name: Line(**line) for name, line in config.items()})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"link {config!r}: {error}") from None

    @classmethod
    def fit(cls, samples: Iterable[tuple[str, float, float]]) -> LinkSpeed:
        """Fit the link that explains measured (collective, bytes that a rank sent, seconds) best.

        Without samples of "allreduce_half" it is taken to be like "allreduce".

        Raises:
            ValueError: an unknown collective, fewer than two sizes of one, or seconds that are not above 0.
        """
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for collective, nbytes, seconds in samples:
            if collective not in COLLECTIVES:
                raise ValueError(f"sample of {collective!r}: must be one of {', '.join(map(repr, COLLECTIVES))}")
            points[collective].append((nbytes, seconds))
        points.setdefault("allreduce_half", points["allreduce"])
        try:
            return cls(**{name: fit_line(points[name]) for name in COLLECTIVES})
        except ValueError as error:
            missing = [name for name in COLLECTIVES if len({size for size, _ in points[name]}) < 2]
            raise ValueError(f"samples of {', '.join(missing) or 'a collective'}: {error}") from None

    @classmethod
    def on_paper(cls, bandwidth: float, latency: float, ranks: int, ranks_per_host: int = 1) -> LinkSpeed:
        """Make a link by its data sheet: every collective keeps it busy all the time, so real ones are slower.

        Args:
            bandwidth: of a host in each direction, bits per second.
            latency: seconds for the smallest message from one host to another.
            ranks: in all.
            ranks_per_host: that share a host's bandwidth. Rings cross it once, an alltoall once for each of them.

        Raises:
            ValueError: an argument out of its range.
        """
        if not bandwidth > 0 or not latency >= 0:
            raise ValueError(f"bandwidth={bandwidth!r}, latency={latency!r}: must be above 0, and at least 0")
        if ranks < 1 or ranks_per_host < 1 or ranks % ranks_per_host:
            raise ValueError(
                f"ranks={ranks!r}: must be a multiple of ranks_per_host={ranks_per_host!r}, both 1 or more"
            )
        per_byte = 8 / (bandwidth * _TCP_SHARE)
        others = ranks - 1
        outside = ranks_per_host * (ranks - ranks_per_host) / others if others else 0.0
        # ranks tell the first one what they have, and hear from it what is next
        fixed = _CYCLE_SECONDS + 2 * latency
        ring = Line(fixed + 2 * others * latency, per_byte)
        return cls(
            allreduce=ring,
            allreduce_half=ring,
            alltoall=Line(fixed + latency, per_byte * outside),
            allgather=Line(fixed + others * latency, per_byte),
        )


@dataclass(frozen=True)
class Network:
    """Holds all links that an exchange can use.

    Args:
        ranks: how many there are.
        link: between all ranks.
        ranks_per_host: how many ranks share a host.
        between: the link of one rank from each host; None if `link` is that, or if it is not known.
        inside: the link of the ranks of one host; None if each host has one rank, or if it is not known.
        core: the share of each collective's time that what computes meanwhile loses; empty if it is not known.
        copying: seconds to copy a byte in memory; the same on all ranks, so that they predict alike.

    Raises:
        ValueError: `ranks` is not a multiple of `ranks_per_host`.
    """

    ranks: int
    link: LinkSpeed
    ranks_per_host: int = 1
    between: LinkSpeed | None = None
    inside: LinkSpeed | None = None
    core: Mapping[str, float] = field(default_factory=dict)
    copying: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_host < 1 or self.ranks % self.ranks_per_host:
            raise ValueError(
                f"Network(ranks={self.ranks!r}, ranks_per_host={self.ranks_per_host!r}): ranks must be a multiple of "
                "ranks_per_host, and both 1 or more"
            )

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.ranks // self.ranks_per_host

    @property
    def bandwidth(self) -> float:
        """The bandwidth of an Ethernet that allreduces fill, bits per second; never infinite."""
        return 8 / (_TCP_SHARE * max(self.link.allreduce.per_unit, _LEAST_PER_BYTE))

    def slowed(self, factor: float) -> Network:
        """Return this network with `factor` times the seconds per byte between hosts."""
        between = None if self.between is None else self.between.slowed(factor)
        return replace(self, link=self.link.slowed(factor), between=between)

    @classmethod
    def on_paper(
        cls, bandwidth: float, latency: float, ranks: int, ranks_per_host: int = 1, inside_bandwidth: float = 1e10
    ) -> Network:
        """Make all links by data sheet; `inside_bandwidth` is from one rank to its neighbour, bits per second.

        Raises:
            ValueError: an argument out of its range.
        """
        link = LinkSpeed.on_paper(bandwidth, latency, ranks, ranks_per_host)
        hosts = ranks // ranks_per_host
        if ranks_per_host == 1:
            return cls(ranks, link)
        inside = LinkSpeed.on_paper(inside_bandwidth, 0.0, ranks_per_host)
        if hosts == 1:
            return cls(ranks, inside, ranks_per_host, inside=inside)
        return cls(ranks, link, ranks_per_host, LinkSpeed.on_paper(bandwidth, latency, hosts), inside)
