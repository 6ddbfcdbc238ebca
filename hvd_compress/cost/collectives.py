"""Run blocking collectives to be timed: those that an edge provides, and Horovod's own."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import UnsupportedError

__all__ = ["Collectives", "HorovodCollectives"]


class Collectives(Protocol):
    """Blocking collectives over all ranks, which an edge provides, called in the same order on each of them."""

    ranks: int

    def run(self, collective: str, nbytes: int, peers: Sequence[int] | None = None) -> None:
        """Run one of `COLLECTIVES` with a buffer of `nbytes` on this rank; an alltoall may send to `peers` only."""

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest of all ranks' values, one by one, the same on all ranks."""


class HorovodCollectives:
    """Runs `Collectives` by a Horovod module; frameworks differ only in how a NumPy array becomes a tensor.

    Args:
        hvd: horovod.torch or horovod.tensorflow.
        tensor: from a NumPy array.
        process_set: the ranks that take part; all if None.
    """

    def __init__(self, hvd: Any, tensor: Callable[[npt.NDArray[Any]], Any], process_set: Any = None) -> None:
        who = hvd if process_set is None else process_set
        self.ranks: int = who.size()
        self.position: int = who.rank()
        self.name = f"{hvd.__name__}, process set {0 if process_set is None else process_set.process_set_id}"
        """What tells these collectives from others of the process."""
        self._hvd = hvd
        self._tensor = tensor
        self._settings = {} if process_set is None else {"process_set": process_set}
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
        settings = {"name": name, **self._settings}
        if collective.startswith("allreduce"):
            # in place where the framework can, as its optimizers do
            allreduce = getattr(self._hvd, "allreduce_", self._hvd.allreduce)
            allreduce(buffer, op=self._hvd.Sum, **settings)
            return
        if collective == "alltoall":
            settings["splits"] = None if peers is None else self._tensor(self._splits(nbytes, peers))
        getattr(self._hvd, collective)(buffer, **settings)

    def _splits(self, nbytes: int, peers: Sequence[int]) -> npt.NDArray[np.int32]:
        splits = np.zeros(self.ranks, np.int32)
        splits[list(peers)] = nbytes // len(peers)
        return splits

    def host_numbers(self) -> list[int]:
        """Return a number for each rank, the same for ranks on one host.

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
        """Return the largest of all ranks' values, one by one."""
        mine = self._tensor(np.array([values], np.float64))
        name = f"hvd_compress.maximum.{len(values)}"
        everyone = self._hvd.allgather(mine, name=name, **self._settings).numpy()
        return [float(v) for v in np.asarray(everyone).max(axis=0)]
