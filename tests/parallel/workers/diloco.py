"""DiLoCo among real ranks, on PyTorch; 4 processes of one machine may stand for 2 nodes of 2."""

from __future__ import annotations

import copy
import io
import itertools
import os
import time
import warnings
from unittest import mock

import horovod.torch as plain
import numpy as np
import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress import BF16, QSGD, Adaptive, OneBit, Policy, TopK
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.ranks import Ranks
from tests.diloco_golden import RUNS, check_trajectory
from tests.diloco_oracle import Nesterov, Oracle
from tests.hostile import same
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import in_elastic_run
from tests.parallel.workers.plain import check_that_it_goes_on

cases = Cases()

SIZE = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
RANKS_PER_NODE = {1: 1, 2: 1, 4: 2}[SIZE]
PROCESS_SETS = hvd.daso_process_sets(ranks_per_node=RANKS_PER_NODE)


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 60), torch.nn.Tanh(), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 5)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(16, 30))).to(dtype)


def wrapped(model, *, momentum=0.9, **settings):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return hvd.DiLoCo(sgd, model.named_parameters(), **{"sync_every": 4, **settings})


def train(optimizer, model, begin: int, end: int, rank: int | None = None) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        x = batch(step, hvd.rank() if rank is None else rank, next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()


def everyone(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return plain.allgather(tensor.detach()[None].contiguous(), name=name)


def assert_same_everywhere(model) -> None:
    for name, p in model.named_parameters():
        of_all = everyone(p.float(), f"same.{name}")
        assert torch.equal(of_all, of_all[:1].expand_as(of_all)), name


def assert_equal(model, other) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.detach().numpy().tobytes() == q.detach().numpy().tobytes(), name


# -- trajectories --------------------------------------------------------------------------------------------------


@cases.each(RUNS)
def trajectories_of_another_implementation_are_followed_exactly(golden) -> None:
    check_trajectory(hvd.DiLoCo, golden)


class Adagrad:
    """Adagrad as torch documents it."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}

    def step(self, x, gradients):
        after = dict(x)
        for name, g in gradients.items():
            self.sums[name] = self.sums.get(name, 0) + g * g
            after[name] = x[name] - np.float32(0.1) * g / (np.sqrt(self.sums[name]) + np.float32(1e-10))
        return after


OUTERS = {
    "nesterov": (None, Nesterov),
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=1.0), lambda: Nesterov(1.0, 0.0)),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=0.1), Adagrad),
}
GRID = {
    f"H{h}-F{f}-delay{d}-alpha{a}-{outer}": (h, f, d, a, outer)
    for (h, f, d), a, outer in itertools.chain(
        itertools.product(((1, 1, 0), (6, 2, 0), (6, 2, 2), (4, 1, 3)), (0.0, 0.5), ["nesterov"]),
        [((6, 2, 1), 0.25, "sgd"), ((4, 4, 0), 0.0, "adagrad")],
    )
}


@cases.each(GRID)
def ranks_follow_the_definition(settings) -> None:
    """All ranks in this process, with torch's own optimizers; 22 steps of float32, summed in another order."""
    sync_every, fragments, delay, alpha, outer = settings
    make, oracle_of = OUTERS[outer]
    model = network()
    given = {} if make is None else {"outer": make}
    optimizer = wrapped(model, sync_every=sync_every, fragments=fragments, delay=delay, alpha=alpha, **given)
    models = [network() for _ in range(hvd.size())]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    start = {name: p.detach().numpy() for name, p in models[0].named_parameters()}
    cut = [[optimizer._local_steps.parameters.tensors[n].name for n in f.numbers]
           for f in optimizer._local_steps.member._fragments]  # fmt: skip
    oracle = Oracle(start, hvd.size(), cut, sync_every, delay, alpha, oracle_of)
    for step in range(22):
        train(optimizer, model, step, step + 1)
        for rank, (m, sgd) in enumerate(zip(models, optimizers, strict=True)):
            train(sgd, m, step, step + 1, rank)
            oracle.local[rank] = {name: p.detach().numpy().copy() for name, p in m.named_parameters()}
        oracle.synchronize()
        for m, values in zip(models, oracle.local, strict=True):
            for name, p in m.named_parameters():
                p.data.copy_(torch.from_numpy(values[name]))
        for (name, p), q in zip(model.named_parameters(), models[hvd.rank()].parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=2e-5), (step, name)


# -- compression and states ----------------------------------------------------------------------------------------

COMPRESSED = {
    "none": {},
    "fragments": {"fragments": 2, "alpha": 0.5},
    "adaptive": {"compression": Adaptive(8)},
    "topk-decay": {"compression": TopK(0.1), "feedback_decay": 0.95, "outer": lambda ps: torch.optim.SGD(ps, lr=1.0)},
    "sparseloco": {
        "compression": TopK(chunk=256, ratio=1 / 16, value_bits=2),
        "feedback_decay": 0.95,
        "outer": lambda ps: torch.optim.SGD(ps, lr=1.0),
    },
    "policy-adam": {
        "compression": Policy([("*.weight", OneBit()), ("*", BF16())]),
        "outer": lambda ps: torch.optim.Adam(ps, lr=0.01),
    },
    "qsgd": {"compression": QSGD(4, seed=3), "fragments": 2},
}


@cases.each(COMPRESSED)
def training_makes_progress_and_goes_on_from_a_state(settings) -> None:
    model, other = network(), network()
    make = {"sync_every": 6, "delay": 2, **settings}
    optimizer = wrapped(model, **make)
    first = model(batch(99, 0)).square().mean()
    # what was sent after step 10 arrives after step 12
    train(optimizer, model, 0, 11)
    assert optimizer.diloco_stats()["under_way"] is not None
    saved = io.BytesIO()
    state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "diloco": optimizer.diloco_state_dict()}
    torch.save(state, saved)
    train(optimizer, model, 11, 31)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    again = wrapped(other, **make)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["opt"])
    again.load_diloco_state_dict(state["diloco"])
    train(again, other, 11, 31)
    assert_equal(model, other)
    optimizer.average_parameters()
    assert_same_everywhere(model)
    assert model(batch(99, 0)).square().mean() < first
    for wrong in (
        {"diloco": 1},
        {**state["diloco"], "steps": -1},
        with_outer(state["diloco"], lambda outer: outer.pop("state")),
        with_outer(state["diloco"], lambda outer: outer["param_groups"].clear()),
        with_outer(state["diloco"], lambda outer: outer["state"].update({99: {}})),
    ):
        before = again.diloco_state_dict()
        with pytest.raises(StateError):
            again.load_diloco_state_dict(wrong)
        assert str(before) == str(again.diloco_state_dict())


