"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import DIGEST_BYTES, agree, check_agreement, digest, scope_of, serialize

__all__ = [
    "Collective",
    "is_mismatch",
    "require_agreement",
    "require_agreement_of_call",
    "require_agreement_through",
    "without_compression",
]

Collective = tuple[str, str]
"""What kind of collective it is, and its name."""


def require_agreement(description: dict[str, Any], process_set: hvd.ProcessSet) -> None:
    """Compare `description` across the ranks of `process_set`; a collective call.

    Raises:
        MismatchError: on all ranks, naming the first difference.
    """

    def allgather(data: bytes, name: str) -> bytes:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return bytes(hvd.allgather(tensor, name=name, process_set=process_set).numpy().tobytes())

    agree(description, scope_of(process_set), allgather)


def require_agreement_through(
    description: dict[str, Any], process_set: hvd.ProcessSet, collective: str, name: str
) -> None:
    """`require_agreement` in place of an operation that ranks are about to start who do not know of it.

    Horovod refuses operations of one name whose types differ, on all ranks: so nobody waits for ever.

    Args:
        description: see `require_agreement`.
        process_set: the ranks that compare.
        collective: "allreduce" of floating point numbers, "allgather" of uint8, or else an alltoall of uint8.
        name: of the operation.

    Raises:
        MismatchError: on all ranks, naming the first difference.
        HorovodInternalError: another rank has started the operation itself.
    """
    ranks, position = process_set.size(), process_set.rank()

    def allgather(data: bytes, its_name: str) -> bytes:
        mine = torch.frombuffer(bytearray(data), dtype=torch.int8)
        if its_name != name:
            # all ranks have met
            return bytes(hvd.allgather(mine, name=its_name, process_set=process_set).numpy().tobytes())
        if collective == "allgather":
            everyone = hvd.synchronize(hvd.allgather_async(mine, name=name, process_set=process_set))
        elif collective == "allreduce":
            rows = torch.zeros((ranks, mine.numel()), dtype=torch.int32)
            rows[position] = mine
            handle = hvd.allreduce_async_(rows, name=name, op=hvd.Sum, process_set=process_set)
            everyone = hvd.synchronize(handle).to(torch.int8)
        else:
            splits = torch.full((ranks,), mine.numel(), dtype=torch.int32)
            handle = hvd.alltoall_async(mine.repeat(ranks), splits=splits, name=name, process_set=process_set)
            everyone, _ = hvd.synchronize(handle)
        return bytes(everyone.numpy().tobytes())

    agree(description, scope_of(process_set), allgather, name)


def require_agreement_of_call(
    call: str, told: dict[str, Any], name: str, tensors: int, process_set: hvd.ProcessSet, earlier: Iterable[Collective]
) -> None:
    """Compare what the ranks say of a call of allreduce; a collective call that does not hang where they differ.

    It goes by the Horovod name of the call without compression, so that a rank that calls in that way fails, and by
    those of the first collectives of the call before, so that a rank that has not changed does.

    Args:
        call: for errors.
        told: what this rank says.
        name: of the call.
        tensors: how many there are; several are named as a group.
        process_set: the ranks that take part.
        earlier: the first collectives of the last call of this name, if that was another one.

    Raises:
        MismatchError: on all ranks, naming the first difference where all of them compare.
    """
    text = serialize(told)
    mine = digest(text) + len(text).to_bytes(8, "little")
    # of type int32, which compression refuses and its payloads are not
    rows = torch.zeros(process_set.size(), len(mine) // 4, dtype=torch.int32)
    rows[process_set.rank()] = torch.frombuffer(bytearray(mine), dtype=torch.int32)
    common = {"name": name, "process_set": process_set}
    waiting = {"rows": hvd.allreduce_async_(rows, op=hvd.Sum, **common)}
    if tensors != 1:
        marks = [torch.zeros(1, dtype=torch.int32) for _ in range(tensors)]
        waiting["group"] = hvd.grouped_allreduce_async_(marks, op=hvd.Sum, **common)
    for collective, its_name in earlier:
        start = getattr(hvd, f"{collective}_async")
        mark = torch.zeros(process_set.size(), dtype=torch.int32)
        waiting[its_name] = start(mark, name=its_name, process_set=process_set)
    while waiting:
        for kind in [kind for kind, handle in waiting.items() if hvd.poll(handle)]:
            try:
                hvd.synchronize(waiting.pop(kind))
            except HorovodInternalError as error:
                if not is_mismatch(error):
                    raise
                # ranks that call as before have failed as well, and compare now
                if kind in ("rows", "group"):
                    raise MismatchError(without_compression(call, error)) from error
            if kind == "rows":
                _compare(call, text, [row.numpy().tobytes() for row in rows], name, process_set)
        time.sleep(_SECONDS_BETWEEN_POLLS)


def is_mismatch(error: HorovodInternalError) -> bool:
    """Whether ranks have started different operations of one name, of which at least one compares calls."""
    return "Mismatched" in str(error) and "int32" in str(error)


def without_compression(call: str, error: HorovodInternalError) -> str:
    """What is told where a rank that compresses has met one that does not."""
    return (
        f"{call}: the ranks disagree on compression: one of them compresses this tensor, and another one does not, or "
        f"gives int32. All ranks must give the same compression. Horovod says: {error}"
    )


def _compare(call: str, text: bytes, rows: list[bytes], name: str, process_set: hvd.ProcessSet) -> None:
    if len(set(rows)) == 1:
        return
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    joined = hvd.allgather(mine, name=f"hvd_compress.told.{name}", process_set=process_set).numpy().tobytes()
    texts = []
    for row in rows:
        length = int.from_bytes(row[DIGEST_BYTES:], "little")
        texts.append(joined[:length])
        joined = joined[length:]
    try:
        check_agreement(texts)
    except MismatchError as error:
        raise MismatchError(f"{call}: {error}") from None


_SECONDS_BETWEEN_POLLS = 0.0005
