"""CompressedAdam, DeMo, DGC and Signum among real ranks."""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial

import horovod.torch as plain
import numpy as np
import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive, Auto, OneBit, Percentile, Policy, RandomK, TopK
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.feedback import redistribute
from tests import adam_oracle
from tests.adam_oracle import SHAPE, STEPS, Oracle
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import in_elastic_run

cases = Cases()

ADAMS = {
    "onebit": {},
    "adaptive, renewed": {"compression": Adaptive(4), "variance": "renewed", "renewals": 2},
    "topk, two_phase": {"compression": TopK(0.05), "exchange": "two_phase", "weight_decay": 0.1},
    "policy": {"compression": Policy({"2.*": TopK(0.1)}, OneBit()), "bucket_bytes": 0},
}
DEMOS = {"allgather": {}, "hierarchical, plain": {"exchange": "hierarchical", "sign": False, "lr": 1.0}}


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30)).to(dtype)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(16, 40))).float()


def adam(model: torch.nn.Module, **settings):
    return hvd.CompressedAdam(model.named_parameters(), **{"lr": 0.01, "warmup_steps": 3, **settings})


def demo(model: torch.nn.Module, **settings):
    return hvd.DeMo(model.named_parameters(), **{"lr": 0.01, "k": 4, "chunk": 16, **settings})


def dgc(model: torch.nn.Module, **settings):
    return hvd.DGC(model.named_parameters(), **{"lr": 0.1, "compression": TopK(0.05), "min_numel": 0, **settings})


def signum(model: torch.nn.Module, **settings):
    return hvd.Signum(model.named_parameters(), **{"lr": 0.002, **settings})


def train(optimizer, model, begin: int, end: int) -> float:
    loss = torch.zeros(())
    for step in range(begin, end):
        optimizer.zero_grad()
        x = batch(step, hvd.rank()).to(model[0].weight.dtype)
        loss = (model(x) - x[:, :30]).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def train_on_all_batches(optimizer, model, steps: int) -> None:
    """Train on the batches of all ranks at once, without an exchange: what `train` has to equal."""
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            x = batch(step, rank)
            ((model(x) - x[:, :30]).square().mean() / hvd.size()).backward()
        optimizer.step()


def step_with_a_late_parameter(optimizer, model, extra: torch.Tensor, number: int) -> None:
    """One rank has no gradient of the first bias, and none has one of `extra` before step 8."""
    optimizer.zero_grad()
    model(batch(number, hvd.rank())).square().mean().backward()
    if hvd.rank() == 0:
        model[0].bias.grad = None
    if number >= 8:
        (extra * (number + hvd.rank())).sum().backward()
    optimizer.step()


