"""With one rank nothing is exchanged or compressed, and everything can still be called."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit
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
    raises(StateError, lambda: optimizer.load_compression_state_dict({**state, "residuals": {"w": entry}}), "one rank")


@cases.add
def allreduce_returns_what_it_got() -> None:
    x = torch.from_numpy(numbers("x", 0, 0, (53, 307)))
    assert torch.equal(hvd.allreduce(x, name="x", compression=OneBit()), x)
    assert torch.equal(hvd.grouped_allreduce([x, x], name="y", compression=OneBit())[1], x)
