"""With one rank nothing is exchanged or compressed, and everything can still be called."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import AdaGrad, OneBit
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


@cases.add
def allreduce_returns_what_it_got() -> None:
    x = torch.from_numpy(numbers("x", 0, 0, (53, 307)))
    assert torch.equal(hvd.allreduce(x, name="x", compression=OneBit()), x)
    assert torch.equal(hvd.grouped_allreduce([x, x], name="y", compression=OneBit())[1], x)