def assert_same_everywhere(model, optimizer=None) -> None:
    tensors = [p.detach() for p in model.parameters()]
    if optimizer is not None:
        tensors += [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    for i, tensor in enumerate(tensors):
        of_all = plain.allgather(tensor.double()[None], name=f"momentum.same.{i}")
        assert torch.equal(of_all, of_all[:1].expand_as(of_all)), i


def values(model) -> list[bytes]:
    return [p.detach().double().numpy().tobytes() for p in model.parameters()]


# -- CompressedAdam ------------------------------------------------------------------------------------------------


@cases.add
def the_warm_up_is_adamw_with_averaged_gradients() -> None:
    model, other = network(), network()
    settings = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizer, adamw = adam(model, warmup_steps=6, **settings), torch.optim.AdamW(other.parameters(), **settings)
    train(optimizer, model, 0, 6)
    train_on_all_batches(adamw, other, 6)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert optimizer.compression_stats()["steps_by_way"] == {"warm-up": 6, "renewal": 0, "compressed": 0}


def gradients(step: int) -> list[np.ndarray]:
    return adam_oracle.gradients(step, hvd.size())


@cases.each({"frozen": ("frozen", False), "renewed": ("renewed", False), "late": ("frozen", True)})
def it_follows_the_algorithm(setting) -> None:
    variance, late = setting
    p = torch.nn.Parameter(torch.ones(SHAPE))
    optimizer = hvd.CompressedAdam(
        [("w", p)], lr=0.01, weight_decay=0.1, warmup_steps=4, variance=variance, renewals=2, exchange="two_phase",
        min_numel=0,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    oracle = Oracle(OneBit(), hvd.size(), variance == "renewed")
    for step in range(STEPS):
        of_all = adam_oracle.gradients(step, hvd.size(), late)
        p.grad = torch.from_numpy(of_all[hvd.rank()].copy())
        oracle.step(of_all, optimizer.param_groups[0]["lr"], 0.1)
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(p.detach().numpy(), oracle.x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(optimizer.state[p]["exp_avg"].numpy(), oracle.m, rtol=1e-3, atol=1e-4)
    assert optimizer.compression_stats()["steps_by_way"]["renewal"] == {"frozen": int(late), "renewed": 4}[variance]


@cases.each(ADAMS)
def ranks_learn_and_stay_equal(settings) -> None:
    model = network()
    optimizer = adam(model, **settings)
    first = train(optimizer, model, 0, 1)
    last = train(optimizer, model, 1, 40)
    assert last < 0.75 * first
    assert_same_everywhere(model, optimizer)
    stats = optimizer.compression_stats()
    assert stats["steps_by_way"]["compressed"] >= 25
    assert stats["total"]["bytes_sent"] > 0
    assert (stats["steps_by_way"]["renewal"] > 0) == ("variance" in settings)


@cases.each({"onebit": OneBit(), "topk": TopK(0.05), "adaptive": Adaptive(4)})
def elements_that_get_no_gradient_in_the_warm_up(compression) -> None:
    p = torch.nn.Parameter(torch.ones(40, 40))
    optimizer = hvd.CompressedAdam(
        [("w", p)], lr=0.01, warmup_steps=4, compression=compression, exchange="allgather", renewals=2, min_numel=0
    )
    moved = []
    for step in range(40):
        before = p.detach().clone()
        p.grad = torch.from_numpy(gradients(step)[hvd.rank()])
        # rows 20 to 29 come late, and on one rank alone; rows from 30 on get no gradient at all
        p.grad[20:] = 0.0
        if step >= 13 and hvd.rank() == 0:
            p.grad[20:30] = 1e-3
        optimizer.step()
        moved.append((p.detach() - before).abs())
        assert torch.equal(p[30:], torch.ones(10, 40))
    largest = torch.stack(moved).amax((1, 2))
    # 1 / sqrt(1 - beta2) is the most that one gradient counts
    assert largest.max() < 0.01 * 32
    late = torch.stack(moved)[:, 20:30].amax((1, 2)).nonzero().flatten()
    # gradients came at step 13; the next step with uncompressed gradients is 15
    assert late[0] == 15
    assert (p[20:30] < 1 - 0.0009).all()
    assert optimizer.compression_stats()["steps_by_way"]["renewal"] == 1
    of_all = plain.allgather(p.detach()[None], name="late")
    assert torch.equal(of_all, of_all[:1].expand_as(of_all))


@cases.each({"warm-up": 2, "compressed": 6, "with late gradients": 7})
def a_bad_number_takes_the_step_back_on_all_ranks(step) -> None:
    model, other = network(), network()
    optimizer, untouched = adam(model), adam(other)
    if step == 7:
        # their mean is 0, so that they have no variance
        for net in (model, other):
            net[0].weight.register_hook(lambda g: g * (g.abs() > 0.02))
    train(optimizer, model, 0, step)
    train(untouched, other, 0, step)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    model(batch(step, hvd.rank())).square().mean().backward()
    if hvd.rank() == hvd.size() - 1:
        model[2].weight.grad[3, 3] = torch.inf
    with pytest.warns(RuntimeWarning, match="CompressedAdam: a gradient is not finite on some rank"):
        optimizer.step()
    assert values(model) == values(other)
    after = optimizer.state_dict()
    for number, kept in before["state"].items():
        assert all(torch.equal(torch.as_tensor(after["state"][number][k]), torch.as_tensor(v)) for k, v in kept.items())
    assert optimizer.compression_stats()["steps_taken_back"] == 1
    train(optimizer, model, step, step + 4)
    train(untouched, other, step, step + 4)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    assert_same_everywhere(model, optimizer)


def saved(optimizer) -> dict:
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "own": optimizer.compression_state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@cases.each({**ADAMS, "bfloat16": {"dtype": torch.bfloat16}})
def a_state_goes_on_as_if_it_had_not_stopped(settings) -> None:
    dtype = settings.get("dtype", torch.float32)
    settings = {key: value for key, value in settings.items() if key != "dtype"}
    model = network(dtype)
    optimizer = adam(model, **settings)
    # one unit sleeps during the warm-up, and wakes on one rank before the state is saved
    model[0].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([5]), float(awake and hvd.rank() == 0)))
    awake = False
    train(optimizer, model, 0, 8)
    awake = True
    train(optimizer, model, 8, 9)
    state = saved(optimizer)
    assert "late gradients of 0.weight" in state["own"]["residuals"]
    other = copy.deepcopy(model)
    other[0].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([5]), float(hvd.rank() == 0)))
    again = adam(other, **settings)
    again.load_state_dict(state["optimizer"])
    again.load_compression_state_dict(state["own"])
    train(again, other, 9, 14)
    followed = values(other)
    del again
    model_again = adam(model, **settings)
    model_again.load_state_dict(state["optimizer"])
    model_again.load_compression_state_dict(state["own"])
    train(model_again, model, 9, 14)
    assert values(model) == followed
    assert_same_everywhere(model, model_again)


@cases.add
def states_are_divided_among_another_number_of_ranks() -> None:
    model = network()
    optimizer = adam(model)
    model[0].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([5]), float(late)))
    late = 0.0
    train(optimizer, model, 0, 3)
    late = 1.0 + hvd.rank()
    train(optimizer, model, 3, 4)
    states = hvd.allgather_object(optimizer.compression_state_dict())
    (alone,) = redistribute(states, 1)
    key = "late gradients of 0.weight"
    total = sum(state["residuals"][key]["values"].double() for state in states)
    np.testing.assert_allclose(alone["residuals"][key]["values"], total.numpy(), rtol=1e-6)
    assert alone["residuals"][key]["values"].reshape(60, 40)[5, 0] == sum(range(1, hvd.size() + 1))
    with pytest.raises(StateError, match="redistribute"):
        optimizer.load_compression_state_dict(alone)
    optimizer.load_compression_state_dict(redistribute([alone], hvd.size())[hvd.rank()])
    wrong = copy.deepcopy(states[hvd.rank()])
    wrong["residuals"][key]["shape"] = [40, 60]
    with pytest.raises(StateError, match="has shape"):
        optimizer.load_compression_state_dict(wrong)
    train(optimizer, model, 4, 8)
    assert_same_everywhere(model)


