"""Horovod's asynchronous collectives on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.horovod_nodes import HorovodNodes
from hvd_compress.ranks import HorovodRanks
from hvd_compress.torch._horovod import known_process_sets

__all__ = ["NODES", "TorchRanks"]

Array = np.ndarray[Any, Any]


class TorchRanks(HorovodRanks):
    """See `Ranks`.

    Args:
        process_set: the ranks that take part; this rank is one of them.
    """

    def __init__(self, process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
        super().__init__(hvd, process_set)

    def start(self, collective: str, name: str, array: Array, sizes: Sequence[int] | None = None, root: int = 0) -> Any:
        # Horovod's thread, which is in no such mode, sizes the results made here
        with torch.inference_mode(False):
            tensor, settings = torch.from_numpy(array), {"name": name, "process_set": self._process_set}
            if collective == "allreduce":
                return hvd.allreduce_async_(tensor, op=hvd.Sum, **settings)
            if collective == "allgather":
                return hvd.allgather_async(tensor, **settings)
            if collective == "broadcast":
                # Horovod counts roots among all ranks
                return hvd.broadcast_async_(tensor, self._process_set.ranks[root], **settings)
            splits = None if sizes is None else torch.tensor(sizes, dtype=torch.int32)
            return hvd.alltoall_async(tensor, splits=splits, **settings)

    def is_done(self, handle: Any) -> bool:
        return bool(hvd.poll(handle))

    def wait(self, handle: Any) -> Array:
        output = hvd.synchronize(handle)
        tensor = output[0] if isinstance(output, tuple) else output
        array: Array = tensor.numpy()
        return array


NODES = HorovodNodes(hvd, known_process_sets, TorchRanks)
