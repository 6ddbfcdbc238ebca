"""DASO among real ranks, on PyTorch: 4 processes of one machine stand for 2 nodes of 2."""

from __future__ import annotations

import copy
import io
import itertools
import os
import time
from unittest import mock

import horovod.torch as plain
import numpy as np
import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress import BF16, Adaptive, DasoSchedule, NoCompression, OneBit, TopK
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.ranks import Ranks
from hvd_compress.schedules import Moment
from tests.parallel.cases import Cases
from tests.parallel.workers.plain import check_that_it_goes_on

cases = Cases()

SIZE = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
RANKS_PER_NODE = {1: 1, 2: 1, 4: 2}[SIZE]
UNEVEN = [0, 1, 1, 1]
PROCESS_SETS = hvd.daso_process_sets(ranks_per_node=RANKS_PER_NODE)
if SIZE == 4:
    # of the uneven nodes, which need [0, 1] too
    PROCESS_SETS += [hvd.ProcessSet([1, 2, 3])]

RAW = {"blocking_compression": NoCompression()}


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 60), torch.nn.Tanh(), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 5)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(16, 30))).to(dtype)


def wrapped(model, *, momentum=0.9, **settings):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    settings = {"ranks_per_node": RANKS_PER_NODE, "patience": None, **RAW, **settings}
    return hvd.DASO(sgd, model.named_parameters(), **settings)


def train(optimizer, model, begin: int, end: int, between=lambda loss: None) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        loss = model(batch(step, hvd.rank(), next(model.parameters()).dtype)).square().mean()
        loss.backward()
        between(loss.detach())
        optimizer.step()


def everyone(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return plain.allgather(tensor.detach()[None].contiguous(), name=name)


def assert_same_everywhere(model) -> None:
    for name, p in model.named_parameters():
        of_all = everyone(p, f"same.{name}")
        assert torch.equal(of_all, of_all[:1].expand_as(of_all)), name


def assert_equal(model, other) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.detach().numpy().tobytes() == q.detach().numpy().tobytes(), name


def simulated(schedule: DasoSchedule, merge: str, steps: int) -> torch.nn.Module:
    """All ranks in this process, by equation 1 of the paper, and torch's own optimizer."""
    ranks, per = hvd.size(), RANKS_PER_NODE
    nodes = ranks // per
    models = [network() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    clock = schedule.clock()
    sent: list[list[torch.Tensor]] = []
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(step, rank)).square().mean().backward()
        for begin in range(0, ranks, per):
            of_node = models[begin : begin + per]
            for ps in zip(*(m.parameters() for m in of_node), strict=True):
                mean = sum(p.grad for p in ps) / per
                for p in ps:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        moment = clock.batch()
        params = [[p.data for p in m.parameters()] for m in models[::per]]
        if nodes == 1 or moment == Moment():
            continue
        if moment.arrives is not None and not moment.blocks:
            s = moment.arrives
            for model in models:
                for i, p in enumerate(model.parameters()):
                    total = sum(node[i] for node in sent)
                    if merge == "paper":
                        p.data = (2 * s * p.data + total) / (2 * s + nodes)
                    else:
                        own = sent[models.index(model) // per][i]
                        p.data = total / nodes + (p.data - own)
        if moment.blocks:
            means = [sum(node[i] for node in params) / nodes for i in range(len(params[0]))]
            for model in models:
                for p, mean in zip(model.parameters(), means, strict=True):
                    p.data = mean.clone()
        if moment.sends:
            sent = [[p.data.clone() for p in m.parameters()] for m in models[::per]]
    return models[hvd.rank()]


GRID = {
    f"{form}-{merge}-B{b}-S{s}": (form, merge, b, s)
    for form, merge in itertools.product(("sharded", "rotate"), ("paper", "delta"))
    for b, s in ((1, 0), (1, 1), (3, 2), (4, 4))
}


@cases.each(GRID)
def ranks_follow_equation_1_bit_for_bit(settings) -> None:
    form, merge, skips, wait = settings
    model = network()
    optimizer = wrapped(model, form=form, merge=merge, global_skips=skips, batches_to_wait=wait, steps_per_epoch=10)
    train(optimizer, model, 0, 17)
    schedule = DasoSchedule(skips, wait, patience=None, steps_per_epoch=10)
    assert_equal(model, simulated(schedule, merge, 17))


@cases.add
def b_1_and_s_0_is_plain_averaging_of_parameters_bit_for_bit() -> None:
    model, other = network(), network()
    optimizer = wrapped(model, global_skips=1, batches_to_wait=0, ranks_per_node=1)
    sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    for step in range(12):
        train(optimizer, model, step, step + 1)
        sgd.zero_grad()
        other(batch(step, hvd.rank())).square().mean().backward()
        sgd.step()
        for name, p in other.named_parameters():
            p.data = plain.allreduce(p.data, op=plain.Average, name=f"plain.{name}")
        assert_equal(model, other)


@cases.add
def on_one_node_it_is_horovod_inside() -> None:
    model, other = network(), network()
    optimizer = wrapped(model, ranks_per_node=hvd.size(), global_skips=2)
    sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    distributed = plain.DistributedOptimizer(sgd, other.named_parameters())
    train(optimizer, model, 0, 9)
    train(distributed, other, 0, 9)
    optimizer.epoch_end(1.0)
    assert_equal(model, other)
    assert optimizer.daso_stats()["bytes_between_nodes"] == 0


COMPRESSED = {
    "nodes-of-one": {"compression": Adaptive(8), "ranks_per_node": 1, "form": "rotate"},
    "bf16": {"compression": BF16()},
    "adaptive": {"compression": Adaptive(8)},
    "onebit-rotate": {"compression": OneBit(), "form": "rotate"},
    "topk-delta": {"compression": TopK(0.1), "merge": "delta"},
    "phases": {
        "compression": Adaptive(8), "blocking_compression": BF16(), "total_epochs": 3, "warmup_epochs": 1,
        "cooldown_epochs": 1,
    },
}  # fmt: skip


@cases.each(COMPRESSED)
def compressed_training_makes_ranks_equal_and_goes_on_from_a_state(settings) -> None:
    model, other = network(), network()
    make = {"global_skips": 3, "batches_to_wait": 2, "steps_per_epoch": 10, **settings}
    optimizer = wrapped(model, **make)
    first = model(batch(99, 0)).square().mean()
    # in the middle of a cycle: what was sent after step 13 is under way after step 14
    train(optimizer, model, 0, 14)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "daso": optimizer.daso_state_dict()}, saved)
    train(optimizer, model, 14, 30)
    assert_same_everywhere(model)
    assert model(batch(99, 0)).square().mean() < first
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    again = wrapped(other, **make)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["opt"])
    again.load_daso_state_dict(state["daso"])
    train(again, other, 14, 30)
    assert_equal(model, other)
    with pytest.raises(StateError, match="format"):
        again.load_daso_state_dict({"daso": 1})


