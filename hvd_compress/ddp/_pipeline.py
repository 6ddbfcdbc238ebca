"""Takes the buckets of a step through the stages of their exchanges, each stage on a thread and a group of its own.

    hook ─▶ lane 0: encode, first collective ─▶ lane 1: sum, encode, second collective ─▶ ... ─▶ last lane: decode

Every lane takes the buckets in the order in which hooks give them, which is that of DDP's buckets on all ranks: so the
collectives of a lane come in one order on all ranks, whatever takes how long where. Results are decoded when the last
bucket of the step has arrived: then ranks know, and all of them the same, whether every value is finite. DDP looks at
the first of them no earlier, since it waits for its buckets at the end of the backward pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.ddp._dense import DensePart
from hvd_compress.ddp._given import Given, Staged
from hvd_compress.ddp._lane import Lane
from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.engine import Ledger

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
        self.failure: BaseException | None = None
        """What has ended it: whoever waits for a future gets that."""
        self.is_whole = False
        """Whether its last bucket has come."""
        self.has_ended = threading.Event()
        """Set when all futures are complete."""


class Job:
    """One bucket of a step.

    Args:
        step: that it belongs to.
        given: its gradients.
        future: that DDP waits for.
    """

    def __init__(self, step: Step, given: Given, future: FutureTensor) -> None:
        self.step, self.given, self.future = step, given, future
        self.staged: Staged | None = None
        """The exchange of what is compressed and of what travels beside it; None if nothing is."""
        self.dense: list[DensePart] = []
        self.finds_unused = False
        """Whether a gradient that is zero on all ranks is left out: it may be none."""
        self.before: Callable[[], None] | None = None
        """What is to be done first."""
        self.is_sent = False
        self.received: Any = None
        self.is_finite = True


class Pipeline:
    """Runs the jobs of one model.

    Args:
        ranks: of each stage, with a group and a lane of its own.
        scale: factor on the sums.
    """

    def __init__(self, ranks: Sequence[GlooRanks], scale: float) -> None:
        self._ranks = list(ranks)
        self._scale = scale
        self._last = Lane(f"hvd_compress.{self._ranks[0].name}.last")
        self.failure: BaseException | None = None
        """What has ended it."""

    def submit(self, job: Job, ledger: Ledger[Staged]) -> None:
        """Begin a job; never waits. The last one of its step ends all of them."""
        self._ranks[0].lane.submit(self._stage, 0, job, ledger)

    def close(self) -> None:
        """Leave the groups, and let the threads end."""
        for ranks in self._ranks:
            ranks.close()
        self._last.close()

    def _stage(self, number: int, job: Job, ledger: Ledger[Staged]) -> None:
        if job.step.failure is None:
            try:
                if number == 0 and job.before is not None:
                    job.before()
                if job.staged is not None:
                    self._move(number, job, job.staged)
            except BaseException as error:
                self._fail(job.step, error)
        if number + 1 < len(self._ranks):
            self._ranks[number + 1].lane.submit(self._stage, number + 1, job, ledger)
        else:
            self._last.submit(self._end, job, ledger)

    def _move(self, number: int, job: Job, staged: Staged) -> None:
        """Run one stage, and the collective after it."""
        bucket, ranks = staged.bucket, self._ranks[number]
        if number == 0:
            unused = self._unused(job, staged, ranks) if job.finds_unused else []
            job.is_sent = staged.give(job.given, unused)
        if not job.is_sent or number >= len(bucket.collectives):
            return
        if number:
            bucket.proceed(bucket.collectives[number - 1], job.received)
            bucket.wait()
        collective, parcel = bucket.collectives[number], bucket.parcel()
        begin = time.perf_counter()
        job.received = ranks.move(
            collective, bucket.name, parcel.buffer, parcel.sizes, bucket.root or 0, bucket.expected(collective)
        )
        bucket.tally.seconds["exchange_seconds"] += time.perf_counter() - begin

    def _unused(self, job: Job, staged: Staged, ranks: GlooRanks) -> list[str]:
        """Return the compressed tensors whose gradients are zero on all ranks, the same on all of them.

        DDP gives zeros where no rank has used a parameter, and leaves its `.grad` alone afterwards: what is owed must
        not be paid there.
        """
        names = list(staged.bucket.accounts)
        with job.given.beside():
            mine = [bool(job.given.gradients[name].any()) for name in names]
        used = ranks.move("allreduce", f"{staged.bucket.name}, which of it is used", np.array(mine, np.int32))
        return [name for name, count in zip(names, used.tolist(), strict=True) if not count]

    def _end(self, job: Job, ledger: Ledger[Staged]) -> None:
        """Check what has arrived; with the last job, end the step."""
        step = job.step
        step.jobs.append(job)
        if job.is_sent and job.staged is not None and step.failure is None:
            try:
                job.is_finite = job.staged.bucket.arrive(job.received)
            except BaseException as error:
                self._fail(step, error)
        job.received = None
        if not job.given.is_last:
            return
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
        for job in step.jobs:
            if job.is_sent and job.staged is not None:
                job.staged.combine(job.given, keep, self._scale)
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
                        # it has travelled with the gradient
                        ledger.debts.pop(name, None)

    def _complete(self, step: Step) -> None:
        jobs, step.jobs = step.jobs, []
        for job in jobs:
            # on the stream on which the result is made: whoever waits for the future waits for that
            with job.given.beside():
                job.future.set_result(job.given.buffer)
        step.has_ended.set()

    def _fail(self, step: Step, error: BaseException) -> None:
        """End the training: ranks that wait for this one get an error, too."""
        step.failure = step.failure or error
        self.failure = self.failure or error
        for ranks in self._ranks:
            ranks.leave()


def _is_finite(mean: torch.Tensor) -> bool:
    return bool(torch.isfinite(mean.coalesce().values() if mean.is_sparse else mean).all())
