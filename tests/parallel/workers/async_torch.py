"""An asynchronous parameter server for torch, beside Horovod under MPI."""

from __future__ import annotations

import copy

import horovod.torch as plain
import numpy as np
import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit, Policy, TopK
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from tests.parallel.cases import Cases

cases = Cases()

PROCESS_SETS = "dynamic"


def network(seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 1)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(32, 12))).to(dtype)
    return x, x[:, :1] - 0.5 * x[:, 1:2]


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def wrapped(model: torch.nn.Module, base: torch.optim.Optimizer | None = None, **settings):
    return hvd.AsyncParameterServerOptimizer(base or momentum(model), model.named_parameters(), **settings)


def backward(model: torch.nn.Module, step: int, rank: int) -> float:
    x, y = batch(step, rank, next(model.parameters()).dtype)
    loss = (model(x) - y).float().square().mean()
    loss.backward()
    return loss.item()


def run(model, optimizer, steps: int, on_update=None, begin: int = 0) -> list[float]:
    """Serve, or train; the losses of a worker."""
    if optimizer.is_server:
        optimizer.serve(on_update)
        return []
    losses = []
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        losses.append(backward(model, step, plain.rank()))
        optimizer.step()
    return losses


def trained_bits(model) -> list[bytes]:
    return [p.detach().float().numpy().tobytes() for p in model.parameters()]


WAYS = {
    "plain": {},
    "lockstep": {"staleness": 0},
    "topk": {"compression": TopK(0.2)},
    "both-ways": {"compression": Policy([("*.weight", OneBit())]), "answer": TopK(0.5)},
    "last-serves": {"server": -1},
}


@cases.each(WAYS)
def training_goes_down_and_all_begin_with_the_servers_parameters(settings) -> None:
    # how many ranks there are is known when Horovod has started
    place = settings.get("server", 0) % plain.size()
    settings = {**settings, "server": place}
    model = network(seed=plain.rank())
    # momentum on top of stale gradients and lagging answers would diverge at this rate
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1 / plain.size()), **settings)
    assert optimizer.is_server == (plain.rank() == place)
    assert trained_bits(model) == trained_bits(network(seed=place))
    counts: list[int] = []
    losses = run(model, optimizer, 150, counts.append)
    optimizer.close()
    stats = optimizer.server_stats()
    if optimizer.is_server:
        assert stats["updates"] == 150 * (plain.size() - 1)
        assert counts == list(range(1, stats["updates"] + 1))
        # batch norm's buffers are the workers' own
        assert (model[2].running_mean == 0).all()
    else:
        assert np.mean(losses[-10:]) < 0.3 * np.mean(losses[:3]), losses
        assert not optimizer.state_dict()["state"]
        if "compression" in settings:
            assert stats["bytes_sent"] < stats["dense_bytes_sent"]


@cases.add
def one_worker_in_lockstep_is_the_optimizer_itself_bit_for_bit() -> None:
    if plain.size() != 2:
        return
    model, other = network(), network()
    for module in (model, other):
        module[0].bias.requires_grad_(False)
    optimizer, base = wrapped(model, staleness=0), momentum(other)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if optimizer.is_server else None
    theirs = torch.optim.lr_scheduler.StepLR(base, 3, 0.5)
    run(model, optimizer, 10, None if scheduler is None else lambda count: scheduler.step())
    for step in range(10):
        base.zero_grad()
        backward(other, step, 1)
        base.step()
        theirs.step()
    assert trained_bits(model) == trained_bits(other)
    if optimizer.is_server:
        mine = [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
        assert all(torch.equal(a, s["momentum_buffer"]) for a, s in zip(mine, base.state.values(), strict=True))
    optimizer.close()


@cases.add
def a_saved_training_goes_on_as_if_it_had_not_stopped() -> None:
    if plain.size() != 2:
        return
    settings = {"staleness": 0, "compression": TopK(0.1)}
    whole = network()
    optimizer = wrapped(whole, **settings)
    run(whole, optimizer, 12)
    optimizer.close()

    model = network()
    optimizer = wrapped(model, **settings)
    run(model, optimizer, 6)
    optimizer.close()
    owed, state, values = optimizer.compression_state_dict(), optimizer.state_dict(), model.state_dict()

    resumed = network(seed=1)
    base = momentum(resumed)
    if plain.rank() == 0:
        # only the server's optimizer has a state, and its parameters go to all
        resumed.load_state_dict(values)
        base.load_state_dict(state)
    else:
        # buffers are the worker's own
        resumed[2].load_state_dict(model[2].state_dict())
    again = wrapped(resumed, base, **settings)
    again.load_compression_state_dict(owed)
    run(resumed, again, 6, begin=6)
    again.close()
    assert trained_bits(resumed) == trained_bits(whole)
    with pytest.raises(StateError, match="given to rank"):
        again.load_compression_state_dict({**owed, "rank": 1 - plain.rank()})


@cases.each({"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64})
def other_types_of_parameters(dtype) -> None:
    model = network(dtype=dtype)
    # each worker's updates count in full, so the rate that converges falls with their number
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1 / plain.size()), answer=TopK(0.5))
    losses = run(model, optimizer, 60)
    optimizer.close()
    assert all(p.dtype == dtype for p in model.parameters())
    if losses:
        assert np.mean(losses[-5:]) < np.mean(losses[:5])


@cases.add
def a_parameter_without_gradient_is_not_touched() -> None:
    model = network()
    before = model[3].weight.detach().clone()
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), staleness=0)
    if optimizer.is_server:
        optimizer.serve()
    else:
        for step in range(3):
            optimizer.zero_grad()
            model[0](batch(step, plain.rank())[0]).square().mean().backward()
            optimizer.step()
    optimizer.close()
    # weight decay would move it, had it a gradient of zeros
    assert torch.equal(model[3].weight, before)
    assert not torch.equal(model[0].weight, network()[0].weight)


