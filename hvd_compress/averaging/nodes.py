"""Say which ranks share a node, and which of them exchange parameters with which ranks of other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["Nodes"]


@dataclass(frozen=True)
class Nodes:
    """Knows the ranks of each node.

    Args:
        members: ranks of each node, ascending; nodes in the order of their first rank.

    Example:
        >>> from hvd_compress.averaging import Nodes
        >>> Nodes.of_numbers([7, 7, 9, 9, 9]).groups
        ((0, 2), (1, 3))
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Nodes:
        """Make nodes from a number for each rank, which is the same for ranks on one node."""
        by_number: dict[int, list[int]] = {}
        for rank, number in enumerate(numbers):
            by_number.setdefault(number, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in by_number.values()))

    @classmethod
    def of_equal(cls, size: int, ranks_per_node: Any) -> Nodes:
        """Make nodes of so many ranks each, counted node by node.

        Raises:
            ValueError: they do not divide the ranks.
        """
        is_number = isinstance(ranks_per_node, int) and not isinstance(ranks_per_node, bool)
        if not is_number or ranks_per_node < 1 or size % ranks_per_node:
            raise ValueError(f"ranks_per_node={ranks_per_node!r}: must be a whole number that divides the {size} ranks")
        return cls.of_numbers([rank // ranks_per_node for rank in range(size)])

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self.members)

    @property
    def size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(map(len, self.members))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """One rank of each node in each group: as many groups as the smallest node has ranks (figure 1 of the paper).

        Further ranks of larger nodes are in no group, and get from their node what the others bring.
        """
        return tuple(zip(*self.members, strict=False))

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(i for i, ranks in enumerate(self.members) if rank in ranks)

    def weight_of(self, node: int) -> float:
        """Return a node's weight in the sum over nodes, with which all ranks count alike; 1 if nodes are alike."""
        return len(self.members[node]) * self.count / self.size
