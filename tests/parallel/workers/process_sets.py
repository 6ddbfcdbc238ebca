"""Optimizers and allreduces of process sets, also such that leave ranks out, rank 0 among them. Needs 3 ranks."""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import FP16, QSGD, AdaGrad, OneBit, TopK
from hvd_compress.errors import MismatchError, UnsupportedError
from hvd_compress.exchange.raw import CheckedRaw
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.common import (
    EXCHANGES,
    MIN_NUMEL,
    SHAPES,
    Net,
    Oracle,
    bytes_of,
    check_equal_on_all_ranks,
    gradient,
    loss_of,
    numbers,
    raises,
    to_numpy,
    train,
)

cases = Cases()
WITHOUT_ZERO, WITH_ZERO, SINGLE = [1, 2], [0, 2], [1]
PROCESS_SETS = "dynamic"
SETS = {"without-rank-0": WITHOUT_ZERO, "with-rank-0": WITH_ZERO}


@functools.cache
def all_sets() -> list[Any]:
    return [hvd.add_process_set(ranks) for ranks in (WITHOUT_ZERO, WITH_ZERO, SINGLE)]


def set_of(ranks: list[int]) -> Any:
    return next(process_set for process_set in all_sets() if process_set.ranks == ranks)


def wrap(model: torch.nn.Module, ranks: list[int], compression: Any = None, **settings: Any) -> Any:
    settings = {"exchange": "two_phase", "min_numel": MIN_NUMEL, **settings}
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    named = model.named_parameters()
    return hvd.DistributedOptimizer(sgd, named, compression or OneBit(), process_set=set_of(ranks), **settings)


def check_own_gradient(model: torch.nn.Module, step: int) -> None:
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, gradient(name, horovod.rank(), step, p)), f"{name} of an outsider was changed"


def train_members(ranks: list[int], compressor: Any, exchange: str, **settings: Any) -> None:
    model = Net()
    optimizer = wrap(model, ranks, compressor, exchange=exchange, **settings)
    if horovod.rank() not in ranks:
        train(model, optimizer, range(3), check=functools.partial(check_own_gradient, model))
        assert optimizer.compression_stats()["total"]["bytes_sent"] == 0
        return
    oracle = Oracle(compressor, exchange, ranks=ranks, together=("second.weight", "first.weight"))
    train(model, optimizer, range(3), check=functools.partial(oracle.check_step, model))
    check_equal_on_all_ranks(model, set_of(ranks))
    state = optimizer.compression_state_dict()
    assert (state["size"], state["rank"]) == (2, ranks.index(horovod.rank()))


@cases.each({**SETS, "single": SINGLE})
def adagrad_is_of_the_members_and_of_each_outsider(ranks: list[int]) -> None:
    model, twin = Net(), Net()
    optimizer = wrap(model, ranks, CheckedRaw(), adagrad=AdaGrad(1e-6))
    local = torch.optim.Adagrad(twin.parameters(), lr=0.125, eps=1e-6)
    averaged = ranks if horovod.rank() in ranks else [horovod.rank()]
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in twin.named_parameters():
            p.grad = torch.stack([gradient(name, rank, step, p) for rank in averaged]).mean(0)
        local.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-4)


@cases.each({**SETS, "single": SINGLE})
def with_adagrad_no_parameter_joins_later(ranks: list[int]) -> None:
    model = Net()
    model.first.bias.requires_grad_(False)
    optimizer = wrap(model, ranks, CheckedRaw(), adagrad=AdaGrad(1e-6))
    loss_of(model, 0).backward()
    optimizer.step()
    model.first.bias.requires_grad_(True)
    raises(UnsupportedError, loss_of(model, 1).backward, "parameter 'first.bias' added or unfrozen after wrapping")


@cases.each({f"{s}-{e}": (SETS[s], e) for s in SETS for e in EXCHANGES})
def members_train_outsiders_are_left_alone(setting: tuple[list[int], str]) -> None:
    train_members(setting[0], OneBit(), setting[1])


@cases.each(SETS)
def randomness_follows_the_position_in_the_set(ranks: list[int]) -> None:
    train_members(ranks, QSGD(bits=4), "two_phase")


@cases.each(SETS)
def groups_in_a_process_set(ranks: list[int]) -> None:
    train_members(ranks, OneBit(), "two_phase", groups=2)


@cases.each(SETS)
def group_lists_in_a_process_set(ranks: list[int]) -> None:
    model = Net()
    groups = [[model.first.weight, model.second.weight]]
    optimizer = wrap(model, ranks, TopK(0.05), groups=groups)
    if horovod.rank() in ranks:
        # a group keeps the order in which it was given
        oracle = Oracle(TopK(0.05), ranks=ranks, together=("first.weight", "second.weight"))
        train(model, optimizer, range(2), check=functools.partial(oracle.check_step, model))
    else:
        train(model, optimizer, range(2), check=functools.partial(check_own_gradient, model))


@cases.each(SETS)
def groups_without_compression(ranks: list[int]) -> None:
    model = Net()
    optimizer = wrap(model, ranks, hvd.Compression.none, groups=2)
    loss_of(model, 0).backward()
    optimizer.step()
    if horovod.rank() not in ranks:
        check_own_gradient(model, 0)
        return
    for name, p in model.named_parameters():
        expected = np.mean([numbers(name, rank, 0, SHAPES[name]) for rank in ranks], axis=0)
        np.testing.assert_allclose(to_numpy(p.grad), expected, rtol=1e-5, atol=1e-6)


