"""All exchanges of one optimizer: what is in flight, and when a step is complete."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import horovod.torch as hvd
import numpy.typing as npt
import torch

from hvd_compress._torch.device import described, memories
from hvd_compress._torch.states import with_tensors
from hvd_compress.engine import KernelThread, Ledger, Routing, has_cores
from hvd_compress.exchange import Account, AdaGrad, Hosts, Pack, bucket_of
from hvd_compress.mpi import start_root_messages
from hvd_compress.torch._gradients.bucket import Shipment
from hvd_compress.torch._gradients.staging import overlapping
from hvd_compress.torch._gradients.waits import Wait
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["Engine", "precondition", "with_debt"]

Array = npt.NDArray[Any]


def precondition(ledger: Ledger[Any], name: str, combined: torch.Tensor) -> bool:
    """With AdaGrad, make a combined dense gradient an update, in place; see `Ledger.precondition`."""
    if ledger.accumulators is None:
        return True
    wide = torch.float64 if combined.dtype == torch.float64 else torch.float32
    staged = combined.detach().to(device="cpu", dtype=wide).contiguous()
    finite = ledger.precondition(name, staged.view(-1).numpy())
    if staged.data_ptr() != combined.data_ptr():
        combined.data.copy_(staged)
    return finite


def with_debt(ledger: Ledger[Any], name: str, gradient: torch.Tensor, keep: bool = False) -> torch.Tensor:
    """Add what is owed to a gradient that travels uncompressed: in place, unless it is sparse or `keep` is set."""
    due = ledger.due(name)
    if due is None:
        return gradient
    owed = torch.from_numpy(due).view(gradient.shape).to(device=gradient.device, dtype=gradient.dtype)
    if gradient.is_sparse:
        return (gradient.to_dense() + owed).to_sparse(gradient.sparse_dim())
    if keep:
        return gradient + owed
    # through `data`, so that it does not count as a write of the user's
    gradient.data.add_(owed)
    return gradient


class Engine(Ledger[Shipment]):
    """Starts, drives and finishes the exchanges of named tensors.

    Args:
        routing: which way tensors go.
        scale: factor on the sum over ranks.
        process_set: the ranks that take part; this rank is one of them.
        tensors: (name, tensor) of all that may come.
        groups: of names, to go together.
        pays_debts: whether the caller calls `with_debt` for gradients that go dense.
        adagrad: see `Ledger`; the caller calls `precondition` for gradients that went dense.
        resting: (name, tensor) of those that take no gradients now.
        label: what tells the collectives from those of other optimizers.
    """

    def __init__(
        self,
        routing: Routing,
        scale: float,
        process_set: hvd.ProcessSet,
        tensors: Iterable[tuple[str, torch.Tensor]],
        groups: list[list[str]] | None = None,
        pays_debts: bool = False,
        adagrad: AdaGrad | None = None,
        resting: Iterable[tuple[str, torch.Tensor]] = (),
        label: str = "",
    ) -> None:
        ranks, messages = TorchRanks(process_set), None
        if routing.exchange.sends_by_mpi:
            messages = start_root_messages(hvd, ranks)

        def make_bucket(accounts: dict[str, Account], pack: Pack | None) -> Shipment:
            bucket = bucket_of(accounts, pack)
            if messages is None:
                return Shipment(bucket, ranks, label)
            channel = messages.channel()
            channel.answer_bytes = bucket.answer_bytes
            return Shipment(bucket, channel)

        tensors = list(tensors)
        memory_of = memories(tensors)
        hosts = None
        if routing.exchange.uses_hosts:
            hosts = Hosts.of_names(ranks.host_numbers())
        super().__init__(
            routing, ranks.size, ranks.position, described(tensors), make_bucket, groups, pays_debts, hosts,
            adagrad, scale, described(resting), memory_of,
        )  # fmt: skip
        self.scale = scale
        self.process_set = process_set
        self._kernel_thread = KernelThread(has_cores(hvd.local_size() if hvd.is_initialized() else 1))

    def waiting(self) -> dict[str, Shipment]:
        """Return the bucket of each tensor whose gradient `Shipment.put_off` takes."""
        return {name: bucket for bucket in self.buckets for name in bucket.waiting}

    @property
    def put_off(self) -> list[str]:
        """Names of the tensors that `Shipment.put_off` has taken in this step."""
        return [name for bucket in self.buckets for name, gradient in bucket.came.items() if gradient is not None]

    def start(self, name: str, gradient: torch.Tensor | None, keep: bool = False) -> None:
        """Encode a gradient, start the collective that it completes, and start the next stages of other buckets.

        The gradient must stay as it is until `combine`, which overwrites it with the result unless `keep` is set. None
        leaves the tensor out of this step, on all ranks alike.
        """
        bucket = self.bucket_of(name)
        waits = name in bucket.waiting
        left = bucket.put_off(name, gradient) if waits and not keep else None
        if left is not None:
            # a bucket that is being filled has nothing in flight
            if len(self.buckets) > 1:
                self.progress()
        else:
            if gradient is not None and self.debts:
                gradient = self.with_debt(name, gradient, keep)
            # taken here: whoever made a gradient on a stream of another device is on this thread
            flat = None if gradient is None else bucket.take(name, gradient, keep)
            self._kernel_thread.run(self._start, bucket, name, flat)
            left = bucket.let_pass(name) if waits else None
        if left == 0:
            self.start_together(bucket)

    def start_together(self, bucket: Shipment) -> None:
        """Take and encode all gradients that were put off, now that the last one has come."""
        if self.debts:
            for name, gradient in bucket.came.items():
                if gradient is not None:
                    self.with_debt(name, gradient)
        places, flats = bucket.take_together()
        if places or flats:
            self._kernel_thread.run(self._start_together, bucket, places, flats)

    def _start(self, bucket: Shipment, name: str, flat: Array | None) -> None:
        if len(self.buckets) > 1:
            self._progress()
        bucket.start(name, flat)

    def _start_together(self, bucket: Shipment, places: dict[str, int], flats: dict[str, Array]) -> None:
        if len(self.buckets) > 1:
            self._progress()
        bucket.start_together(places, flats)

    def progress(self) -> None:
        """Run every stage whose collective is complete; never waits."""
        if any([b.is_between or b.loading for b in self.buckets]):  # noqa: C419 - a generator takes twice as long
            self._kernel_thread.run(self._progress)

    def _progress(self) -> None:
        for bucket in self.buckets:
            bucket.progress()

    def with_debt(self, name: str, gradient: torch.Tensor, keep: bool = False) -> torch.Tensor:
        """Add what is owed to a gradient that travels uncompressed: in place, unless it is sparse or `keep` is set."""
        return with_debt(self, name, gradient, keep)

    def abandon(self) -> None:
        """Wait for what is in flight and forget it; residuals and debts stay as before the step."""
        self._kernel_thread.forget()
        super().abandon()

    def rest(self) -> None:
        """Let nothing run any more that works in memory of ours; what is in flight is for whoever ends it."""
        self._kernel_thread.forget()

    def wait(self) -> bool:
        """Wait for all that is in flight; whether all of it is finite (the same on all ranks)."""
        waits = self.waits()
        while True:
            try:
                next(waits)
            except StopIteration as end:
                return bool(end.value)

    def waits(self) -> Generator[Wait, None, bool]:
        """`wait`, in parts: yields what each of them would wait for."""
        self._kernel_thread.drain()
        busy = [bucket for bucket in self.buckets if bucket.busy]
        # No deadlock: every rank has started all first collectives before it waits for one, and starts each next one
        # as soon as it has the one before. The order is that of the backward pass, equal on all ranks, for speed only.
        for bucket in busy:
            if bucket.loading:
                bucket.load()
        while between := [bucket for bucket in busy if bucket.is_between]:
            for bucket in between:
                yield Wait(bucket.is_over)
                bucket.wait_next()
        finite = True
        for bucket in busy:
            yield Wait(bucket.is_over)
            finite = bucket.wait() and finite
        return finite

    def combine(self, keep: bool) -> dict[str, torch.Tensor]:
        """Decode all that has arrived: {name: result}; see `Shipment.combine`."""
        self.count_step()
        results: dict[str, torch.Tensor] = {}
        shared = overlapping([span for bucket in self.buckets for span in bucket.spans()])
        for bucket in self.buckets:
            if bucket.busy:
                results |= bucket.combine(keep, self.scale, shared)
            else:
                # all of it was left out
                bucket.came = {}
        return results

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`; values are torch tensors, copied."""
        return with_tensors(super().state_dict())
