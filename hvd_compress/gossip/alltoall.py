"""Carry messages as parts of one alltoall, empty but for neighbours; every step waits for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.exchange import aligned_empty
from hvd_compress.gossip.copies import Array
from hvd_compress.gossip.message import cut_message
from hvd_compress.gossip.node import Node
from hvd_compress.ranks import Ranks
from hvd_compress.waiting import waiting

__all__ = ["Alltoall"]


class Alltoall:
    """Carries the messages of a node.

    Args:
        node: whose messages.
        ranks: that take part.
        name: of the alltoall.
    """

    waits = True

    def __init__(self, node: Node, ranks: Ranks, name: str) -> None:
        self._node = node
        self._ranks = ranks
        self._name = name
        # always sent whole, with splits that say how much of it counts: Horovod's response cache knows a tensor by its
        # shape. Words, because splits count elements and have 32 bits
        self._buffer = aligned_empty(len(node.part.receivers) * node.capacity // 8, np.int64)
        self._splits = [0] * ranks.size
        self._handle: Any = None

    def send(self, arrays: Sequence[Array | None]) -> None:
        """Decide what to send of these values, and start sending it."""
        node = self._node
        sent = np.flatnonzero(node.decide(arrays))
        nbytes = node.write(arrays, self._buffer.view(np.uint8))
        self._issue(sent, nbytes)

    def answer(self) -> None:
        """Send nothing, as a rank that has finished."""
        nbytes = self._node.write_nothing(self._buffer.view(np.uint8))
        self._issue(np.empty(0, np.intp), nbytes)

    def receive(self) -> None:
        """Take over what the neighbours have sent."""
        handle, self._handle = self._handle, None
        with waiting("for its neighbours' messages in a step or average_parameters() of EventGraD"):
            received = self._ranks.wait(handle).view(np.uint8)
        at = 0
        for index in range(len(self._node.part.senders)):
            message = cut_message(received, at)
            self._node.read(index, message)
            at += message.size
        self._node.end_round()

    def close(self) -> None:
        """Do nothing, since nothing is held between steps."""

    def _issue(self, sent: npt.NDArray[np.intp], nbytes: int) -> None:
        """Send the message at the start of the buffer, with these tensors in it, to all receivers."""
        self._node.count_sent(sent, self._buffer.view(np.uint8)[:nbytes], len(self._node.part.receivers))
        words = nbytes // 8
        for i, receiver in enumerate(self._node.part.receivers):
            self._buffer[i * words : (i + 1) * words] = self._buffer[:words]
            self._splits[receiver] = words
        self._handle = self._ranks.start("alltoall", self._name, self._buffer, self._splits)
