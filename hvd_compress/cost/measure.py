"""Measures a link by a few collectives; whose they are is the caller's business."""

from __future__ import annotations

import math
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvd_compress.cost.line import fit_line
from hvd_compress.cost.link import COLLECTIVES, Link, Network
from hvd_compress.cost.speeds import copy_speed
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Hosts, ring_bytes
from hvd_compress.kernels.checksum import checksum

__all__ = ["Collectives", "HorovodCollectives", "measure_link", "measure_network", "sent_bytes"]

_SIZES = tuple(2**i for i in (13, 16, 18, 20, 22, 24, 26))
_LEAST_SIZES = 3
_REPEATS = 5
_SLOW_SECONDS = 0.05  # from here on noise is small against the time itself: fewer repeats do
_SLOW_REPEATS = 2
_LONGEST_SECONDS = 0.4
_LOADED_SECONDS = 0.05
_COMPUTED_WORDS = 2**14  # 128 KiB: some microseconds a call, in the second-level cache


class Collectives(Protocol):
    """What an edge provides: blocking collectives over all ranks, called in the same order on each of them."""

    ranks: int

    def run(self, collective: str, nbytes: int, peers: Sequence[int] | None = None) -> None:
        """Run one of `COLLECTIVES` with a buffer of `nbytes` on this rank; an alltoall may send to `peers` only."""

    def maximum(self, values: list[float]) -> list[float]:
        """The largest of all ranks' values, one by one, the same on all ranks."""


