"""With one rank nothing is exchanged or compressed, and everything can still be called."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import AdaGrad, OneBit, TopK
from hvd_compress.errors import StateError
from tests.parallel.cases import Cases
from tests.parallel.workers.common import COMPRESSORS, Net, bytes_of, loss_of, numbers, raises, train

cases = Cases()


def wrap(model: torch.nn.Module, compression: Any = None, **settings: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), compression or OneBit(), min_numel=0, **settings)


@cases.each({**COMPRESSORS, "none": hvd.Compression.none, "fp16": hvd.Compression.fp16})
def training_is_that_of_the_wrapped_optimizer(compressor: Any) -> None:
    assert horovod.size() == 1
    model, twin = Net(), Net()
    optimizer = wrap(model, compressor)
    train(model, optimizer, range(3), check=lambda step: None)
    local = torch.optim.SGD(twin.parameters(), lr=0.125, momentum=0.9)
    train(twin, local, range(3), check=lambda step: None)
    assert bytes_of(model.parameters()) == bytes_of(twin.parameters())
    assert optimizer.compression_stats()["total"]["bytes_sent"] == 0


@cases.add
def everything_can_be_called() -> None:
    model = Net()
    optimizer = wrap(model, groups=2, backward_passes_per_step=2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.set_backward_passes_per_step(1)
    optimizer.set_loss_scale(2.0)
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)

    def closure() -> Any:
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.compression_state_dict()
    optimizer.load_compression_state_dict(state)
    entry = {"shape": [1], "values": torch.ones(1)}
    raises(
        StateError,
        lambda: optimizer.load_compression_state_dict({**state, "residuals": {"w": entry}}),
        "is not compressed here",
    )


@cases.add
def adagrad_is_torchs() -> None:
    """Around plain SGD, with no exchange: nothing else would make it AdaGrad."""
    model, twin = Net(), Net()

    def wrapped() -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=0.125)
        return hvd.DistributedOptimizer(sgd, model.named_parameters(), OneBit(), adagrad=AdaGrad(1e-6))

    optimizer = wrapped()
    for step in range(4):
        scale = 2.0**step
        optimizer.set_loss_scale(scale)
        (scale * loss_of(model, step)).backward()
        optimizer.synchronize()
        for p in model.parameters():
            p.grad /= scale
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            state, values = optimizer.compression_state_dict(), copy.deepcopy(model.state_dict())
            (loss_of(model, 9) * float("inf")).backward()
            optimizer.step()
            after = optimizer.compression_state_dict()["accumulators"]
            assert all(torch.equal(e["values"], after[n]["values"]) for n, e in state["accumulators"].items())
            optimizer.zero_grad()
            # goes on in another optimizer
            model.load_state_dict(values)
            optimizer = wrapped()
            optimizer.load_compression_state_dict(state)
    local = torch.optim.Adagrad(twin.parameters(), lr=0.125, eps=1e-6)
    train(twin, local, range(4), check=lambda step: None)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def owing(owed: dict[str, torch.Tensor], **entries: Any) -> dict[str, Any]:
    """A state for one rank, which several have saved."""
    residuals = {n: {"shape": list(v.shape), "values": v.reshape(-1).clone()} for n, v in owed.items()}
    return {
        "format": 1, "size": 1, "rank": 0, "steps": 3, "residuals": residuals, "owner_residuals": {}, **entries,
    }  # fmt: skip


def combined(model: torch.nn.Module, optimizer: Any, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The gradients that a step works with."""
    optimizer.zero_grad()
    (loss_of(model, step) * scale).backward()
    optimizer.synchronize()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with optimizer.skip_synchronize():
        optimizer.step()
    return gradients


