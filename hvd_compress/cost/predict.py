"""Predict what an exchange takes, and a training step whose exchanges overlap with backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvd_compress.cost.link import LinkSpeed, Network
from hvd_compress.cost.speeds import Speed
from hvd_compress.exchange import Dense, Exchange, Plan, ring_bytes

__all__ = ["Stage", "Work", "break_even_bandwidth", "dense_work", "exchange_seconds", "stages_of", "work_of"]

# decades that break-even bandwidths are looked for in, bits per second
_LEAST_BANDWIDTH, _MOST_BANDWIDTH = 1e5, 1e13


@dataclass(frozen=True)
class Work:
    """Describes one exchange in plain numbers, of one tensor or of a bucket of several.

    Args:
        exchange: `Dense` for Horovod's allreduce.
        numel: elements.
        hop_bytes: what a rank sends in each collective; in those between the hosts of a hierarchical exchange, what all
            ranks of its host send.
        pieces: payloads that hold all elements once; kernels are called for each.
        groups: how many groups of elements compressors take together.
        sharing: how many ranks a host has, in a hierarchical exchange.
        half: whether Horovod's allreduce is of float16.
    """

    exchange: Exchange
    numel: int
    hop_bytes: tuple[float, ...]
    pieces: int = 1
    groups: int = 0
    sharing: int = 1
    half: bool = False

    @property
    def sent_bytes(self) -> float:
        """The bytes a rank sends; in a hierarchical exchange only those to other hosts, as in `compression_stats`."""
        if self.exchange.uses_hosts:
            _, to_owner, to_all, _ = self.hop_bytes
            return (to_owner + to_all) / self.sharing
        return sum(self.hop_bytes)


@dataclass(frozen=True)
class Stage:
    """Describes a piece of an exchange that occupies one resource.

    Args:
        seconds: how long it takes alone.
        collective: the collective of Horovod that it is; "" for kernels, which occupy a core.
        fusable_bytes: the bytes that Horovod may join with others of the same collective; 0 for none.
        per_byte: seconds that each of these bytes adds to such a joint collective.
        joined_per_byte: seconds that each byte of a joint collective costs besides, to be copied together and apart.
        core: the share of the seconds that what computes meanwhile loses, see `Network`.
    """

    seconds: float
    collective: str = ""
    fusable_bytes: float = 0.0
    per_byte: float = 0.0
    joined_per_byte: float = 0.0
    core: float = 0.0


def dense_work(numel: int, itemsize: int, ranks: int, half: bool = False) -> Work:
    """Describe the work of Horovod's own allreduce, with `half` as float16."""
    nbytes = numel * (2 if half else itemsize)
    return Work(Dense(), numel, (ring_bytes(nbytes, ranks),), half=half)


