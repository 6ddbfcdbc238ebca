"""Rank 1 goes wrong in the middle of training, in the way that the argument names."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit
from hvd_compress.exchange import Bucket, Parcel
from tests.parallel.workers.common import MIN_NUMEL, Net, loss_of

WRONG_FROM = 3


class UserError(Exception):
    """What a user's code may raise."""


def corrupt_payloads() -> None:
    """From now on this rank sends payloads of which some bits of the body are wrong."""
    parcel_of = Bucket.parcel

    def corrupting(self: Bucket) -> Parcel:
        parcel = parcel_of(self)
        parcel.buffer[100::1000] ^= 4
        return parcel

    Bucket.parcel = corrupting  # type: ignore[method-assign]


def main(report: Any, how: str) -> None:
    """Train for ever; a run that is left alone ends with an error."""
    model = Net()
    exchange = how.removeprefix("corrupt-") if how.startswith("corrupt-") else "two_phase"
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), OneBit(), exchange=exchange, min_numel=MIN_NUMEL
    )
    for step in range(10_000):
        if step == WRONG_FROM and horovod.rank() == 1:
            report(wrong=time.time())
            if how == "raise-before-backward":
                raise UserError("the user's own mistake")
            if how.startswith("corrupt-"):
                corrupt_payloads()
        try:
            loss_of(model, step % 10).backward()
            if step == WRONG_FROM and horovod.rank() == 1 and how == "raise-after-backward":
                raise UserError("the user's own mistake")
            optimizer.step()
        except Exception as error:
            report(error=f"{type(error).__name__}: {error}")
            raise
        optimizer.zero_grad()
    raise RuntimeError("nobody stopped")
