"""Let candidates take turns in the same processes of ranks, timed from a barrier to their slowest rank."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from places import DONE

__all__ = ["WARM_UP", "Samples", "counted_operations", "deliver", "done", "rounds", "sample", "slowest"]

Samples = dict[str, dict[str, list[float]]]

WARM_UP = 2
TRIALS = 5  # runs that tell how many make a turn
MOST_REPEATS = 100
LONG = 2.0  # seconds of a run to which it makes no difference what caches hold
LOOK = 6  # rounds between two looks at what was measured


def rounds(
    actions: Mapping[str, Callable[[int], object]],
    seconds: float,
    least: int = 3,
    most: int = 100,
    turn: float | None = None,
    undecided: Callable[[Samples], bool] | None = None,
    more_seconds: float = 0.0,
) -> Samples:
    """Let all actions run once a round, until `seconds` are over and `least` rounds are complete.

    Each round has its own order, the same on all ranks, so that no action always follows the same other one. The
    first round is left out: it compiles kernels, fills caches, and tells how long actions take.

    Args:
        actions: what to run, given the number of the round; equal on all ranks.
        seconds: how long all rounds may take, with the one before them.
        least: the least number of rounds, whatever they take.
        most: the most rounds.
        turn: seconds for which an action is repeated in each of its turns. Where it takes less than LONG it runs twice
            at least, and WARM_UP times before that do not count: it is slower when another one has just filled the
            caches, which in a training none does. None runs each just once.
        undecided: whether rounds go on when `seconds` are over, by what has been measured; asked every LOOK rounds.
        more_seconds: how long they may go on at most.

    Returns:
        {name: {"seconds": of the slowest rank in each round, "bytes": that a rank sent, the mean of all ranks}}; bytes
        are counted at the network interface and are 0 where the ranks have none of their own.
    """
    begin = time.perf_counter()
    names = list(actions)
    mine: list[list[list[float]]] = []  # round, action, (seconds, bytes)
    number = 0
    repeats: dict[str, int] = {}

    def go_on() -> bool:
        spent = time.perf_counter() - begin
        if _all_go_on(number <= least or (spent < seconds and number <= most)):
            return True
        if undecided is None or not _all_go_on(spent < seconds + more_seconds):
            return False
        # whoever looks more often takes more chance results for decided ones
        return number % LOOK != 0 or undecided(_samples(names, mine))

    while go_on():
        order = random.Random(number).sample(names, len(names))
        if number == 0:
            repeats = {name: _repeats(actions[name], turn) for name in order}
        else:
            samples = {name: sample(actions[name], number, repeats[name]) for name in order}
            mine.append([samples[name] for name in names])
        number += 1
    return _samples(names, mine)


def _repeats(action: Callable[[int], object], turn: float | None) -> int:
    """Try an action; returns its runs in a turn, the same on all ranks: two at least, unless it takes long."""
    if turn is None:
        sample(action, 0)
        return 1
    taken: list[float] = []
    while len(taken) < TRIALS and sum(taken) < TRIALS * turn:
        taken.append(slowest(sample(action, len(taken))[0]))
    least = 1 if min(taken) > LONG else 2
    return max(least, min(MOST_REPEATS, int(turn / min(taken))))


def _samples(names: list[str], mine: list[list[list[float]]]) -> Samples:
    """Gather all ranks' (seconds, bytes) by rounds and actions; the same on every rank."""
    everyone = hvd.allgather(torch.tensor([mine], dtype=torch.float64), name="benchmarks.samples")
    slowest, sent = everyone[..., 0].amax(0), everyone[..., 1].mean(0)
    return {name: {"seconds": slowest[:, i].tolist(), "bytes": sent[:, i].tolist()} for i, name in enumerate(names)}


def sample(action: Callable[[int], object], number: int, repeats: int = 1) -> list[float]:
    """Run an action that all ranks start together; returns the mean (seconds of this rank, bytes it sent) of some."""
    for _ in range(WARM_UP if repeats > 1 else 0):
        action(number)
    hvd.barrier()
    sent = _sent_bytes()
    begin = time.perf_counter()
    for i in range(repeats):
        action(number + i)
    taken = time.perf_counter() - begin
    hvd.barrier()
    return [taken / repeats, (_sent_bytes() - sent) / repeats]


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' numbers."""
    everyone = hvd.allgather(torch.tensor([seconds], dtype=torch.float64), name="benchmarks.slowest")
    return float(everyone.max())


def _all_go_on(go_on: bool) -> bool:
    # the first rank's clock decides for all
    return bool(hvd.broadcast(torch.tensor([int(go_on)]), 0, name="benchmarks.go_on"))


def _sent_bytes() -> int:
    """Return the bytes that have left this rank's virtual host."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "eth0":
            return int(fields.split()[8])
    return 0


class _Counted:
    """Stands for Horovod's library, and counts the operations that it is given."""

    def __init__(self, library: Any, counts: Counter[str]) -> None:
        self._library = library
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        kind, asynchronous, _ = name.removeprefix("horovod_torch_").partition("_async_")

        def counted(*arguments: Any) -> Any:
            self._counts[kind] += 1
            return function(*arguments)

        return counted if asynchronous else function


@contextmanager
def counted_operations() -> Iterator[Counter[str]]:
    """Count the operations by kind that this rank hands to Horovod inside the block, which may fuse allreduces."""
    counts: Counter[str] = Counter()
    library = mpi_ops.mpi_lib
    mpi_ops.mpi_lib = _Counted(library, counts)
    try:
        yield counts
    finally:
        mpi_ops.mpi_lib = library


def done(what: str) -> None:
    """Move the progress bar by a unit."""
    if hvd.rank() == 0:
        print(DONE, what, flush=True)


def deliver(task: Mapping[str, Any], result: Any) -> None:
    """Hand the result to the process that has started the ranks."""
    if hvd.rank() == 0:
        Path(task["result"]).write_text(json.dumps(result))
    hvd.barrier()
