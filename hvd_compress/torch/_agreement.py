"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import Place, agree_at, check_agreement, serialize
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["Meeting", "is_mismatch", "require_agreement_through", "without_compression"]

Array = np.ndarray[Any, Any]


_MARK: Array = np.zeros(40, np.int8)
"""As long as what is compared, so that both are of one shape."""


def require_agreement_through(description: dict[str, Any], process_set: hvd.ProcessSet, place: Place) -> None:
    """`Ranks.agree` in place of an operation that ranks are about to start who do not know of it.

    Raises:
        MismatchError: on all ranks, naming the first difference.
        HorovodInternalError: another rank has started the operation itself.
    """
    Meeting(process_set, place.name).agree([place], description)


class Meeting:
    """Ranks that compare in places where others may be, and that leave nothing under way when they disagree.

    Horovod refuses operations of one name whose types differ, on all ranks: so nobody waits for ever.

    Args:
        process_set: the ranks that compare.
        name: of what they compare, for their disagreement.
        started: operations of these ranks that have failed already, as they have met such a comparison.
    """

    def __init__(self, process_set: hvd.ProcessSet, name: str, started: Iterable[Place] = ()) -> None:
        self.ranks = TorchRanks(process_set)
        self._process_set = process_set
        self._name = name
        self._started = list(started)
        self._waiting: dict[Place, Any] = {}
        # ranks that have met already are not late, unless they are programs without us
        self._patience = _SECONDS_TO_MEET if self._started else float("inf")

    def require_agreement(self, label: str, description: dict[str, Any], places: Sequence[Place]) -> None:
        """Compare at the first of some places, when all ranks have come there; those at the others are told to come.

        Raises:
            MismatchError: on all ranks, naming the first difference; nothing is under way any more.
        """
        try:
            self.agree(places, description)
            self._finish()
        except (MismatchError, HorovodInternalError) as error:
            if isinstance(error, HorovodInternalError) and "Mismatched" not in str(error):
                raise
            self.leave(label, description, error)

    def agree(self, places: Sequence[Place], description: dict[str, Any]) -> None:
        """See `fingerprint.agree_at`."""
        agree_at(places, description, lambda mine: self.gather(mine, places), self.ranks.gather_bytes)

    def gather(self, mine: bytes, places: Sequence[Place]) -> bytes:
        """Bytes of all ranks, as many of each, that have met at the first place.

        Raises:
            HorovodInternalError: another rank has started that operation itself.
        """
        first, *others = places
        self._start(first, np.frombuffer(mine, np.int8))
        for place in others:
            self._start(place)
        begin = time.monotonic()
        while time.monotonic() - begin < self._patience:
            for place in [place for place, handle in self._waiting.items() if self.ranks.is_done(handle)]:
                try:
                    gathered = self.ranks.wait(self._waiting.pop(place))
                except HorovodInternalError as error:
                    # ranks that were about to start another one have failed as well, and come to the first one now
                    if place == first or "Mismatched" not in str(error):
                        raise
                else:
                    if place == first:
                        return gathered.astype(np.int8).tobytes()
            time.sleep(_SECONDS_BETWEEN_POLLS)
        raise HorovodInternalError("Mismatched programs: ranks do not compare what they call (int32)")

    def leave(self, label: str, description: dict[str, Any], cause: Exception) -> None:
        """After a disagreement: start what other ranks have started, so that nothing stays under way, and tell why.

        Raises:
            MismatchError: naming the first difference.
        """
        told = json.dumps([serialize(description).decode(), self._started]).encode() + _END
        data = np.frombuffer(bytearray(told), np.uint8)
        handle = self.ranks.start("allgather", f"hvd_compress.told.{self._name}", data)
        begin = time.monotonic()
        while not self.ranks.is_done(handle):
            if time.monotonic() - begin > _SECONDS_TO_MEET:
                raise MismatchError(without_compression(label, cause)) from cause
            time.sleep(_SECONDS_BETWEEN_POLLS)
        everyone = self.ranks.wait(handle).tobytes().split(_END)[:-1]
        texts, started = zip(*map(json.loads, everyone), strict=True)
        for place in sorted({Place(*place) for of_rank in started for place in of_rank} - set(self._started)):
            self._start(place)
        self._finish()
        try:
            check_agreement([text.encode() for text in texts])
        except MismatchError as error:
            raise MismatchError(f"{label}: {error}") from cause
        raise cause

    def _start(self, place: Place, mine: Array = _MARK) -> None:
        """Start the operation of a place with elements of another type, which carry the bytes of this rank, or none."""
        self._started.append(place)
        ranks, sizes = self.ranks, None
        if place.collective == "grouped_allreduce":
            marks = [torch.zeros(1, dtype=torch.int32) for _ in range(place.tensors)]
            handle = hvd.grouped_allreduce_async_(marks, op=hvd.Sum, name=place.name, process_set=self._process_set)
            self._waiting[place] = handle
            return
        if place.collective == "allreduce":
            rows = np.zeros((ranks.size, mine.size), np.int32)
            rows[ranks.position] = mine
            given = rows.reshape(-1)
        elif place.collective == "allgather":
            given = mine.copy()
        else:
            given, sizes = np.tile(mine, ranks.size), [mine.size] * ranks.size
        self._waiting[place] = ranks.start(place.collective, place.name, given, sizes)

    def _finish(self) -> None:
        """Wait for what is under way, whatever comes of it."""
        while self._waiting:
            _, handle = self._waiting.popitem()
            try:
                self.ranks.wait(handle)
            except HorovodInternalError as error:
                if "Mismatched" not in str(error):
                    raise


def is_mismatch(error: HorovodInternalError) -> bool:
    """Whether ranks have started different operations of one name, of which at least one compares calls."""
    return "Mismatched" in str(error) and "int32" in str(error)


def without_compression(call: str, error: Exception) -> str:
    """What is told where a rank that compresses has met one that does not."""
    return (
        f"{call}: the ranks disagree on compression: one of them compresses this tensor, and another one does not, or "
        f"gives int32. All ranks must give the same compression. Horovod says: {error}"
    )


_END = b"\0"
_SECONDS_BETWEEN_POLLS = 0.0005
_SECONDS_TO_MEET = 10.0
"""After an operation that has failed on all ranks; those that do not come run programs without us."""
