"""Collectives of torch.distributed on arrays: a Gloo group of our own, used by one thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hvd_compress.ddp._call_thread import CallThread
from hvd_compress.errors import LostRankError
from hvd_compress.ranks import OnHost, Ranks

__all__ = ["GlooRanks"]

Array = npt.NDArray[Any]


class GlooRanks(Ranks):
    """See `Ranks`. Gloo matches collectives by their order alone: ranks start them in the same one.

    Args:
        group: a process group of Gloo, which nobody else uses.
        name: what tells the ranks from others.
    """

    def __init__(self, group: Any, name: str) -> None:
        super().__init__(group.size(), group.rank(), name)
        self._group = group
        self.thread = CallThread(f"hvd_compress.{name}")
        """The thread that runs the collectives."""

    def start(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        return self.thread.submit(self.move, collective, name, array, sizes, root)

    def is_done(self, handle: Any) -> bool:
        return bool(handle.done())

    def wait(self, handle: Any) -> Array:
        array: Array = handle.result()
        return array

    def on_host(self) -> OnHost:
        told = [os.environ.get(key) for key in ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")]
        # what torchrun says; without it, hosts are told apart by their names
        if any(value is None for value in told):
            return super().on_host()
        return OnHost(*(int(value or 0) for value in told))

    def leave(self) -> None:
        """Leave the group: ranks that wait for this one, now or later, get an error."""
        self._group = None

    def close(self) -> None:
        """Leave the group, and let the thread end."""
        self.leave()
        self.thread.close()

    def move(
        self,
        collective: str,
        name: str,
        array: Array,
        sizes: Sequence[int] | None = None,
        root: int = 0,
        expected: Sequence[int] | None = None,
    ) -> Array:
        """Run a collective, on that thread; see `start`.

        Args:
            collective: its kind.
            name: for errors.
            array: what this rank gives.
            sizes: of an alltoall.
            root: of a broadcast.
            expected: elements that come from each rank, of an alltoall with `sizes` or an allgather, where this rank
                knows; else they are asked for, which takes one more message.

        Raises:
            LostRankError: a rank has ended, or has not answered in time.
        """
        group = self._group
        try:
            if group is None:
                raise RuntimeError("this rank has left the group")
            return self._moved(group, collective, np.ascontiguousarray(array), sizes, root, expected)
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self.position} of {self.size}, {collective} of {name!r}: {str(error).strip()}. Another rank "
                "has ended, or has not answered within the timeout of the process group; what it has written says why"
            ) from error

    def _moved(
        self,
        group: Any,
        collective: str,
        array: Array,
        sizes: Sequence[int] | None,
        root: int,
        expected: Sequence[int] | None,
    ) -> Array:
        if collective == "allreduce":
            total = torch.from_numpy(array.copy())
            group.allreduce([total]).wait()
            return total.numpy()
        # bytes, so that each type of elements is moved
        mine, itemsize = torch.from_numpy(array.view(np.uint8)), array.dtype.itemsize
        if collective == "broadcast":
            moved = _broadcast(group, mine, root)
        elif collective == "allgather":
            counts = _told_all(group, mine.numel()) if expected is None else [n * itemsize for n in expected]
            moved = _gathered(group, mine, counts)
        else:
            given = None if sizes is None else [n * itemsize for n in sizes]
            coming = None if given is None or expected is None else [n * itemsize for n in expected]
            moved = _exchanged(group, mine, given, coming)
        return moved.numpy().view(array.dtype)


def _broadcast(group: Any, mine: torch.Tensor, root: int) -> torch.Tensor:
    moved = mine.clone()
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    if moved.numel():
        group.broadcast([moved], options).wait()
    return moved


def _told_all(group: Any, count: int) -> list[int]:
    """Return what each rank says."""
    everyone = torch.empty(group.size(), dtype=torch.int64)
    group._allgather_base(everyone, torch.tensor([count])).wait()
    counts: list[int] = everyone.tolist()
    return counts


def _gathered(group: Any, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Bring bytes of all ranks to all: as messages, since Gloo's allgather wants equally many of each."""
    moved = torch.empty(sum(counts), dtype=torch.uint8)
    spans = list(pairwise(accumulate(counts, initial=0)))
    rank, size = group.rank(), group.size()
    works = []
    # each begins with another one, so that not all send to the same
    for other in ((rank + i) % size for i in range(1, size)):
        if counts[other]:
            works.append(group.recv([moved[slice(*spans[other])]], other, 0))
        if counts[rank]:
            works.append(group.send([mine], other, 0))
    moved[slice(*spans[rank])] = mine
    for work in works:
        work.wait()
    return moved


def _exchanged(group: Any, mine: torch.Tensor, given: list[int] | None, coming: list[int] | None) -> torch.Tensor:
    """Bring each rank its part of all."""
    if given is None:
        moved = torch.empty_like(mine)
        if mine.numel():
            group.alltoall_base(moved, mine, [], []).wait()
        return moved
    if coming is None:
        counts = torch.empty(group.size(), dtype=torch.int64)
        group.alltoall_base(counts, torch.tensor(given), [], []).wait()
        coming = counts.tolist()
    moved = torch.empty(sum(coming), dtype=torch.uint8)
    group.alltoall_base(moved, mine[: sum(given)], coming, given).wait()
    return moved
