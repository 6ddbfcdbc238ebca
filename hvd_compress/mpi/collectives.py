"""What the collectives of all edges have in common: names, agreement, and the way to one-sided messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.fingerprint import scope_of
from hvd_compress.gossip import Node, Transport, collective_name
from hvd_compress.mpi.root_messages import RootMessages
from hvd_compress.mpi.session import Session
from hvd_compress.mpi.start import communicator, start_one_sided, start_root_messages
from hvd_compress.topology import Neighbours

__all__ = ["HorovodRanks"]


class HorovodRanks(ABC):
    """See `gossip.Collectives`; edges add the collectives themselves.

    Args:
        hvd: Horovod for a framework, started.
        process_set: the ranks that take part; this rank is one of them.
        require_agreement: of the edge.
    """

    def __init__(self, hvd: Any, process_set: Any, require_agreement: Callable[[dict[str, Any], Any], None]) -> None:
        self.size, self.position = int(process_set.size()), int(process_set.rank())
        self._hvd = hvd
        self._process_set = process_set
        self._require_agreement = require_agreement
        self._name = collective_name(scope_of(process_set))

    def require_agreement(self, description: dict[str, Any]) -> None:
        """Raise MismatchError on all ranks unless all say the same."""
        self._require_agreement(description, self._process_set)

    def one_sided(self, node: Node, parts: Sequence[Neighbours]) -> Transport:
        """The transport over MPI's one-sided operations."""
        return start_one_sided(self._hvd, node, parts, self._gathered)

    def root_messages(self) -> RootMessages:
        """The transport of a parameter server over MPI's messages between two ranks."""
        return start_root_messages(self._hvd, self._gathered)

    def communicator(self, asked: str, lacking: str, instead: str) -> tuple[Session, Any]:
        """See `start.communicator`."""
        return communicator(self._hvd, self._gathered, asked, lacking, instead)

    def _gathered(self, number: int) -> list[int]:
        """A number of each rank."""
        mine, one_each = np.full(self.size, number, np.int64), np.ones(self.size, np.int32)
        gathered: list[int] = self.wait(self.start(mine, one_each)).tolist()
        return gathered

    @abstractmethod
    def start(self, words: npt.NDArray[np.int64], splits: npt.NDArray[np.int32]) -> Any:
        """Start an alltoall."""

    @abstractmethod
    def wait(self, handle: Any) -> npt.NDArray[np.int64]:
        """What it brought, in the order of the senders."""
