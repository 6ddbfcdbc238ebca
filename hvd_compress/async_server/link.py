"""Carry messages between the server and one worker."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Link", "QueueLink", "queue_links"]

Bytes = npt.NDArray[np.uint8]


class Link(Protocol):
    """One end of a link, whose messages arrive whole and in order."""

    def send(self, message: Bytes) -> None:
        """Start sending; the bytes are in use until `flush` returns."""

    def flush(self) -> None:
        """Wait until no bytes are in use."""

    def receive(self) -> Bytes | None:
        """Return a message that has arrived, which lasts until the next call, or None; never waits."""


class QueueLink:
    """One end of a link inside a process.

    Args:
        outgoing: messages to the other end.
        incoming: messages from there.
    """

    def __init__(self, outgoing: deque[Bytes], incoming: deque[Bytes]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, message: Bytes) -> None:
        """See `Link`."""
        self._outgoing.append(message.copy())

    def flush(self) -> None:
        """See `Link`."""

    def receive(self) -> Bytes | None:
        """See `Link`."""
        return self._incoming.popleft() if self._incoming else None


def queue_links() -> tuple[QueueLink, QueueLink]:
    """Make both ends of a link inside this process.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.async_server import queue_links
        >>> here, there = queue_links()
        >>> here.send(np.arange(8, dtype=np.uint8))
        >>> there.receive(), there.receive()
        (array([0, 1, 2, 3, 4, 5, 6, 7], dtype=uint8), None)
    """
    there: deque[Bytes] = deque()
    back: deque[Bytes] = deque()
    return QueueLink(there, back), QueueLink(back, there)