def work_of(plans: Sequence[Plan], bytes_per_element: float = math.inf, ranks_per_host: int = 1) -> Work:
    """Describe the work of tensors that go together, from their plans.

    Args:
        plans: none of them dense.
        bytes_per_element: of a measured payload, for compressors whose slots only say the most.
        ranks_per_host: of a hierarchical exchange.
    """
    first, numel = plans[0], sum(plan.numel for plan in plans)
    nbytes = sum(_expected(plan, bytes_per_element) for plan in plans)
    others = (first.ranks - 1) / first.ranks
    if not first.exchange.has_owners:
        hops: tuple[float, ...] = ((first.ranks - 1) * nbytes,)
    elif not first.exchange.uses_hosts:
        # an owner sends its sums to all others
        hops = (others * nbytes, (first.ranks - 1) / len(first.exchange.checked_owners(first.ranks)) * nbytes)
    else:
        hosts = first.ranks // ranks_per_host
        inside, between = (ranks_per_host - 1) / ranks_per_host, (hosts - 1) / hosts
        # all ranks of a host share its link to the others
        cut_up = sum(map(_bytes_inside, plans))
        hops = (inside * cut_up, between * nbytes, between * nbytes, inside * nbytes)
    # what travels uncompressed beside compressed ones has no groups
    groups = sum(-(-plan.numel // plan.group) for plan in plans if plan.group > 1)
    return Work(first.exchange, numel, hops, sum(len(plan.chunks) for plan in plans), groups, ranks_per_host)


def stages_of(work: Work, speed: Speed, network: Network, inside: Speed | None = None) -> tuple[Stage, ...]:
    """List the stages of an exchange, one after the other.

    Args:
        work: of the exchange.
        speed: of the compressor.
        network: of the ranks.
        inside: speed of what compresses inside of hosts; that of the compressor by default.

    Raises:
        ValueError: a hierarchical exchange in a network whose links inside and between hosts are not known.
    """
    link, ranks, numel = network.link, network.ranks, work.numel
    one, speed = speed, speed.of_calls(work.pieces)

    def sent(collective: str, nbytes: float, of: LinkSpeed = link) -> Stage:
        return Stage(of.seconds(collective, nbytes), collective, core=network.core.get(collective, 0.0))

    def reduction(owners: int, senders: int) -> Stage:
        """Describe an owner's part, which decodes and adds what all have sent, and encodes the sum."""
        chunk, calls = numel / owners, one.of_calls(work.pieces / owners)
        added = calls.decode(chunk) + (senders - 1) * calls.add(chunk)
        return Stage(added + calls.encoding(chunk, work.groups / owners))

    encode = Stage(speed.encoding(numel, work.groups))
    if isinstance(work.exchange, Dense):
        collective = "allreduce_half" if work.half else "allreduce"
        (nbytes,) = work.hop_bytes
        # copied into the buffer that Horovod fuses in and out of it; of a ring, 2 (ranks - 1) / ranks of it are sent
        copied = 2 * network.copying * ranks / (2 * max(ranks - 1, 1))
        joined = replace(sent(collective, nbytes), fusable_bytes=nbytes, joined_per_byte=copied,
                         per_byte=getattr(link, collective).per_unit)  # fmt: skip
        if not work.half:
            return (joined,)
        # Horovod casts into new tensors in both directions
        return (
            Stage(encode.seconds + speed.of_new_memory(2 * numel)),
            joined,
            Stage(speed.decode(numel) + speed.of_new_memory(4 * numel)),
        )
    if not work.exchange.has_owners:
        first, rest = speed.decode(numel), (ranks - 1) * speed.add(numel)
        (nbytes,) = work.hop_bytes
        return (encode, sent("allgather", nbytes), Stage(first + rest))
    if not work.exchange.uses_hosts:
        to_owner, to_all = work.hop_bytes
        owners = len(work.exchange.checked_owners(ranks))
        return (
            encode, sent("alltoall", to_owner), reduction(owners, ranks), sent("allgather", to_all),
            Stage(speed.decode(numel)),
        )  # fmt: skip
    if network.between is None or network.inside is None:
        raise ValueError("a hierarchical exchange needs Network(between=, inside=): the links between and inside hosts")
    cut_up, to_owner, to_all, passed_on = work.hop_bytes
    shard, per_host = numel / network.ranks_per_host, network.ranks_per_host
    cutting, summed = 0.0, (per_host - 1) * 4 * shard * network.copying
    if work.exchange.inside_compressor is not None:
        kernels = (one if inside is None else inside).of_calls(work.pieces / per_host)
        cutting, summed = ((per_host - 1) * seconds(shard) for seconds in (kernels.encode, kernels.add))
    return (
        *([Stage(cutting)] if cutting else []),
        sent("alltoall", cut_up, network.inside),
        Stage(summed + one.of_calls(work.pieces / per_host).encoding(shard, work.groups / per_host)),
        sent("alltoall", to_owner, network.between),
        reduction(ranks, network.hosts),
        sent("alltoall", to_all, network.between),
        sent("alltoall", passed_on, network.inside),
        Stage(speed.decode(numel)),
    )


def exchange_seconds(work: Work, speed: Speed, network: Network) -> float:
    """Predict the seconds of one exchange when nothing else goes on."""
    return sum(stage.seconds for stage in stages_of(work, speed, network))


def break_even_bandwidth(compressed: Callable[[float], float], dense: Callable[[float], float]) -> float:
    """Find the bandwidth at which both take the same time: below it compressing pays.

    Args:
        compressed: bandwidth in bits per second -> seconds.
        dense: the same; of two that both fall with the bandwidth, the one that falls further.

    Returns:
        Bits per second, to a thousandth; 0 if compressing never pays, infinity if it always does.

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
    while high / low > 1 + 1e-3:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return math.sqrt(low * high)


def _bytes_inside(plan: Plan) -> float:
    """Predict the bytes of a gradient that is cut up inside of a host."""
    compressor = plan.exchange.inside_of(plan.chunk_compressors[0])
    return 4 * plan.numel if compressor is None else compressor.body_bytes(plan.numel, compressor.group_of(plan.shape))


def _expected(plan: Plan, bytes_per_element: float) -> float:
    """Predict the bytes of all payloads of one rank."""
    most = sum(plan.slots)
    return most if plan.fixed_size else min(most, bytes_per_element * plan.numel)
