"""Ranks under a hook of DistributedDataParallel of which one fails; each reports what it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import OneBit, ddp
from tests.parallel.workers.ddp import Known, use

FRAMEWORK = "distributed"
STEPS = 6
SECONDS = 4.0


def dies(model: Any, step: int) -> None:
    if step == 3:
        # torchrun would end the others, too, of another code
        os._exit(0)


def raises_in_its_loss(model: Any, step: int) -> None:
    if step == 3:
        raise ArithmeticError("the loss of this rank")


def does_not_answer(model: Any, step: int) -> None:
    if step == 3:
        time.sleep(3 * SECONDS)


def gets_damaged_bytes(model: Any, step: int) -> None:
    if step != 3:
        return
    hook = model._comm_hooks[0][1]
    ranks = hook.pipeline._ranks[0]
    move = ranks.move

    def damage(*arguments: Any, **settings: Any) -> Any:
        array = move(*arguments, **settings)
        array[:4] ^= 255
        return array

    mock.patch.object(ranks, "move", damage).start()


KINDS: dict[str, Callable[[Any, int], None]] = {
    kind.__name__: kind for kind in (dies, raises_in_its_loss, does_not_answer, gets_damaged_bytes)
}


def never_registers(report: Callable[..., None]) -> None:
    """Let one rank do without the hook."""
    model = DistributedDataParallel(Known())
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2 * SECONDS)
        return
    begin = time.monotonic()
    try:
        ddp.register_comm_hook(model, OneBit(), timeout=timedelta(seconds=SECONDS))
    except Exception as error:
        report(error=f"{type(error).__name__}: {error}", after=time.monotonic() - begin)


def main(report: Callable[..., None], kind: str) -> None:
    if kind == "never_registers":
        never_registers(report)
        return
    model = DistributedDataParallel(Known(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(
        model, OneBit(), exchange="two_phase", min_numel=1000, bucket_bytes=1, timeout=timedelta(seconds=SECONDS)
    )
    fails = dist.get_rank() == dist.get_world_size() - 1
    begin = time.monotonic()
    try:
        for step in range(STEPS):
            if fails:
                KINDS[kind](model, step)
            begin = time.monotonic()
            model(step).backward()
            use(model)
            model.zero_grad()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        state = ddp.state_dict(model)
        finite = all(entry["values"].isfinite().all() for entry in state["residuals"].values())
        report(error=text, after=time.monotonic() - begin, steps=state["steps"], finite=bool(finite))
        if fails:
            return
        try:
            model(STEPS).backward()
        except Exception as again:
            report(again=type(again).__name__)
    if kind == "does_not_answer" and not fails:
        # a process that ends says so to the one that sleeps
        time.sleep(3 * SECONDS)
