"""Horovod's process sets for nodes and for groups across them; an edge gives its Horovod.

A set is best given to `hvd.init`: where sets may be added later, Horovod asks all ranks about them in each cycle of its
background thread, and nodes wait for each other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hvd_compress.averaging import Groups, Nodes
from hvd_compress.errors import UnsupportedError
from hvd_compress.fingerprint import scope_of
from hvd_compress.ranks import Ranks

__all__ = ["HorovodNodes", "NodeSets"]

# where launchers tell a process how many there are, and how many on its host
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class NodeSets(NamedTuple):
    """Process sets of one rank.

    Args:
        nodes: of all ranks that take part, counted among themselves.
        everyone: these ranks.
        within: the ranks of its node.
        across: one rank of each node, of the group that this rank is in.
    """

    nodes: Nodes
    everyone: Any
    within: Any
    across: Any


class HorovodNodes:
    """Nodes, as Horovod for a framework knows them.

    Args:
        hvd: Horovod for the framework.
        known_sets: tells the ranks of all process sets by their number.
        ranks_of: makes `Ranks` of a process set that this rank is in.
    """

    def __init__(
        self,
        hvd: Any,
        known_sets: Callable[[], Mapping[int, Sequence[int]]],
        ranks_of: Callable[[Any], Ranks],
    ) -> None:
        self._hvd = hvd
        self._known_sets = known_sets
        self._ranks_of = ranks_of
        self._numbers: Counter[str] = Counter()

    def process_sets(self, ranks_per_node: int | None = None, size: int | None = None) -> list[Any]:
        """The process sets of `DASO` for `hvd.init(process_sets=...)`, with what the launcher tells before that.

        Raises:
            UnsupportedError: the launcher does not tell how many ranks there are.
            ValueError: the ranks are not so many times a number of nodes.
        """
        size = _told(_SIZES, "size", 1) if size is None else size
        ranks_per_node = _told(_LOCAL_SIZES, "ranks_per_node", size) if ranks_per_node is None else ranks_per_node
        return [self._hvd.ProcessSet(list(ranks)) for ranks in _needed(Nodes.of_equal(size, ranks_per_node))]

    def sets(
        self, ranks_per_node: int | None, process_set: Any = None, user: str = "DASO", beside: Sequence[str] = ()
    ) -> NodeSets:
        """Find the process sets of this rank, or add them on all ranks; a collective call.

        Args:
            ranks_per_node: counted from the first rank on; None for those of the hosts that Horovod reports.
            process_set: the ranks that take part; all by default.
            user: who needs them, for errors.
            beside: see `Ranks.agree`.

        Raises:
            UnsupportedError: a set is missing, and Horovod was not started so that it can be added.
            ValueError: the ranks are not so many times a number of nodes; or this rank is not among them.
            MismatchError: the ranks disagree.
        """
        hvd = self._hvd
        whole = hvd.global_process_set if process_set is None else process_set
        is_all = whole.size() == hvd.size()
        # adding a set is up to all ranks there are
        may_add = is_all and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
        of_whole = range(hvd.size()) if is_all else list(whole.ranks)
        if hvd.rank() not in of_whole:
            raise ValueError(
                f"{user} on rank {hvd.rank()} with process_set of the ranks {list(of_whole)}: only these ranks call it"
            )
        told = {"optimizer": user, "ranks_per_node": ranks_per_node, "process sets may be added": may_add}
        everyone = self._ranks_of(whole)
        everyone.agree(told, beside=beside)
        if ranks_per_node is not None:
            nodes = Nodes.of_equal(len(of_whole), ranks_per_node)
        else:
            nodes = Nodes.of_numbers(everyone.host_numbers())
        by_ranks = {tuple(ranks): number for number, ranks in self._known_sets().items()}
        found: dict[tuple[int, ...], Any] = {tuple(range(nodes.size)): whole}
        for positions in _needed(nodes):
            ranks = tuple(of_whole[p] for p in positions)
            if ranks in by_ranks:
                found[positions] = hvd.ProcessSet(list(ranks))
                found[positions].process_set_id = by_ranks[ranks]
            elif may_add:
                found[positions] = hvd.add_process_set(list(ranks))
            else:
                raise UnsupportedError(_missing(user, ranks, is_all))
        position = of_whole.index(hvd.rank())
        within = nodes.members[nodes.node_of(position)]
        across = next((group for group in nodes.groups if position in group), ())
        return NodeSets(nodes, whole, found.get(within) or _alone(hvd), found.get(across) or _alone(hvd))

    def groups(self, sets: NodeSets, kind: str = "daso", name: str | None = None) -> Groups:
        """Where this rank stands, with collectives that are named for one more optimizer of a kind.

        Args:
            sets: of this rank.
            kind: of the optimizer.
            name: of the collectives, where ranks have not made equally many optimizers: as in elastic runs.
        """
        everyone, within, across = (
            self._ranks_of(s) if s.size() > 1 else None for s in (sets.everyone, sets.within, sets.across)
        )
        is_all = sets.nodes.size == self._hvd.size()
        # ranks of one set wrap their optimizers in the same order, or are told so by `Member`
        if name is None:
            counted = f"hvd_compress.{kind}" if is_all else f"hvd_compress.{kind}.{scope_of(sets.everyone)}"
            self._numbers[counted] += 1
            name = f"{counted}.{self._numbers[counted] - 1}"
        position = self._hvd.rank() if is_all else list(sets.everyone.ranks).index(self._hvd.rank())
        return Groups(sets.nodes, position, everyone, within, across, name)


def _missing(user: str, ranks: Sequence[int], is_all: bool) -> str:
    needs = f"{user} needs a process set of the ranks {list(ranks)}: start Horovod with "
    if not is_all:
        return f"{needs}hvd.init(process_sets=[...]) that has it, beside the one that is given to {user}"
    return (
        f"{needs}hvd.init(process_sets=hvd.daso_process_sets()), which takes ranks_per_node= where nodes are not those "
        'that the launcher tells of, or with hvd.init(process_sets="dynamic")'
    )


def _alone(hvd: Any) -> Any:
    """In the place of a process set that this rank would be alone in, and which Horovod does not need to know."""

    class Alone(hvd.ProcessSet):
        def size(self) -> int:
            return 1

        def rank(self) -> int:
            return 0

        def included(self) -> bool:
            return False

    return Alone([hvd.rank()])


def _needed(nodes: Nodes) -> list[tuple[int, ...]]:
    """The sets that Horovod does not have: of several ranks, and not of all."""
    # those inside of nodes first: Horovod runs what waits in a set of a lower number first
    return [ranks for ranks in (*nodes.members, *nodes.groups) if 1 < len(ranks) < nodes.size]


def _told(names: Sequence[str], argument: str, otherwise: int) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    if any(name in os.environ for name in (*_SIZES, *_LOCAL_SIZES)):
        raise UnsupportedError(f"the launcher sets none of {', '.join(names)}: give daso_process_sets({argument}=...)")
    return otherwise
