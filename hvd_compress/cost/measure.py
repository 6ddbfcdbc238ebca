"""Measure links and kernels as all ranks feel them, by a few collectives of the `Ranks` that the caller provides."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np

from hvd_compress.compressors import Compressor
from hvd_compress.cost.line import fit_line
from hvd_compress.cost.link import COLLECTIVES, LinkSpeed, Network
from hvd_compress.cost.speeds import Speed, copy_speed, measure_speed, speed_of
from hvd_compress.exchange import Hosts, ring_bytes
from hvd_compress.kernels.checksum import checksum
from hvd_compress.ranks import Ranks

__all__ = ["measure_link", "measure_network", "network_of", "sent_bytes", "slowest_speeds"]

_SIZES = tuple(2**i for i in (13, 16, 18, 20, 22, 24, 26))
_LEAST_SIZES = 3
_REPEATS = 5
_SLOW_SECONDS = 0.05  # noise is small against longer times: fewer repeats do
_SLOW_REPEATS = 3
_LONGEST_SECONDS = 0.4
_LOADED_SECONDS = 0.05
_COMPUTED_WORDS = 2**14  # 128 KiB: some microseconds a call, in the second-level cache

_known: dict[tuple[type, str, int, bool], Network] = {}


def sent_bytes(collective: str, nbytes: int, ranks: int) -> float:
    """Compute the bytes that a rank sends in a collective whose buffer is `nbytes` on each rank."""
    if collective.startswith("allreduce"):
        return ring_bytes(nbytes, ranks)
    return (ranks - 1) * nbytes / (ranks if collective == "alltoall" else 1)


def measure_hosts(ranks: Ranks, hosts: Hosts, link: LinkSpeed) -> tuple[LinkSpeed, LinkSpeed]:
    """Measure the alltoalls of a hierarchical exchange inside hosts and between them; a collective call.

    Args:
        ranks: all of them.
        hosts: of the ranks.
        link: between all ranks, from which the other collectives are taken.

    Returns:
        The links inside hosts, by the bytes that a rank sends, and between them, by those of all ranks of a host.
    """
    inside = fit_line(_points(ranks, "alltoall", hosts.inside(ranks.position)))
    points = _points(ranks, "alltoall", hosts.between(ranks.position))
    between = fit_line((hosts.per_host * sent, s) for sent, s in points)
    return replace(link, alltoall=inside), replace(link, alltoall=between)


def measure_link(ranks: Ranks) -> LinkSpeed:
    """Fit a link to collectives of growing size; a few seconds at most. Equal on all ranks; a collective call.

    Raises:
        ValueError: a single rank has no link.
    """
    if ranks.size < 2:
        raise ValueError("a link has two ends: start two ranks or more")
    return LinkSpeed.fit((c, sent, seconds) for c in COLLECTIVES for sent, seconds in _points(ranks, c))


def measure_network(ranks: Ranks, hosts: Hosts | None = None) -> Network:
    """Measure a network, in a few seconds at most; equal on all ranks, a collective call.

    Args:
        ranks: all of them.
        hosts: of the ranks; without them, the links inside hosts are not told from those between them.

    Raises:
        ValueError: a single rank has no link.
    """
    link = measure_link(ranks)
    core = measure_core(ranks, link)
    (copying,) = ranks.maximum([copy_speed().per_unit / 4])
    per_host = 1 if hosts is None else hosts.per_host
    network = Network(ranks.size, link, per_host, core=core, copying=copying)
    if hosts is None or hosts.per_host == 1 or hosts.count == 1:
        return network
    inside, between = measure_hosts(ranks, hosts, link)
    return replace(network, inside=inside, between=between)


def network_of(ranks: Ranks, with_hosts: bool) -> Network:
    """Measure the network, once in a process as long as the ranks stay the same; a collective call.

    Args:
        ranks: that share it.
        with_hosts: tell the links inside hosts from those between them.
    """
    key = (type(ranks), ranks.name, ranks.size, with_hosts)
    mine = _known[key].link.alltoall.per_unit if key in _known else -1.0
    # ranks that joined since know nothing
    most, least = ranks.maximum([mine, -mine])
    if most != -least or most < 0:
        hosts = Hosts.of_names(ranks.host_numbers()) if with_hosts else None
        _known[key] = measure_network(ranks, hosts)
    return _known[key]


def slowest_speeds(compressors: Iterable[Compressor], ranks: Ranks) -> dict[Compressor, Speed]:
    """Measure kernels on all ranks at once and return the slowest rank's speeds; a collective call."""
    speeds = {}
    for compressor in compressors:
        speed_of(compressor)  # compiles, before all measure at the same time
        ranks.maximum([0.0])
        speeds[compressor] = Speed.from_numbers(ranks.maximum(measure_speed(compressor).numbers()))
    return speeds


