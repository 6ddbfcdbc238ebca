"""Takes the buckets of a step through the stages of their exchanges, beside the backward pass.

    hook ─▶ encode ─▶ first collective ─▶ sum, encode ─▶ second collective ─▶ decode
            kernels   its own thread      kernels        its own thread       kernels

Kernels run on one thread, and each collective of a stage on the thread and in the group of that stage. Every thread
takes the buckets in the order in which hooks give them, which is that of DDP's buckets on all ranks: so the collectives
of a group come in one order on all ranks, whatever takes how long where. Results are decoded when all buckets of the
step have arrived: then ranks know, and all of them the same, whether every value is finite. DDP looks at the first of
them no earlier, since it waits for its buckets at the end of the backward pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.ddp._call_thread import CallThread
from hvd_compress.ddp._dense import DensePart, pay_debts
from hvd_compress.ddp._given import Given, Staged
from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.engine import Ledger
from hvd_compress.exchange import Bucket

__all__ = ["Job", "Pipeline", "Step"]

FutureTensor = torch.futures.Future[torch.Tensor]


class Step:
    """What the buckets of one backward pass share.

    Args:
        counts: whether it is a step of the training, and no part of one.
    """

    def __init__(self, counts: bool = True) -> None:
        self.counts = counts
        self.jobs: list[Job] = []
        """Those that have arrived."""
        self.count = 0
        """How many there are; 0 as long as that is not known."""
        self.failure: BaseException | None = None
        """What has ended it: whoever waits for a future gets that."""
        self.is_whole = False
        """Whether its last bucket has come."""
        self.is_kept = False
        """Whether what is owed has changed with it: all of it was finite."""
        self.has_ended = threading.Event()
        """Set when all results are there, or will never be."""


class Job:
    """One bucket of a step.

    Args:
        step: that it belongs to.
        given: its gradients.
        future: that DDP waits for.
    """

    def __init__(self, step: Step, given: Given, future: FutureTensor) -> None:
        self.step, self.given, self.future = step, given, future
        self.exchanges: list[Staged] = []
        """The exchanges of what is compressed and of what travels beside it: more than one where a `Policy` has
        compressors that cannot share one. Small buckets share them, and the last of them takes each through."""
        self.under_way = 1
        """How many of its parts have not ended yet: exchanges that it takes through, or itself."""
        self.dense: list[DensePart] = []
        self.paid: list[str] = []
        """Those of its tensors to whose gradients what is owed of them was added."""
        self.finds_unused = False
        """Whether a gradient that no rank has computed is left out: it may be none."""
        self.used: set[str] | None = None
        """Those of its tensors whose gradients this rank has computed; None where only zeros tell."""
        self.unused: list[str] = []
        """Those that are left out."""
        self.before: Callable[[], None] | None = None
        """What is to be done first."""
        self.is_finite = True

    def has_used(self, name: str) -> bool:
        """Whether this rank has computed a gradient."""
        return bool(self.given.gradients[name].any()) if self.used is None else name in self.used

    def take_exchanges(self, ledger: Ledger[Staged]) -> list[str]:
        """Find the exchanges of its tensors; returns the names of those that none has."""
        exchanged = [name for name in self.given.names if ledger.exchanges(name)]
        staged = [ledger.bucket_of(name) for name in exchanged]
        self.exchanges = list({id(each): each for each in staged}.values())
        return [name for name in self.given.names if name not in exchanged]

    def pay_debts(self, ledger: Ledger[Staged], dense: Sequence[str]) -> None:
        """Add what is owed of those of its tensors that go uncompressed: of `dense`, and of what is packed."""
        if ledger.debts:
            names = [*dense, *(name for name in self.given.names if name in ledger.packs)]
            used = [name for name in names if not self.finds_unused or self.has_used(name)]
            self.paid = pay_debts(ledger.debts, self.given, used)


class Pipeline:
    """Runs the jobs of one model.

    Args:
        talk: the ranks, for what they ask each other before a bucket is encoded.
        ranks: of each stage, with a group and a thread of its own.
    """

    def __init__(self, talk: GlooRanks, ranks: Sequence[GlooRanks]) -> None:
        self._talk = talk
        self._ranks = list(ranks)
        self._scale = 1.0 / talk.size
        self._kernels = CallThread(f"hvd_compress.{talk.name}.kernels")
        self.failure: BaseException | None = None
        """What has ended it."""

    def submit(self, job: Job, ledger: Ledger[Staged]) -> None:
        """Begin a job; never waits. The last one of its step to arrive ends all of them.

        Either all jobs of a step look for unused tensors, or none does.
        """
        job.given.note_ready()
        thread, call = (self._talk.thread, self._ask) if job.finds_unused else (self._kernels, self._begin)
        thread.submit(self._guarded, call, job, ledger)

    def close(self) -> None:
        """Leave the groups, and let the threads end."""
        for ranks in (self._talk, *self._ranks):
            ranks.close()
        self._kernels.close()

    def _guarded(self, call: Callable[..., None], job: Job, ledger: Ledger[Staged], *arguments: Any) -> None:
        """Run a part of a job, after which another one follows; a failure ends the job, and all others of its step."""
        step = job.step
        if step.failure is None:
            try:
                call(job, ledger, *arguments)
                return
            except BaseException as error:
                self._fail(step, error)
        self._kernels.submit(self._end, job, ledger)

    # -- on the thread of `talk` -------------------------------------------------------------------------------------

    def _ask(self, job: Job, ledger: Ledger[Staged]) -> None:
        """Find the compressed tensors that no rank has used, the same on all of them.

        DDP gives zeros there, or what `.grad` holds from a step before, and leaves `.grad` alone afterwards: what is
        owed must not be paid there.
        """
        if job.exchanges:
            compressed = {name for staged in job.exchanges for name in staged.bucket.accounts}
            names = [name for name in job.given.gradients if name in compressed]
            with job.given.beside():
                mine = [job.has_used(name) for name in names]
            label = f"{job.exchanges[0].bucket.name}, which of it is used"
            used = self._talk.move("allreduce", label, np.array(mine, np.int32))
            job.unused = [name for name, count in zip(names, used.tolist(), strict=True) if not count]
        self._kernels.submit(self._guarded, self._begin, job, ledger)

    # -- on the threads of the stages --------------------------------------------------------------------------------

    def _carry(self, job: Job, ledger: Ledger[Staged], bucket: Bucket, number: int) -> None:
        """Run the collective of a stage."""
        ranks = self._ranks[number]
        bucket.wait()
        collective, parcel = bucket.collectives[number], bucket.parcel()
        begin = time.perf_counter()
        received = ranks.move(
            collective, bucket.name, parcel.buffer, parcel.sizes, bucket.root or 0, bucket.expected(collective)
        )
        bucket.tally.seconds["exchange_seconds"] += time.perf_counter() - begin
        self._kernels.submit(self._guarded, self._proceed, job, ledger, bucket, number, received)

    # -- on the thread of the kernels --------------------------------------------------------------------------------

    def _begin(self, job: Job, ledger: Ledger[Staged]) -> None:
        if job.before is not None:
            job.before()
        complete = [staged.bucket for staged in job.exchanges if staged.give(job.given, job.unused)]
        if not complete:
            self._end(job, ledger)
            return
        job.under_way = len(complete)
        for bucket in complete:
            self._ranks[0].thread.submit(self._guarded, self._carry, job, ledger, bucket, 0)

    def _proceed(self, job: Job, ledger: Ledger[Staged], bucket: Bucket, number: int, received: Any) -> None:
        """Take what a collective has brought."""
        if number + 1 == len(bucket.collectives):
            is_finite = bucket.arrive(received)
            job.is_finite = job.is_finite and is_finite
            self._end(job, ledger)
            return
        bucket.proceed(bucket.collectives[number], received)
        self._ranks[number + 1].thread.submit(self._guarded, self._carry, job, ledger, bucket, number + 1)

    def _end(self, job: Job, ledger: Ledger[Staged]) -> None:
        """Count a part of a job that has arrived, or failed; with the last one of the step, end that."""
        step = job.step
        job.under_way -= 1
        if job.under_way:
            return
        step.jobs.append(job)
        if job.given.is_last:
            step.count = job.given.number + 1
        if len(step.jobs) != step.count:
            return
        step.jobs.sort(key=lambda each: each.given.number)
        if step.failure is None:
            try:
                self._combine(step, ledger)
            except BaseException as error:
                self._fail(step, error)
        if step.failure is not None:
            ledger.abandon()
        self._complete(step)

    def _combine(self, step: Step, ledger: Ledger[Staged]) -> None:
        """Decide the whole step, now that all is here: one value that is not finite takes all residuals back."""
        keep = all(job.is_finite for job in step.jobs)
        for job in step.jobs:
            with job.given.beside():
                means = [part.wait() for part in job.dense]
                if ledger.owes:
                    keep = keep and all(map(_is_finite, means))
        step.is_kept = keep
        for staged in {id(staged): staged for job in step.jobs for staged in job.exchanges}.values():
            staged.combine(keep, self._scale)
        for job in step.jobs:
            with job.given.beside():
                for part in job.dense:
                    part.combine()
        if step.counts:
            ledger.count_step()
        for job in step.jobs:
            for part in job.dense:
                for name in part.names:
                    gradient = job.given.gradients[name]
                    nbytes = gradient.numel() * gradient.element_size()
                    ledger.count_dense(name, gradient.numel() * part.itemsize, nbytes)
            if keep:
                for name in job.paid:
                    # it has travelled with the gradient
                    ledger.debts.pop(name, None)

    def _complete(self, step: Step) -> None:
        jobs, step.jobs = step.jobs, []
        # before the futures: whoever waits for the last one may begin the next step at once
        step.has_ended.set()
        for job in jobs:
            # on the stream on which the result is made: whoever waits for the future waits for that
            with job.given.beside():
                job.future.set_result(job.given.buffer)

    def _fail(self, step: Step, error: BaseException) -> None:
        """End the training: ranks that wait for this one get an error, too."""
        step.failure = step.failure or error
        self.failure = self.failure or error
        for ranks in (self._talk, *self._ranks):
            ranks.leave()


def _is_finite(mean: torch.Tensor) -> bool:
    return bool(torch.isfinite(mean.coalesce().values() if mean.is_sparse else mean).all())