@cases.add
def elements_without_a_variance_are_known_after_a_while_of_being_frozen() -> None:
    """The second row gets no gradient in the warm-up, and is frozen when the masks of all others are made."""
    rows, other = torch.nn.Parameter(torch.ones(2, 8)), torch.nn.Parameter(torch.ones(8))
    optimizer = hvd.CompressedAdam([("rows", rows), ("other", other)], lr=0.01, warmup_steps=2, min_numel=0)

    def step(second: float = 0.0) -> None:
        rows.grad = torch.tensor([[1.0], [second]]).expand(2, 8).clone() if rows.requires_grad else None
        other.grad = torch.ones(8)
        optimizer.step()

    step()
    step()
    rows.requires_grad_(False)
    step()
    rows.requires_grad_(True)
    before = rows.detach().clone()
    step(second=1e-3)
    assert torch.equal(rows[1], before[1])
    owed = optimizer.compression_state_dict()["residuals"]
    np.testing.assert_allclose(np.asarray(owed["late gradients of rows"]["values"]).reshape(2, 8)[1], 1e-3, rtol=1e-6)
    # a renewal while they are frozen keeps what is late
    rows.requires_grad_(False)
    for _ in range(8):
        step()
    assert "late gradients of rows" in optimizer.compression_state_dict()["residuals"]


@cases.add
def a_learning_rate_may_be_a_tensor_and_states_of_nadam_are_refused() -> None:
    model = network()
    optimizer = adam(model, lr=torch.tensor(0.01))
    train(optimizer, model, 0, 2)
    of_nadam = torch.optim.NAdam(model.parameters())
    model(batch(0, 0)).square().mean().backward()
    of_nadam.step()
    with pytest.raises(StateError, match=r"momentum_decay=0\.004"):
        optimizer.load_state_dict(of_nadam.state_dict())


@cases.add
def missing_frozen_and_added_parameters_and_groups() -> None:
    model = network()
    extra = torch.nn.Parameter(torch.ones(20, 20))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    optimizer = hvd.CompressedAdam(
        groups, lr=0.01, warmup_steps=2, named_parameters=[*model.named_parameters(), ("extra", extra)]
    )
    unmoved = [p.clone() for p in model[2].parameters()]

    step = partial(step_with_a_late_parameter, optimizer, model, extra)

    for number in range(5):
        step(number)
    assert all(map(torch.equal, model[2].parameters(), unmoved))
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    for number in range(5, 8):
        step(number)
    assert torch.equal(model[0].weight, frozen)
    optimizer.add_param_group({"params": [extra]})
    for number in range(8, 12):
        step(number)
    assert (extra < 1).all()
    assert optimizer.compression_stats()["steps_by_way"] == {"warm-up": 4, "renewal": 0, "compressed": 8}
    assert "extra" in optimizer.compression_stats()["tensors"]
    assert_same_everywhere(model)


@cases.add
def ranks_that_disagree_are_told() -> None:
    model = network()
    with pytest.raises(MismatchError, match="warmup_steps"):
        adam(model, warmup_steps=3 + hvd.rank())
    with pytest.raises(MismatchError, match="sign"):
        demo(model, sign=hvd.rank() == 0)


@cases.each({"in the warm-up": 2, "after it": 6})
def a_state_that_one_rank_has_loaded_is_an_error_on_all(steps) -> None:
    model = network()
    # names of their own: what was under way when ranks were told stays so
    named = [(f"lone {steps} {name}", p) for name, p in model.named_parameters()]
    optimizer = hvd.CompressedAdam(named, warmup_steps=3)
    train(optimizer, model, 0, 1)
    state = copy.deepcopy(optimizer.state_dict())
    train(optimizer, model, 1, steps)
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    with pytest.raises(MismatchError):
        train(optimizer, model, steps, steps + 1)


@cases.add
def a_state_of_one_rank_is_broadcast() -> None:
    model = network()
    optimizer = adam(model)
    train(optimizer, model, 0, 6)
    other = network()
    again = adam(other)
    if hvd.rank() == 0:
        again.load_state_dict(optimizer.state_dict())
        other.load_state_dict(model.state_dict())
    hvd.broadcast_parameters(other.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(again, root_rank=0)
    train(again, other, 6, 10)
    assert again.compression_stats()["steps_by_way"]["compressed"] == 4
    assert_same_everywhere(other, again)


@cases.each({"adam": (adam, "exp_avg"), "dgc": (lambda model: dgc(model, warmup_steps=4), "velocity")})
def a_state_that_is_broadcast_while_ranks_train_is_taken_over(setting) -> None:
    make, _ = setting
    model = network()
    optimizer = make(model)
    train(optimizer, model, 0, 6)
    best = copy.deepcopy(optimizer.state_dict())
    train(optimizer, model, 6, 9)
    if hvd.rank() == 0:
        optimizer.load_state_dict(best)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(optimizer, model, 6, 9)
    assert_same_everywhere(model)
    assert {optimizer.state[p]["step"] for p in model.parameters()} == {9}


@cases.add
def a_grad_scaler_and_closures() -> None:
    model = network()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, hvd.rank())).square().mean()).backward()
        if step in (1, 6) and hvd.rank() == 1:
            model[0].weight.grad[0, 0] = torch.inf
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.compression_stats()["steps_taken_back"] == 2
    assert optimizer.state[model[0].weight]["step"] == 6
    assert_same_everywhere(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(batch(9, hvd.rank())).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


@cases.each({"adam": adam, "demo": demo, "dgc": dgc, "signum": signum})
def no_rank_makes_a_step_that_a_scaler_skips_though_gradients_are_clipped_by_value(make) -> None:
    model = network()
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, hvd.rank())).square().mean()).backward()
        if step in (1, 4) and hvd.rank() == 0:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        before = values(model)
        scaler.step(optimizer)
        scaler.update()
        assert (values(model) == before) == (step in (1, 4))
    assert optimizer.compression_stats()["steps_taken_back"] == 2
    assert_same_everywhere(model)


