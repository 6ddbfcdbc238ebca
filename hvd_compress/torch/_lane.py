"""One tensor's exchanges: the stages of `engine.Lane` joined by Horovod's asynchronous collectives."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress import engine
from hvd_compress.compressors import Compressor
from hvd_compress.exchange import Parcel, Plan
from hvd_compress.torch._staging import Staged, stage

__all__ = ["Lane"]


class Lane(engine.Lane):
    """`engine.Lane` with the gradient's tensor and the collective in flight.

    Args:
        name: of the tensor, the same on all ranks; collectives are named after it.
        plan: sizes, the same on all ranks.
        compressor: of the whole tensor.
        position: of this rank in the process set.
        process_set: the ranks that take part.
    """

    def __init__(
        self, name: str, plan: Plan, compressor: Compressor, position: int, process_set: hvd.ProcessSet
    ) -> None:
        super().__init__(name, plan, compressor, position)
        self._process_set = process_set
        self._staged: Staged | None = None
        self._handle: int | None = None
        self._waiting_for = ""

    def start(self, gradient: torch.Tensor) -> None:
        """Encode a dense gradient, which is spoiled, and start the first collective."""
        begin = time.perf_counter()
        self._staged = stage(gradient, name=self.name)
        self.counters.encode_seconds += time.perf_counter() - begin
        self._send(self.plan.collectives[0], self.encode(self._staged.flat.numpy()))

    def progress(self) -> None:
        """Run the next stage if its collective is complete; never waits."""
        if self._waiting_for == "alltoall" and self._handle is not None and hvd.poll(self._handle):
            self._send("allgather", self.reduce(self._receive()))

    def wait_first(self) -> None:
        """Wait for the first of two collectives and start the second."""
        if self._waiting_for == "alltoall":
            self._send("allgather", self.reduce(self._receive()))

    def wait(self) -> bool:
        """Wait until the last payloads are here; whether all are finite."""
        self.wait_first()
        return self.arrive(self._receive())

    def combine(self, keep: bool, scale: float) -> torch.Tensor:
        """The sum times `scale` as a gradient; residuals move on if `keep`, else they are as before the step."""
        staged = self._staged
        if staged is None:
            raise RuntimeError(f"no exchange of {self.name!r} is under way")
        result = self.finish(keep, scale, staged.gradient.nbytes)
        begin = time.perf_counter()
        if self.residual is not None and keep and staged.is_seen_elsewhere():
            # a buffer of the user's that .grad was a view of will be written to again
            self.residual = self.residual.copy()
        self._staged = None
        restored = staged.restore(torch.from_numpy(result))
        self.counters.decode_seconds += time.perf_counter() - begin
        return restored

    def abandon(self) -> None:
        """Wait for what is in flight and forget it; residuals stay as before the step."""
        if self._handle is not None:
            hvd.synchronize(self._handle)
        self._handle, self._waiting_for, self._staged = None, "", None
        super().abandon()

    def _send(self, collective: str, parcel: Parcel) -> None:
        # named by tensor and stage: ranks may issue them in any order
        name = f"hvd_compress.{collective}.{self.name}"
        buffer = torch.from_numpy(parcel.buffer)
        if collective == "alltoall":
            splits = None if parcel.sizes is None else torch.tensor(parcel.sizes, dtype=torch.int32)
            self._handle = hvd.alltoall_async(buffer, splits=splits, name=name, process_set=self._process_set)
        else:
            self._handle = hvd.allgather_async(buffer, name=name, process_set=self._process_set)
        self._waiting_for = collective

    def _receive(self) -> np.ndarray[Any, Any]:
        begin = time.perf_counter()
        output = hvd.synchronize(self._handle)
        self._handle = None
        self.counters.exchange_seconds += time.perf_counter() - begin
        tensor = output[0] if isinstance(output, tuple) else output
        self._waiting_for = ""
        array: np.ndarray[Any, Any] = tensor.numpy()
        return array
