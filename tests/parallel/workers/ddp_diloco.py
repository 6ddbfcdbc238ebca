"""DiLoCo over process groups, on real ranks that torchrun has started; what it computes is that of the Horovod form."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import zlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hvd_compress import OneBit, TopK, ddp
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from tests.diloco_golden import RUNS, check_trajectory
from tests.diloco_oracle import Oracle
from tests.parallel.cases import Cases

FRAMEWORK = "distributed"
cases = Cases()


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 60), torch.nn.Tanh(), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 5)
    )


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(16, 30))).float()
    return model(x).square().mean()


def wrapped(model: torch.nn.Module, **settings: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return ddp.DiLoCo(sgd, model.named_parameters(), **{"sync_every": 4, **settings})


def train(optimizer: Any, model: torch.nn.Module, begin: int, end: int, rank: int | None = None) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank() if rank is None else rank).backward()
        optimizer.step()


def bits(model: torch.nn.Module) -> int:
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


def check_same_everywhere(model: torch.nn.Module) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bits(model))
    assert len(set(everyone)) == 1, everyone


@cases.each(RUNS)
def trajectories_of_another_implementation_are_followed_exactly(golden: dict[str, Any]) -> None:
    check_trajectory(ddp.DiLoCo, golden)


@cases.add
def ranks_follow_the_definition() -> None:
    """All ranks in this process, with torch's own optimizers; 13 steps of float32, summed in another order."""
    model, size = network(), dist.get_world_size()
    optimizer = wrapped(model, sync_every=6, fragments=2, delay=2, alpha=0.5)
    models = [network() for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    start = {name: p.detach().numpy() for name, p in models[0].named_parameters()}
    local_steps = optimizer._local_steps
    cut = [[local_steps.parameters.tensors[n].name for n in f.numbers] for f in local_steps.member._fragments]
    oracle = Oracle(start, size, cut, 6, 2, 0.5)
    for step in range(13):
        train(optimizer, model, step, step + 1)
        for rank, (m, sgd) in enumerate(zip(models, optimizers, strict=True)):
            train(sgd, m, step, step + 1, rank)
            oracle.local[rank] = {name: p.detach().numpy().copy() for name, p in m.named_parameters()}
        oracle.synchronize()
        for m, values in zip(models, oracle.local, strict=True):
            for name, p in m.named_parameters():
                p.data.copy_(torch.from_numpy(values[name]))
        for (name, p), q in zip(model.named_parameters(), models[dist.get_rank()].parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=2e-5), (step, name)


RESUMED: dict[str, dict[str, Any]] = {
    "fragments": {"fragments": 2, "alpha": 0.5},
    "sparseloco": {
        "compression": TopK(chunk=256, ratio=1 / 16, value_bits=2), "feedback_decay": 0.95,
        "outer": lambda params: torch.optim.SGD(params, lr=1.0),
    },
}  # fmt: skip


@cases.each(RESUMED)
def training_makes_progress_and_goes_on_from_a_state(settings: dict[str, Any]) -> None:
    model, other = network(), network()
    make = {"sync_every": 6, "delay": 2, **settings}
    optimizer = wrapped(model, named_buffers=model.named_buffers(), **make)
    first = loss_of(model, 99, 0).item()
    train(optimizer, model, 0, 11)
    assert optimizer.diloco_stats()["under_way"] is not None
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), optimizer.diloco_state_dict()], saved)
    train(optimizer, model, 11, 25)
    saved.seek(0)
    of_model, of_inner, of_diloco = torch.load(saved, weights_only=True)
    again = wrapped(other, **make)
    other.load_state_dict(of_model)
    again.load_state_dict(of_inner)
    again.load_diloco_state_dict(of_diloco)
    train(again, other, 11, 25)
    assert bits(model) == bits(other)
    with pytest.raises(StateError):
        again.load_diloco_state_dict({**of_diloco, "steps": -1})
    optimizer.average_parameters()
    check_same_everywhere(model)
    assert loss_of(model, 99, 0) < first
    stats = optimizer.diloco_stats()
    assert stats["nodes"] == dist.get_world_size()
    assert stats["bytes_between_nodes"] > 0


@cases.add
def schedulers_hooks_and_a_scaler_work_as_on_the_optimizer_inside() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    # one that is made before, and one that is made after wrapping
    before = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = ddp.DiLoCo(sgd, model.named_parameters(), sync_every=2)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    train(optimizer, model, 0, 1)
    before.step()
    after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4)
    for step in range(1, 8):
        optimizer.zero_grad()
        is_bad = step == 3 and dist.get_rank() == 0
        scaler.scale(loss_of(model, step, dist.get_rank()) * (float("inf") if is_bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(seen) == (7 if dist.get_rank() == 0 else 8)
    # torch lays its hooks anew where a state is loaded
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, model, 8, 10)
    assert len(seen) == (9 if dist.get_rank() == 0 else 10)
    stats = optimizer.diloco_stats()
    assert (stats["steps"], stats["synchronizations"]) == (10, {"sent": 5, "merged": 5, "not_finite": 0})
    check_same_everywhere(model)


@cases.add
def wrong_use_is_told_on_all_ranks() -> None:
    model = network()
    with pytest.raises(MismatchError, match="sync_every"):
        wrapped(model, sync_every=2 + dist.get_rank())
    with pytest.raises(MismatchError, match="outer"):
        wrapped(model, outer=lambda params: torch.optim.SGD(params, lr=1.0 + dist.get_rank()))
    with pytest.raises(TypeError, match="around a Sequential: give a torch optimizer"):
        ddp.DiLoCo(model)
    with pytest.raises(ValueError, match="delay must be less than"):
        wrapped(model, delay=4)
    optimizer = wrapped(model, compression=OneBit())
    with pytest.raises(UnsupportedError, match="wrapped already"):
        ddp.DiLoCo(optimizer)
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    train(optimizer, model, 0, 4)

    def train_and_average() -> None:
        train(optimizer, model, 4, 4 + (dist.get_rank() == 0))
        optimizer.average_parameters()

    with pytest.raises(MismatchError, match=r"disagree on DiLoCo's moment: .* after 4 steps"):
        train_and_average()
    model[0].weight.data += dist.get_rank()
    optimizer = wrapped(model)
    with pytest.raises(MismatchError, match="start from equal parameters"):
        train(optimizer, model, 0, 4)


@cases.add
def a_group_of_some_ranks_trains_apart() -> None:
    mine: Any = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = network()
    optimizer = wrapped(model, process_group=mine)
    # alone: ranks may make other numbers of steps
    train(optimizer, model, 0, 4 + 4 * dist.get_rank())
    assert optimizer.diloco_stats()["nodes"] == 1
    other: Any = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(ValueError, match="not in process_group: only its ranks call it"):
            wrapped(network(), process_group=other)


@cases.add
def an_optimizer_that_is_gone_leaves_no_threads() -> None:
    def threads() -> int:
        return sum(t.name.startswith("hvd_compress.ddp") for t in threading.enumerate())

    gc.collect()
    before = threads()
    model = network()
    optimizer = wrapped(model)
    train(optimizer, model, 0, 5)
    assert threads() > before
    del optimizer
    gc.collect()
    deadline = time.monotonic() + 10
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() <= before