def measure_core(ranks: Ranks, link: LinkSpeed) -> dict[str, float]:
    """Measure what share (0 to 1) of each collective's time is lost to computing meanwhile; equal on all ranks.

    It is 0 where every rank has a core to spare, 1 where collectives and computing take turns. The ranks of a host
    compute at the same time, as they do in training.

    Args:
        ranks: all of them.
        link: as measured among them.
    """
    shares = []
    for collective in COLLECTIVES:
        size = next((s for s in reversed(_SIZES) if link.seconds(collective, s) < _LOADED_SECONDS), _SIZES[0])
        nbytes = _buffer_bytes(collective, size, ranks.size)
        calls = math.ceil(_LOADED_SECONDS / link.seconds(collective, size))
        run = partial(_run_often, _prepared(ranks, collective, nbytes), calls)
        run()
        ranks.maximum([0.0])  # so that all begin together
        idle, _ = _computed_during(partial(time.sleep, _LOADED_SECONDS))
        ranks.maximum([0.0])
        alone = _elapsed(run)
        computed, loaded = _computed_during(run)
        # both may give way: what computes, and the collective. On a machine that others keep busy nothing may have been
        # computed at all while this rank slept: then nothing is lost by the collective, either
        given_way = max(0.0, 1.0 - computed / idle) if idle else 0.0
        shares.append(min(1.0, given_way + max(0.0, 1.0 - alone / loaded)))
    return dict(zip(COLLECTIVES, ranks.maximum(shares), strict=True))


def _run_often(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def _prepared(ranks: Ranks, collective: str, nbytes: int, peers: Sequence[int] | None = None) -> Callable[[], object]:
    """One of `COLLECTIVES` with a buffer of `nbytes` on this rank; an alltoall may send to `peers` only."""
    dtype = {"allreduce": np.float32, "allreduce_half": np.float16}.get(collective, np.uint8)
    buffer = np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)
    name = f"hvd_compress.measure.{collective}.{nbytes}" + ("" if peers is None else ".peers")
    sizes = None
    if peers is not None:
        sizes = [nbytes // len(peers) if rank in peers else 0 for rank in range(ranks.size)]
    return ranks.repeated(collective.removesuffix("_half"), name, buffer, sizes)


def _elapsed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _computed_during(wait: Callable[[], object]) -> tuple[float, float]:
    """Compute without the GIL while another call waits; returns computations per second, and the call's seconds."""
    words = np.zeros(_COMPUTED_WORDS, np.uint64)
    ended = threading.Event()
    done = 0

    def compute() -> None:
        nonlocal done
        while not ended.is_set():
            checksum(words, 0)
            done += 1

    checksum(words, 0)  # the first call compiles, and is not timed
    thread = threading.Thread(target=compute, name="hvd_compress.measure", daemon=True)
    thread.start()
    try:
        seconds = _elapsed(wait)
        return done / seconds, seconds
    finally:
        ended.set()
        thread.join()


def _buffer_bytes(collective: str, size: int, senders: int) -> int:
    # a rank sends about as much in each collective, so that all of them take about as long
    nbytes = size // senders if collective == "allgather" else size
    return nbytes - nbytes % (8 * senders)


def _points(ranks: Ranks, collective: str, peers: Sequence[int] | None = None) -> list[tuple[float, float]]:
    """Measure (bytes that a rank sends, seconds) of growing sizes, until they take too long."""
    points = []
    slowest = 0.0
    senders = ranks.size if peers is None else len(peers)
    for i, size in enumerate(_SIZES):
        nbytes = _buffer_bytes(collective, size, senders)
        expected = slowest * size / _SIZES[i - 1] if i else 0.0
        if i >= _LEAST_SIZES and expected > _LONGEST_SECONDS:
            break
        repeats = _SLOW_REPEATS if expected > _SLOW_SECONDS else _REPEATS
        seconds = _seconds(ranks, _prepared(ranks, collective, nbytes, peers), repeats)
        slowest = median(seconds)
        points += [(sent_bytes(collective, nbytes, senders), s) for s in seconds]
    return points


def _seconds(ranks: Ranks, run: Callable[[], object], repeats: int) -> list[float]:
    # the first does not count: Horovod's cache does not know its name yet, and ranks come at different times
    taken = [_elapsed(run) for _ in range(repeats + 1)]
    return ranks.maximum(taken[1:])
