"""One tensor's way through an exchange on one rank: the stages, with the state that must survive between them.

The order is: `encode`, collective, `reduce` (two_phase only), collective, `arrive`, and, when the payloads of the whole
step have arrived, `finish`. Up to `finish` both residuals are as they were before the step: the encode kernels turn the
gradient's own memory into the new residual, and `finish` swaps the two buffers, so taking a step back costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors import Key
from hvd_compress.errors import WireError
from hvd_compress.exchange.memory import aligned_empty
from hvd_compress.exchange.plan import Plan

__all__ = ["Parcel", "Transfer"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Parcel:
    """What a stage hands to the next collective.

    Args:
        buffer: flat uint8; for an alltoall one part per receiver, one after the other.
        sizes: bytes for each receiver of an alltoall; None where all are equal.
        own: bytes of the part that stays on this rank.
    """

    buffer: Bytes
    sizes: tuple[int, ...] | None
    own: int


class Transfer:
    """The stages of one tensor's exchange on one rank.

    Args:
        plan: sizes and bounds, equal on all ranks.
        position: of this rank among those that take part.
        key: seed, name and rank for the randomness; step, hop and chunk are filled in here.
    """

    def __init__(self, plan: Plan, position: int, key: Key) -> None:
        self.plan = plan
        self.position = position
        self.owner_residual: Array | None = None
        self.step = 0
        self._key = key
        self._feedback = plan.chunk_compressors[0].feedback
        self._send = np.empty(0, np.uint8)
        self._result = np.empty(0, np.uint8)
        self._sum: Array = np.empty(0, np.float32)
        self._gradient: Array | None = None
        self._residual: Array | None = None
        self._arrived: list[Bytes] = []

    @property
    def busy(self) -> bool:
        """Whether a step is between `encode` and `finish`."""
        return self._gradient is not None

    def encode(self, x: Array, residual: Array | None) -> Parcel:
        """Stage 1, every rank: the gradient `x` (flat, spoiled) and its residual become payloads.

        `x` and `residual` stay in use until `finish`; `residual` is None without error feedback.
        """
        self._gradient, self._residual = x, residual
        plan = self.plan
        if self._send.size == 0:
            self._send = aligned_empty(len(plan.slots) * plan.slot if plan.fixed_size else sum(plan.slots), np.uint8)
        sizes = []
        at = 0
        for chunk, part in enumerate(self._chunks()):
            nbytes = plan.chunk_compressors[chunk].encode_into(
                x[part],
                None if residual is None else residual[part],
                self._send[at : at + plan.slots[chunk]],
                plan.group,
                self._key_of(hop=0, chunk=chunk),
            )
            sizes.append(plan.slot if plan.fixed_size else nbytes)
            # what a payload leaves of its slot travels too: it must not be what this memory held before
            self._send[at + nbytes : at + sizes[-1]] = 0
            at += sizes[-1]
        own = sizes[self.position] if plan.exchange == "two_phase" else sizes[0]
        if plan.exchange == "two_phase":
            # the whole buffer, though not all of it is sent: Horovod's response cache wants equal shapes in every step
            return Parcel(self._send, None if plan.fixed_size else tuple(sizes), own)
        return Parcel(self._send[:at], None, own)

    def reduce(self, received: Bytes) -> Parcel:
        """Stage 2, the owner of a chunk: the payloads of all ranks become the payload of their sum.

        Raises:
            WireError: a payload is truncated, corrupted or foreign.
        """
        plan = self.plan
        compressor = plan.chunk_compressors[self.position]
        part = self._chunks()[self.position]
        numel = part.stop - part.start
        dtype = np.float32 if self._gradient is None else self._gradient.dtype
        if self._sum.size != numel or self._sum.dtype != dtype:
            self._sum = np.empty(numel, dtype)
        if self._feedback and self.owner_residual is None:
            self.owner_residual = np.zeros(numel, dtype)
        if self.owner_residual is not None:
            self.owner_residual = self.owner_residual.astype(dtype, copy=False)
        for sender, payload in enumerate(self._cut(received, plan.ranks)):
            compressor.decode_into(payload, self._sum, add=sender > 0)
        if self._result.size == 0:
            self._result = aligned_empty(plan.slot, np.uint8)
        key = self._key_of(hop=1, chunk=self.position)
        nbytes = compressor.encode_into(self._sum, self.owner_residual, self._result, plan.group, key)
        own = plan.slot if plan.fixed_size else nbytes
        self._result[nbytes:own] = 0
        return Parcel(self._result[:own], None, own)

    def arrive(self, received: Bytes) -> bool:
        """Last payloads are here; whether all of them, and so the sum, are finite.

        Raises:
            WireError: truncated or foreign.
        """
        self._arrived = self._cut(received, self.plan.ranks)
        headers = [wire.open_payload(payload)[0] for payload in self._arrived]
        return not any(header.nonfinite for header in headers)

    def finish(self, keep: bool, scale: float) -> tuple[Array, Array | None]:
        """Stage 3, every rank: decode, and make the step's residuals final, or take them back.

        Args:
            keep: False takes both residuals back to what they were before the step.
            scale: factor on the sum, such as 1 / ranks.

        Returns:
            The sum times `scale` and the residual from now on, in the two buffers that `encode` was given.

        Raises:
            WireError: a payload is corrupted.
        """
        if self._gradient is None:
            raise RuntimeError("finish() without encode()")
        out, residual = self._gradient, self._residual
        if keep and residual is not None:
            out, residual = residual, self._gradient
        self._decode(out, scale)
        if keep and self.owner_residual is not None:
            self.owner_residual, self._sum = self._sum, self.owner_residual
        self.abandon()
        self.step += 1
        return out, residual

    def abandon(self) -> None:
        """Forget a step in flight; the residuals stay what they were before it."""
        self._gradient = self._residual = None
        self._arrived = []

    def _decode(self, out: Array, scale: float) -> None:
        plan = self.plan
        if plan.exchange == "two_phase":
            for chunk, part in enumerate(self._chunks()):
                plan.chunk_compressors[chunk].decode_into(self._arrived[chunk], out[part], scale)
            return
        # all ranks add in the order of the senders: floating point sums depend on it
        for sender, payload in enumerate(self._arrived):
            plan.chunk_compressors[0].decode_into(payload, out, scale, add=sender > 0)

    def _chunks(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(self.plan.bounds)]

    def _cut(self, received: Bytes, count: int) -> list[Bytes]:
        """The payloads in the bytes of a collective."""
        if not self.plan.fixed_size:
            return wire.frames(received, count)
        slot = self.plan.slot
        if received.size != count * slot:
            raise WireError(f"received {received.size} bytes, expected {count} slots of {slot}")
        return [received[i * slot : (i + 1) * slot] for i in range(count)]

    def _key_of(self, hop: int, chunk: int) -> Key:
        return replace(self._key, step=self.step, hop=hop, chunk=chunk)
