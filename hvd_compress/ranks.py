"""Collectives on flat arrays among some ranks: what every kind of them has to do, and what follows from that."""

from __future__ import annotations

import socket
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import fingerprint
from hvd_compress.errors import UnsupportedError

__all__ = ["HorovodRanks", "OnHost", "Ranks", "forget_numbers"]

Array = npt.NDArray[Any]

_counts: Counter[str] = Counter()


def forget_numbers() -> None:
    """Let `Ranks.numbered` begin anew: ranks that join an elastic run have made nothing yet; all of them do so."""
    _counts.clear()


class OnHost(NamedTuple):
    """Where a rank is, as its launcher counts.

    Args:
        rank: among those of its host.
        host: its number.
        size: how many ranks its host has.
    """

    rank: int
    host: int
    size: int


class Ranks(ABC):
    """Some ranks, as one of them sees them.

    Args:
        size: how many they are.
        position: of this one among them.
        name: what tells them from other ranks; the same on all of them.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Ranks, ThreadRanks
        >>> def mean_of_squares(ranks: Ranks):  # a program that any kind of ranks runs
        ...     return ranks.mean("squares", np.full(1, ranks.position**2, np.float32))
        >>> ThreadRanks.run_all(3, mean_of_squares)[0]
        array([1.6666666], dtype=float32)
    """

    def __init__(self, size: int, position: int, name: str) -> None:
        self.size = size
        self.position = position
        self.name = name
        self._counts = _counts

    # -- what every kind does in its own way -------------------------------------------------------------------------

    @abstractmethod
    def start(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        """Start a collective; returns what `is_done` and `wait` take.

        Args:
            collective: "allreduce", which makes the sum, "allgather", which takes arrays of different sizes, or
                "broadcast". Everything else, such as "alltoall" or "scatter_inside", is an alltoall.
            name: the same on all ranks, and of nothing else that is under way.
            array: flat, in use until `wait` has returned; an allreduce and a broadcast may leave their result in it.
            sizes: of an alltoall, how many elements each rank gets, one after the other; None for equal parts.
            root: position of the rank whose array a broadcast brings.
        """

    @abstractmethod
    def is_done(self, handle: Any) -> bool:
        """Return whether `wait` would return at once; never waits."""

    @abstractmethod
    def wait(self, handle: Any) -> Array:
        """Wait for a collective; returns what it has brought, flat, in the order of the ranks it came from."""

    def on_host(self) -> OnHost:
        """Where this rank is; unless told otherwise, all ranks are on one host."""
        return OnHost(self.position, 0, self.size)

    # -- what follows from that --------------------------------------------------------------------------------------

    def run(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Array:
        """Run a collective; see `start`."""
        return self.wait(self.start(collective, name, array, sizes, root))

    def repeated(
        self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None
    ) -> Callable[[], object]:
        """Return what runs a collective as often as it is called, with memory that is kept; for measuring."""
        return partial(self.run, collective, name, array, sizes)

    def mean(self, name: str, array: Array) -> Array:
        """Average a flat float32 or float64 array over the ranks; all of them get the same bits."""
        return self.run("allreduce", name, array.copy()) / array.dtype.type(self.size)

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, one by one, the same on all ranks."""
        everyone = self.run("allgather", f"hvd_compress.maximum.{len(values)}", np.array(values, np.float64))
        largest: list[float] = everyone.reshape(self.size, -1).max(axis=0).tolist()
        return largest

    def barrier(self, name: str) -> None:
        """Wait for all ranks."""
        self.run("allreduce", name, np.zeros(1, np.float32))

    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join bytes of all ranks, of which each may give another number."""
        return self.run("allgather", name, _as_array(data)).tobytes()

    def numbered(self, kind: str) -> str:
        """Name one more thing of a kind: all ranks make them in the same order, or are told so by `agree`."""
        name = f"hvd_compress.{kind}.{self.name}"
        self._counts[name] += 1
        return f"{name}.{self._counts[name] - 1}"

    def agree(self, description: dict[str, Any], name: str | None = None, beside: Sequence[str] = ()) -> None:
        """Compare what each rank says; a collective call where all can come. See `fingerprint.agree`.

        Args:
            description: JSON-able.
            name: of the collective, where another rank may start one that is not ours under the same name.
            beside: tensors that another rank might exchange meanwhile without this package, in the order of the
                parameters; kinds of ranks that can tell raise an error then.

        Raises:
            MismatchError: on all ranks, naming the first difference.
        """
        fingerprint.agree(description, self.gather_bytes, name or self.numbered("fingerprint"))

    def begin_agreement(self, description: dict[str, Any]) -> Callable[[], None]:
        """Begin what `agree` does; returns what ends it, for ranks that have something to do meanwhile."""

        def start(data: bytes, name: str) -> Callable[[], bytes]:
            handle = self.start("allgather", name, _as_array(data))
            return lambda: self.wait(handle).tobytes()

        return fingerprint.begin_agreement(description, start, self.numbered("fingerprint"))

    def host_numbers(self) -> list[int]:
        """Return a number for each rank, the same for ranks on one host.

        Raises:
            UnsupportedError: hosts of one name with different numbers of ranks, which cannot be told apart.
        """
        mine = np.array([zlib.crc32(socket.gethostname().encode()), *self.on_host()], np.int64)
        everyone = self.run("allgather", "hvd_compress.hosts", mine).reshape(self.size, -1)
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


class HorovodRanks(Ranks):
    """The ranks of a process set of Horovod; edges add the collectives.

    Args:
        hvd: Horovod for a framework, started.
        process_set: the ranks that take part; this rank is one of them.
    """

    def __init__(self, hvd: Any, process_set: Any) -> None:
        super().__init__(int(process_set.size()), int(process_set.rank()), fingerprint.scope_of(process_set))
        self._hvd = hvd
        self._process_set = process_set

    def on_host(self) -> OnHost:
        return OnHost(self._hvd.local_rank(), self._hvd.cross_rank(), self._hvd.local_size())


def _as_array(data: bytes) -> Array:
    # of memory that may be written to: an array of bytes could not become a tensor without a warning
    return np.frombuffer(bytearray(data), np.uint8)
