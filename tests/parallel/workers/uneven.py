"""Ranks that make different numbers of steps, or run different programs: they are told so, and do not wait for ever."""

from __future__ import annotations

import functools
import logging
import os
import time
from typing import Any

import horovod.torch
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

import hvd_compress.torch as hvd
from hvd_compress import AdaGrad, Adaptive, Auto, ConstantThreshold, NoCompression, OneBit, Policy, TopK
from hvd_compress.errors import MismatchError
from hvd_compress.torch import Compression
from tests.parallel.cases import Cases
from tests.parallel.workers.common import raises
from tests.parallel.workers.habits import Layers, loss_of

cases = Cases()

SIZE = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
RANKS_PER_NODE = {2: 1, 4: 2}[SIZE]
PROCESS_SETS = hvd.daso_process_sets(ranks_per_node=RANKS_PER_NODE)


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))


def daso(model: torch.nn.Module, **settings):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    return hvd.DASO(
        sgd, model.named_parameters(), ranks_per_node=RANKS_PER_NODE, blocking_compression=NoCompression(), **settings
    )


def train(optimizer, model, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 30) * (1 + hvd.rank())).square().mean().backward()
        optimizer.step()


def on_first_node() -> bool:
    return hvd.rank() < RANKS_PER_NODE


# What a rank has begun and others never join stays behind, and Horovod's join() would give it to all: these come first.
JOINS = {
    "two-phase": {"compression": OneBit(), "exchange": "two_phase"},
    "allgather": {"compression": TopK(ratio=0.1), "exchange": "allgather"},
    "alone": {"compression": OneBit(), "bucket_bytes": 0},
    "hierarchical": {"compression": OneBit(), "exchange": "hierarchical"},
    "server": {"compression": OneBit(), "exchange": "parameter_server"},
    "adagrad": {"compression": OneBit(), "adagrad": AdaGrad()},
    "adaptive": {"compression": Adaptive(pi=16)},
    "auto": {"compression": Auto([OneBit()])},
    "policy": {"compression": Policy({"*weight": OneBit(), "*": Compression.fp16})},
}


def to_join(model: torch.nn.Module, prefix: str, **settings):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    named = [(f"{prefix}.{name}", p) for name, p in model.named_parameters()]
    return hvd.DistributedOptimizer(sgd, named, min_numel=1, **settings)


@cases.each(JOINS, witnesses=["two-phase", "hierarchical", "adagrad"])
def ranks_that_join_after_equal_numbers_of_steps_go_on(settings) -> None:
    model = network()
    optimizer = to_join(model, "together", **settings)
    for _ in range(2):
        train(optimizer, model, 2)
        assert 0 <= hvd.join() < hvd.size()


@cases.each({"none": Compression.none, "fp16": Compression.fp16})
def a_rank_may_join_others_that_compress_nothing(compression) -> None:
    model = network()
    optimizer = to_join(model, "dense", compression=compression)
    train(optimizer, model, 2 + (2 if on_first_node() else 0))
    assert 0 <= hvd.join() < RANKS_PER_NODE


@cases.each({label: (label, settings) for label, settings in JOINS.items()})
def a_rank_that_joins_while_others_make_another_compressed_step(setting) -> None:
    label, settings = setting
    model = network()
    optimizer = to_join(model, f"uneven {label}", **settings)
    train(optimizer, model, 3)
    uneven = functools.partial(train, optimizer, model, 1)
    with pytest.raises(MismatchError, match=r"join\(\)"):
        (uneven if on_first_node() else hvd.join)()


SCHEDULES = {
    "warm-up": ({"warmup_epochs": 1}, 1),
    "waits": ({"global_skips": 2, "batches_to_wait": 0}, 1),
    "sends": ({"global_skips": 4, "batches_to_wait": 1}, 1),
    "arrives": ({"global_skips": 2, "batches_to_wait": 1}, 2),
    "changes": ({"global_skips": 2, "batches_to_wait": 2, "compression": OneBit()}, 5),
    "steps-known": ({"global_skips": 2, "batches_to_wait": 1, "steps_per_epoch": 4}, 1),
}


@cases.each(SCHEDULES)
def a_node_that_makes_more_steps_of_daso_than_the_other(settings) -> None:
    schedule, more = settings
    model = network()
    optimizer = daso(model, **schedule)

    def unequal() -> None:
        # 3 are sent by all, the next ones by one node
        train(optimizer, model, 3 + (more if on_first_node() else 0))
        optimizer.epoch_end(1.0)

    with pytest.raises(MismatchError, match=r"disagree on DASO's moment: .* after 3 batches"):
        unequal()


@cases.add
def a_rank_that_wraps_one_more_optimizer_than_the_others_that_end_an_epoch() -> None:
    model = network()
    optimizer = daso(model)
    train(optimizer, model, 2)

    def wrap_again() -> None:
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), OneBit())

    with pytest.raises(MismatchError, match="the ranks disagree on"):
        (optimizer.epoch_end if hvd.rank() else wrap_again)()


@cases.add
def ranks_that_average_and_ranks_that_measure() -> None:
    model = network()
    optimizer = hvd.EventGraDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(MismatchError, match="the ranks disagree on EventGraD's call"):
        (optimizer.consensus_distance if hvd.rank() else optimizer.average_parameters)()


