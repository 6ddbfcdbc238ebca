"""One tensor on one rank, step after step: the stages of `Transfer`, the residual, and what both cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, Key
from hvd_compress.engine.counters import Counters
from hvd_compress.errors import WireError
from hvd_compress.exchange import Parcel, Plan, Transfer, aligned_empty, ring_bytes

__all__ = ["Lane"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Lane:
    """Where one tensor travels; an edge runs the collectives between the stages.

    Args:
        name: of the tensor, the same on all ranks; it keys the randomness.
        plan: sizes, the same on all ranks.
        compressor: of the whole tensor.
        position: of this rank among those that take part.
    """

    def __init__(self, name: str, plan: Plan, compressor: Compressor, position: int) -> None:
        self.name = name
        self.plan = plan
        self.counters = Counters()
        self.residual: Array | None = None
        self.transfer = Transfer(plan, position, Key(seed=compressor.seed, name=name, rank=position))
        self._feedback = compressor.feedback
        self._own_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way."""
        return self.transfer.busy

    # -- stages --------------------------------------------------------------------------------------------------

    def encode(self, flat: Array) -> Parcel:
        """Stage 1: a gradient (flat float32 or float64, in use and spoiled until `finish`) becomes payloads."""
        begin = time.perf_counter()
        if self._feedback and self.residual is None:
            self.residual = aligned_empty(flat.size, flat.dtype)
            self.residual[...] = 0
        if self.residual is not None:
            # of a model that was converted since
            self.residual = self.residual.astype(flat.dtype, copy=False)
        parcel = self.transfer.encode(flat, self.residual)
        self._count_sent(self.plan.collectives[0], parcel)
        self.counters.encode_seconds += time.perf_counter() - begin
        return parcel

    def reduce(self, received: Bytes) -> Parcel:
        """Stage 2 of two phases: what all ranks sent of this rank's chunk becomes the payload of their sum.

        Raises:
            WireError: a payload is truncated, corrupted or foreign; the message names tensor and rank.
        """
        begin = time.perf_counter()
        self.counters.bytes_received += received.size - self._own_bytes
        with self._naming_errors():
            parcel = self.transfer.reduce(received)
        self._count_sent("allgather", parcel)
        self.counters.encode_seconds += time.perf_counter() - begin
        return parcel

    def arrive(self, received: Bytes) -> bool:
        """The last payloads are here; whether all are finite.

        Raises:
            WireError: see `reduce`.
        """
        self.counters.bytes_received += received.size * (1 - 1 / self.plan.ranks)
        with self._naming_errors():
            return self.transfer.arrive(received)

    def finish(self, keep: bool, scale: float, gradient_bytes: int) -> Array:
        """Stage 3: the sum times `scale`, in one of the two buffers; residuals move on if `keep`.

        Args:
            keep: False takes both residuals back to what they were before the step.
            scale: factor on the sum.
            gradient_bytes: of the gradient in its own dtype, for the statistics.

        Raises:
            WireError: see `reduce`.
        """
        begin = time.perf_counter()
        with self._naming_errors():
            result, self.residual = self.transfer.finish(keep, scale)
        self.counters.steps += 1
        self.counters.dense_bytes += ring_bytes(gradient_bytes, self.plan.ranks)
        self.counters.decode_seconds += time.perf_counter() - begin
        return result

    def abandon(self) -> None:
        """Forget a step in flight; residuals stay as before it."""
        self.transfer.abandon()

    # -- what is owed --------------------------------------------------------------------------------------------

    @property
    def keeps_residual(self) -> bool:
        """Whether error feedback is on."""
        return self._feedback

    def is_owing(self) -> bool:
        """Whether anything is left of what this rank was to send."""
        owed = (self.residual, self.transfer.owner_residual)
        return any(r is not None and r.any() for r in owed)

    def inherit(self, other: Lane) -> None:
        """Take over the residuals, counters and step of a lane of the same tensor with another compressor."""
        self.counters, self.transfer.step = other.counters, other.transfer.step
        if other.residual is not None:
            self.residual = other.residual
            owed = other.transfer.owner_residual
            if owed is not None:
                # both are in units of the sum; the chunks of another compressor may have other bounds
                start = other.plan.bounds[other.transfer.position]
                self.residual[start : start + owed.size] += owed

    def rescale(self, factor: float) -> None:
        """Multiply both residuals."""
        for owed in (self.residual, self.transfer.owner_residual):
            if owed is not None:
                owed *= factor

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank still owes."""
        owed = [r for r in (self.residual, self.transfer.owner_residual) if r is not None]
        # float64 for the sum, without a float64 copy of the residual
        return float(np.sqrt(sum(np.einsum("i,i->", r, r, dtype=np.float64, casting="safe") for r in owed)))

    def _count_sent(self, collective: str, parcel: Parcel) -> None:
        self._own_bytes = parcel.own
        if collective == "alltoall":
            sent = (parcel.buffer.size if parcel.sizes is None else sum(parcel.sizes)) - parcel.own
        else:
            sent = (self.plan.ranks - 1) * parcel.own
        self.counters.bytes_sent += sent

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except WireError as error:
            rank = self.transfer.position
            raise WireError(f"exchange of {self.name!r}, received by rank {rank}: {error}") from error
