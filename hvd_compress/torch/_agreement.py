"""Carries the fingerprints of `hvd_compress.fingerprint` between ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.fingerprint import DIGEST_BYTES, check_agreement, digest, serialize

__all__ = ["require_agreement"]

_calls: Counter[int] = Counter()


def require_agreement(description: dict[str, Any], process_set: hvd.ProcessSet) -> None:
    """Compare `description` across the ranks of `process_set`; a collective call.

    Raises:
        MismatchError: on all ranks, naming the first difference.
    """
    # numbered by call and process set: all ranks wrap their optimizers in the same order, or are told so here
    number = _calls[process_set.process_set_id]
    _calls[process_set.process_set_id] += 1
    name = f"hvd_compress.fingerprint.{process_set.process_set_id}.{number}"
    text = serialize(description)
    mine = digest(text) + len(text).to_bytes(8, "little")
    everyone = _allgather_bytes(mine, f"{name}.digest", process_set)
    rows = [everyone[i : i + len(mine)] for i in range(0, len(everyone), len(mine))]
    if all(row == mine for row in rows):
        return
    joined = _allgather_bytes(text, f"{name}.text", process_set)
    texts = []
    for row in rows:
        length = int.from_bytes(row[DIGEST_BYTES:], "little")
        texts.append(joined[:length])
        joined = joined[length:]
    check_agreement(texts)


def _allgather_bytes(data: bytes, name: str, process_set: hvd.ProcessSet) -> bytes:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return bytes(hvd.allgather(tensor, name=name, process_set=process_set).numpy().tobytes())
