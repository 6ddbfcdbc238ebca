"""One rank ends in the middle of a training whose ranks wait for messages, not for collectives of Horovod's.

Arguments: what is trained with, when the rank ends, how, and who starts MPI: the one that starts it ends it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit, ParameterServer

PROCESS_SETS = hvd.daso_process_sets(ranks_per_node=1)
VICTIM = 1
STEPS, WRONG_AT = 10_000, 20
WHO_STARTS_MPI = "TESTS_MPI_IS_STARTED_FIRST"

if os.environ.get(WHO_STARTS_MPI):
    from mpi4py import MPI

    MPI.Get_version()


class UserError(Exception):
    """What a user's code may raise."""


def wrapped(what: str, model: torch.nn.Module) -> Any:
    """The model's optimizer."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    named = list(model.named_parameters())
    if what in ("one_sided", "alltoall"):
        return hvd.EventGraDOptimizer(sgd, named, transport=what)
    if what == "daso":
        return hvd.DASO(sgd, named, ranks_per_node=1)
    if what == "diloco":
        # under way when the other rank ends
        return hvd.DiLoCo(sgd, named, sync_every=4, delay=3)
    if what == "async":
        return hvd.AsyncParameterServerOptimizer(sgd, named)
    return hvd.DistributedOptimizer(sgd, named, OneBit(), exchange=ParameterServer(transport="mpi"), min_numel=0)


def main(report: Any, what: str, when: str, how: str) -> None:
    """Train; a run that is left alone goes on for minutes."""

    def at(moment: str) -> None:
        if moment != when or horovod.rank() != (0 if moment == "serving" else VICTIM):
            return
        report(wrong=time.time())
        if how == "shutdown":
            horovod.shutdown()
        elif how == "exits":
            sys.exit(0)
        else:
            raise UserError("the user's own mistake")

    at("wrapping")
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = wrapped(what, model)
    if what == "async" and optimizer.is_server:
        optimizer.serve(lambda updates: at("serving" if updates == WRONG_AT else ""))
    else:
        for step in range(WRONG_AT + 1 if when == "closing" else STEPS):
            optimizer.zero_grad()
            model(torch.ones(4, 300)).sum().backward()
            at("after-backward" if step == WRONG_AT else "")
            optimizer.step()
            at("training" if step == WRONG_AT else "")
            if what == "async" and when == "training" and step == WRONG_AT:
                # others may finish with the server, and fail in what they do together with the rank that has ended
                break
    at("closing")
    if what in ("one_sided", "alltoall", "diloco"):
        optimizer.average_parameters()
    elif what == "daso":
        optimizer.epoch_end(torch.tensor(1.0))
    elif what == "async":
        optimizer.close()
    horovod.barrier()
