"""One tensor's exchanges, step after step: the stages of `Transfer` joined by Horovod's asynchronous collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.compressors import Compressor, Key
from hvd_compress.errors import WireError
from hvd_compress.exchange import Parcel, Plan, Transfer, ring_bytes
from hvd_compress.torch._staging import Staged, stage
from hvd_compress.torch._stats import Counters

__all__ = ["Lane"]


class Lane:
    """Where one tensor travels: its plan, its residual on this rank and the collective in flight.

    Args:
        name: of the tensor, the same on all ranks; collectives are named after it.
        plan: sizes, the same on all ranks.
        compressor: of the whole tensor.
        process_set: the ranks that take part.
    """

    def __init__(self, name: str, plan: Plan, compressor: Compressor, process_set: hvd.ProcessSet) -> None:
        self.name = name
        self.plan = plan
        self.counters = Counters()
        self.residual: torch.Tensor | None = None
        self._feedback = compressor.feedback
        self._process_set = process_set
        position = process_set.rank()
        self.transfer = Transfer(plan, position, Key(seed=compressor.seed, name=name, rank=position))
        self._staged: Staged | None = None
        self._handle: int | None = None
        self._waiting_for = ""
        self._own_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way."""
        return self._staged is not None

    def start(self, gradient: torch.Tensor) -> None:
        """Encode a dense gradient, which is spoiled, and start the first collective."""
        begin = time.perf_counter()
        self._staged = stage(gradient, name=self.name)
        flat = self._staged.flat
        if self._feedback and self.residual is None:
            self.residual = torch.zeros_like(flat)
        if self.residual is not None:
            self.residual = self.residual.to(flat.dtype)  # of a model that was converted since
        residual = None if self.residual is None else self.residual.numpy()
        parcel = self.transfer.encode(flat.numpy(), residual)
        self.counters.encode_seconds += time.perf_counter() - begin
        self._send(self.plan.collectives[0], parcel)

    def progress(self) -> None:
        """Run the next stage if its collective is complete; never waits."""
        if self._waiting_for == "alltoall" and self._handle is not None and hvd.poll(self._handle):
            self._reduce()

    def wait(self) -> bool:
        """Wait until the last payloads are here; whether all are finite."""
        self.wait_first()
        received = self._receive()
        self.counters.bytes_received += received.size * (1 - 1 / self.plan.ranks)
        with self._naming_errors():
            return self.transfer.arrive(received)

    def wait_first(self) -> None:
        """Wait for the first of two collectives and start the second."""
        if self._waiting_for == "alltoall":
            self._reduce()

    def finish(self, keep: bool, scale: float) -> torch.Tensor:
        """Decode the sum times `scale`; residuals move on if `keep`, else they are as before the step."""
        begin = time.perf_counter()
        staged = self._staged
        if staged is None:
            raise RuntimeError(f"no exchange of {self.name!r} is under way")
        flat, old = staged.flat, self.residual
        with self._naming_errors():
            self.transfer.finish(keep, scale)
        # the swap of the two buffers, seen from the tensors that own their memory
        result = flat
        if keep and old is not None:
            # a buffer of the user's that .grad was a view of will be written to again
            result, self.residual = old, flat.clone() if staged.is_seen_elsewhere() else flat
        self._staged = None
        restored = staged.restore(result)
        self.counters.steps += 1
        self.counters.dense_bytes += ring_bytes(staged.gradient.nbytes, self.plan.ranks)
        self.counters.decode_seconds += time.perf_counter() - begin
        return restored

    def abandon(self) -> None:
        """Wait for what is in flight and forget it; residuals stay as before the step."""
        if self._handle is not None:
            hvd.synchronize(self._handle)
        self._handle, self._waiting_for, self._staged = None, "", None
        self.transfer.abandon()

    def rescale(self, factor: float) -> None:
        """Multiply both residuals."""
        if self.residual is not None:
            self.residual.mul_(factor)
        if self.transfer.owner_residual is not None:
            self.transfer.owner_residual *= factor

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank still owes."""
        own = 0.0 if self.residual is None else float(torch.linalg.vector_norm(self.residual, dtype=torch.float64))
        owner = self.transfer.owner_residual
        as_owner = 0.0 if owner is None else float(np.linalg.norm(owner.astype(np.float64)))
        return float(np.hypot(own, as_owner))

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except WireError as error:
            rank = self.transfer.position
            raise WireError(f"exchange of {self.name!r}, received by rank {rank}: {error}") from error

    def _reduce(self) -> None:
        received = self._receive()
        begin = time.perf_counter()
        self.counters.bytes_received += received.size - self._own_bytes
        with self._naming_errors():
            parcel = self.transfer.reduce(received)
        self.counters.encode_seconds += time.perf_counter() - begin
        self._send("allgather", parcel)

    def _send(self, collective: str, parcel: Parcel) -> None:
        # named by tensor and stage: ranks may issue them in any order
        name = f"hvd_compress.{collective}.{self.name}"
        buffer = torch.from_numpy(parcel.buffer)
        self._own_bytes = parcel.own
        if collective == "alltoall":
            splits = None if parcel.sizes is None else torch.tensor(parcel.sizes, dtype=torch.int32)
            sent = (parcel.buffer.size if parcel.sizes is None else sum(parcel.sizes)) - parcel.own
            self._handle = hvd.alltoall_async(buffer, splits=splits, name=name, process_set=self._process_set)
        else:
            sent = (self.plan.ranks - 1) * parcel.own
            self._handle = hvd.allgather_async(buffer, name=name, process_set=self._process_set)
        self.counters.bytes_sent += sent
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
