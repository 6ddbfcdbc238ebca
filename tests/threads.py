"""Nodes whose ranks are threads of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress import ThreadRanks
from hvd_compress.averaging import Groups, Nodes

SECONDS = 120.0


class World:
    """Runs programs, and counts the collectives that they start."""

    def __init__(self) -> None:
        self.issued: Counter[int] = Counter()
        self.names: set[str] = set()

    def run(self, nodes: Nodes, program: Callable[[Groups], Any]) -> list[Any]:
        """The results of a program on all ranks."""
        counted = self

        class Counted(ThreadRanks):
            def start(self, collective: str, name: str, *arguments: Any, **settings: Any) -> Any:
                counted.issued[self._number] += 1
                counted.names.add(name)
                return super().start(collective, name, *arguments, **settings)

        return Counted.run_all(nodes.size, lambda ranks: program(groups(nodes, ranks)), SECONDS)


def groups(nodes: Nodes, ranks: ThreadRanks) -> Groups:
    """Where a rank stands."""
    rank = ranks.position

    def among(members: Sequence[int]) -> ThreadRanks | None:
        return ranks.among(members) if len(members) > 1 else None

    within = nodes.members[nodes.node_of(rank)]
    across = next((group for group in nodes.groups if rank in group), ())
    return Groups(nodes, rank, ranks if nodes.size > 1 else None, among(within), among(across), "daso")