@cases.each(SETS)
def sum_in_a_process_set(ranks: list[int]) -> None:
    model = Net()
    optimizer = wrap(model, ranks, op=hvd.Sum)
    loss_of(model, 0).backward()
    optimizer.step()
    if horovod.rank() in ranks:
        Oracle(OneBit(), op="sum", ranks=ranks).check_step(model, 0)


@cases.add
def a_set_of_one_rank_exchanges_nothing() -> None:
    model, twin = Net(), Net()
    optimizer = wrap(model, SINGLE)
    train(model, optimizer, range(2), check=functools.partial(check_own_gradient, model))
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.125), range(2), check=lambda step: None)
    assert bytes_of(model.parameters()) == bytes_of(twin.parameters())
    assert optimizer.compression_stats()["total"]["bytes_sent"] == 0


@cases.add
def a_set_of_one_rank_takes_sparse_gradients_as_float16() -> None:
    words = torch.nn.Embedding(100, 30, sparse=True)
    optimizer = wrap(words, SINGLE, FP16())
    words(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert words.weight.grad.is_sparse


@cases.add_thorough
def auto_agrees_in_sets_whose_ranks_have_made_different_numbers_of_optimizers() -> None:
    for ranks in (WITHOUT_ZERO, WITH_ZERO):
        model = Net()
        optimizer = wrap(model, ranks, "auto")
        train(model, optimizer, range(60), check=lambda step: None)  # a trial takes 45 at most
        if horovod.rank() in ranks:
            assert optimizer.compression_stats()["auto"]["measured_seconds"]
            check_equal_on_all_ranks(model, set_of(ranks))


@cases.add
def closures_and_clipping_in_a_process_set() -> None:
    model = Net()
    optimizer = wrap(model, WITHOUT_ZERO)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    if horovod.rank() in WITHOUT_ZERO:
        check_equal_on_all_ranks(model, set_of(WITHOUT_ZERO))


@cases.add
def two_optimizers_of_overlapping_sets_at_once() -> None:
    models = {"a": Net(), "b": Net()}
    sets = {"a": WITHOUT_ZERO, "b": WITH_ZERO}
    optimizers = {k: wrap(models[k], sets[k]) for k in models}
    oracles = {k: Oracle(OneBit(), ranks=sets[k]) for k in models}
    for step in range(3):
        for model in models.values():
            loss_of(model, step).backward()
        # rank 2 is in both, and has both in flight
        for k, optimizer in optimizers.items():
            optimizer.step()
            if horovod.rank() in sets[k]:
                oracles[k].check_step(models[k], step)
            optimizer.zero_grad()


@cases.each(SETS)
def allreduce_in_a_process_set(ranks: list[int]) -> None:
    if horovod.rank() not in ranks:
        return
    shape = (53, 307)
    loopback = Loopback(2, OneBit())
    for step in range(2):
        x = torch.from_numpy(numbers("p", horovod.rank(), step, shape))
        result = hvd.allreduce(x, name="in_set", compression=OneBit(), process_set=set_of(ranks))
        expected = loopback.allreduce([numbers("p", r, step, shape) for r in ranks], name="in_set")[0]
        assert to_numpy(result).tobytes() == expected.tobytes()
    hvd.forget_residuals()


@cases.add
def a_set_that_gets_the_number_of_another_one_gets_nothing_else_of_it() -> None:
    for process_set in all_sets():
        hvd.remove_process_set(process_set)
    all_sets.cache_clear()
    shape, numbers_of_sets = (53, 307), []
    loopbacks = {(0, 1): Loopback(2, OneBit()), (1, 2): Loopback(2, OneBit())}
    # rank 0 comes to a set whose number rank 1 knows from another one, and a set is made again
    for step, ranks in enumerate([(1, 2), (0, 1)] * 4):
        process_set = hvd.add_process_set(ranks)
        numbers_of_sets.append(process_set.process_set_id)
        if horovod.rank() in ranks:
            x = torch.from_numpy(numbers("p", horovod.rank(), step, shape))
            result = hvd.allreduce(x, name="again", compression=OneBit(), process_set=process_set)
            expected = loopbacks[ranks].allreduce([numbers("p", r, step, shape) for r in ranks], name="again")[0]
            assert to_numpy(result).tobytes() == expected.tobytes()
            assert torch.equal(hvd.allreduce(torch.ones(3), process_set=process_set), torch.ones(3))
        hvd.remove_process_set(process_set)
    assert len(set(numbers_of_sets)) < 8, "no number was used again, so nothing is tested"
    hvd.forget_residuals()


@cases.add
def members_that_disagree_are_told_and_only_they() -> None:
    def make() -> Any:
        return wrap(Net(), WITHOUT_ZERO, TopK(0.5) if horovod.rank() == 2 else TopK(0.25))

    if horovod.rank() in WITHOUT_ZERO:
        raises(MismatchError, make, "compression.ratio", "0.5", "0.25")
    else:
        make()


@cases.add
def all_ranks_can_still_train_together() -> None:
    model, oracle = Net(), Oracle(OneBit())
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), OneBit(), exchange="two_phase", min_numel=MIN_NUMEL
    )
    train(model, optimizer, range(2), check=functools.partial(oracle.check_step, model))