@cases.each({"adam": adam, "demo": demo, "dgc": dgc, "signum": signum})
def a_rank_on_which_nothing_is_trained_is_an_error_on_all(make) -> None:
    model = network()
    # names of their own: what was under way when ranks were told stays so
    optimizer = make(model, named_parameters=[(f"none {make.__name__} {n}", p) for n, p in model.named_parameters()])
    train(optimizer, model, 0, 5)
    if hvd.rank() == 0:
        model.requires_grad_(False)
    with pytest.raises(MismatchError, match=r"frozen, unfrozen|freeze, unfreeze"):
        optimizer.step()
    model = network()
    optimizer = make(model)
    train(optimizer, model, 0, 4)
    before = values(model)
    # on all ranks
    model.requires_grad_(False)
    optimizer.step()
    assert values(model) == before
    model.requires_grad_(True)
    train(optimizer, model, 4, 6)
    assert_same_everywhere(model)


@cases.add
def sparse_gradients_are_those_of_dense_ones() -> None:
    def rows(sparse: bool) -> torch.Tensor:
        torch.manual_seed(1)
        table = torch.nn.Embedding(200, 16, sparse=sparse)
        optimizer = hvd.CompressedAdam(table.named_parameters(), lr=0.01, warmup_steps=3)
        for step in range(8):
            optimizer.zero_grad()
            ids = torch.from_numpy(np.random.default_rng([step, hvd.rank()]).integers(0, 100, 300))
            table(ids).square().mean().backward()
            optimizer.step()
        return table.weight.detach()

    assert torch.equal(rows(sparse=True), rows(sparse=False))


@cases.add
def what_is_refused() -> None:
    model = network()
    with pytest.raises(UnsupportedError, match="Auto chooses for gradients"):
        adam(model, compression=Auto())
    with pytest.raises(ValueError, match="warmup_steps"):
        adam(model, warmup_steps=0)
    with pytest.raises(ValueError, match='must be "frozen" or "renewed"'):
        adam(model, variance="constant")
    with pytest.raises(ValueError, match="betas"):
        adam(model, betas=(0.9, 1.0))
    with pytest.raises(TypeError, match="must be real floating-point"):
        hvd.DeMo([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="names must differ"):
        hvd.DeMo(list(model.parameters()), named_parameters=[("w", p) for p in model.parameters()])
    with pytest.raises(ValueError, match=r"DeMo\(k=300"):
        demo(model, k=300)
    optimizer = adam(model)
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(UnsupportedError, match="CompressedAdam has wrapped"):
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
    later = demo(model)
    with pytest.raises(GradientError, match="were given to another"):
        train(optimizer, model, 0, 1)
    train(later, model, 0, 1)


@cases.each(
    {
        "CompressedAdam": partial(hvd.CompressedAdam, warmup_steps=2),
        "DeMo": hvd.DeMo,
        "DGC": partial(hvd.DGC, compression=TopK(0.5), momentum=0.0),
    }
)
def parameters_of_any_shape(made) -> None:
    ps = [torch.nn.Parameter(torch.ones(shape)) for shape in [(), (1,), (1, 5), (3, 1), (0,), (2, 0), (2, 3, 4)]]
    optimizer = made(ps, lr=0.01, min_numel=0)
    for _ in range(5):
        for p in ps:
            p.grad = torch.full_like(p, 1.0 + hvd.rank())
        optimizer.step()
    assert all((p < 1).all() and (p > 0.8).all() for p in ps)


# -- DeMo ----------------------------------------------------------------------------------------------------------


def cosine_matrix(n: int) -> np.ndarray:
    k, i = np.arange(n)[:, None], np.arange(n)
    return np.cos(np.pi * k * (i + 0.5) / n) * np.sqrt(np.where(k == 0, 1, 2) / n)


@cases.each({"signs": True, "values": False})
def demo_follows_the_algorithm(sign) -> None:
    p = torch.nn.Parameter(torch.ones(40, 40))
    optimizer = hvd.DeMo([p], lr=0.01, decay=0.9, weight_decay=0.1, k=3, chunk=8, sign=sign, min_numel=0)
    c = cosine_matrix(8)
    x, momenta = np.ones((40, 40)), [np.zeros((40, 40)) for _ in range(hvd.size())]
    for step in range(10):
        p.grad = torch.from_numpy(gradients(step)[hvd.rank()])
        optimizer.step()
        sent = []
        for momentum, gradient in zip(momenta, gradients(step), strict=True):
            momentum[...] = 0.9 * momentum + gradient
            mine = np.zeros((40, 40))
            for row in range(0, 40, 8):
                for column in range(0, 40, 8):
                    place = slice(row, row + 8), slice(column, column + 8)
                    coefficients = c @ momentum[place] @ c.T
                    least = np.sort(np.abs(coefficients).ravel())[-3]
                    mine[place] = c.T @ np.where(np.abs(coefficients) >= least, coefficients, 0) @ c
            momentum -= mine
            sent.append(mine)
        update = np.mean(sent, axis=0)
        x = x * (1 - 0.01 * 0.1) - 0.01 * (np.sign(update) if sign else update)
    assert (np.abs(p.detach().numpy() - x) < 1e-5).mean() > 0.999
    mine = optimizer.compression_state_dict()["residuals"]["momentum of parameter.0"]["values"]
    np.testing.assert_allclose(mine.numpy(), momenta[hvd.rank()].ravel(), atol=1e-4)


@cases.add
def an_autocast_around_a_step_of_demo_changes_nothing() -> None:
    models = network(), network()
    for model in models:
        optimizer = demo(model)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, hvd.rank())).square().mean().backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=model is models[0]):
                optimizer.step()
    assert values(models[0]) == values(models[1])


