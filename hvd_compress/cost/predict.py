"""Predicts what an exchange takes, and a training step whose exchanges overlap with backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hvd_compress.cost.link import Network
from hvd_compress.cost.speeds import Speed
from hvd_compress.exchange import Plan, ring_bytes

__all__ = ["Stage", "Work", "break_even_bandwidth", "dense_work", "exchange_seconds", "hierarchical_work", "stages_of",
           "work_of"]  # fmt: skip

# decades that break-even bandwidths are looked for in, bits per second
_LEAST_BANDWIDTH, _MOST_BANDWIDTH = 1e5, 1e13


@dataclass(frozen=True)
class Work:
    """One exchange in plain numbers, of one tensor or of a bucket of several.

    Args:
        exchange: "dense", "fp16", "two_phase", "allgather" or "hierarchical".
        numel: elements.
        hop_bytes: what a rank sends in each collective. Hierarchical: in the allreduce within its host, in the alltoall
            and the allgather between hosts, and in the broadcast within its host.
    """

    exchange: str
    numel: int
    hop_bytes: tuple[float, ...]

    @property
    def sent_bytes(self) -> float:
        """What a rank sends in all."""
        return sum(self.hop_bytes)


@dataclass(frozen=True)
class Stage:
    """A piece of an exchange that occupies one resource.

    Args:
        seconds: alone.
        collective: of Horovod; "" for kernels, which occupy a core.
        fusable_bytes: what Horovod would join with others of the same collective, else 0.
        per_byte: seconds that each of these bytes adds to such a joint collective.
    """

    seconds: float
    collective: str = ""
    fusable_bytes: float = 0.0
    per_byte: float = 0.0


def dense_work(numel: int, itemsize: int, ranks: int, half: bool = False) -> Work:
    """What goes through Horovod's own allreduce, `half` as float16."""
    nbytes = numel * (2 if half else itemsize)
    return Work("fp16" if half else "dense", numel, (ring_bytes(nbytes, ranks),))


def work_of(plan: Plan, itemsize: int = 4, bytes_per_element: float = math.inf) -> Work:
    """What a plan says.

    Args:
        plan: of a tensor.
        itemsize: bytes per element of the gradient, for a plan that is dense.
        bytes_per_element: of a measured payload, for compressors whose slots only say the most.
    """
    if plan.exchange == "dense":
        return dense_work(plan.numel, itemsize, plan.ranks)
    others = plan.ranks - 1
    if plan.exchange == "allgather":
        return Work("allgather", plan.numel, (others * _expected(plan, bytes_per_element),))
    hop = others * _expected(plan, bytes_per_element)
    return Work("two_phase", plan.numel, (hop, hop))


def hierarchical_work(plan: Plan, itemsize: int, ranks_per_host: int, bytes_per_element: float = math.inf) -> Work:
    """Summed within each host, exchanged by one rank of each by a two-phase `plan` between hosts, broadcast."""
    nbytes = plan.numel * itemsize
    hop = (plan.ranks - 1) * _expected(plan, bytes_per_element)
    return Work("hierarchical", plan.numel, (ring_bytes(nbytes, ranks_per_host), hop, hop, nbytes))


def stages_of(work: Work, speed: Speed, network: Network) -> tuple[Stage, ...]:
    """The stages of an exchange, one after the other.

    Raises:
        ValueError: a hierarchical exchange in a network whose links inside and between hosts are not known.
    """
    link, ranks, numel = network.link, network.ranks, work.numel
    if work.exchange in ("dense", "fp16"):
        collective = "allreduce" if work.exchange == "dense" else "allreduce_half"
        (nbytes,) = work.hop_bytes
        line = getattr(link, collective)
        sent = Stage(line(nbytes), collective, nbytes, line.per_unit)
        if work.exchange == "dense":
            return (sent,)
        return (Stage(speed.encode(numel)), sent, Stage(speed.decode(numel)))
    if work.exchange == "allgather":
        first, rest = speed.decode(numel), (ranks - 1) * speed.add(numel)
        (nbytes,) = work.hop_bytes
        return (Stage(speed.encode(numel)), Stage(link.allgather(nbytes), "allgather"), Stage(first + rest))
    if work.exchange == "two_phase":
        return _two_phase(numel, work.hop_bytes, speed, network)
    if network.between is None or network.inside is None:
        raise ValueError("a hierarchical exchange needs Network(between=, inside=): the links between and inside hosts")
    within, *hops, result = work.hop_bytes
    hosts = Network(network.hosts, network.between)
    return (
        Stage(network.inside.allreduce(within), "allreduce"),
        *_two_phase(numel, tuple(hops), speed, hosts),
        Stage(network.inside.allgather(result), "broadcast"),
    )


def exchange_seconds(work: Work, speed: Speed, network: Network) -> float:
    """Seconds of one exchange when nothing else goes on."""
    return sum(stage.seconds for stage in stages_of(work, speed, network))


def break_even_bandwidth(
    compressed: Callable[[float], float], dense: Callable[[float], float], digits: float = 1e-3
) -> float:
    """The bandwidth at which both take the same time: below it compressing pays.

    Args:
        compressed: bandwidth in bits per second -> seconds.
        dense: the same; of two that both fall with the bandwidth, the one that falls further.
        digits: relative precision.

    Returns:
        Bits per second; 0 if compressing never pays, infinity if it always does.

    Example:
        >>> from hvd_compress.cost import break_even_bandwidth
        >>> round(break_even_bandwidth(lambda b: 1 + 8 / b, lambda b: 1e9 / b), -6)
        1000000000.0
    """

    def pays(bandwidth: float) -> bool:
        return compressed(bandwidth) < dense(bandwidth)

    if not pays(_LEAST_BANDWIDTH):
        return 0.0
    if pays(_MOST_BANDWIDTH):
        return math.inf
    low, high = _LEAST_BANDWIDTH, _MOST_BANDWIDTH
    while high / low > 1 + digits:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return math.sqrt(low * high)


def _two_phase(numel: int, hop_bytes: tuple[float, ...], speed: Speed, network: Network) -> tuple[Stage, ...]:
    link, ranks, chunk = network.link, network.ranks, numel / network.ranks
    to_owner, to_all = hop_bytes
    return (
        Stage(ranks * speed.encode(chunk)),
        Stage(link.alltoall(to_owner), "alltoall"),
        Stage(speed.decode(chunk) + (ranks - 1) * speed.add(chunk) + speed.encode(chunk)),
        Stage(link.allgather(to_all), "allgather"),
        Stage(ranks * speed.decode(chunk)),
    )


def _expected(plan: Plan, bytes_per_element: float) -> float:
    """Bytes of a payload for one other rank, on average."""
    most = sum(plan.slots) / len(plan.slots)
    return most if plan.fixed_size else min(most, bytes_per_element * plan.numel / len(plan.slots))
