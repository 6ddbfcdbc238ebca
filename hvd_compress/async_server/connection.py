"""Carry messages between the server and one worker."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Connection", "QueueConnection", "queue_connections"]

Bytes = npt.NDArray[np.uint8]


class Connection(Protocol):
    """One end of a connection, whose messages arrive whole and in order."""

    def send(self, message: Bytes) -> None:
        """Start sending; the bytes are in use until `flush` returns."""

    def flush(self) -> None:
        """Wait until no bytes are in use."""

    def receive(self) -> Bytes | None:
        """Return a message that has arrived, which lasts until the next call, or None; never waits."""


class QueueConnection:
    """One end of a connection inside a process.

    Args:
        outgoing: messages to the other end.
        incoming: messages from there.
    """

    def __init__(self, outgoing: deque[Bytes], incoming: deque[Bytes]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, message: Bytes) -> None:
        """See `Connection`."""
        self._outgoing.append(message.copy())

    def flush(self) -> None:
        """See `Connection`."""

    def receive(self) -> Bytes | None:
        """See `Connection`."""
        return self._incoming.popleft() if self._incoming else None


def queue_connections() -> tuple[QueueConnection, QueueConnection]:
    """Make both ends of a connection inside this process.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.async_server import queue_connections
        >>> here, there = queue_connections()
        >>> here.send(np.arange(8, dtype=np.uint8))
        >>> there.receive(), there.receive()
        (array([0, 1, 2, 3, 4, 5, 6, 7], dtype=uint8), None)
    """
    there: deque[Bytes] = deque()
    back: deque[Bytes] = deque()
    return QueueConnection(there, back), QueueConnection(back, there)
