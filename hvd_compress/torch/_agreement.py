"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.fingerprint import agree, scope_of

__all__ = ["require_agreement"]


def require_agreement(description: dict[str, Any], process_set: hvd.ProcessSet) -> None:
    """Compare `description` across the ranks of `process_set`; a collective call.

    Raises:
        MismatchError: on all ranks, naming the first difference.
    """

    def allgather(data: bytes, name: str) -> bytes:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return bytes(hvd.allgather(tensor, name=name, process_set=process_set).numpy().tobytes())

    agree(description, scope_of(process_set), allgather)