@cases.add
def a_vector_that_demo_takes_later_is_sent_like_one_from_the_start() -> None:
    found = []
    for comes_later in (False, True):
        p, vector = torch.nn.Parameter(torch.ones(40, 40)), torch.nn.Parameter(torch.ones(1000))
        optimizer = hvd.DeMo([p] if comes_later else [p, vector], lr=0.01, k=1, chunk=16, sign=False, min_numel=0)
        if comes_later:
            optimizer.add_param_group({"params": [vector]})
        for step in range(4):
            p.grad = torch.from_numpy(gradients(step)[hvd.rank()]).float()
            vector.grad = p.grad.reshape(-1)[:1000].clone()
            optimizer.step()
        found.append(vector.detach().numpy().tobytes())
        # all that has left the momentum was sent
        owed = optimizer.compression_state_dict()["residuals"]["parameter.1"]["values"]
        assert not owed.any()
    assert found[0] == found[1]


def check_learns_and_goes_on_from_a_state(make, steps: int) -> None:
    """Of an optimizer whose ranks keep a momentum of their own: training goes on to the bit from what it has saved."""
    model = network()
    optimizer = make(model)
    first = train(optimizer, model, 0, 1)
    assert train(optimizer, model, 1, steps) < first
    assert_same_everywhere(model)
    state, other = saved(optimizer), copy.deepcopy(model)
    train(optimizer, model, steps, steps + 4)
    again = make(other)
    again.load_state_dict(state["optimizer"])
    again.load_compression_state_dict(state["own"])
    train(again, other, steps, steps + 4)
    assert values(model) == values(other)
    (alone,) = redistribute(hvd.allgather_object(state["own"]), 1)
    assert "momentum of 0.weight" in alone["residuals"]


@cases.each(DEMOS)
def demo_goes_on_from_a_state(settings) -> None:
    check_learns_and_goes_on_from_a_state(partial(demo, **settings), 16)


@cases.each(DEMOS)
def a_bad_number_takes_a_step_of_demo_back(settings) -> None:
    model = network()
    optimizer = demo(model, **settings)
    train(optimizer, model, 0, 4)
    before, kept = values(model), optimizer.compression_state_dict()["residuals"]
    optimizer.zero_grad()
    model(batch(4, hvd.rank())).square().mean().backward()
    if hvd.rank() == 0:
        model[0].weight.grad[1, 1] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["DeMo: a gradient is not finite" in str(w.message) for w in caught] == [True]
    assert values(model) == before
    for name, entry in optimizer.compression_state_dict()["residuals"].items():
        torch.testing.assert_close(entry["values"], kept[name]["values"], rtol=1e-5, atol=1e-6)
    train(optimizer, model, 5, 9)
    assert all(p.isfinite().all() for p in model.parameters())
    assert_same_everywhere(model)


# -- DGC -----------------------------------------------------------------------------------------------------------

DGCS = {
    "allgather, warm-up": {"exchange": "allgather", "warmup_steps": 8},
    "percentile, nesterov": {
        "compression": Percentile(90, error_feedback=True),
        "nesterov": True,
        "weight_decay": 1e-3,
    },
    "randomk": {"compression": RandomK(0.2)},
    "small tensors uncompressed": {"min_numel": 1000, "exchange": "two_phase"},
}


class DgcOracle:
    """One parameter on all ranks, typed from algorithm 4 of the paper; its sums are those of an allgather."""

    def __init__(self, x: np.ndarray, momentum: float, nesterov: bool) -> None:
        self.x, self.momentum, self.nesterov = x.copy(), momentum, nesterov
        self.u, self.v = (np.zeros((hvd.size(), *x.shape)) for _ in range(2))

    def step(self, grads: list[np.ndarray], lr: float, decay: float, k: int) -> None:
        update = np.zeros_like(self.x)
        for u, v, g in zip(self.u, self.v, grads, strict=True):
            g = g + decay * self.x
            u[...] = self.momentum * u + g
            v += g + self.momentum * u if self.nesterov else u
            mask = np.zeros(v.size, bool)
            mask[np.argsort(-np.abs(v).ravel(), kind="stable")[:k]] = True
            mask = mask.reshape(v.shape)
            update += np.where(mask, v, 0) / hvd.size()
            u[mask] = v[mask] = 0
        self.x -= lr * update


@cases.each({"plain": (False, 0.0, 0), "nesterov, decay": (True, 0.1, 0), "warm-up": (False, 0.0, 6)})
def dgc_follows_the_algorithm(setting) -> None:
    nesterov, decay, warmup = setting
    p = torch.nn.Parameter(torch.ones(40, 40))
    optimizer = hvd.DGC(
        [("w", p)], lr=0.1, momentum=0.8, weight_decay=decay, nesterov=nesterov, compression=TopK(k=80)
        if not warmup else TopK(0.05), warmup_steps=warmup, warmup_shares=(0.2, 0.15, 0.1), exchange="allgather",
        min_numel=0,
    )  # fmt: skip
    oracle = DgcOracle(np.ones((40, 40)), 0.8, nesterov)
    kept = [320, 320, 240, 240, 160, 160] if warmup else []
    for step in range(16):
        p.grad = torch.from_numpy(gradients(step)[hvd.rank()])
        optimizer.step()
        oracle.step(gradients(step), 0.1, decay, kept[step] if step < len(kept) else 80)
        np.testing.assert_allclose(p.detach().numpy(), oracle.x, rtol=1e-4, atol=1e-4)
    own = optimizer.compression_state_dict()["residuals"]
    np.testing.assert_allclose(own["velocity of w"]["values"].numpy(), oracle.u[hvd.rank()].ravel(), atol=1e-4)
    np.testing.assert_allclose(own["w"]["values"], oracle.v[hvd.rank()].ravel(), atol=1e-4)
    sent = optimizer.compression_stats()["total"]["bytes_sent"]
    # 6 bytes for each, and 4 bytes a block and a header in each step
    assert sent <= (hvd.size() - 1) * (6 * (sum(kept) + 80 * (16 - len(kept))) + 16 * 100)


