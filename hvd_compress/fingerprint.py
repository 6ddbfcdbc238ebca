"""Compare what each rank says about its settings and tensors; edges carry the bytes."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvd_compress import wire
from hvd_compress.elastic import are_together
from hvd_compress.errors import MismatchError
from hvd_compress.waiting import waiting

__all__ = [
    "DIGEST_BYTES",
    "STARTED",
    "Place",
    "agree",
    "agree_at",
    "begin_agreement",
    "check_agreement",
    "digest",
    "scope_of",
    "serialize",
    "versions",
]

DIGEST_BYTES = 32
STARTED = "operations beside"
"""In a description: kinds and names of operations that a rank has started for the time of the comparison."""
_MOST_SHOWN = 200

_VERSIONS = ("package version", "wire version")


class Place(NamedTuple):
    """Names an operation in whose place ranks compare: a sum of floating point numbers, or a movement of uint8.

    Args:
        collective: "allreduce", "grouped_allreduce", "allgather", or else one of an exchange that is an alltoall.
        name: of the operation.
        tensors: in a group.
    """

    collective: str
    name: str
    tensors: int = 1


def serialize(description: dict[str, Any]) -> bytes:
    """Turn a JSON-able description into canonical bytes."""
    return json.dumps(description, sort_keys=True, default=str).encode()


def versions() -> dict[str, Any]:
    """Return the versions that ranks compare too: two releases may choose, lay out or name things differently."""
    # the package itself is above this module, and is there whenever this module is
    package = sys.modules[__name__.partition(".")[0]]
    return dict(zip(_VERSIONS, (package.__version__, wire.VERSION), strict=True))


def digest(serialized: bytes) -> bytes:
    """Return DIGEST_BYTES bytes that differ when descriptions do."""
    return hashlib.sha256(serialized).digest()


def check_agreement(descriptions: Sequence[bytes]) -> None:
    """Raise MismatchError, naming the first difference, unless all serialized descriptions are equal.

    Example:
        >>> from hvd_compress.fingerprint import check_agreement, serialize
        >>> check_agreement([serialize({"op": "Average"}), serialize({"op": "Sum"})])
        Traceback (most recent call last):
        hvd_compress.errors.MismatchError: the ranks disagree on op: rank 0 has 'Average', rank 1 has 'Sum'. All ranks \
must be given the same settings, and parameters of the same names, shapes and order.
    """
    parsed = [json.loads(d) for d in descriptions]
    for rank, other in enumerate(parsed):
        difference = _first_difference(parsed[0], other)
        if difference:
            where, mine, theirs = difference
            remedy = "All ranks must be given the same settings, and parameters of the same names, shapes and order."
            if where in _VERSIONS:
                remedy = "Install the same release of hvd_compress wherever ranks run."
            raise MismatchError(
                f"the ranks disagree on {where}: rank 0 has {mine!r}, rank {rank} has {theirs!r}. {remedy}"
            )


def scope_of(process_set: Any) -> str:
    """Name the ranks of a Horovod process set, whose own number another set gets after its removal."""
    if process_set.process_set_id == 0:
        return "all"
    # a process set that was made from a communicator knows no ranks
    ranks = process_set.process_set_id if process_set.ranks is None else list(process_set.ranks)
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]


def agree(description: dict[str, Any], allgather: Callable[[bytes, str], bytes], name: str) -> None:
    """Compare the description of this rank, and `versions`, with all others; a collective call where all can come.

    In elastic runs nothing is compared before the ranks' states are synced: a new rank comes here while the others wait
    in their states' `sync`, or train.

    Args:
        description: JSON-able.
        allgather: bytes of this rank and the name of the collective -> bytes of all ranks, joined in their order.
        name: of the collective; Horovod raises an error on both ranks where another one starts something else by it.

    Raises:
        MismatchError: on all ranks, naming the first difference.
    """
    if are_together():
        begin_agreement(description, lambda data, label: partial(allgather, data, label), name)()


def agree_at(
    places: Sequence[Place],
    description: dict[str, Any],
    meet: Callable[[bytes], bytes],
    allgather: Callable[[bytes, str], bytes],
) -> None:
    """Do what `agree` does in place of operations that ranks are about to start who do not know of it.

    Args:
        places: of the operations; the name of the first is that of the comparison.
        description: JSON-able.
        meet: bytes of this rank -> those of all ranks that have come to the places; fails where another one has started
            an operation itself.
        allgather: as in `agree`; ranks that gather once more have all met.

    Raises:
        MismatchError: on all ranks, naming the first difference.
    """
    name = places[0].name
    agree(description, lambda data, label: meet(data) if label == name else allgather(data, label), name)


def begin_agreement(
    description: dict[str, Any], start: Callable[[bytes, str], Callable[[], bytes]], name: str
) -> Callable[[], None]:
    """Begin what `agree` does, and return what ends it, for ranks that have something to do meanwhile.

    Args:
        description: JSON-able.
        start: starts an allgather of bytes by name, and returns what waits for it.
        name: of the collective.

    Returns:
        What ends it, and raises MismatchError on all ranks.
    """
    text, mine = _told(description)
    wait = start(mine, name)

    def end() -> None:
        with waiting(f"for all ranks to compare {_shortened(text)} with each other ({name})"):
            _compare(wait(), text, mine, name, lambda data, label: start(data, label)())

    return end


def _told(description: dict[str, Any]) -> tuple[bytes, bytes]:
    text = serialize({**description, **versions()})
    return text, digest(text) + len(text).to_bytes(8, "little")


def _shortened(text: bytes) -> str:
    return text.decode() if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN].decode(errors='ignore')} ..."


def _compare(everyone: bytes, text: bytes, mine: bytes, name: str, allgather: Callable[[bytes, str], bytes]) -> None:
    rows = [everyone[i : i + len(mine)] for i in range(0, len(everyone), len(mine))]
    if all(row == mine for row in rows):
        return
    joined = allgather(text, f"{name}.text")
    texts = []
    for row in rows:
        length = int.from_bytes(row[DIGEST_BYTES:], "little")
        texts.append(joined[:length])
        joined = joined[length:]
    try:
        check_agreement(texts)
    except MismatchError as error:
        error.descriptions = [json.loads(told) for told in texts]
        raise


def _first_difference(a: Any, b: Any, where: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        # another release may differ in anything; and which optimizer or compressor says more than a setting that only
        # one has
        names = ("optimizer", "id")
        for key in sorted(
            a.keys() | b.keys(), key=lambda key: (key not in _VERSIONS, key not in names, key == STARTED, key)
        ):
            inner = _first_difference(a.get(key), b.get(key), f"{where}.{key}" if where else str(key))
            if inner:
                return inner
        return None
    if isinstance(a, list) and isinstance(b, list):
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            inner = _first_difference(x, y, f"{where}[{index}]")
            if inner:
                return inner
        return (f"the number of {where}", len(a), len(b)) if len(a) != len(b) else None
    return None if a == b else (where, a, b)