@cases.each({"plain": {}, "ahead": {"overlap": True}})
def distances_are_measured_after_any_numbers_of_steps(settings) -> None:
    model, other = network(), network()
    # what is measured in between changes nothing
    for m, measures in ((model, True), (other, False)):
        sgd = torch.optim.SGD(m.parameters(), lr=0.1)
        optimizer = hvd.EventGraDOptimizer(sgd, m.named_parameters(), trigger=ConstantThreshold(0), **settings)
        for _ in range(2):
            train(optimizer, m, 2)
            if measures:
                assert optimizer.consensus_distance() > 0
        train(optimizer, m, 1 + hvd.rank())
        if measures:
            assert optimizer.consensus_distance() > 0
        optimizer.average_parameters()
        assert optimizer.consensus_distance() < 1e-6
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@cases.add
def a_rank_that_waits_for_long_says_what_for() -> None:
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler = Keep()
    logging.getLogger("hvd_compress").addHandler(handler)
    try:
        if hvd.rank() == 0:
            # longer than HOROVOD_STALL_CHECK_TIME_SECONDS of this start
            time.sleep(3.5)
        model = network()
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), OneBit())
    finally:
        logging.getLogger("hvd_compress").removeHandler(handler)
    if hvd.rank():
        assert f"this rank ({hvd.rank()}) has waited for" in told[0]
        assert "to compare" in told[0]


# -- parameters that change on some ranks only -----------------------------------------------------------------------


def unfreeze(model: Any, optimizer: Any) -> None:
    model[0].bias.requires_grad_(True)


def add(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(40, 30))]})


@cases.each({"unfrozen": unfreeze, "added": add})
def what_takes_gradients_later_on_one_rank_is_an_error_on_all_ranks_of_daso(change: Any) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    # what a rank has started and others never will stays under way: these names are used up
    named = [(f"{change.__name__} later, {name}", p) for name, p in model.named_parameters()]
    optimizer = hvd.DASO(sgd, named, ranks_per_node=RANKS_PER_NODE, global_skips=2, batches_to_wait=1)
    train(optimizer, model, 3)
    if hvd.rank() == hvd.size() - 1:
        change(model, optimizer)
    begin = time.monotonic()
    # of the other node, in the step in which nodes meet next
    with pytest.raises((ValueError, MismatchError), match=r"takes gradients|unfrozen, added|same point|DASO's moment"):
        train(optimizer, model, 4)
    assert time.monotonic() - begin < 20.0


@cases.each({"onebit": OneBit(), "allgather": "allgather", "none": hvd.Compression.none})
def ranks_that_freeze_different_parameters_are_told_so(how: Any) -> None:
    settings = {"exchange": "allgather"} if how == "allgather" else {}
    for differs in ("frozen on one rank", "other ones"):
        model = Layers()
        # what a rank has started and others never will stays under way: these names are used up
        named = [(f"{differs}, {how!r}, {name}", p) for name, p in model.named_parameters()]
        sgd = torch.optim.SGD(model.parameters(), lr=0.125)
        compression = OneBit() if how == "allgather" else how
        optimizer = hvd.DistributedOptimizer(sgd, named, compression, min_numel=100, **settings)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if hvd.rank() == 0:
            model.c.weight.requires_grad_(False)
        elif differs == "other ones":
            model.b.weight.requires_grad_(False)

        def one_step(model: Layers = model, optimizer: Any = optimizer) -> None:
            loss_of(model, 5).backward()
            optimizer.step()

        raises(MismatchError, one_step)
        hvd.barrier()
        # and who catches that does not make others wait
        for p in model.parameters():
            p.requires_grad_(True)
        optimizer.zero_grad()
        raises(MismatchError, one_step, "start the run again")
        hvd.barrier()


@cases.each({"before the first step": 0, "later": 2})
def ranks_that_load_accumulators_alone_are_told_so(steps: int) -> None:
    model = Layers()
    # what others have started by then stays under way: these names are used up
    named = [(f"loaded after {steps}, {name}", p) for name, p in model.named_parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = hvd.DistributedOptimizer(sgd, named, OneBit(), min_numel=100, adagrad=AdaGrad())
    state = optimizer.compression_state_dict()
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    if hvd.rank():
        optimizer.load_compression_state_dict(state)

    def one_step() -> None:
        loss_of(model, 5).backward()
        optimizer.step()

    raises(MismatchError, one_step)
    hvd.barrier()


# -- last: what these ranks have started stays under way ---------------------------------------------------------------


@cases.add
def a_rank_with_horovods_own_optimizer_beside_ranks_with_ours_is_an_error_on_all() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = [(f"whose, {name}", p) for name, p in model.named_parameters()]
    begin = time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        optimizer = horovod.torch.DistributedOptimizer(sgd, named)
        raises(HorovodInternalError, lambda: train(optimizer, model, 1), "Mismatched")
    else:
        raises(MismatchError, lambda: hvd.DistributedOptimizer(sgd, named, OneBit()), "disagree on the optimizer")
    assert time.monotonic() - begin < 20.0
