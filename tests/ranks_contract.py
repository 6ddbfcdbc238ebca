"""What all kinds of `Ranks` have to do, as programs that every rank runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_compress.errors import MismatchError
from hvd_compress.ranks import Ranks

PROGRAMS: dict[str, Callable[[Ranks], None]] = {}
DTYPES = ("uint8", "int32", "int64", "float16", "float32", "float64")


def program(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    PROGRAMS[function.__name__] = function
    return function


def name(what: str) -> str:
    return f"tests.ranks.{what}"


def check_same(ranks: Ranks, array: np.ndarray) -> None:
    """The bits are those of all ranks."""
    everyone = ranks.gather_bytes(array.tobytes(), name("same"))
    assert everyone == ranks.size * array.tobytes()


@program
def an_allreduce_sums(ranks: Ranks) -> None:
    for dtype in ("int32", "int64", "float32", "float64"):
        mine = np.arange(5, dtype=dtype) + ranks.position
        total = ranks.run("allreduce", name(f"sum.{dtype}"), mine)
        expected = ranks.size * np.arange(5) + sum(range(ranks.size))
        assert (total.dtype, total.tolist()) == (np.dtype(dtype), expected.tolist())


@program
def sums_have_the_same_bits_everywhere(ranks: Ranks) -> None:
    values = np.random.default_rng(ranks.position).normal(size=1000).astype(np.float32)
    check_same(ranks, ranks.run("allreduce", name("bits"), values))


@program
def an_allgather_takes_what_each_rank_has(ranks: Ranks) -> None:
    for dtype in DTYPES:
        mine = np.full(ranks.position, ranks.position, dtype)
        found = ranks.run("allgather", name(f"gather.{dtype}"), mine)
        assert (found.dtype, found.tolist()) == (mine.dtype, [r for r in range(ranks.size) for _ in range(r)])


@program
def an_alltoall_has_equal_parts_unless_it_is_told_sizes(ranks: Ranks) -> None:
    for collective in ("alltoall", "scatter_inside"):
        mine = 10 * ranks.position + np.arange(ranks.size).repeat(2)
        found = ranks.run(collective, name(f"{collective}.equal"), mine)
        assert found.tolist() == [10 * sender + ranks.position for sender in range(ranks.size) for _ in range(2)]


@program
def an_alltoall_with_sizes_leaves_the_end_where_it_is(ranks: Ranks) -> None:
    # rank i gets i elements from each, and what follows counts for nothing
    sizes = list(range(ranks.size))
    for dtype in DTYPES:
        mine = np.full(sum(sizes) + 3, ranks.position, dtype)
        found = ranks.run("alltoall", name(f"sizes.{dtype}"), mine, sizes)
        assert found.dtype == mine.dtype
        assert found.tolist() == [sender for sender in range(ranks.size) for _ in range(ranks.position)]


@program
def a_broadcast_brings_what_the_root_has(ranks: Ranks) -> None:
    for root in range(ranks.size):
        mine = np.arange(3, dtype=np.float64) + ranks.position
        found = ranks.run("broadcast", name("broadcast"), mine, root=root)
        assert found.tolist() == [root, root + 1, root + 2]


@program
def several_go_on_at_once_and_are_awaited_in_any_order(ranks: Ranks) -> None:
    arrays = [np.full(4, 10 * i + ranks.position, np.int64) for i in range(4)]
    handles = [ranks.start("allgather", name(f"at_once.{i}"), array) for i, array in enumerate(arrays)]
    for i in reversed(range(4)):
        deadline = time.monotonic() + 20
        while not ranks.is_done(handles[i]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert ranks.wait(handles[i]).tolist() == [10 * i + r for r in range(ranks.size) for _ in range(4)]


@program
def a_name_can_be_used_again(ranks: Ranks) -> None:
    for i in range(20):
        mine = np.full(1 + i % 3, i + ranks.position, np.float32)
        total = ranks.run("allreduce", name(f"again.{i % 3}"), mine)
        assert total[0] == ranks.size * i + sum(range(ranks.size))


@program
def what_came_is_the_callers_own(ranks: Ranks) -> None:
    for collective in ("allreduce", "allgather", "broadcast", "alltoall"):
        found = ranks.run(collective, name(f"own.{collective}"), np.ones(2 * ranks.size, np.float32))
        ranks.barrier(name("own.come"))
        found += 1 + ranks.position
        ranks.barrier(name("own.written"))
        assert len(set(found.tolist())) == 1
        assert found[0] == 2 + ranks.position + (ranks.size - 1) * (collective == "allreduce")


@program
def a_mean_leaves_its_argument(ranks: Ranks) -> None:
    for dtype in ("float32", "float64"):
        mine = np.array([1, ranks.position], dtype)
        mean = ranks.mean(name(f"mean.{dtype}"), mine)
        assert mine.tolist() == [1, ranks.position]
        assert mean.dtype == mine.dtype
        assert mean.tolist() == pytest.approx([1, (ranks.size - 1) / 2])
        check_same(ranks, mean)


@program
def the_maximum_is_that_of_each_value(ranks: Ranks) -> None:
    assert ranks.maximum([ranks.position, -ranks.position, 7.5]) == [ranks.size - 1, 0, 7.5]


@program
def nobody_passes_a_barrier_before_all_have_come(ranks: Ranks) -> None:
    time.sleep(0.05 * ranks.position)
    before = time.time()
    ranks.barrier(name("barrier"))
    last_came, minus_first_left = ranks.maximum([before, -time.time()])
    assert last_came <= -minus_first_left


@program
def bytes_are_joined(ranks: Ranks) -> None:
    found = ranks.gather_bytes(str(ranks.position).encode() * ranks.position, name("bytes"))
    assert found == b"".join(str(r).encode() * r for r in range(ranks.size))


@program
def names_are_counted_alike(ranks: Ranks) -> None:
    found = [ranks.numbered("test") for _ in range(3)]
    assert len(set(found)) == 3
    check_same(ranks, np.frombuffer("".join(found).encode(), np.uint8))


@program
def ranks_that_say_the_same_agree(ranks: Ranks) -> None:
    ranks.agree({"op": "Sum"})
    end = ranks.begin_agreement({"step": 3})
    assert ranks.maximum([1.0]) == [1.0]
    end()


@program
def all_are_told_what_ranks_disagree_on(ranks: Ranks) -> None:
    told: dict[str, Any] = {"rank": ranks.position, "text": "x" * ranks.position}
    ways: list[Callable[[], object]] = [
        lambda: ranks.agree(told), lambda: ranks.agree(told, name("named")), lambda: ranks.begin_agreement(told)(),
    ]  # fmt: skip
    for way in ways:
        if ranks.size == 1:
            way()
            continue
        with pytest.raises(MismatchError, match="disagree on rank: rank 0 has 0, rank 1 has 1"):
            way()
    # nothing is under way any more
    ranks.agree({"op": "Sum"})


@program
def ranks_of_one_machine_share_a_host(ranks: Ranks) -> None:
    numbers = ranks.host_numbers()
    assert len(numbers) == ranks.size
    assert len(set(numbers)) == 1
    check_same(ranks, np.array(numbers))
    assert ranks.on_host().size == ranks.size


@program
def what_is_measured_runs_again_and_again(ranks: Ranks) -> None:
    for dtype in ("float16", "float32"):
        run = ranks.repeated("allreduce", name(f"repeated.{dtype}"), np.zeros(8, dtype))
        for _ in range(3):
            run()
    sizes = [2] + [0] * (ranks.size - 1)
    for collective, given in (("allgather", None), ("alltoall", None), ("alltoall", sizes)):
        buffer = np.zeros(2 * ranks.size, np.uint8)
        run = ranks.repeated(collective, name(f"repeated.{collective}.{given is None}"), buffer, given)
        for _ in range(3):
            run()