UNNAMED = {
    "sharded": {},
    "rotate": {"form": "rotate"},
    "rotate-in-parts": {"form": "rotate", "global_skips": 3, "batches_to_wait": 3},
    "rotate-onebit": {"form": "rotate", "compression": OneBit()},
    # among more than two nodes a change takes two collectives
    "two-phases": {"compression": Adaptive(8), "global_skips": 3, "batches_to_wait": 3, "ranks_per_node": 1},
}


@cases.each(UNNAMED)
def unnamed_calls_of_the_user_are_not_disturbed(settings) -> None:
    torch.manual_seed(7)
    # large enough to go in parts
    model = torch.nn.Sequential(torch.nn.Linear(30, 7000), torch.nn.Tanh(), torch.nn.Linear(7000, 5))
    optimizer = wrapped(model, **{"global_skips": 2, "batches_to_wait": 1, **settings})
    mean = (hvd.size() - 1) / 2
    for step in range(9):
        # one rank is slow, so that collectives have ended on some ranks earlier than on others
        if hvd.rank() == 0:
            time.sleep(0.01)
        train(optimizer, model, step, step + 1)
        mine = torch.full((3,), float(hvd.rank()))
        for horovod in (hvd, plain):
            assert torch.equal(horovod.allreduce(mine), torch.full((3,), mean))
            assert horovod.allgather(mine).numel() == 3 * hvd.size()
    optimizer.epoch_end()
    assert_same_everywhere(model)


@cases.add
def a_bad_number_reaches_all_when_an_epoch_ends() -> None:
    model = network()
    optimizer = wrapped(model, compression=OneBit(), global_skips=2, steps_per_epoch=4)
    train(optimizer, model, 0, 7)
    if hvd.rank() < RANKS_PER_NODE:
        model[0].weight.data[1, 2] = torch.nan
    optimizer.epoch_end()
    assert torch.isnan(model[0].weight[1, 2])
    assert_same_everywhere_but_nan(model)


