"""One tensor's way through an exchange on one rank: the stages, with the state that must survive between them.

The order is: `encode`, collective, `reduce` (not in an allgather), collective, `arrive`, and, when the payloads of the
whole step have arrived, `finish`. A hierarchical exchange begins with `hold`, a collective inside the host, and
`add_inside`. Up to `finish` both residuals are as they were before the step: the encode kernels turn the
gradient's own memory into the new residual, and `finish` swaps the two buffers, so taking a step back costs nothing.
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
    """The stages of one tensor's exchange on one rank.

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
        self._sum: Array = np.empty(0, np.float32)
        self._gradient: Array | None = None
        self._skipped = False
        self._arrived: Sequence[tuple[wire.Header, wire.Sections]] = ()

    @property
    def busy(self) -> bool:
        """Whether a step is between `encode` or `skip` and `finish`."""
        return self._gradient is not None or self._skipped

    @cached_property
    def owned(self) -> slice | None:
        """The elements whose sum this rank makes, if there are any."""
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
        """(number, elements) of each chunk that this rank encodes and that has a payload."""
        wanted = range(len(self.plan.slots)) if self.hosts is None else self.hosts.shard_of(self.position)
        return [(chunk, part) for chunk, part in self.plan.chunks if chunk in wanted]

    def hold(self, x: Array) -> None:
        """Stage 0 of a hierarchical exchange: take a gradient (see `encode`), to be cut up among this host's ranks."""
        if self.pending is not None:
            x += self.pending
        self._gradient = x

    def held(self, chunks: range) -> Array:
        """The elements of a shard, given by its chunks, of the gradient in `hold`."""
        if self._gradient is None:
            raise RuntimeError(f"held() of {self.name!r} without hold()")
        return self._gradient[self.plan.bounds[chunks.start] : self.plan.bounds[chunks.stop]]

    def add_inside(self, others: Sequence[Bytes]) -> Array:
        """The gradient, with what the other ranks of this host have sent of its shard added, in their order."""
        if self._gradient is None:
            raise RuntimeError(f"add_inside() of {self.name!r} without hold()")
        shard = self._gradient[self.shard]
        for sent in others:
            shard += sent.view(shard.dtype)
        return self._gradient

    def encode(self, x: Array, slots: Sequence[Bytes], source: Array | None = None) -> list[int]:
        """Stage 1, every rank: a gradient becomes the payloads of its chunks.

        Args:
            x: flat float32 or float64; in use, and spoiled, until `finish`.
            slots: where the payload of each of `sent_chunks` goes.
            source: the gradient, if it must stay as it is; `x` is only memory then.

        Returns:
            The bytes of each payload.
        """
        self._prepare(x)
        plan, r, start = self.plan, self.residual, self.shard.start
        return [
            plan.chunk_compressors[chunk].encode_into(
                x[part],
                None if r is None else r[part.start - start : part.stop - start],
                slot,
                plan.group,
                self._key_of(hop=0, chunk=chunk),
                source=None if source is None else source[part],
            )
            for (chunk, part), slot in zip(self.sent_chunks, slots, strict=True)
        ]

    def skip(self, slots: Sequence[Bytes]) -> list[int]:
        """Stage 1 without a gradient, on all ranks alike: payloads that say so; residuals stay as they are."""
        self._skipped = True
        plan = self.plan
        return [
            plan.chunk_compressors[chunk].say_absent(slot, part.stop - part.start, plan.group)
            for (chunk, part), slot in zip(self.sent_chunks, slots, strict=True)
        ]

    def reduce(self, payloads: Sequence[Bytes], slot: Bytes) -> int:
        """Stage 2, the owner of a chunk: the payloads of all ranks become the payload of their sum, in `slot`.

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
        return answers.encode_into(self._sum, self.owner_residual, slot, plan.group, key)

    def arrive(self, payloads: Sequence[Bytes]) -> bool:
        """The last payloads are here; whether all of them, and so the sum, are finite.

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
        """Stage 3, every rank: decode, and make the step's residuals final, or take them back.

        Args:
            keep: False takes residuals and accumulator back to what they were before the step.
            scale: factor on the sum, such as 1 / ranks; an accumulator has its own.

        Returns:
            The sum times `scale`, in the memory of the gradient or of the last residual; None after `skip`.

        Raises:
            WireError: a payload is corrupted.
        """
        if not self.busy:
            raise RuntimeError(f"finish() of {self.name!r} without encode()")
        out = self._gradient
        if out is not None:
            out = self._open_result(keep, out)
            self._decode(out, scale if self.accumulator is None else self.accumulator.loss_scale)
        self._close(keep)
        return out

    # -- for who runs the stages of several transfers at once ------------------------------------------------------

    def begin(self) -> None:
        """A float32 gradient is there, but not here."""
        self._gradient = _NOT_HERE

    def fit_residual(self, dtype: npt.DTypeLike) -> Array | None:
        """The residual, of this type; zeros if there is none yet, None where none is kept."""
        if self.keeps_residual and self.residual is None:
            residual = aligned_empty(self.shard.stop - self.shard.start, dtype)
            residual[...] = 0
            # complete: statistics may be asked for on another thread
            self.residual = residual
        if self.residual is not None and self.residual.dtype != dtype:
            # of a model that was converted since
            self.residual = self.residual.astype(dtype)
        return self.residual

    def fit_owner_residual(self, dtype: npt.DTypeLike) -> Array | None:
        """The same of what is owed of the sums of `owned`."""
        if self._owner_keeps_residual and self.owner_residual is None and self.owned is not None:
            self.owner_residual = np.zeros(self.owned.stop - self.owned.start, dtype)
        if self.owner_residual is not None and self.owner_residual.dtype != dtype:
            self.owner_residual = self.owner_residual.astype(dtype)
        return self.owner_residual

    def end(self, keep: bool) -> None:
        """The step has ended, and the residuals are what they are to be."""
        if keep:
            self.pending = None
        self._gradient = None
        self.step += 1

    def note(self, stage: str, times: int, seconds: float) -> None:
        """A stage, named as its method, was run so many times, with full slots, in so many seconds."""

    def abandon(self) -> None:
        """Forget a step in flight; residuals and accumulator stay what they were before it."""
        if self.accumulator is not None:
            self.accumulator.settle(keep=False)
        self._gradient = None
        self._skipped = False
        self._arrived = ()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _prepare(self, x: Array) -> None:
        """Take a gradient, see `encode`, and see to it that there is a residual for it."""
        self.fit_residual(x.dtype)
        self._gradient = x

    def _prepare_sum(self) -> None:
        """Memory for the sum of what this rank owns, and a residual for it where one is kept."""
        if self.owned is None:
            raise RuntimeError(f"rank {self.position} owns nothing of {self.name!r}")
        numel = self.owned.stop - self.owned.start
        dtype = np.float32 if self._gradient is None else self._gradient.dtype
        if self._sum.size != numel or self._sum.dtype != dtype:
            self._sum = aligned_empty(numel, dtype)
        self.fit_owner_residual(dtype)

    def _open_result(self, keep: bool, gradient: Array) -> Array:
        """Memory for the result of the step; with `keep` the new residual, in the gradient's memory, is final."""
        residual = self.residual
        if not keep or residual is None:
            return gradient
        if residual.size == gradient.size:
            self.residual = gradient
            return residual
        residual[:] = gradient[self.shard]
        return gradient

    def _close(self, keep: bool) -> None:
        """The result is decoded: settle what the owner keeps, and be ready for the next step."""
        if self._gradient is not None:
            if keep:
                self.pending = None
            if keep and self.owner_residual is not None:
                self.owner_residual, self._sum = self._sum, self.owner_residual
            if self.accumulator is not None:
                self.accumulator.settle(keep)
        self.abandon()
        self.step += 1

    @cached_property
    def _senders(self) -> list[tuple[Compressor, int]]:
        """The compressor, and number of elements, of each payload that is to arrive."""
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
        # all ranks add in the order of the senders: floating point sums depend on it
        for sender, opened in enumerate(self._arrived):
            plan.chunk_compressors[0].decode_opened(*opened, out, scale, add=sender > 0)

    def _key_of(self, hop: int, chunk: int) -> Key:
        return Key(self._seed, self.name, self.step, self.position, hop, chunk)