@cases.add
def what_is_owed_goes_with_the_next_gradients() -> None:
    model = Net()
    model.second.weight.requires_grad_(False)
    optimizer = wrap(model)
    optimizer.load_compression_state_dict(optimizer.compression_state_dict())
    first, second = torch.randn(model.first.weight.shape), torch.randn(model.second.weight.shape)
    state = owing({"first.weight": first, "second.weight": second})
    raises(StateError, lambda: optimizer.load_compression_state_dict({**state, "size": 2}), "redistribute(states, 1)")
    assert optimizer.compression_stats()["tensors"] == {}
    optimizer.load_compression_state_dict(state)
    norm = torch.cat([first.reshape(-1), second.reshape(-1)]).norm()
    assert abs(optimizer.compression_stats()["total"]["residual_norm"] - norm) < 1e-3 * norm
    # a step that is not finite takes nothing away
    combined(model, optimizer, 0, float("inf"))
    kept = optimizer.compression_state_dict()["residuals"]
    assert torch.equal(kept["first.weight"]["values"], first.reshape(-1))
    # what is owed is in units of the scaled loss
    optimizer.set_loss_scale(4.0)
    twin = Net()
    loss_of(twin, 1).backward()
    plain = {n: p.grad for n, p in twin.named_parameters()}
    found = combined(model, optimizer, 1, 4.0)
    torch.testing.assert_close(found["first.weight"], 4.0 * (plain["first.weight"] + first))
    assert list(optimizer.compression_state_dict()["residuals"]) == ["second.weight"]
    # of a frozen parameter it waits
    optimizer.set_loss_scale(1.0)
    model.second.weight.requires_grad_(True)
    found = combined(model, optimizer, 1)
    torch.testing.assert_close(found["second.weight"], plain["second.weight"] + second)
    torch.testing.assert_close(found["first.weight"], plain["first.weight"])
    assert optimizer.compression_state_dict()["residuals"] == {}
    assert optimizer.compression_state_dict()["steps"] == 6
    # of one without a gradient it is the gradient
    optimizer.load_compression_state_dict(state)
    optimizer.zero_grad()
    loss_of(model, 1, ["second.weight"]).backward()
    optimizer.step()
    torch.testing.assert_close(model.first.weight.grad, first)
    # a state that is refused leaves no hooks behind
    other = Net()
    untouched = wrap(other)
    raises(StateError, lambda: untouched.load_compression_state_dict(owing({"x": first})), "is not compressed here")
    for _ in range(2):
        loss_of(other, 0).backward()
    untouched.step()


@cases.add
def what_is_owed_is_a_gradient_of_adagrad() -> None:
    model, twin = Net(), Net()
    settings = {"adagrad": AdaGrad(1e-6)}
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), OneBit(), min_numel=0, **settings)
    shape = tuple(model.first.weight.shape)
    owed, update = torch.randn(shape), torch.randn(shape)
    zeros = {
        n: {"shape": list(p.shape), "start": 0, "values": torch.zeros(p.numel())} for n, p in Net().named_parameters()
    }
    late = {"first.weight": {"shape": list(shape), "start": 0, "values": update.reshape(-1)}}
    state = owing({"first.weight": owed}, owner_residuals=late, accumulators=zeros)
    optimizer.load_compression_state_dict(state)
    loss_of(model, 0).backward()
    optimizer.step()
    local = torch.optim.Adagrad(twin.parameters(), lr=0.125, eps=1e-6)
    loss_of(twin, 0).backward()
    twin.first.weight.grad += owed
    local.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    after = optimizer.compression_state_dict()
    assert after["residuals"] == {}
    # what owners owe are updates, which wait for owners
    assert torch.equal(after["owner_residuals"]["first.weight"]["values"], update.reshape(-1))


@cases.each(
    {
        "CompressedAdam": lambda model: hvd.CompressedAdam(
            model.parameters(), 0.1, warmup_steps=1, compression=OneBit(), named_parameters=model.named_parameters()
        ),
        "DGC": lambda model: hvd.DGC(
            model.parameters(), 0.1, compression=TopK(0.01), named_parameters=model.named_parameters()
        ),
        "DeMo": lambda model: hvd.DeMo(model.parameters(), 0.1, named_parameters=model.named_parameters()),
        "Signum": lambda model: hvd.Signum(model.parameters(), 0.1, named_parameters=model.named_parameters()),
    }
)
def momentum_that_is_owed_goes_with_the_next(make: Any) -> None:
    """It makes another step of the next one, and nothing is owed afterwards."""
    found = {}
    for owes in (False, True):
        model = Net()
        optimizer = make(model)
        shape = tuple(optimizer._carrier._stand_ins["first.weight"].shape)
        if owes:
            optimizer.load_compression_state_dict(owing({"first.weight": torch.full(shape, 5.0)}))
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[owes] = model
        assert "first.weight" not in optimizer.compression_state_dict()["residuals"]
    assert not torch.equal(found[False].first.weight, found[True].first.weight)
    assert torch.equal(found[False].second.weight, found[True].second.weight)


@cases.add
def allreduce_returns_what_it_got() -> None:
    x = torch.from_numpy(numbers("x", 0, 0, (53, 307)))
    assert torch.equal(hvd.allreduce(x, name="x", compression=OneBit()), x)
    assert torch.equal(hvd.grouped_allreduce([x, x], name="y", compression=OneBit())[1], x)