def assert_same_everywhere_but_nan(model) -> None:
    for name, p in model.named_parameters():
        of_all = everyone(p, f"nan.{name}")
        assert torch.allclose(of_all, of_all[:1].expand_as(of_all), rtol=0, atol=0, equal_nan=True), name


@cases.add
def buffers_and_states_become_their_mean_when_an_epoch_ends() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DASO(
        sgd, model.named_parameters(), named_buffers=model.named_buffers(), average_state=True,
        ranks_per_node=RANKS_PER_NODE, **RAW,
    )  # fmt: skip
    train(optimizer, model, 0, 5)
    running = everyone(model[2].running_mean, "running").mean(0)
    momentum = everyone(optimizer.state[model[0].weight]["momentum_buffer"], "momentum").mean(0)
    counted = model[2].num_batches_tracked.item()
    optimizer.epoch_end(torch.tensor(float(hvd.rank())))
    assert torch.allclose(model[2].running_mean, running, rtol=1e-6)
    assert torch.allclose(optimizer.state[model[0].weight]["momentum_buffer"], momentum, rtol=1e-6)
    assert model[2].num_batches_tracked.item() == counted
    assert_same_everywhere(model)
    told = optimizer.daso_stats()["epochs"]
    assert [epoch["loss"] for epoch in told] == [(hvd.size() - 1) / 2]
    train(optimizer, model, 5, 8)


@cases.add
def states_that_a_node_has_not_yet_are_zeros_in_their_mean() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # among several ranks of a node Horovod makes gradients that are missing zeros
    optimizer = hvd.DASO(
        sgd, model.named_parameters(), named_buffers=model, average_state=True, ranks_per_node=1, **RAW
    )
    in_first_node = hvd.rank() == 0
    for number in range(3):
        optimizer.zero_grad()
        # other nodes never train the first layer
        x = batch(number, hvd.rank())
        (model(x) if in_first_node else model[1:](model[0](x).detach())).square().mean().backward()
        if not in_first_node:
            model[0].zero_grad(set_to_none=True)
        optimizer.step()
    assert ("momentum_buffer" in optimizer.state[model[0].weight]) == in_first_node
    kept = optimizer.state[model[0].weight].get("momentum_buffer", torch.zeros_like(model[0].weight))
    momentum = everyone(kept, "momentum.late").mean(0)
    optimizer.epoch_end()
    if in_first_node:
        assert torch.allclose(optimizer.state[model[0].weight]["momentum_buffer"], momentum, rtol=1e-6)
    assert_same_everywhere(model)


LOSSES = {
    "tracked": lambda p: (p.sum() * 0 + 2.0, 2.0),
    "one-element": lambda p: ((p.sum() * 0 + 2.0).reshape(1), 2.0),
    "bfloat16": lambda p: (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
    "numpy": lambda p: (np.float32(0.5), 0.5),
    "numpy-array": lambda p: (np.array([0.5]), 0.5),
    "integer": lambda p: (3, 3.0),
    "infinite": lambda p: (torch.tensor(torch.inf), float("inf")),
    "none": lambda p: (None, None),
}


@cases.each(LOSSES)
def losses_are_taken_as_users_have_them(make) -> None:
    # warnings are errors here: torch warns of a tracked tensor that becomes a number
    model = network()
    optimizer = wrapped(model)
    train(optimizer, model, 0, 1)
    given, expected = make(model[0].weight)
    optimizer.epoch_end(given)
    assert [epoch["loss"] for epoch in optimizer.daso_stats()["epochs"]] == [expected]


@cases.add
def what_is_no_loss_and_copies_are_refused() -> None:
    model = network()
    optimizer = wrapped(model)
    for given in (torch.ones(2), torch.tensor(1j), "loss", []):
        with pytest.raises(TypeError, match="give one real number, such as the mean loss"):
            optimizer.epoch_end(given)
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer).step()
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match=r"'w' of torch.complex64.*view_as_complex"):
        hvd.DASO(torch.optim.SGD([weight], lr=0.1), [("w", weight)], ranks_per_node=RANKS_PER_NODE)