@cases.add
def dgc_of_uncompressed_tensors_is_sgd_with_momentum() -> None:
    model, other = network(), network()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    optimizer, sgd = dgc(model, min_numel=10**6, **settings), torch.optim.SGD(other.parameters(), **settings)
    train(optimizer, model, 0, 8)
    train_on_all_batches(sgd, other, 8)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@cases.each(DGCS)
def dgc_learns_and_goes_on_from_a_state(settings) -> None:
    model = network()
    optimizer = dgc(model, **settings)
    first = train(optimizer, model, 0, 1)
    # in the middle of a warm-up
    train(optimizer, model, 1, 5)
    state, other = saved(optimizer), copy.deepcopy(model)
    last = train(optimizer, model, 5, 40)
    assert last < 0.9 * first
    assert_same_everywhere(model)
    again = dgc(other, **settings)
    again.load_state_dict(state["optimizer"])
    again.load_compression_state_dict(state["own"])
    train(again, other, 5, 40)
    assert values(model) == values(other)
    (alone,) = redistribute(hvd.allgather_object(state["own"]), 1)
    assert "velocity of 0.weight" in alone["residuals"]


@cases.add
def dgc_pays_what_it_owes_where_the_share_is_so_large_that_tensors_go_dense() -> None:
    model = network()
    settings = {"warmup_steps": 8, "warmup_shares": (0.9, 0.05), "exchange": "allgather"}
    optimizer = dgc(model, **settings)
    train(optimizer, model, 0, 7)
    state, own = copy.deepcopy(optimizer.state_dict()), optimizer.compression_state_dict()
    assert torch.as_tensor(own["residuals"]["0.weight"]["values"]).abs().sum() > 0
    for loads_own_first in (False, True):
        again = dgc(other := network(), **settings)
        for load in sorted((again.load_state_dict, again.load_compression_state_dict), key=lambda f: f.__name__,
                           reverse=not loads_own_first):  # fmt: skip
            load(state if load == again.load_state_dict else own)
        train(again, other, 7, 9)
        assert_same_everywhere(other)
    # new parameters bring the warm-up back
    extra = torch.nn.Parameter(torch.ones(20, 20))
    again.add_param_group({"params": [("extra", extra)]})
    train(again, other, 9, 10)
    left = again.compression_state_dict()["residuals"]
    assert "0.weight" not in left or not torch.as_tensor(left["0.weight"]["values"]).any()
    assert_same_everywhere(other)


@cases.each({"in the warm-up": 3, "where it ends": 8, "after it": 12})
def a_bad_number_takes_a_step_of_dgc_back(step) -> None:
    model = network()
    optimizer = dgc(model, warmup_steps=8)
    train(optimizer, model, 0, step)
    before, kept = values(model), copy.deepcopy(optimizer.compression_state_dict()["residuals"])
    optimizer.zero_grad()
    model(batch(step, hvd.rank())).square().mean().backward()
    if hvd.rank() == 0:
        model[0].weight.grad[1, 1] = torch.nan
    with pytest.warns(RuntimeWarning, match="DGC: a gradient is not finite on some rank"):
        optimizer.step()
    assert values(model) == before
    for name, entry in optimizer.compression_state_dict()["residuals"].items():
        torch.testing.assert_close(
            torch.as_tensor(entry["values"]), torch.as_tensor(kept[name]["values"]), rtol=1e-5, atol=1e-6
        )
    train(optimizer, model, step, step + 9)
    assert_same_everywhere(model)


