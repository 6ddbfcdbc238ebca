"""What the Keras code asks of an edge: the only way from here to tensors and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Exchange", "Link"]


class Exchange(Protocol):
    """Combines gradients of a fixed list of variables over all ranks."""

    takes_part: bool

    def reduce(self, gradients: Sequence[Any], loss_scale: Any = None) -> list[Any]:
        """The combined gradients, in the order of the variables; None stays None."""

    def inherit(self, other: Any) -> None:
        """Take over what another exchange of the same variables owes, and its counters."""

    def stats(self) -> dict[str, Any]:
        """The "total" and "tensors" of `compression_stats()`."""

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank."""


class Link(Protocol):
    """An edge, seen from Keras.

    Args:
        none: Horovod's compressor that does nothing.
        average_op: Horovod's Average.
        all_ranks: the global process set.
    """

    none: Any
    average_op: Any
    all_ranks: Any

    def rank(self) -> int:
        """Of this process, among all."""

    def size(self) -> int:
        """The number of processes."""

    def check(self, **settings: Any) -> None:
        """Raise what a wrong setting of a wrapper is to raise."""

    def exchange(self, variables: Sequence[Any], groups: Any, settings: dict[str, Any]) -> Exchange:
        """An exchange for the gradients of Keras variables; a collective call."""

    def ranks_of(self, process_set: Any) -> int:
        """How many ranks a process set has; 1 where this one is not among them."""

    def divided(self, gradient: Any, ranks: int) -> Any:
        """A gradient, sparse ones too, divided by `ranks`."""

    def accumulators(self, passes: int) -> Any:
        """Sums of the gradients of several backward passes, for Keras 2."""

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        """Make Keras variables those of the root; a collective call."""

    def average(self, values: Sequence[float], names: Sequence[str]) -> list[float]:
        """Averages over all ranks; a collective call.

        Raises:
            MismatchError: the ranks have values of other names.
        """

    def allreduce(
        self,
        value: Any,
        name: str | None,
        average: bool | None,
        prescale_factor: float,
        postscale_factor: float,
        op: Any,
        compression: Any,
    ) -> Any:
        """See `Interface.allreduce`."""

    def allgather(self, value: Any, name: str | None) -> Any:
        """See `Interface.allgather`."""

    def broadcast_value(self, value: Any, root_rank: int, name: str | None) -> Any:
        """See `Interface.broadcast`."""

    def reducescatter(self, value: Any, name: str | None, op: Any) -> Any:
        """See `Interface.reducescatter`."""