@cases.add
def a_step_that_a_scaler_skips_on_one_node_counts_on_all() -> None:
    model = network()
    optimizer = wrapped(model, global_skips=2, batches_to_wait=1, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = 0
    for step in range(8):
        optimizer.zero_grad()
        loss = model(batch(step, hvd.rank())).square().mean()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        if step in (2, 3) and hvd.rank() < RANKS_PER_NODE:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        before, scale = model[0].weight.detach().clone(), scaler.get_scale()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            # what arrives from the other nodes is merged all the same
            arrived = hvd.size() > 1 and step == 2
            assert torch.equal(model[0].weight, before) != arrived
    assert skipped == (2 if hvd.rank() < RANKS_PER_NODE else 0)
    assert optimizer.daso_stats()["batches"] == 8
    optimizer.epoch_end()
    assert_same_everywhere(model)


class Branches(torch.nn.Module):
    """Of two layers, one may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = torch.nn.Linear(30, 8), torch.nn.Linear(30, 8)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


BASES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "fused": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
}


@cases.each(BASES)
def a_scaler_is_used_as_most_code_does(make) -> None:
    model, other = network(), network()
    optimizer = hvd.DASO(
        make(model.parameters()), model.named_parameters(), global_skips=2, batches_to_wait=1, patience=None,
        ranks_per_node=RANKS_PER_NODE, **RAW,
    )  # fmt: skip
    expected = wrapped(other, global_skips=2, batches_to_wait=1, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(8):
        optimizer.zero_grad()
        is_bad = step == 4 and hvd.rank() == 0
        loss = model(batch(step, hvd.rank())).square().mean()
        scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
        clips = step % 3 == 1
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before, scale = model[3].weight.detach().clone(), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if step == 4:
            assert (scaler.get_scale() < scale) == (hvd.rank() < RANKS_PER_NODE)
            break
        train(expected, other, step, step + 1) if not clips else clipped(expected, other, step)
        assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(model.parameters(), other.parameters(), strict=True))
        assert not torch.equal(model[3].weight, before)
    optimizer.epoch_end()
    assert_same_everywhere(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def clipped(optimizer, model, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step, hvd.rank())).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


@cases.add
def a_scaler_that_looks_before_all_gradients_have_come_is_told() -> None:
    if RANKS_PER_NODE == 1:
        return
    model = Branches()
    optimizer = wrapped(model, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, hvd.rank()), both=step % 2 == 0).square().mean()).backward()
        if step == 1:
            with pytest.raises(GradientError, match=r"while gradients are exchanged.*Call opt\.synchronize\(\) after"):
                scaler.step(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            continue
        if step == 3:
            optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
    optimizer.epoch_end()
    assert_same_everywhere(model)


def unfreeze(model, optimizer) -> None:
    model[0].bias.requires_grad_(True)


def add(model, optimizer) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(40, 30))]})


CHANGES = {"unfrozen": unfreeze, "added": add}


@cases.each(CHANGES)
def what_takes_gradients_later_is_an_error_on_all_ranks(change) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = wrapped(model, global_skips=2, batches_to_wait=1)
    train(optimizer, model, 0, 3)
    change(model, optimizer)
    optimizer.zero_grad()
    model(batch(3, hvd.rank())).square().mean().backward()
    for call in (optimizer.step, optimizer.epoch_end):
        with pytest.raises(ValueError, match=r"takes gradients, and did not when DASO.*On all ranks: make .* equal"):
            call()
    # the remedy
    plain.broadcast_parameters(model.state_dict(), 0)
    again = wrapped(model, global_skips=2, batches_to_wait=1)
    train(again, model, 8, 11)
    again.epoch_end()
    assert_same_everywhere(model)


@cases.add
def what_is_frozen_later_is_made_equal_and_then_stays() -> None:
    model = network()
    optimizer = wrapped(model, global_skips=2, batches_to_wait=1)
    train(optimizer, model, 0, 3)
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    train(optimizer, model, 3, 5)
    optimizer.epoch_end()
    assert_same_everywhere(model)
    before = model[0].weight.clone()
    train(optimizer, model, 5, 11)
    optimizer.epoch_end()
    assert torch.allclose(model[0].weight, before, rtol=0, atol=1e-6)
    assert_same_everywhere(model)


@cases.add
def what_the_plain_optimizer_has_goes_on() -> None:
    model = network()
    check_that_it_goes_on(
        model,
        lambda plain: hvd.DASO(plain, model.named_parameters(), global_skips=2, ranks_per_node=RANKS_PER_NODE, **RAW),
        lambda: model(batch(0, hvd.rank())).square().mean(),
    )


@cases.add
def frozen_shared_and_grouped_parameters() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.detach().clone() + hvd.rank()
    model[0].bias.data = frozen.clone()
    groups = [
        {"params": [model[0].weight, model[1].bias, model[0].bias]},
        {"params": model[2].parameters(), "lr": 0.01},
    ]
    adam = torch.optim.Adam(groups, lr=0.02)
    optimizer = hvd.DASO(adam, model.named_parameters(), global_skips=2, ranks_per_node=RANKS_PER_NODE, **RAW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(5):
        train(optimizer, model, step, step + 1)
        scheduler.step()
    optimizer.epoch_end()
    assert torch.equal(model[0].bias, frozen)
    assert model[1].weight is model[0].weight
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01 * 0.1**2)
    for p in (model[0].weight, model[1].bias, model[2].weight, model[2].bias):
        of_all = everyone(p, "frozen.same")
        assert torch.equal(of_all, of_all[:1].expand_as(of_all))
    model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="takes gradients, and did not when DASO"):
        optimizer.step()


@cases.each({"bfloat16": torch.bfloat16, "float64": torch.float64})
def other_types_of_parameters(dtype) -> None:
    model = network(dtype)
    optimizer = wrapped(model, global_skips=2, steps_per_epoch=5)
    train(optimizer, model, 0, 10)
    assert all(p.dtype == dtype for p in model.parameters())
    for name, p in model.named_parameters():
        of_all = everyone(p.float(), f"other.{name}")
        assert torch.equal(of_all, of_all[:1].expand_as(of_all))


@cases.add
def closures_and_accumulated_passes() -> None:
    model, other = network(), network()
    optimizer = wrapped(model, global_skips=2, steps_per_epoch=4)
    accumulating = wrapped(other, global_skips=2, steps_per_epoch=4, backward_passes_per_step=2)

    def closure(step: int):
        optimizer.zero_grad()
        loss = model(batch(step, hvd.rank())).square().mean()
        loss.backward()
        return loss

    for step in range(4):
        assert optimizer.step(lambda step=step: closure(step)) > 0
        accumulating.zero_grad()
        for half in range(2):
            other(batch(2 * step + half, hvd.rank())).square().mean().backward()
        accumulating.step()
    assert_same_everywhere(model)
    assert_same_everywhere(other)
    assert accumulating.daso_stats()["batches"] == 4


@cases.add
def nodes_that_horovod_reports_may_differ_in_size() -> None:
    if hvd.size() != 4:
        return
    model, other = network(), network()
    with mock.patch.object(Ranks, "host_numbers", return_value=UNEVEN):
        optimizer = wrapped(model, global_skips=1, batches_to_wait=0, ranks_per_node=None, momentum=0.0)
    train(optimizer, model, 0, 6)
    assert_same_everywhere(model)
    # every rank counts the same: with plain SGD and B = 1 that is the mean of all gradients
    sgd = plain.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.05), other.named_parameters())
    train(sgd, other, 0, 6)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-5)


@cases.add
def wrong_use_is_told_on_all_ranks() -> None:
    model = network()
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="global_skips"):
            wrapped(model, global_skips=2 + hvd.rank())
    optimizer = wrapped(model)
    with pytest.raises(UnsupportedError, match="distributed already"):
        hvd.DASO(optimizer, model.named_parameters())
    with pytest.raises(ValueError, match="ranks_per_node=3"):
        wrapped(model, ranks_per_node=3)
    with pytest.raises(ValueError, match="without total_epochs"):
        wrapped(model, cooldown_epochs=1)
    model[3].bias.data = model[0].bias.data[:5]
    with pytest.raises(ValueError, match="share their memory"):
        wrapped(model)
    model = network()
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="ranks_per_node"):
            wrapped(model, ranks_per_node=None if hvd.rank() else RANKS_PER_NODE)
    if hvd.size() == 4:
        numbers = [0, 1, 1, 0]
        with (
            mock.patch.object(Ranks, "host_numbers", return_value=numbers),
            pytest.raises(UnsupportedError, match=r"process set of the ranks \[0, 3\].*daso_process_sets"),
        ):
            wrapped(model, ranks_per_node=None)


@cases.add
def states_can_be_broadcast_without_a_step() -> None:
    model = network()
    optimizer = wrapped(model)
    plain.broadcast_parameters(model.state_dict(), root_rank=0)
    plain.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.daso_stats()["batches"] == 0
