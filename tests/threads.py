"""Ranks that are threads of one process, with the collectives of `daso.Ranks`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from hvd_compress.daso import Groups, Nodes
from hvd_compress.fingerprint import check_agreement, serialize

SECONDS = 120.0


class World:
    """What ranks have handed to collectives: one dict per set, name and turn."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted: dict[Any, dict[int, Any]] = {}
        self.issued: Counter[int] = Counter()
        self.failure: BaseException | None = None

    def groups(self, nodes: Nodes, rank: int) -> Groups:
        """Where a rank stands."""

        def ranks_of(members: Sequence[int]) -> ThreadRanks | None:
            return ThreadRanks(self, tuple(members), rank) if len(members) > 1 else None

        within = nodes.members[nodes.node_of(rank)]
        across = next((group for group in nodes.groups if rank in group), ())
        return Groups(nodes, rank, ranks_of(range(nodes.size)), ranks_of(within), ranks_of(across), "daso")

    def run(self, nodes: Nodes, program: Callable[[Groups], Any]) -> list[Any]:
        """The results of a program on all ranks."""
        with ThreadPoolExecutor(nodes.size) as pool:
            futures = [pool.submit(self._watched, program, self.groups(nodes, rank)) for rank in range(nodes.size)]
            wait(futures)
        if self.failure is not None:
            raise self.failure
        return [future.result() for future in futures]

    def _watched(self, program: Callable[[Groups], Any], groups: Groups) -> Any:
        try:
            return program(groups)
        except BaseException as error:
            # the others must not wait for this one
            with self.changed:
                self.failure = self.failure or error
                self.changed.notify_all()
            raise


class ThreadRanks:
    """See `daso.Ranks`."""

    def __init__(self, world: World, members: tuple[int, ...], rank: int) -> None:
        self.size, self.position = len(members), members.index(rank)
        self._world = world
        self._members = members
        self._turns: Counter[str] = Counter()

    def require_agreement(self, description: dict[str, Any]) -> None:
        check_agreement(self._all_of(self._post("agreement", serialize(description))))

    def begin_agreement(self, description: dict[str, Any]) -> Callable[[], None]:
        key = self._post("agreement", serialize(description))
        return lambda: check_agreement(self._all_of(key))

    def start(self, collective: str, array: Any, name: str, sizes: Any = None, root: int = 0) -> Any:
        self._world.issued[self._members[self.position]] += 1
        return collective, self._post(name, (array, sizes)), root, name

    def wait(self, handle: Any) -> Any:
        collective, key, root, _ = handle
        everyone = self._all_of(key)
        if collective == "broadcast":
            return np.array(everyone[root][0])
        if collective == "allgather":
            return np.concatenate([array for array, _ in everyone])
        if collective == "allreduce":
            total = everyone[0][0].copy()
            for array, _ in everyone[1:]:
                total += array
            return total
        parts = []
        for array, sizes in everyone:
            sizes = sizes or [array.size // self.size] * self.size
            begin = sum(sizes[: self.position])
            parts.append(array[begin : begin + sizes[self.position]])
        return np.concatenate(parts)

    def _post(self, name: str, value: Any) -> Any:
        key = self._members, name, self._turns[name]
        self._turns[name] += 1
        with self._world.changed:
            posted = self._world.posted.setdefault(key, {})
            posted[self.position] = value
            if len(posted) == self.size and isinstance(value, tuple):
                # read when all are there, as Horovod does: an array that has changed by then is a fault
                posted.update({position: (array.copy(), sizes) for position, (array, sizes) in posted.items()})
            self._world.changed.notify_all()
        return key

    def _all_of(self, key: Any) -> list[Any]:
        posted = self._world.posted
        with self._world.changed:
            complete = self._world.changed.wait_for(
                lambda: len(posted[key]) == self.size or self._world.failure is not None, SECONDS
            )
            if not complete or len(posted[key]) < self.size:
                raise TimeoutError(f"{key}: only positions {sorted(posted[key])} of {self.size} have come")
            return [posted[key][position] for position in range(self.size)]
