"""Take one tensor through an exchange on one rank: the stages, with the state that must survive between them.

The order is: `encode`, collective, `reduce` (not in an allgather), collective, `arrive`, and, when the payloads of the
whole step have arrived, `finish`. A hierarchical exchange begins with `hold`, a collective inside the host, and
`encode_inside`. Gradients are only read, and residuals are renewed where they lie. Taking a step back puts what was
sent back into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors import Compressor, Key
from hvd_compress.errors import WireError
from hvd_compress.exchange.adagrad import Accumulator
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.memory import aligned_empty
from hvd_compress.exchange.plan import Plan

__all__ = ["Transfer"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_NOT_HERE = np.empty(0, np.float32)
"""Stands for a gradient that others encode."""


class Transfer:
    """Runs the stages of one tensor's exchange on one rank.

    Args:
        name: of the tensor, the same on all ranks; it keys the randomness.
        plan: sizes and bounds, equal on all ranks.
        compressor: of the whole tensor.
        position: of this rank among those that take part.
        hosts: of the ranks, for a hierarchical exchange.
        accumulator: of the elements that this rank owns; with it, results are AdaGrad's updates.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        compressor: Compressor,
        position: int,
        hosts: Hosts | None = None,
        accumulator: Accumulator | None = None,
    ) -> None:
        self.name = name
        self.plan = plan
        self.position = position
        self.hosts = hosts
        self.chunk = position if hosts is None else hosts.chunk_of(position)
        """The chunk that this rank owns."""
        self.keeps_residual = compressor.feedback
        """Whether error feedback is on."""
        self._owner_keeps_residual = any(answer.feedback for answer in plan.answer_compressors)
        self.residual: Array | None = None
        """Of the elements in `shard`."""
        self.owner_residual: Array | None = None
        """Of the elements in `owned`: in units of the sum, with an accumulator in units of the update."""
        self.accumulator = accumulator
        self.pending: Array | None = None
        """What is owed of all elements, and goes with the next gradient: a hierarchical rank keeps residuals of its
        shard only."""
        self.step = 0
        self._seed = compressor.seed
        self.payloads: list[Bytes] = []
        """Of `sent_chunks`, in the bucket's buffer, until the step has ended."""
        self._sum: Array = np.empty(0, np.float32)
        self._gradient: Array | None = None
        self._out: Array | None = None
        """Where the result goes; None for the gradient's own memory."""
        self._held: Array | None = None
        """In a hierarchical exchange, the gradient with what is pending."""
        self._encoded: Array | None = None
        """What the payloads were made of, beside the residual; None where it is lost."""
        self._answer: Bytes | None = None
        """The payload of the sum of what this rank owns."""
        self._skipped = False
        self._arrived: Sequence[tuple[wire.Header, wire.Sections]] = ()

    @property
    def busy(self) -> bool:
        """Whether a step is between `encode` or `skip` and `finish`."""
        return self._gradient is not None or self._skipped

    @cached_property
    def owned(self) -> slice | None:
        """The elements whose sum this rank makes; None if there are none."""
        if self.plan.exchange == "allgather":
            return None
        return next((part for chunk, part in self.plan.chunks if chunk == self.chunk), None)

    @cached_property
    def shard(self) -> slice:
        """The elements that this rank encodes: all, or in a hierarchical exchange its share of its host's sum."""
        if self.hosts is None:
            return slice(0, self.plan.numel)
        chunks = self.hosts.shard_of(self.position)
        return slice(self.plan.bounds[chunks.start], self.plan.bounds[chunks.stop])

    @cached_property
    def sent_chunks(self) -> list[tuple[int, slice]]:
        """The number and elements of each chunk that this rank encodes and that has a payload."""
        wanted = range(len(self.plan.slots)) if self.hosts is None else self.hosts.shard_of(self.position)
        return [(chunk, part) for chunk, part in self.plan.chunks if chunk in wanted]

    def encode(self, gradient: Array, slots: Sequence[Bytes]) -> list[int]:
        """Run stage 1, on every rank: encode a gradient into the payloads of its chunks.

        Args:
            gradient: flat float32 or float64; read until the step has ended, and then overwritten with the result,
                unless `move` has named another place for that.
            slots: where the payload of each of `sent_chunks` goes.

        Returns:
            The bytes of each payload.
        """
        self._gradient = gradient
        return self._encode(gradient, slots)

    def hold(self, gradient: Array) -> None:
        """Run stage 0 of a hierarchical exchange: take a gradient (see `encode`) to cut up among this host's ranks."""
        self._gradient = gradient
        self._held = gradient if self.pending is None else gradient + self.pending

    def held(self, chunks: range) -> Array:
        """Return the elements of a shard, given by its chunks, of the gradient that `hold` took."""
        if self._held is None:
            raise RuntimeError(f"held() of {self.name!r} without hold()")
        return self._held[self.plan.bounds[chunks.start] : self.plan.bounds[chunks.stop]]

    def encode_inside(self, others: Sequence[Bytes], slots: Sequence[Bytes]) -> list[int]:
        """Run stage 1 of a hierarchical exchange: encode the sum of this host's gradients, in this rank's shard.

        Args:
            others: what the other ranks of this host have sent of the shard, in their order.
            slots: see `encode`.
        """
        if self._held is None:
            raise RuntimeError(f"encode_inside() of {self.name!r} without hold()")
        total = aligned_empty(self.shard.stop - self.shard.start, self._held.dtype)
        total[...] = self._held[self.shard]
        for sent in others:
            total += sent.view(total.dtype)
        return self._encode(total, slots)

    def move(self, out: Array) -> None:
        """Write the result of this step into `out`, flat and of the gradient's type, and not into the gradient."""
        self._out = out

    def lose_gradient(self) -> None:
        """Note that the gradient was overwritten: a step taken back cannot subtract it, so it stays owed."""
        self._encoded = None

    def skip(self, slots: Sequence[Bytes]) -> list[int]:
        """Run stage 1 without a gradient, on all ranks: write payloads that say so and leave residuals as they are."""
        self._skipped = True
        plan = self.plan
        return [
            plan.chunk_compressors[chunk].say_absent(slot, part.stop - part.start, plan.group)
            for (chunk, part), slot in zip(self.sent_chunks, slots, strict=True)
        ]

    def reduce(self, payloads: Sequence[Bytes], slot: Bytes) -> int:
        """Run stage 2, on the owner of a chunk: sum the payloads of all ranks and encode the sum into `slot`.

        With an accumulator it is the payload of the update that the sum makes.

        Raises:
            WireError: a payload is truncated, corrupted or foreign.
        """
        plan = self.plan
        part = self.owned
        if part is None:
            raise RuntimeError(f"rank {self.position} owns nothing of {self.name!r}")
        answers = plan.answer_compressors[self.chunk]
        numel = part.stop - part.start
        if self._skipped:
            return answers.say_absent(slot, numel, plan.group)
        self._prepare_sum()
        for sender, payload in enumerate(payloads):
            plan.chunk_compressors[self.chunk].decode_into(payload, self._sum, add=sender > 0)
        if self.accumulator is not None and not self.accumulator.precondition(self._sum):
            return answers.say_nonfinite(slot, numel, plan.group)
        key = self._key_of(hop=1, chunk=self.chunk)
        used = answers.encode_into(self._sum, self.owner_residual, slot, plan.group, key)
        self._answer = slot[:used]
        return used

    def arrive(self, payloads: Sequence[Bytes]) -> bool:
        """Check the last payloads; returns whether all of them, and so the sum, are finite.

        Args:
            payloads: one of each chunk, or one of each rank in an allgather.

        Raises:
            WireError: truncated or foreign.
        """
        self._arrived = [wire.open_payload(payload) for payload in payloads]
        finite = True
        for (compressor, numel), (header, _) in zip(self._senders, self._arrived, strict=True):
            # told here, not when decoding: other tensors of the step may be final by then
            if header.codec not in (compressor.codec, compressor.coded_codec) or header.numel != numel:
                raise WireError(
                    f"payload of codec {header.codec} and {header.numel} elements, expected codec {compressor.codec} "
                    f"and {numel} elements"
                )
            finite = finite and not header.nonfinite
        return finite

    def finish(self, keep: bool, scale: float) -> Array | None:
        """Run stage 3, on every rank: decode, and make the step's residuals final or take them back.

        Args:
            keep: False takes residuals and accumulator back to what they were before the step.
            scale: factor on the sum, such as 1 / ranks; an accumulator has its own.

        Returns:
            The sum times `scale`, see `encode` for its place; None after `skip`.

        Raises:
            WireError: a payload is corrupted.
        """
        if not self.busy:
            raise RuntimeError(f"finish() of {self.name!r} without encode()")
        if not keep:
            self._take_back()
        out = self._gradient if self._out is None else self._out
        if out is not None:
            self._decode(out, scale if self.accumulator is None else self.accumulator.loss_scale)
        if self.accumulator is not None:
            self.accumulator.settle(keep)
        self._forget()
        self.end(keep and out is not None)
        return out

    # -- for who runs the stages of several transfers at once ------------------------------------------------------

    def begin(self) -> None:
        """Begin a step whose float32 gradient others hold and encode."""
        self._gradient = _NOT_HERE

    def fit_residual(self, dtype: npt.DTypeLike) -> Array | None:
        """Return the residual in this type, zeros if there is none yet; None where none is kept."""
        if self.keeps_residual and self.residual is None:
            residual = aligned_empty(self.shard.stop - self.shard.start, dtype)
            residual[...] = 0
            # complete: statistics may be asked for on another thread
            self.residual = residual
        if self.residual is not None and self.residual.dtype != dtype:
            # the model was converted to another type since
            self.residual = self.residual.astype(dtype)
        return self.residual

    def fit_owner_residual(self, dtype: npt.DTypeLike) -> Array | None:
        """Return the owner's residual, of the sums of `owned`, in this type; None where none is kept."""
        if self._owner_keeps_residual and self.owner_residual is None and self.owned is not None:
            self.owner_residual = np.zeros(self.owned.stop - self.owned.start, dtype)
        if self.owner_residual is not None and self.owner_residual.dtype != dtype:
            self.owner_residual = self.owner_residual.astype(dtype)
        return self.owner_residual

    def end(self, keep: bool) -> None:
        """End the step, whose residuals others have made final."""
        if keep:
            self.pending = None
        self._gradient = None
        self.step += 1

    def note(self, stage: str, times: int, seconds: float) -> None:
        """Take note that others ran a stage, named as its method, so often in so many seconds, with full slots."""

    def abandon(self) -> None:
        """Forget a step in flight and make residuals and accumulator what they were before it."""
        self._take_back()
        if self.accumulator is not None:
            self.accumulator.settle(keep=False)
        self._forget()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _encode(self, x: Array, slots: Sequence[Bytes]) -> list[int]:
        """Encode the elements of `shard`."""
        residual = self.fit_residual(x.dtype)
        self._encoded = x
        self.payloads = []
        plan = self.plan
        for (chunk, _), at, slot in zip(self.sent_chunks, self._in_shard, slots, strict=True):
            of_chunk = None if residual is None else residual[at]
            key = self._key_of(hop=0, chunk=chunk)
            used = plan.chunk_compressors[chunk].encode_into(x[at], of_chunk, slot, plan.group, key)
            self.payloads.append(slot[:used])
        return [payload.size for payload in self.payloads]

    @cached_property
    def _in_shard(self) -> list[slice]:
        """Compute where each of `sent_chunks` lies in `shard`."""
        start = self.shard.start
        return [slice(part.start - start, part.stop - start) for _, part in self.sent_chunks]

    def _take_back(self) -> None:
        """Make residuals what they were before the step."""
        plan, x = self.plan, self._encoded
        if self.residual is not None:
            # there are none where others encode the gradient, or the step was skipped
            for (chunk, _), at, payload in zip(self.sent_chunks, self._in_shard, self.payloads, strict=False):
                gradient = None if x is None else x[at]
                plan.chunk_compressors[chunk].take_back(payload, self.residual[at], gradient)
        if self._answer is not None and self.owner_residual is not None:
            plan.answer_compressors[self.chunk].take_back(self._answer, self.owner_residual, self._sum)
        self.payloads, self._answer = [], None

    def _forget(self) -> None:
        self._gradient = self._out = self._held = self._encoded = self._answer = None
        self.payloads = []
        self._skipped = False
        self._arrived = ()

    def _prepare_sum(self) -> None:
        """Allocate memory for the sum that this rank owns, and its residual where one is kept."""
        if self.owned is None:
            raise RuntimeError(f"rank {self.position} owns nothing of {self.name!r}")
        numel = self.owned.stop - self.owned.start
        dtype = np.float32 if self._gradient is None else self._gradient.dtype
        if self._sum.size != numel or self._sum.dtype != dtype:
            self._sum = aligned_empty(numel, dtype)
        self.fit_owner_residual(dtype)

    @cached_property
    def _senders(self) -> list[tuple[Compressor, int]]:
        """List the compressor and number of elements of each payload that is to arrive."""
        plan = self.plan
        if plan.exchange != "allgather":
            return [(plan.answer_compressors[chunk], part.stop - part.start) for chunk, part in plan.chunks]
        return [(plan.chunk_compressors[0], plan.numel)] * plan.ranks

    def _decode(self, out: Array, scale: float) -> None:
        plan = self.plan
        if plan.exchange != "allgather":
            for (chunk, part), opened in zip(plan.chunks, self._arrived, strict=True):
                plan.answer_compressors[chunk].decode_opened(*opened, out[part], scale)
            return
        # all ranks add in the order of the senders, since floating point sums depend on the order
        for sender, opened in enumerate(self._arrived):
            plan.chunk_compressors[0].decode_opened(*opened, out, scale, add=sender > 0)

    def _key_of(self, hop: int, chunk: int) -> Key:
        return Key(self._seed, self.name, self.step, self.position, hop, chunk)
