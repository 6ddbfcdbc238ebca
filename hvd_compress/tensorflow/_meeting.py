"""Ranks that compare single calls in places where others may be, and leave nothing under way when they disagree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import Place, agree, check_agreement, serialize
from hvd_compress.tensorflow._agreement import is_mismatch, met
from hvd_compress.tensorflow._ranks import TensorFlowRanks

__all__ = ["Meeting"]


class Meeting:
    """Compares at several places at once: in which of them another rank may be is not known.

    Horovod refuses operations of one name whose types differ, on all ranks. TensorFlow's interface has no handles, so
    each place has a thread that waits there.

    Args:
        process_set: the ranks that compare.
        name: of what they compare, for their disagreement.
        started: operations of this rank that have failed already, as they have met such a comparison.
    """

    def __init__(self, process_set: hvd.ProcessSet, name: str, started: Iterable[Place] = ()) -> None:
        self._process_set = process_set
        self._name = name
        self._started = list(started)
        self._under_way = 0
        self._results: SimpleQueue[tuple[Place, bytes | Exception]] = SimpleQueue()

    def require_agreement(self, label: str, description: dict[str, Any], places: Sequence[Place]) -> None:
        """Compare at the first of some places; ranks at any of the others are told.

        Raises:
            MismatchError: on all ranks, naming the first difference.
        """
        name = places[0].name

        def allgather(data: bytes, its_name: str) -> bytes:
            # those that gather once more have all met
            if its_name != name:
                return TensorFlowRanks(self._process_set).gather_bytes(data, its_name)
            return self._gather(data, places)

        try:
            agree(description, allgather, name)
            while self._under_way:
                self._next()
        except (MismatchError, tf.errors.OpError) as error:
            if isinstance(error, tf.errors.OpError) and not is_mismatch(error):
                raise
            self.leave(label, description, error)

    def leave(self, label: str, description: dict[str, Any], cause: Exception) -> None:
        """After a disagreement: start what other ranks have started, so that nothing stays under way, and tell why.

        Ranks that run a graph do not come here, and those that lay one wait for nobody.

        Raises:
            MismatchError: naming the first difference.
        """
        if not tf.executing_eagerly():
            raise _as_mismatch(label, cause) from cause
        told = json.dumps([serialize(description).decode(), self._started]).encode() + _END
        everyone = _within(_SECONDS_TO_MEET, lambda: self._tell(told))
        if everyone is None:
            raise _as_mismatch(label, cause) from cause
        texts, started = zip(*map(json.loads, everyone.split(_END)[:-1]), strict=True)
        for place in sorted({Place(*place) for of_rank in started for place in of_rank} - set(self._started)):
            self._start(place, bytes(_MARK_BYTES))
        while self._under_way:
            self._next()
        try:
            check_agreement([text.encode() for text in texts])
        except MismatchError as error:
            raise MismatchError(f"{label}: {error}") from cause
        raise _as_mismatch(label, cause) from cause

    def _gather(self, mine: bytes, places: Sequence[Place]) -> bytes:
        for place in dict.fromkeys(places):
            self._start(place, mine)
        while True:
            place, result = self._next()
            if isinstance(result, Exception):
                raise result
            if place == places[0]:
                return result

    def _start(self, place: Place, mine: bytes) -> None:
        self._started.append(place)
        self._under_way += 1

        def wait() -> None:
            try:
                self._results.put((place, met(mine, [place], self._process_set)))
            except Exception as error:
                self._results.put((place, error))

        Thread(target=wait, daemon=True, name="hvd_compress meeting").start()

    def _next(self) -> tuple[Place, bytes | Exception]:
        self._under_way -= 1
        return self._results.get()

    def _tell(self, told: bytes) -> bytes:
        return TensorFlowRanks(self._process_set).gather_bytes(told, f"hvd_compress.told.{self._name}")


def _as_mismatch(label: str, cause: Exception) -> MismatchError:
    if isinstance(cause, MismatchError):
        return MismatchError(f"{label}: {cause}")
    return MismatchError(
        f"{label}: the ranks disagree on compression: one of them compresses this tensor, and another one does not, or "
        f"gives int32. All ranks must give the same compression. Horovod says: {cause}"
    )


def _within(seconds: float, call: Callable[[], bytes]) -> bytes | None:
    answers: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=lambda: answers.put(call()), daemon=True, name="hvd_compress told").start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return None


_END = b"\0"
_MARK_BYTES = 40
"""As many as are compared, so that a mark and what is compared are of one shape."""
_SECONDS_TO_MEET = 10.0
"""After an operation that has failed on all ranks; those that do not come run a graph, or programs without us."""