def with_outer(state, change):
    changed = copy.deepcopy(state)
    change(changed["fragments"][0]["outer"])
    return changed


@cases.add
def a_damaged_momentum_is_refused() -> None:
    model = network()
    optimizer = wrapped(model)
    train(optimizer, model, 0, 5)
    state = optimizer.diloco_state_dict()
    for change in (
        lambda outer: outer["state"][0].update(momentum_buffer=torch.full((60, 30), torch.nan)),
        lambda outer: outer["state"][0].update(momentum_buffer=torch.ones(60, 31)),
        lambda outer: outer["state"][0].update(momentum_buffer="ones"),
        lambda outer: outer["param_groups"][0].update(lr=float("nan")),
        lambda outer: outer["param_groups"][0].update(params=[0]),
    ):
        with pytest.raises(StateError, match="of the outer optimizer in a DiLoCo state"):
            optimizer.load_diloco_state_dict(with_outer(state, change))
    optimizer.load_diloco_state_dict(state)


@cases.add
def without_a_state_parameters_must_be_equal() -> None:
    model = network()
    optimizer = wrapped(model, sync_every=2)
    if hvd.size() > 1:
        model[0].weight.data += hvd.rank()
        with pytest.raises(MismatchError, match=r"what they agreed on last \(start from equal parameters"):
            train(optimizer, model, 0, 2)


# -- habits --------------------------------------------------------------------------------------------------------


