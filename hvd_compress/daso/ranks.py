"""Say what an edge provides: collectives on arrays among some ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hvd_compress.daso.lane import Array
from hvd_compress.daso.nodes import Nodes
from hvd_compress.tensors import averaged

__all__ = ["Groups", "Ranks", "means"]


class Ranks(Protocol):
    """The ranks of a process set, this one among them."""

    size: int
    position: int

    def require_agreement(self, description: dict[str, Any]) -> None:
        """Raise MismatchError on all ranks unless all say the same."""

    def begin_agreement(self, description: dict[str, Any]) -> Callable[[], None]:
        """Begin what `require_agreement` does, and return what ends it."""

    def start(self, collective: str, array: Array, name: str, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        """Start "allreduce" (a sum), "allgather", "alltoall" (with the elements for each rank) or "broadcast".

        Args:
            collective: its name.
            array: flat; in use until `wait` has returned.
            name: the same on all ranks, and of nothing else that is under way.
            sizes: of the parts of an alltoall; None for equal ones.
            root: of a broadcast, its position.
        """

    def wait(self, handle: Any) -> Array:
        """Wait for a collective; returns what it brought, flat."""


class Groups(NamedTuple):
    """Tells where a rank stands among the nodes.

    Args:
        nodes: of all ranks.
        rank: this one.
        everyone: all ranks; None if this one is alone.
        within: the ranks of its node; None if it is alone there.
        across: one rank of each node; None if there is one node, or this rank is in no group.
        name: of the collectives, the same on all ranks, and of no other optimizer.
    """

    nodes: Nodes
    rank: int
    everyone: Ranks | None
    within: Ranks | None
    across: Ranks | None
    name: str

    @property
    def position(self) -> int:
        """The rank's position among the ranks of its node."""
        return self.nodes.members[self.nodes.node_of(self.rank)].index(self.rank)

    @property
    def weight(self) -> float:
        """The weight of the rank's node."""
        return self.nodes.weight_of(self.nodes.node_of(self.rank))


def means(ranks: Ranks, arrays: Sequence[Array], name: str) -> list[Array]:
    """Average flat arrays over the ranks, with one collective for each dtype; all get the same bits."""

    def mean(together: Array) -> Array:
        handle = ranks.start("allreduce", together, f"{name}.{together.dtype}")
        return ranks.wait(handle) / together.dtype.type(ranks.size)

    return averaged(arrays, mean)
