"""Horovod's collectives on arrays, among the ranks of a process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.fingerprint import begin_agreement, scope_of
from hvd_compress.horovod_nodes import HorovodNodes
from hvd_compress.torch._agreement import require_agreement
from hvd_compress.torch._horovod import known_process_sets

__all__ = ["NODES", "TorchRanks"]

Array = np.ndarray[Any, Any]


class TorchRanks:
    """See `daso.Ranks`.

    Args:
        process_set: the ranks that take part; this rank is one of them.
    """

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        self.size, self.position = int(process_set.size()), int(process_set.rank())
        self._process_set = process_set

    def require_agreement(self, description: dict[str, Any]) -> None:
        """Raise MismatchError on all ranks unless all say the same."""
        require_agreement(description, self._process_set)

    def begin_agreement(self, description: dict[str, Any]) -> Callable[[], None]:
        """The same in two parts: begins, and returns what ends it."""

        def start(data: bytes, name: str) -> Callable[[], bytes]:
            handle = self.start("allgather", np.frombuffer(bytearray(data), np.uint8), name)
            return lambda: self.wait(handle).tobytes()

        return begin_agreement(description, scope_of(self._process_set), start)

    def start(self, collective: str, array: Array, name: str, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        """Start a collective."""
        tensor, common = torch.from_numpy(array), {"name": name, "process_set": self._process_set}
        if collective == "allreduce":
            return hvd.allreduce_async(tensor, op=hvd.Sum, **common)
        if collective == "allgather":
            return hvd.allgather_async(tensor, **common)
        if collective == "broadcast":
            return hvd.broadcast_async_(tensor, self._process_set.ranks[root], **common)
        splits = None if sizes is None else torch.tensor(sizes, dtype=torch.int32)
        return hvd.alltoall_async(tensor, splits, **common)

    def wait(self, handle: Any) -> Array:
        """What it has brought."""
        output = hvd.synchronize(handle)
        tensor = output[0] if isinstance(output, tuple) else output
        array: Array = tensor.numpy()
        return array


NODES = HorovodNodes(hvd, torch.from_numpy, known_process_sets, TorchRanks, require_agreement)
