"""Run the steps of one rank, whichever transport carries its messages, and end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from hvd_compress import saved
from hvd_compress.gossip.copies import Array
from hvd_compress.gossip.node import Node

__all__ = ["Averager", "Transport"]


class Transport(Protocol):
    """Carries messages between neighbours."""

    waits: bool
    """Whether every `receive` waits for one message of each neighbour."""

    def send(self, arrays: Sequence[Array | None]) -> None:
        """Decide what to send of these values, and start sending it; they may change as soon as this returns."""

    def answer(self) -> None:
        """Send nothing, as a rank that has finished."""

    def receive(self) -> None:
        """Take over what the neighbours have sent."""

    def close(self) -> None:
        """Give up what it holds; a collective call."""


class Averager:
    """A rank that averages with its neighbours.

    Args:
        node: what it knows.
        transport: None where there are no neighbours.
        overlap: whether a message leaves as soon as its values are there, and is waited for in the next step only.
    """

    def __init__(self, node: Node, transport: Transport | None, overlap: bool = False) -> None:
        self.node = node
        self.transport = transport
        self._overlap = overlap
        self._next = _Next.UNSENT
        self._has_begun = False

    def mix(self, arrays: Sequence[Array | None]) -> None:
        """Send, receive and average, in place; a frozen tensor, given as None, is left as it is."""
        self.begin(lambda: arrays)
        if self.transport is None:
            # counted all the same: a program for many ranks shows its figures on one, too
            self.node.decide(arrays)
            return
        if self._next is _Next.UNSENT:
            self._send(arrays)
        self.drain()
        self._next = _Next.UNSENT
        self.node.mix(arrays)

    def begin(self, arrays: Callable[[], Sequence[Array | None]]) -> None:
        """Take own values for what is known of the neighbours, unless that has been done."""
        if not self._has_begun:
            self.node.start_from(arrays())
            self._has_begun = True

    def after_update(self, arrays: Sequence[Array | None]) -> None:
        """Send what the next step will begin with, if `overlap` is set."""
        if self._overlap and self.transport is not None and self._next is _Next.UNSENT:
            self._send(arrays)

    def finish(self) -> None:
        """Take part until all ranks have finished; a collective call."""
        if self.transport is None:
            return
        self.drain()
        if self.transport.waits:
            self.node.finished = True
            while not self.node.is_over:
                self.transport.answer()
                self.transport.receive()
            self.node.reopen()

    def drain(self) -> None:
        """Take over what is under way."""
        if self._next is _Next.SENT and self.transport is not None:
            # what fails is not waited for again
            self._next = _Next.UNSENT
            self.transport.receive()
            self._next = _Next.RECEIVED

    def agree(self, arrays: Sequence[Array]) -> None:
        """Take these values, which all ranks hold now, for all copies; no rank may be sending."""
        if self.transport is not None:
            self.take_what_came()
            self._next = _Next.UNSENT
            self.node.all_agree_on(arrays)
            self._has_begun = True

    def take_what_came(self) -> None:
        """Empty the queues of one-sided messages."""
        if self.transport is not None and not self.transport.waits:
            self.transport.receive()

    def abandon(self) -> None:
        """Forget what is under way, which will never be complete; `load` has to follow."""
        self._next = _Next.UNSENT
        self.node.reopen()

    def close(self) -> None:
        """Give up what the transport holds."""
        if self.transport is not None:
            self.transport.close()

    def state_dict(self) -> dict[str, Any]:
        """Take over what is under way and return the state; see `Node.state_dict`."""
        self.drain()
        return {**self.node.state_dict(), "ahead": self._next is _Next.RECEIVED, "begun": self._has_begun}

    def check(self, state: Any) -> dict[str, Any]:
        """Check a state and return what `load` takes over of it.

        Raises:
            StateError: as `Node.check`.
        """
        of_node = self.node.check(state)
        given = saved.record("event state", state, ["ahead", "begun"])
        flags = {key: saved.flag(f"{key} of an event state", given[key]) for key in ("ahead", "begun")}
        return {"node": of_node, **flags}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self.drain()
        self.node.load(checked["node"])
        self._next = _Next.RECEIVED if checked["ahead"] else _Next.UNSENT
        self._has_begun = checked["begun"]

    def _send(self, arrays: Sequence[Array | None]) -> None:
        assert self.transport is not None
        self.transport.send(arrays)
        self._next = _Next.SENT


class _Next(Enum):
    """States how far the messages of the next step are."""

    UNSENT = auto()
    SENT = auto()
    RECEIVED = auto()