@cases.add
def a_state_of_dgc_of_one_rank_is_broadcast() -> None:
    model = network()
    optimizer = dgc(model, warmup_steps=4)
    train(optimizer, model, 0, 6)
    other = network()
    again = dgc(other, warmup_steps=4)
    if hvd.rank() == 0:
        again.load_state_dict(optimizer.state_dict())
        other.load_state_dict(model.state_dict())
    hvd.broadcast_parameters(other.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(again, root_rank=0)
    # the warm-up is over, so that each step sends as few as any later one
    train(again, other, 6, 9)
    assert_same_everywhere(other)
    assert {again.state[p]["step"] for p in other.parameters()} == {9}


@cases.each({"at first": 0, "in the warm-up": 2, "after it": 6})
def a_state_of_dgc_that_one_rank_has_loaded_is_an_error_on_all(steps) -> None:
    model = network()
    # names of their own: what was under way when ranks were told stays so
    named = [(f"lone DGC {steps} {name}", p) for name, p in model.named_parameters()]
    optimizer = hvd.DGC(named, lr=0.1, compression=TopK(0.05), warmup_steps=4, min_numel=0)
    train(optimizer, model, 0, steps)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {i: {"step": steps + 1} for i in range(len(named))}
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    with pytest.raises(MismatchError):
        train(optimizer, model, steps, steps + 1)


@cases.add
def parameters_of_dgc_rest_are_frozen_and_added() -> None:
    model = network()
    extra = torch.nn.Parameter(torch.ones(20, 20))
    optimizer = dgc(model, warmup_steps=4)

    step = partial(step_with_a_late_parameter, optimizer, model, extra)

    for number in range(5):
        step(number)
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    for number in range(5, 8):
        step(number)
    assert torch.equal(model[0].weight, frozen)
    optimizer.add_param_group({"params": [("extra", extra)]})
    # the warm-up comes back for all, and ends again
    for number in range(8, 14):
        step(number)
    # a quarter in the first of these steps, a twentieth at least in each of the others
    assert (extra < 1).sum() >= 200
    assert_same_everywhere(model)


@cases.add
def what_dgc_refuses() -> None:
    model = network()
    with pytest.raises(UnsupportedError, match="entries that are sent as they are"):
        dgc(model, compression=OneBit())
    with pytest.raises(UnsupportedError, match="error feedback"):
        dgc(model, compression=TopK(0.1, error_feedback=False))
    with pytest.raises(UnsupportedError, match="add up their gradients there"):
        dgc(model, exchange="hierarchical")
    with pytest.raises(TypeError, match="must be a compressor"):
        dgc(model, compression=Policy({"0.*": TopK(0.1)}, OneBit()))
    with pytest.raises(ValueError, match="cannot send another share"):
        dgc(model, compression=TopK(k=3), warmup_steps=5)
    with pytest.raises(ValueError, match="greater than 0 and less than 1"):
        dgc(model, warmup_shares=(0.5, 1.0))
    with pytest.raises(ValueError, match=r"DGC\(momentum=1"):
        dgc(model, momentum=1)
    with pytest.raises(MismatchError, match="warmup_steps"):
        dgc(model, warmup_steps=hvd.rank())
    with pytest.raises(MismatchError, match="ratio"):
        dgc(model, compression=TopK(0.1 + 0.1 * hvd.rank()), warmup_steps=3)


# -- Signum --------------------------------------------------------------------------------------------------------

SIGNUMS = {"two phases": {}, "server": {"exchange": "parameter_server"}, "plain signs": {"momentum": 0.0}}


@cases.each(SIGNUMS)
def signum_steps_with_what_most_ranks_want(settings) -> None:
    p = torch.nn.Parameter(torch.ones(40, 40))
    optimizer = hvd.Signum([p], lr=0.01, weight_decay=0.1, **settings)
    beta = settings.get("momentum", 0.9)
    momenta = [np.zeros((40, 40)) for _ in range(hvd.size())]
    ties = 0
    for step in range(10):
        before = p.detach().numpy().astype(np.float64)
        p.grad = torch.from_numpy(gradients(step)[hvd.rank()])
        optimizer.step()
        for momentum, gradient in zip(momenta, gradients(step), strict=True):
            momentum[...] = beta * momentum + (1 - beta) * gradient
        moved = (p.detach().numpy() - (1 - 0.01 * 0.1) * before) / -0.01
        votes = np.sum(np.sign(momenta), axis=0)
        np.testing.assert_allclose(np.abs(moved), 1, atol=1e-4)
        assert (np.sign(moved) == np.sign(votes))[votes != 0].mean() > 0.999
        ties += (votes == 0).sum()
        of_ties = np.sign(moved)[votes == 0]
        # a tie is decided at random, in both directions alike
        assert abs(of_ties.mean()) < 5 / of_ties.size**0.5
    assert ties > 0
    mine = optimizer.compression_state_dict()["residuals"]["momentum of parameter.0"]["values"]
    np.testing.assert_allclose(mine.numpy(), momenta[hvd.rank()].ravel(), atol=1e-5)
    # the server sends its answer to each of the others
    answers = hvd.size() - 1 if "exchange" in settings and hvd.rank() == 0 else 1
    assert optimizer.compression_stats()["total"]["ratio"] * answers > 15


@cases.each({"two phases": {}, "hierarchical": {"exchange": "hierarchical"}})
def signum_learns_and_goes_on_from_a_state(settings) -> None:
    check_learns_and_goes_on_from_a_state(partial(signum, **settings), 30)


@cases.add
def a_bad_number_takes_a_step_of_signum_back() -> None:
    model = network()
    optimizer = signum(model)
    train(optimizer, model, 0, 4)
    before, kept = values(model), optimizer.compression_state_dict()["residuals"]
    optimizer.zero_grad()
    model(batch(4, hvd.rank())).square().mean().backward()
    if hvd.rank() == 0:
        model[0].weight.grad[1, 1] = torch.inf
    with pytest.warns(RuntimeWarning, match="Signum: a gradient is not finite"):
        optimizer.step()
    assert values(model) == before
    for name, entry in optimizer.compression_state_dict()["residuals"].items():
        assert torch.equal(entry["values"], kept[name]["values"])
    train(optimizer, model, 5, 9)
    assert_same_everywhere(model)


@cases.each(
    {"without momentum": {}, "with momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}
)
def a_state_of_sgd_is_refused(settings) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    for made in (sgd, torch.optim.RMSprop(model.parameters()), torch.optim.Adagrad(model.parameters())):
        model(batch(0, 0)).square().mean().backward()
        made.step()
        for make in (signum, dgc, demo, adam):
            with pytest.raises(StateError, match="it is of another kind of optimizer"):
                make(network()).load_state_dict(made.state_dict())


@cases.add
def signum_takes_parameters_of_any_shape() -> None:
    ps = [torch.nn.Parameter(torch.ones(shape)) for shape in [(), (1,), (1, 5), (3, 1), (0,), (2, 0), (2, 3, 4)]]
    optimizer = hvd.Signum(ps, lr=0.01)
    for _ in range(5):
        for p in ps:
            p.grad = torch.full_like(p, 1.0 + hvd.rank())
        optimizer.step()
    for p in ps:
        torch.testing.assert_close(p, torch.full_like(p, 0.95))


@cases.add
def settings_of_signum_that_cannot_work_are_refused() -> None:
    model = network()
    with pytest.raises(UnsupportedError, match="here no owner of the sum decides the vote"):
        signum(model, exchange="allgather")
    for wrong in ({"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=rf"Signum\({next(iter(wrong))}="):
            signum(model, **wrong)
    with pytest.raises(MismatchError, match="seed"):
        signum(model, seed=hvd.rank())
    for make, wrong in (
        (signum, {"momentum": 1.5}),
        (dgc, {"lr": -1.0}),
        (demo, {"decay": 2.0}),
        (adam, {"eps": -1.0}),
    ):
        with pytest.raises(ValueError, match=rf"\({next(iter(wrong))}="):
            make(model).add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], **wrong})
    later = signum(model)
    train(later, model, 0, 1)


# -- habits --------------------------------------------------------------------------------------------------------


@cases.each(
    {
        "adam": (adam, torch.float32),
        "adam, bfloat16": (adam, torch.bfloat16),
        "demo": (demo, torch.float32),
        "dgc": (dgc, torch.float32),
        "signum": (signum, torch.float32),
    }
)
def parameters_that_were_not_broadcast_are_told(setting) -> None:
    make, dtype = setting
    model = network(dtype)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[2].weight[3, 3] += 1
    optimizer = make(model)
    with pytest.warns(UserWarning, match="parameter '2.weight' of rank 1 differs from that of rank 0"):
        train(optimizer, model, 0, 1)


@cases.add
def a_state_after_the_warm_up_tells_of_parameters_that_differ() -> None:
    model = network()
    optimizer = adam(model)
    train(optimizer, model, 0, 4)
    state = copy.deepcopy(optimizer.state_dict())
    other = network()
    again = adam(other)
    again.load_state_dict(state)
    if hvd.rank() == 1:
        with torch.no_grad():
            other[0].bias[0] += 1
    with pytest.warns(UserWarning, match="parameter '0.bias' of rank 1 differs from that of rank 0"):
        train(again, other, 4, 5)


@cases.each({"adam": adam, "demo": demo, "dgc": dgc, "signum": signum})
def a_model_may_be_converted(make) -> None:
    model = network()
    optimizer = make(model)
    train(optimizer, model, 0, 5)
    model.double()
    train(optimizer, model, 5, 8)
    assert_same_everywhere(model, optimizer if make is adam else None)
    model.bfloat16()
    train(optimizer, model, 8, 10)
    assert_same_everywhere(model, optimizer if make is adam else None)


@cases.add
def a_state_of_adamw_goes_on_and_others_are_refused() -> None:
    model, other = network(), network()
    dense = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(4):
        dense.zero_grad()
        other(batch(step, 0)).square().mean().backward()
        dense.step()
    model.load_state_dict(other.state_dict())
    optimizer = adam(model, warmup_steps=6)
    optimizer.load_state_dict(dense.state_dict())
    for step in range(4, 10):
        for net, each in ((model, optimizer), (other, dense)):
            each.zero_grad()
            # the same on all ranks, so that their mean is that of one
            net(batch(step, 0)).square().mean().backward()
            each.step()
        if step == 5:
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert optimizer.compression_stats()["steps_by_way"] == {"warm-up": 2, "renewal": 0, "compressed": 4}
    sgd = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
    for refusing, state in ((optimizer, sgd), (demo(network()), dense), (adam(network()), demo(network()))):
        before = copy.deepcopy(refusing.state_dict())
        with pytest.raises(StateError, match="it is of another kind of optimizer"):
            refusing.load_state_dict(state.state_dict())
        assert refusing.state_dict()["param_groups"] == before["param_groups"]
    maximizing = torch.optim.AdamW(other.parameters(), maximize=True)
    with pytest.raises(StateError, match="maximize=True"):
        optimizer.load_state_dict(maximizing.state_dict())
    decayed = torch.optim.Adam(other.parameters(), weight_decay=0.1)
    with pytest.raises(StateError, match=r"an Adam with weight_decay=0\.1, which is part of its moments"):
        optimizer.load_state_dict(decayed.state_dict())


# -- elastic runs --------------------------------------------------------------------------------------------------


def numbers_of(optimizer) -> dict[str, list[float]]:
    """What this rank alone keeps, by names; what is 0 counts as nothing."""
    state = optimizer.compression_state_dict()
    kinds = [state[kind] for kind in ("residuals", "owner_residuals")]
    return {f"{i}.{n}": e["values"].tolist() for i, k in enumerate(kinds) for n, e in k.items() if e["values"].any()}


ELASTIC = {
    "adam": adam,
    "adam, renewed": partial(adam, variance="renewed", renewals=2),
    "demo": demo,
    "dgc": partial(dgc, warmup_steps=8, warmup_shares=(0.2, 0.1)),
    "signum": signum,
}


@cases.each(ELASTIC)
def an_elastic_state_brings_back_what_each_rank_keeps(make) -> None:
    with in_elastic_run():
        model = network()
        optimizer = make(model)
        with pytest.raises(UnsupportedError, match=r"no hvd\.elastic\.TorchState has synced this optimizer"):
            train(optimizer, model, 0, 1)
        state = hvd.elastic.TorchState(model, optimizer)
        state.sync()
        train(optimizer, model, 0, 5)
        state.commit()
        kept = numbers_of(optimizer)
        train(optimizer, model, 5, 9)
        expected = values(model)
        state.restore()
        state.reset()
        state.sync()
        if hvd.size() == 2 and make is demo:
            # nothing is owed beside, which would have other owners
            assert numbers_of(optimizer) == kept
        train(optimizer, model, 5, 9)
        for p, q in zip(model.parameters(), expected, strict=True):
            # what owners owed is owed by senders now, and comes in another order
            np.testing.assert_allclose(p.detach().double().numpy().ravel(), np.frombuffer(q), atol=0.05)
        assert_same_everywhere(model)
        assert optimizer.compression_stats().get("lost_ranks", 0) == 0


@cases.add
def process_sets_are_refused_in_elastic_runs() -> None:
    with in_elastic_run():
        for make in (adam, demo, dgc, signum):
            with pytest.raises(UnsupportedError, match="in an elastic run: Horovod forgets process sets"):
                make(network(), process_set=plain.ProcessSet([0]))
