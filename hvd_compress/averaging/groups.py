"""Say where a rank stands among the nodes, and which ranks it shares what with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvd_compress.averaging.flat_tensors import Array
from hvd_compress.averaging.nodes import Nodes
from hvd_compress.ranks import Ranks
from hvd_compress.tensors import averaged

__all__ = ["Groups", "means"]


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

    @classmethod
    def alone(cls, name: str) -> Groups:
        """Tell of a rank that knows of no others."""
        return cls(Nodes(((0,),)), 0, None, None, None, name)

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
    return averaged(arrays, lambda together: ranks.mean(f"{name}.{together.dtype}", together))