class HorovodCollectives:
    """`Collectives` through a Horovod module; frameworks differ in how a NumPy array becomes a tensor only.

    Args:
        hvd: horovod.torch or horovod.tensorflow.
        tensor: from a NumPy array.
        settings: of every collective, such as a process set.
    """

    def __init__(self, hvd: Any, tensor: Callable[[npt.NDArray[Any]], Any], ranks: int, **settings: Any) -> None:
        self.ranks = ranks
        self._hvd = hvd
        self._tensor = tensor
        self._settings = settings
        self._kind: tuple[str, int] | None = None
        self._buffer: Any = None

    def run(self, collective: str, nbytes: int, peers: Sequence[int] | None = None) -> None:
        """Run one of `COLLECTIVES` on a buffer of zeros; of an alltoall, only `peers` may get parts."""
        name = f"hvd_compress.measure.{collective}.{nbytes}" + ("" if peers is None else ".peers")
        if self._kind != (collective, nbytes):
            dtype = {"allreduce": np.float32, "allreduce_half": np.float16}.get(collective, np.uint8)
            # the last one is given up: training may want the memory of all of them
            self._kind, self._buffer = (collective, nbytes), None
            self._buffer = self._tensor(np.zeros(nbytes // np.dtype(dtype).itemsize, dtype))
        buffer = self._buffer
        if collective.startswith("allreduce"):
            # in place where the framework can, as its optimizers do
            allreduce = getattr(self._hvd, "allreduce_", self._hvd.allreduce)
            allreduce(buffer, name=name, op=self._hvd.Sum, **self._settings)
        elif collective == "alltoall":
            splits = None if peers is None else self._tensor(self._splits(nbytes, peers))
            self._hvd.alltoall(buffer, splits=splits, name=name, **self._settings)
        else:
            self._hvd.allgather(buffer, name=name, **self._settings)

    def _splits(self, nbytes: int, peers: Sequence[int]) -> npt.NDArray[np.int32]:
        splits = np.zeros(self.ranks, np.int32)
        splits[list(peers)] = nbytes // len(peers)
        return splits

    def host_numbers(self) -> list[int]:
        """A number for each rank, the same for those on one host.

        Raises:
            UnsupportedError: hosts of one name with different numbers of ranks, which Horovod does not tell apart.
        """
        hvd, name = self._hvd, zlib.crc32(socket.gethostname().encode())
        mine = self._tensor(np.array([[name, hvd.local_rank(), hvd.cross_rank(), hvd.local_size()]], np.int64))
        everyone = hvd.allgather(mine, name="hvd_compress.hosts", **self._settings).numpy()
        names, local_ranks, numbers, sizes = everyone.T.tolist()
        if len(set(zip(names, local_ranks, strict=True))) == len(names):
            return list(names)
        # Several hosts of one name, such as containers. Horovod counts hosts for each local rank on its own: a host has
        # one number only if all have equally many ranks, and were started in one order.
        if len(set(sizes)) > 1:
            raise UnsupportedError(
                f"exchange='hierarchical' where ranks share hosts with {sorted(set(sizes))} ranks: start equally many "
                "on all hosts, or use exchange='two_phase'"
            )
        return list(numbers)

    def maximum(self, values: list[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""
        mine = self._tensor(np.array([values], np.float64))
        everyone = self._hvd.allgather(mine, name=f"hvd_compress.maximum.{len(values)}", **self._settings).numpy()
        return [float(v) for v in everyone.max(axis=0)]


def sent_bytes(collective: str, nbytes: int, ranks: int) -> float:
    """Bytes that a rank sends in a collective whose buffer is `nbytes` on each rank."""
    if collective.startswith("allreduce"):
        return ring_bytes(nbytes, ranks)
    return (ranks - 1) * nbytes / (ranks if collective == "alltoall" else 1)


def measure_hosts(collectives: Collectives, hosts: Hosts, position: int, link: Link) -> tuple[Link, Link]:
    """What the alltoalls of a hierarchical exchange take inside hosts and between them; a collective call.

    Args:
        collectives: of all ranks.
        hosts: of the ranks.
        position: of this rank.
        link: of all ranks, of which the other collectives are taken.

    Returns:
        The links inside hosts, by the bytes that a rank sends, and between them, by those of all ranks of a host.
    """
    inside = fit_line(_points(collectives, "alltoall", hosts.inside(position)))
    between = fit_line(
        (hosts.per_host * sent, s) for sent, s in _points(collectives, "alltoall", hosts.between(position))
    )
    return replace(link, alltoall=inside), replace(link, alltoall=between)


def measure_link(collectives: Collectives) -> Link:
    """Fit a link to collectives of growing size; a few seconds at most. Equal on all ranks; a collective call.

    Raises:
        ValueError: a single rank has no link.
    """
    if collectives.ranks < 2:
        raise ValueError("a link has two ends: start two ranks or more")
    return Link.fit((c, sent, seconds) for c in COLLECTIVES for sent, seconds in _points(collectives, c))


def measure_network(collectives: Collectives, hosts: Hosts | None = None, position: int = 0) -> Network:
    """All that is measured of a network, a few seconds at most; equal on all ranks, a collective call.

    Args:
        collectives: of all ranks.
        hosts: of the ranks; without them, the links inside hosts are not told from those between them.
        position: of this rank.

    Raises:
        ValueError: a single rank has no link.
    """
    link = measure_link(collectives)
    core = measure_core(collectives, link)
    (copying,) = collectives.maximum([copy_speed().per_unit / 4])
    per_host = 1 if hosts is None else hosts.per_host
    network = Network(collectives.ranks, link, per_host, core=core, copying=copying)
    if hosts is None or hosts.per_host == 1 or hosts.count == 1:
        return network
    inside, between = measure_hosts(collectives, hosts, position, link)
    return replace(network, inside=inside, between=between)


def measure_core(collectives: Collectives, link: Link) -> dict[str, float]:
    """How much of each collective's time is lost to what computes meanwhile, from 0 to 1, the same on all ranks.

    0 where every rank has a core to spare, 1 where collectives and computing take turns. The ranks of a host compute at
    the same time, as they do in training.

    Args:
        collectives: of all ranks.
        link: as measured among them.
    """
    shares = []
    for collective in COLLECTIVES:
        size = next((s for s in reversed(_SIZES) if link.seconds(collective, s) < _LOADED_SECONDS), _SIZES[0])
        nbytes = size // collectives.ranks if collective == "allgather" else size
        nbytes -= nbytes % (8 * collectives.ranks)
        calls = math.ceil(_LOADED_SECONDS / link.seconds(collective, size))
        run = partial(_run_often, collectives, collective, nbytes, calls)
        run()
        collectives.maximum([0.0])  # so that all begin together
        idle, _ = _computed_during(partial(time.sleep, _LOADED_SECONDS))
        collectives.maximum([0.0])
        alone = _elapsed(run)
        computed, loaded = _computed_during(run)
        # both may give way: what computes, and the collective
        shares.append(min(1.0, max(0.0, 1.0 - computed / idle) + max(0.0, 1.0 - alone / loaded)))
    return dict(zip(COLLECTIVES, collectives.maximum(shares), strict=True))


def _run_often(collectives: Collectives, collective: str, nbytes: int, calls: int) -> None:
    for _ in range(calls):
        collectives.run(collective, nbytes)


def _elapsed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _computed_during(wait: Callable[[], object]) -> tuple[float, float]:
    """How often in a second something can be computed, without the GIL, while another call waits; seconds of that."""
    words = np.zeros(_COMPUTED_WORDS, np.uint64)
    ended = threading.Event()
    done = 0

    def compute() -> None:
        nonlocal done
        while not ended.is_set():
            checksum(words, 0)
            done += 1

    checksum(words, 0)  # compiled before it is timed
    thread = threading.Thread(target=compute, name="hvd_compress.measure", daemon=True)
    thread.start()
    try:
        seconds = _elapsed(wait)
        return done / seconds, seconds
    finally:
        ended.set()
        thread.join()


def _points(collectives: Collectives, collective: str, peers: Sequence[int] | None = None) -> list[tuple[float, float]]:
    """(bytes that a rank sends, seconds) of growing sizes, until they take too long."""
    points = []
    slowest = 0.0
    senders = collectives.ranks if peers is None else len(peers)
    for i, size in enumerate(_SIZES):
        # what a rank sends is to be alike for all collectives, so that they take about as long
        nbytes = size // senders if collective == "allgather" else size
        nbytes -= nbytes % (8 * senders)
        expected = slowest * size / _SIZES[i - 1] if i else 0.0
        if i >= _LEAST_SIZES and expected > _LONGEST_SECONDS:
            break
        repeats = _SLOW_REPEATS if expected > _SLOW_SECONDS else _REPEATS
        seconds = _seconds(collectives, collective, nbytes, repeats, peers)
        slowest = median(seconds)
        points += [(sent_bytes(collective, nbytes, senders), s) for s in seconds]
    return points


def _seconds(
    collectives: Collectives, collective: str, nbytes: int, repeats: int, peers: Sequence[int] | None = None
) -> list[float]:
    # one more than counts: Horovod's cache does not know the name yet, and ranks come in at different times
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        collectives.run(collective, nbytes, peers)
        taken.append(time.perf_counter() - begin)
    return collectives.maximum(taken[1:])
