"""Horovod's asynchronous collectives on arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress import fingerprint
from hvd_compress.elastic import are_together
from hvd_compress.errors import MismatchError
from hvd_compress.horovod_nodes import HorovodNodes
from hvd_compress.ranks import HorovodRanks
from hvd_compress.torch._horovod import known_process_sets
from hvd_compress.waiting import shut_down_by

__all__ = ["NODES", "TorchRanks"]

Array = np.ndarray[Any, Any]

_SECONDS_BETWEEN_POLLS = 0.0005

# `hvd.shutdown` would forget handles that another thread waits for
shut_down_by("horovod.torch", hvd.mpi_ops._basics.shutdown)


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

    def agree(self, description: dict[str, Any], name: str | None = None, beside: Sequence[str] = ()) -> None:
        """See `Ranks.agree`.

        Horovod's own optimizer on another rank would never come to the comparison. It broadcasts the parameters or
        reduces their gradients, and waits for the first in the alphabet, or for the last one, whose gradient comes
        first. Horovod refuses operations of one name whose types differ, on all ranks: so markers of another type,
        under these two names, tell both ranks.
        """
        if not beside or not are_together():
            super().agree(description, name)
            return
        names, markers = {"broadcast": min(beside), "allreduce": beside[-1]}, {}
        for kind, tensor in names.items():
            # One of a comparison that has failed may still be under way, and is as good. All ranks start two markers:
            # Horovod numbers operations without a name by how many there were.
            with suppress(ValueError):
                markers[kind] = self.start(kind, tensor, np.zeros(1, np.int32))

        def gather(data: bytes, label: str) -> bytes:
            handle = self.start("allgather", label, np.frombuffer(bytearray(data), np.uint8))
            while not self.is_done(handle):
                for kind in [kind for kind, marker in markers.items() if self.is_done(marker)]:
                    self._check(markers.pop(kind), kind, names[kind])
                time.sleep(_SECONDS_BETWEEN_POLLS)
            return self.wait(handle).tobytes()

        fingerprint.agree(description, gather, name or self.numbered("fingerprint"))
        # all ranks have started them: they have agreed on the names
        for kind, marker in markers.items():
            self._check(marker, kind, names[kind])

    def _check(self, marker: Any, kind: str, tensor: str) -> None:
        try:
            TorchRanks.wait(self, marker)
        except HorovodInternalError as error:
            if "Mismatched" not in str(error):
                raise
            raise MismatchError(
                "the ranks disagree on the optimizer: this rank wraps one of hvd_compress, and another rank has "
                f"started the {kind} of {tensor!r}, as programs with Horovod's own DistributedOptimizer do. Wrap the "
                f"same optimizer on all ranks, at the same point of the program. Horovod says: {error}"
            ) from error

    def is_done(self, handle: Any) -> bool:
        return bool(hvd.poll(handle))

    def wait(self, handle: Any) -> Array:
        output = hvd.synchronize(handle)
        tensor = output[0] if isinstance(output, tuple) else output
        array: Array = tensor.numpy()
        return array


NODES = HorovodNodes(hvd, known_process_sets, TorchRanks)