@cases.add
def a_gradient_that_is_not_finite_is_not_applied() -> None:
    model = network()
    optimizer = wrapped(model, staleness=0, compression=TopK(0.2))
    if optimizer.is_server:
        optimizer.serve()
        assert trained_bits(model) == trained_bits(network())
        assert all(w["not_finite"] == 1 for w in optimizer.server_stats()["workers"].values())
    else:
        backward(model, 0, plain.rank())
        model[3].bias.grad[0] = np.inf
        optimizer.step()
        assert optimizer.server_stats()["not_finite"] == 1
        residuals = optimizer.compression_state_dict()["residuals"]
        assert not any(entry["values"].any() for entry in residuals.values())
    optimizer.close()


@cases.each({"plain": False, "fused": True})
def a_scaler_unscales_before_gradients_are_sent(fused: bool) -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.5, fused=fused), staleness=0)
    if optimizer.is_server:
        optimizer.serve()
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = batch(0, plain.rank())
        scaler.scale((model(x) - y).square().mean()).backward()
        expected = [b - 0.5 * p.grad / 1024 for b, p in zip(before, model.parameters(), strict=True)]
        scaler.step(optimizer)
        scaler.update()
        # others' gradients may have been applied as well
        if plain.size() == 2:
            for p, e in zip(model.parameters(), expected, strict=True):
                assert torch.allclose(p, e, atol=1e-6)
    optimizer.close()


@cases.add
def complex_parameters_are_trained_as_pairs_of_reals() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0 + 2j, 3 - 1j]))
    optimizer = hvd.AsyncParameterServerOptimizer(torch.optim.SGD([weight], lr=0.125), staleness=0)
    if optimizer.is_server:
        optimizer.serve()
    else:
        weight.abs().square().sum().backward()
        optimizer.step()
    optimizer.close()
    if plain.size() == 2:
        # the gradient of |w|^2 is 2w
        assert torch.allclose(weight.detach(), 0.75 * torch.tensor([1.0 + 2j, 3 - 1j]))


@cases.add
def a_closure_is_called_once() -> None:
    model = network()
    optimizer = wrapped(model)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(backward(model, len(calls), plain.rank()))
        return calls[-1]

    if optimizer.is_server:
        optimizer.serve()
    else:
        assert [optimizer.step(closure) for _ in range(4)] == calls
        assert len(calls) == 4
    optimizer.close()


@cases.add
def ranks_that_disagree_are_told_so() -> None:
    last = plain.rank() == plain.size() - 1
    model = torch.nn.Linear(5 if last else 4, 1)
    with pytest.raises(MismatchError, match="disagree on parameters"):
        wrapped(model)
    with pytest.raises(MismatchError, match="disagree on compression"):
        wrapped(network(), compression=TopK(0.1) if last else OneBit())


@cases.add
def some_ranks_can_have_a_server_of_their_own() -> None:
    if plain.size() < 4:
        return
    some = plain.add_process_set([1, 2, 3])
    if plain.rank() not in (1, 2, 3):
        with pytest.raises(ValueError, match="not in process_set"):
            wrapped(network(), process_set=some)
    else:
        model = network(seed=plain.rank())
        optimizer = wrapped(model, process_set=some, server=1)
        assert optimizer.is_server == (plain.rank() == 2)
        run(model, optimizer, 5)
        optimizer.close()
        if plain.rank() == 2:
            assert optimizer.server_stats()["updates"] == 10
    plain.barrier()
    plain.remove_process_set(some)


@cases.add
def what_cannot_be_honoured_is_refused() -> None:
    model = network()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        wrapped(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="distributed already"):
        wrapped(model, hvd.DistributedOptimizer(momentum(model), model.named_parameters()))
    with pytest.raises(TypeError, match="Auto chooses exchanges"):
        wrapped(model, compression="auto")
    optimizer = wrapped(model)
    with pytest.raises(UnsupportedError, match="a copy of an asynchronous optimizer has no server"):
        copy.deepcopy(optimizer).step()
    if optimizer.is_server:
        with pytest.raises(UnsupportedError, match=r"step\(\) on rank 0, which is the server"):
            optimizer.step()
        optimizer.serve()
    else:
        with pytest.raises(UnsupportedError, match=r"serve\(\) on rank"):
            optimizer.serve()
        model[0].weight.grad = torch.zeros(20, 12).to_sparse()
        with pytest.raises(UnsupportedError, match=r"'0.weight' is sparse"):
            optimizer.step()
        model[0].weight.grad = None
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match="takes gradients, and did not when the asynchronous optimizer was made"):
            optimizer.step()
    optimizer.close()
