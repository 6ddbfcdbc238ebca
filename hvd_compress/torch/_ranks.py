"""Horovod's asynchronous collectives on arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
        name = name or self.numbered("fingerprint")
        if are_together():
            self._begin(description, name, beside)()

    def begin_agreement(self, description: dict[str, Any]) -> Callable[[], None]:
        """See `Ranks.begin_agreement`."""
        return self._begin(description, self.numbered("fingerprint"))

    def _begin(self, description: dict[str, Any], name: str, beside: Sequence[str] = ()) -> Callable[[], None]:
        started = [["broadcast", min(beside)], ["allreduce", beside[-1]]] if beside else []
        markers = {(kind, tensor): self._marker(kind, tensor) for kind, tensor in started}

        def start(data: bytes, label: str) -> Callable[[], bytes]:
            handle = self.start("allgather", label, np.frombuffer(bytearray(data), np.uint8))
            return lambda: self._gathered(handle, markers)

        end_comparison = fingerprint.begin_agreement({**description, fingerprint.STARTED: started}, start, name)

        def end() -> None:
            try:
                end_comparison()
            except MismatchError as error:
                # markers that some of those who have compared have started, and others have not, would stay under way
                others = {(kind, t) for told in error.descriptions for kind, t in told.get(fingerprint.STARTED, ())}
                for kind, tensor in sorted(others):
                    if [kind, tensor] not in started:
                        markers[kind, tensor] = self._marker(kind, tensor)
                self._finish(markers if error.descriptions else {})
                raise
            self._finish(markers)

        return end

    def _marker(self, kind: str, tensor: str) -> Any:
        return self.start(kind, tensor, np.zeros(1, np.int32))

    def _gathered(self, handle: Any, markers: dict[tuple[str, str], Any]) -> bytes:
        """Wait for an allgather, and look after markers meanwhile: where one fails, the allgather never ends."""
        while markers and not self.is_done(handle):
            for key in [key for key, marker in markers.items() if self.is_done(marker)]:
                self._check(markers.pop(key), *key)
            time.sleep(_SECONDS_BETWEEN_POLLS)
        return self.wait(handle).tobytes()

    def _finish(self, markers: dict[tuple[str, str], Any]) -> None:
        while markers:
            key, marker = markers.popitem()
            self._check(marker, *key)

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