@cases.add
def parameters_may_be_broadcast_after_wrapping() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.add_(hvd.rank())
    optimizer = wrapped(model, sync_every=2)
    plain.broadcast_parameters(model.state_dict(), root_rank=0)
    plain.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.diloco_stats()["steps"] == 0
    train(optimizer, model, 0, 4)
    assert_same_everywhere(model)


@cases.add
def buffers_become_their_mean_with_the_parameters() -> None:
    model = network()
    optimizer = wrapped(model, sync_every=30, named_buffers=model.named_buffers())
    train(optimizer, model, 0, 5)
    running = everyone(model[2].running_mean, "running").mean(0)
    mean = everyone(model[0].weight, "weight").mean(0)
    counted = model[2].num_batches_tracked.item()
    optimizer.average_parameters()
    assert torch.allclose(model[2].running_mean, running, rtol=1e-6, atol=1e-7)
    assert torch.allclose(model[0].weight, mean, rtol=1e-6, atol=1e-7)
    assert model[2].num_batches_tracked.item() == counted
    assert_same_everywhere(model)
    train(optimizer, model, 5, 8)


@cases.add
def a_step_that_a_scaler_skips_on_one_rank_counts_on_all() -> None:
    model = network()
    optimizer = wrapped(model, sync_every=2, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(8):
        optimizer.zero_grad()
        is_bad = step == 3 and hvd.rank() == 0
        loss = model(batch(step, hvd.rank())).square().mean()
        scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if step == 3:
            assert (scaler.get_scale() < scale) == is_bad
    stats = optimizer.diloco_stats()
    assert (stats["steps"], stats["synchronizations"]) == (8, {"sent": 4, "merged": 4, "not_finite": 0})
    assert_same_everywhere(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@cases.add
def a_rank_that_diverges_goes_back_and_the_others_go_on() -> None:
    model = network()
    optimizer = wrapped(model, sync_every=4, fragments=2)
    train(optimizer, model, 0, 4)
    before = optimizer.diloco_state_dict()
    train(optimizer, model, 4, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.zero_grad()
        (model(batch(5, hvd.rank())).square().mean() * (torch.nan if hvd.rank() == 0 else 1.0)).backward()
        optimizer.step()
    assert ["not finite in fragment 0" in str(w.message) for w in caught if w.category is RuntimeWarning] == [True]
    assert ("are again what the ranks agreed on last" in str(caught[0].message)) == (hvd.rank() == 0)
    after = optimizer.diloco_state_dict()
    for mine, kept in zip(after["fragments"], before["fragments"], strict=True):
        assert str(mine["outer"]) == str(kept["outer"])
        for x, y in zip(mine["syncs"], kept["syncs"], strict=True):
            assert torch.equal(x["reference"], y["reference"])
    # momentum that was not finite is forgotten, or it would spoil the next step
    train(optimizer, model, 6, 16)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert optimizer.diloco_stats()["synchronizations"]["not_finite"] == 1
    optimizer.average_parameters()
    assert_same_everywhere(model)


@cases.add
def what_is_frozen_later_stays_and_what_is_unfrozen_is_an_error_on_all_ranks() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = wrapped(model, sync_every=2)
    kept = model[0].bias.clone()
    train(optimizer, model, 0, 4)
    model[3].weight.requires_grad_(False)
    model[3].weight.grad = None
    frozen = model[3].weight.clone()
    train(optimizer, model, 4, 8)
    assert torch.equal(model[0].bias, kept)
    assert torch.equal(model[3].weight, frozen)
    model[0].bias.requires_grad_(True)
    optimizer.zero_grad()
    model(batch(3, hvd.rank())).square().mean().backward()
    for call in (optimizer.step, optimizer.average_parameters):
        with pytest.raises(ValueError, match="takes gradients, and did not when DiLoCo was made"):
            call()


@cases.each(
    {
        "float32": {},
        "bfloat16": {"dtype": torch.bfloat16},
        "delay": {"delay": 1},
        "own share": {"alpha": 0.5},
        "two fragments, compressed": {"fragments": 2, "compression": OneBit()},
    }
)
def what_is_frozen_between_synchronizations_becomes_equal_and_stays(settings) -> None:
    settings = dict(settings)
    dtype = settings.pop("dtype", torch.float32)
    model = network(dtype)
    optimizer = wrapped(model, sync_every=4, **settings)
    train(optimizer, model, 0, 6)
    # two steps of this rank alone are in it
    model[3].weight.requires_grad_(False)
    model[3].weight.grad = None
    of_all = everyone(model[3].weight.detach().float(), "frozen between")
    assert hvd.size() == 1 or not torch.equal(of_all[0], of_all[-1])
    train(optimizer, model, 6, 12)
    frozen = model[3].weight.clone()
    of_all = everyone(frozen.float(), "frozen equal")
    assert torch.equal(of_all, of_all[:1].expand_as(of_all))
    train(optimizer, model, 12, 20)
    assert torch.equal(model[3].weight, frozen)


@cases.each({"bfloat16": torch.bfloat16, "float64": torch.float64})
def other_types_of_parameters(dtype) -> None:
    model = network(dtype)
    optimizer = wrapped(model, sync_every=2)
    train(optimizer, model, 0, 6)
    assert all(p.dtype == dtype for p in model.parameters())
    assert_same_everywhere(model)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    (fragment,) = optimizer.diloco_state_dict()["fragments"]
    assert {entry["momentum_buffer"].dtype for entry in fragment["outer"]["state"].values()} == {wide}
    assert [of_dtype["reference"].dtype for of_dtype in fragment["syncs"]] == [wide]


@cases.add
def complex_parameters_are_pairs() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = hvd.DiLoCo(
        torch.optim.SGD([p], lr=0.5), [("p", p)], sync_every=1, outer=lambda ps: torch.optim.SGD(ps, 1)
    )
    p.grad = torch.full_like(p, (1 + 2j) * hvd.rank())
    optimizer.step()
    assert torch.allclose(p, torch.full_like(p, 1 - 0.5 * (1 + 2j) * (hvd.size() - 1) / 2))


@cases.add
def what_the_plain_optimizer_has_goes_on() -> None:
    model = network()
    check_that_it_goes_on(
        model, lambda plain: hvd.DiLoCo(plain, model.named_parameters(), sync_every=2),
        lambda: model(batch(0, hvd.rank())).square().mean(),
    )  # fmt: skip


@cases.add
def groups_schedulers_names_and_accumulated_passes() -> None:
    model, other = network(), network()
    groups = [
        {"params": model[0].parameters()},
        {"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.01},
    ]
    optimizer = hvd.DiLoCo(torch.optim.Adam(groups, lr=0.02), sync_every=2, fragments=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accumulating = wrapped(other, sync_every=2, backward_passes_per_step=2)
    for step in range(4):
        train(optimizer, model, step, step + 1)
        scheduler.step()
        accumulating.zero_grad()
        for half in range(2):
            other(batch(2 * step + half, hvd.rank())).square().mean().backward()
        accumulating.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01 * 0.1**2)
    assert isinstance(optimizer, torch.optim.Adam)
    optimizer.average_parameters()
    assert_same_everywhere(model)
    assert_same_everywhere(other)
    assert accumulating.diloco_stats()["steps"] == 4

    def closure():
        optimizer.zero_grad()
        loss = model(batch(9, hvd.rank())).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


@cases.each({"one": {}, "compressed": {"compression": Adaptive(8), "fragments": 2}})
def unnamed_calls_of_the_user_are_not_disturbed(settings) -> None:
    model = network()
    optimizer = wrapped(model, sync_every=6, delay=2, **settings)
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
    optimizer.average_parameters()
    assert_same_everywhere(model)


@cases.add
def bytes_are_told() -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(300, 400)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DiLoCo(sgd, model.named_parameters(), sync_every=2, compression=TopK(0.01))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    stats = optimizer.diloco_stats()
    assert stats["parameter_bytes"] == 4 * 301 * 400
    assert stats["gradient_bytes"] == 0
    assert stats["nodes"] == hvd.size()
    if hvd.size() > 1:
        assert 0 < stats["bytes_between_nodes"] < 2 * 2 * stats["parameter_bytes"] / 30


@cases.add
def settings_of_sparseloco_send_2000_times_fewer_bytes() -> None:
    """Of a transformer's layer, with biases and norms, which are too small to be compressed."""
    torch.manual_seed(3)
    model = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0)
    optimizer = hvd.DiLoCo(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), sync_every=30,
        compression=TopK(chunk=4096, ratio=1 / 64, value_bits=2), feedback_decay=0.95,
        outer=lambda params: torch.optim.SGD(params, lr=1.0),
    )  # fmt: skip
    for step in range(60):
        optimizer.zero_grad()
        torch.manual_seed(step * hvd.size() + hvd.rank())
        model(torch.randn(2, 1, 256))[0].square().mean().backward()
        optimizer.step()
    assert_same_everywhere(model)
    stats = optimizer.diloco_stats()
    if hvd.size() > 1:
        dense = 60 * 2 * (hvd.size() - 1) / hvd.size() * stats["parameter_bytes"]
        assert dense / stats["bytes_between_nodes"] > 2000, stats


# -- nodes and process sets ----------------------------------------------------------------------------------------


@cases.add
def nodes_inside_average_gradients() -> None:
    """2 nodes of 2, or one node: the same as replicas that take the mean gradient of their ranks."""
    per = {1: 1, 2: 2, 4: 2}[hvd.size()]
    model = network()
    optimizer = wrapped(model, sync_every=3, delay=1, ranks_per_node=per, fragments=1, compression=None)
    nodes = hvd.size() // per
    models = [network() for _ in range(nodes)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    start = {name: p.detach().numpy() for name, p in models[0].named_parameters()}
    oracle = Oracle(start, nodes, [list(start)], 3, 1)
    for step in range(10):
        train(optimizer, model, step, step + 1)
        for node, (m, sgd) in enumerate(zip(models, optimizers, strict=True)):
            sgd.zero_grad()
            for rank in range(node * per, (node + 1) * per):
                (m(batch(step, rank)).square().mean() / per).backward()
            sgd.step()
            oracle.local[node] = {name: p.detach().numpy().copy() for name, p in m.named_parameters()}
        oracle.synchronize()
        for m, values in zip(models, oracle.local, strict=True):
            for name, p in m.named_parameters():
                p.data.copy_(torch.from_numpy(values[name]))
    for p, q in zip(model.parameters(), models[hvd.rank() // per].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=2e-5)
    assert optimizer.diloco_stats()["ranks_of_node"] == per


@cases.add
def process_sets_train_apart() -> None:
    if hvd.size() != 4:
        return
    mine = PROCESS_SETS[0] if hvd.rank() < 2 else PROCESS_SETS[1]
    other = PROCESS_SETS[1] if hvd.rank() < 2 else PROCESS_SETS[0]
    model = network()
    optimizer = wrapped(model, sync_every=2, process_set=mine)
    # one set makes more steps, and one more optimizer
    train(optimizer, model, 0, 4 if hvd.rank() < 2 else 6)
    if hvd.rank() < 2:
        again = network()
        train(wrapped(again, sync_every=2, process_set=mine), again, 0, 2)
    for name, p in model.named_parameters():
        of_all = plain.allgather(p.detach()[None].contiguous(), name=f"set.{name}", process_set=mine)
        assert torch.equal(of_all[0], of_all[1])
    assert optimizer.diloco_stats()["nodes"] == 2
    with pytest.raises(ValueError, match="only these ranks call it"):
        wrapped(network(), process_set=other)
    with (
        mock.patch.object(Ranks, "host_numbers", return_value=[0, 1, 1, 0]),
        pytest.raises(UnsupportedError, match=r"DiLoCo needs a process set of the ranks \[0, 3\].*daso_process_sets"),
    ):
        wrapped(network(), ranks_per_node=None)


# -- what is refused -----------------------------------------------------------------------------------------------


@cases.each({"gradients": "DistributedOptimizer", "neighbours": "EventGraDOptimizer", "momentum": "CompressedAdam"})
def another_optimizer_on_one_rank_is_named(other) -> None:
    if hvd.size() == 1:
        return
    model = network()

    def wrap() -> None:
        if hvd.rank() != 1:
            wrapped(model)
        elif other == "CompressedAdam":
            hvd.CompressedAdam(model.named_parameters())
        else:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            getattr(hvd, other)(sgd, model.named_parameters())

    with pytest.raises(MismatchError, match=f"disagree on optimizer: rank 0 has 'DiLoCo', rank 1 has '{other}'"):
        wrap()


@cases.add
def wrong_use_is_told_on_all_ranks() -> None:
    model = network()
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="sync_every"):
            wrapped(model, sync_every=2 + hvd.rank())
        with pytest.raises(MismatchError, match="outer"):
            wrapped(model, outer=lambda ps: torch.optim.SGD(ps, lr=1.0 + hvd.rank()))
        with pytest.raises(MismatchError, match="ranks_per_node"):
            wrapped(model, ranks_per_node=1 + hvd.rank())
    optimizer = wrapped(model)
    with pytest.raises(UnsupportedError, match="distributed already"):
        hvd.DiLoCo(optimizer, model.named_parameters())
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer).step()
    with pytest.raises(TypeError, match="give a function of parameters that makes a torch optimizer"):
        wrapped(network(), outer=torch.optim.SGD(network().parameters(), lr=1.0))
    with pytest.raises(TypeError, match=r"outer\(params\) has made a int"):
        wrapped(network(), outer=lambda ps: 3)
    with pytest.raises(ValueError, match="it must have the 6 that it was given"):
        wrapped(network(), outer=lambda ps: torch.optim.SGD(ps[:1], lr=1.0))
    with pytest.raises(ValueError, match=r"fragments leave out '2.weight'"):
        wrapped(network(), fragments=[["0.weight", "0.bias"], ["3.weight", "3.bias"]])
    with pytest.raises(ValueError, match="delay must be less than"):
        wrapped(network(), delay=4)
    with pytest.raises(ValueError, match=r"pattern 'nothing\*'"):
        wrapped(network(), compression=Policy([("nothing*", OneBit())]))
    model = network()
    model[3].bias.data = model[0].bias.data[:5]
    with pytest.raises(ValueError, match="share their memory"):
        wrapped(model)


WRAPPERS = {
    "diloco": lambda sgd, named: hvd.DiLoCo(sgd, named, sync_every=2),
    "daso": lambda sgd, named: hvd.DASO(sgd, named, ranks_per_node=1),
}


@cases.each(WRAPPERS)
def the_last_wrapper_of_a_parameter_wins(wrap) -> None:
    model = network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for _ in range(2)]
    first = wrap(optimizers[0], model.named_parameters())
    train(first, model, 0, 1)
    second = wrap(optimizers[1], model.named_parameters())
    plain.broadcast_parameters(model.state_dict(), root_rank=0)
    with pytest.raises(GradientError, match="were given to another DistributedOptimizer, or another wrapper"):
        train(first, model, 1, 2)
    train(second, model, 1, 3)


@cases.each({"in a step": 2, "at the end": 1})
def ranks_with_other_numbers_of_steps_are_told_so(ahead) -> None:
    if hvd.size() == 1:
        return
    model = network()
    optimizer = wrapped(model, sync_every=2)
    train(optimizer, model, 0, 2)

    def train_and_average() -> None:
        train(optimizer, model, 2, 2 + (ahead if hvd.rank() == 0 else 0))
        optimizer.average_parameters()

    with pytest.raises(MismatchError, match=r"disagree on DiLoCo's moment: .* after 2 steps"):
        train_and_average()


# -- elastic runs --------------------------------------------------------------------------------------------------


def wrapped_and_synced(**settings):
    model = network()
    optimizer = wrapped(model, **{"fragments": 2, "delay": 1, "compression": TopK(0.2), **settings})
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    return model, optimizer, state


def plain_numbers(state):
    if isinstance(state, dict):
        return {key: plain_numbers(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain_numbers(value) for value in state]
    return state.numpy() if isinstance(state, torch.Tensor) else state


def parameters_of_ranks(model) -> dict[str, torch.Tensor]:
    return {name: everyone(p, f"of ranks.{name}") for name, p in model.named_parameters()}


def assert_mean_of(model, of_ranks, counting) -> None:
    assert_same_everywhere(model)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), of_ranks[name][counting].mean(dim=0), rtol=1e-5, atol=1e-6)


@cases.add
def steps_of_an_elastic_run_are_refused_before_a_state_is_synced() -> None:
    with in_elastic_run():
        model = network()
        optimizer = wrapped(model)
        for call in (
            lambda: train(optimizer, model, 0, 1),
            optimizer.average_parameters,
            lambda: optimizer.load_diloco_state_dict({}),
        ):
            with pytest.raises(UnsupportedError, match=r"no hvd\.elastic\.TorchState has synced this optimizer"):
                call()
        sgd = torch.optim.SGD(network().parameters(), lr=0.05)
        for settings, told in (
            ({"ranks_per_node": 2}, "Use ranks_per_node=1"),
            ({"ranks_per_node": None}, "Use ranks_per_node=1"),
            ({"process_set": plain.ProcessSet([0])}, "Horovod forgets process sets"),
        ):
            with pytest.raises(UnsupportedError, match=rf"in an elastic run: .*{told}"):
                hvd.DiLoCo(sgd, **settings)


@cases.add
def an_elastic_state_goes_back_to_its_commit_and_makes_parameters_the_mean_of_ranks() -> None:
    with in_elastic_run():
        model, optimizer, state = wrapped_and_synced()
        # the first fragment is under way after the fifth step
        train(optimizer, model, 0, 5)
        state.commit()
        kept, of_ranks, before = optimizer.diloco_state_dict(), parameters_of_ranks(model), optimizer.diloco_stats()
        assert before["under_way"] == 0
        # and the second one after the seventh
        train(optimizer, model, 5, 7)
        plain.barrier()
        state.restore()
        for name, p in model.named_parameters():
            assert torch.equal(p, of_ranks[name][hvd.rank()]), name
        again = optimizer.diloco_state_dict()
        assert again["steps"] == 5
        assert same(plain_numbers(again), plain_numbers(kept))
        state.reset()
        state.sync()
        after = optimizer.diloco_stats()
        # it has arrived, and is what all ranks go on from; the other one is their mean
        assert (after["steps"], after["under_way"], after["lost_ranks"]) == (5, None, 0)
        assert after["synchronizations"]["merged"] == before["synchronizations"]["merged"] + 2
        assert_same_everywhere(model)
        second = dict(list(model.named_parameters())[-2:])
        for name, p in second.items():
            torch.testing.assert_close(p.detach(), of_ranks[name].mean(dim=0), rtol=1e-5, atol=1e-6)
        train(optimizer, model, 5, 12)
        optimizer.average_parameters()
        assert_same_everywhere(model)


@cases.each({"of another commit": "commit", "that has diverged": "diverged"})
def a_rank_is_not_in_the_mean(which) -> None:
    if hvd.size() == 1:
        return
    with in_elastic_run():
        model, optimizer, state = wrapped_and_synced(delay=0)
        train(optimizer, model, 0, 5)
        state.commit()
        of_ranks = parameters_of_ranks(model)
        if hvd.rank() == hvd.size() - 1:
            if which == "commit":
                state._commits -= 1
            else:
                next(model.parameters()).data.fill_(np.nan)
        state.reset()
        state.sync()
        assert_mean_of(model, of_ranks, slice(hvd.size() - 1))
        assert optimizer.diloco_stats()["lost_ranks"] == (which == "commit")


@cases.add
def ranks_that_join_an_elastic_run_with_other_settings_are_told_so() -> None:
    if hvd.size() == 1:
        return
    with in_elastic_run():
        model = network()
        optimizer = wrapped(model, sync_every=4 + hvd.rank() // (hvd.size() - 1))
        state = hvd.elastic.TorchState(model, optimizer)
        with pytest.raises(MismatchError, match="schedule"):
            state.sync()
