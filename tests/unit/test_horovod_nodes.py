"""Process sets of nodes, with a Horovod that only counts."""

from __future__ import annotations

import pytest

from hvd_compress.errors import UnsupportedError
from hvd_compress.horovod_nodes import _LOCAL_SIZES, _SIZES, HorovodNodes


class ProcessSet:
    def __init__(self, ranks):
        self.ranks = sorted(ranks)
        self.process_set_id = None

    def size(self):
        return len(self.ranks)


class Ranks(int):
    """As many, which agree."""

    def agree(self, told, beside=()):
        pass


class Horovod:
    """Of one rank among `size`; sets are those that it was started with, or was told to add."""

    ProcessSet = ProcessSet
    __name__ = "horovod"

    def __init__(self, rank, size, started=()):
        self._rank, self._size = rank, size
        self.global_process_set = ProcessSet(range(size))
        self.sets = {0: list(range(size)), **{i: list(ranks) for i, ranks in enumerate(started, 1)}}
        self.added = []

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def add_process_set(self, ranks):
        self.added.append(ranks)
        return ProcessSet(ranks)


def nodes_of(horovod):
    return HorovodNodes(horovod, lambda: horovod.sets, lambda process_set: Ranks(process_set.size()))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in (*_SIZES, *_LOCAL_SIZES, "HOROVOD_DYNAMIC_PROCESS_SETS"):
        monkeypatch.delenv(name, raising=False)


def ranks_of(sets):
    return [s.ranks for s in sets]


@pytest.mark.parametrize(("size", "local"), [("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"), (_SIZES[1], _LOCAL_SIZES[1])])
def test_a_launcher_tells_which_sets_there_are(monkeypatch, size, local):
    monkeypatch.setenv(size, "6")
    monkeypatch.setenv(local, "3")
    needed = [[0, 1, 2], [3, 4, 5], [0, 3], [1, 4], [2, 5]]
    assert ranks_of(nodes_of(Horovod(0, 6)).process_sets()) == needed
    # what Horovod has, and what a rank is alone in, is not asked of it
    assert ranks_of(nodes_of(Horovod(0, 6)).process_sets(ranks_per_node=1)) == []
    assert ranks_of(nodes_of(Horovod(0, 6)).process_sets(ranks_per_node=6)) == []
    assert ranks_of(nodes_of(Horovod(0, 4)).process_sets(2, size=4)) == [[0, 1], [2, 3], [0, 2], [1, 3]]
    with pytest.raises(ValueError, match="divides the 6 ranks"):
        nodes_of(Horovod(0, 6)).process_sets(ranks_per_node=4)


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    assert nodes_of(Horovod(0, 1)).process_sets() == []
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(UnsupportedError, match=r"daso_process_sets\(ranks_per_node=...\)"):
        nodes_of(Horovod(0, 4)).process_sets()


@pytest.mark.parametrize("rank", range(4))
def test_sets_that_horovod_was_started_with_are_found(rank):
    horovod = Horovod(rank, 4, started=[[0, 1], [2, 3], [0, 2], [1, 3]])
    sets = nodes_of(horovod).sets(2)
    assert (sets.within.ranks, sets.within.process_set_id) == ([rank // 2 * 2, rank // 2 * 2 + 1], 1 + rank // 2)
    assert (sets.across.ranks, sets.across.process_set_id) == ([rank % 2, rank % 2 + 2], 3 + rank % 2)
    assert not horovod.added


@pytest.mark.parametrize("rank", range(4))
def test_all_ranks_add_the_same_sets_in_the_same_order(monkeypatch, rank):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    horovod = Horovod(rank, 4, started=[[2, 3]])
    sets = nodes_of(horovod).sets(2)
    assert horovod.added == [[0, 1], [0, 2], [1, 3]]
    assert (sets.within.size(), sets.across.size()) == (2, 2)


def test_a_set_that_cannot_be_had_is_named_with_what_to_do():
    with pytest.raises(UnsupportedError, match=r"ranks \[0, 2\].*daso_process_sets.*dynamic"):
        nodes_of(Horovod(0, 4, started=[[0, 1], [2, 3]])).sets(2)


@pytest.mark.parametrize(("per_node", "within", "across"), [(1, 1, 4), (4, 4, 1)])
def test_one_rank_on_each_node_and_one_node_need_no_sets(per_node, within, across):
    sets = nodes_of(Horovod(3, 4)).sets(per_node)
    assert (sets.within.size(), sets.across.size()) == (within, across)
    groups = nodes_of(Horovod(3, 4)).groups(sets)
    assert (groups.within is None, groups.across is None, groups.everyone) == (within == 1, across == 1, 4)
    for alone in (s for s in (sets.within, sets.across) if s.size() == 1):
        assert not alone.included()
        assert alone.rank() == 0


def test_a_process_set_has_nodes_of_its_own():
    horovod = Horovod(rank=3, size=6, started=[(1, 3, 4, 5), (1, 3), (4, 5), (1, 4), (3, 5)])
    some = ProcessSet([1, 3, 4, 5])
    nodes = nodes_of(horovod)
    # nodes are counted among the ranks of the set
    sets = nodes.sets(2, some, "DiLoCo")
    assert sets.nodes.members == ((0, 1), (2, 3))
    assert ranks_of([sets.everyone, sets.within, sets.across]) == [[1, 3, 4, 5], [1, 3], [3, 5]]
    # each rank alone: the set itself is the group across them
    sets = nodes.sets(1, some, "DiLoCo")
    assert ranks_of([sets.within, sets.across]) == [[3], [1, 3, 4, 5]]
    assert sets.within.size() == 1


def test_what_a_process_set_needs_is_told(monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    horovod = Horovod(rank=3, size=6, started=[(1, 3, 4, 5)])
    # a set can be added by all ranks together only, and not all are here
    with pytest.raises(UnsupportedError, match=r"DiLoCo needs a process set of the ranks \[1, 3\].*beside the one"):
        nodes_of(horovod).sets(2, ProcessSet([1, 3, 4, 5]), "DiLoCo")
    assert not horovod.added
    with pytest.raises(ValueError, match=r"DiLoCo on rank 3 with process_set of the ranks \[0, 1\]: only these ranks"):
        nodes_of(horovod).sets(1, ProcessSet([0, 1]), "DiLoCo")
