"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.fingerprint import agree, agree_by_name, scope_of

__all__ = ["require_agreement", "require_agreement_through"]


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
        if not its_name.endswith(".digest"):
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

    agree_by_name(description, f"{scope_of(process_set)}.{collective}.{name}", allgather)
