"""`broadcast_optimizer_state` and `broadcast_parameters`: all ranks get what one rank has, which stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as horovod
import torch
from horovod.common.exceptions import HorovodInternalError

import hvd_compress.torch as hvd
from hvd_compress import OneBit
from hvd_compress.errors import MismatchError
from tests.parallel.cases import Cases
from tests.parallel.workers.common import raises

cases = Cases()
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def in_two_groups(params: Iterable[Any]) -> torch.optim.Optimizer:
    first, *rest = params
    groups = [{"params": [first], "lr": 0.3 + horovod.rank()}, {"params": rest, "momentum": 0.5, "label": "rest"}]
    return torch.optim.SGD(groups, lr=0.1)


def on_rank(of_first: float) -> float:
    """A setting that differs from rank to rank."""
    return of_first * (horovod.rank() + 1)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=on_rank(0.05)),
    "momentum": lambda params: torch.optim.SGD(
        params, lr=on_rank(0.02), momentum=0.9, nesterov=True, weight_decay=on_rank(0.1)
    ),
    "groups": in_two_groups,
    "adam": lambda params: torch.optim.Adam(params, lr=on_rank(0.01), betas=(0.9, 0.99 - 0.1 * horovod.rank())),
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True, weight_decay=on_rank(0.1)),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(on_rank(0.1)), foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=on_rank(0.1), weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.3),
    "asgd": lambda params: torch.optim.ASGD(params, weight_decay=0.1),
    "rprop": lambda params: torch.optim.Rprop(params),
    "nadam": lambda params: torch.optim.NAdam(params),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=on_rank(0.1), max_iter=3),
}
WRAPPERS: dict[str, Callable[[Any, torch.nn.Module], Any]] = {
    "plain": lambda optimizer, model: optimizer,
    "one-bit": lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters(), OneBit()),
    "dense": lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters()),
    "eventgrad": lambda optimizer, model: hvd.EventGraDOptimizer(optimizer, model.named_parameters()),
}
HAVE_STATE: dict[str, Callable[[int, int], bool]] = {
    "root": lambda rank, root: rank == root,
    "others": lambda rank, root: rank != root,
    "all": lambda rank, root: True,
    "none": lambda rank, root: False,
}
SETTINGS = {
    f"{name}, {wrapper}, state on {have}": (make, WRAPPERS[wrapper], HAVE_STATE[have], i)
    for name, make in OPTIMIZERS.items()
    for wrapper in (WRAPPERS if name == "momentum" else ["plain", "one-bit"] if name in ("sgd", "adam") else ["plain"])
    for i, have in enumerate(HAVE_STATE)
}


def network(dtype: torch.dtype = torch.float32, contiguous: bool = False) -> torch.nn.Module:
    """Other weights on each rank, some of them not contiguous unless said otherwise."""
    torch.manual_seed(horovod.rank())
    head = torch.nn.Linear(64, 8)
    if not contiguous:
        head.weight.data = head.weight.data.t().contiguous().t()
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), head, torch.nn.BatchNorm1d(8)).to(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, dtype: torch.dtype) -> None:
    for _ in range(steps):
        x = torch.randn(4, 3, 6, 6, dtype=dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).float().square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def check_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), where
        return
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            check_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            check_same(a, b, f"{where}[{i}]")
    else:
        assert found == expected, (where, found, expected)


def check_is_of(value: Any, root: int) -> None:
    """Fail unless this rank's value is that of the root."""
    check_same(value, horovod.allgather_object(value, name="of_all")[root])


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_broadcast(
    make: Make, wrap: Callable[[Any, Any], Any], has_state: Callable[[int, int], bool], order: int, dtype: torch.dtype
) -> None:
    root, rank = (horovod.size() - 1, 0)[order // 2], horovod.rank()
    # LBFGS of torch views gradients as vectors
    model = network(dtype, contiguous=make is OPTIMIZERS["lbfgs"])
    inner = make(model.parameters())
    if has_state(rank, root):
        train(model, inner, 2, dtype)
    if rank == root:
        # it leaves "initial_lr" in the groups of this rank
        torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer = wrap(inner, model)
    groups, gradients = list(optimizer.param_groups), [p.grad for p in model.parameters()]
    copies = [None if g is None else g.clone() for g in gradients]
    kept = copy.deepcopy(optimizer.state_dict()), values_of(model)

    def state() -> None:
        before = values_of(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        check_same(values_of(model), before)

    def parameters() -> None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)

    for broadcast in (state, parameters) if order % 2 else (parameters, state):
        broadcast()
    check_is_of(optimizer.state_dict(), root)
    check_is_of(values_of(model), root)
    if rank == root:
        check_same((optimizer.state_dict(), values_of(model)), kept)
    assert all(group is other for group, other in zip(optimizer.param_groups, groups, strict=True))
    for p, gradient, its_copy in zip(model.parameters(), gradients, copies, strict=True):
        assert p.grad is gradient or (gradient is None and not p.grad.any())
        assert gradient is None or torch.equal(gradient, its_copy)
    # the ranks stay equal from then on
    torch.manual_seed(5)
    if wrap is not WRAPPERS["eventgrad"]:
        train(model, optimizer, 2, dtype)
        check_is_of(values_of(model), root)
        check_is_of(optimizer.state_dict(), root)


def shows(setting: str) -> bool:
    """Two optimizers have their state on all kinds of ranks; the others on the root, as it is after a broken start."""
    return setting.startswith(("adam, plain", "momentum, one-bit")) or setting.endswith("state on root")


@cases.each(SETTINGS, witnesses=list(filter(shows, SETTINGS)))
def all_ranks_get_what_the_root_has(setting: tuple[Any, Any, Any, int]) -> None:
    check_broadcast(*setting, torch.float32)


@cases.each({"sgd": OPTIMIZERS["momentum"], "adam": OPTIMIZERS["adam"]})
def states_in_bfloat16_are_broadcast(make: Make) -> None:
    check_broadcast(make, WRAPPERS["one-bit"], HAVE_STATE["root"], 0, torch.bfloat16)


@cases.add
def states_of_any_structure_are_broadcast() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second, *_ = model.parameters()
    if horovod.rank() == 0:
        optimizer.state[first] = {
            "step": torch.tensor(3.0), "wide": first.detach().double(), "mask": first > 0, "absent": None, "on": True,
            "label": "x", "nested": {"list": [torch.arange(3), 2], "pair": (torch.tensor(1.5 + 2j), "y")},
            "bits": torch.ones(2, dtype=torch.bfloat16),
        }  # fmt: skip
        optimizer.state["of all"] = {"count": torch.tensor([7])}
        optimizer.param_groups[0]["schedule"] = {"warmup": [1, 2]}
    else:
        optimizer.state[first] = {"wide": torch.zeros(1), "only here": torch.ones(2)}
        optimizer.state[second] = {"step": 5}
        optimizer.param_groups[0]["only here"] = 1
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    check_is_of(optimizer.state_dict(), 0)
    assert optimizer.state[first]["nested"]["pair"][0] == torch.tensor(1.5 + 2j)
    assert optimizer.state["of all"]["count"].tolist() == [7]
    assert second not in optimizer.state
    assert "only here" not in optimizer.param_groups[0]


@cases.add
def a_state_that_would_have_to_be_unpickled_is_refused_on_all_ranks() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if horovod.rank() == 0:
        optimizer.param_groups[0]["schedule"] = print
    for root in range(horovod.size()):
        if root == 0:
            raises(TypeError, lambda: hvd.broadcast_optimizer_state(optimizer, 0), "['schedule']", "never unpickled")
        else:
            hvd.broadcast_optimizer_state(optimizer, root)
    assert "schedule" not in optimizer.param_groups[0]


@cases.add
def frozen_parameters_need_no_state() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=on_rank(0.1))
    if horovod.rank() == 0:
        train(model, optimizer, 1, torch.float32)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    check_is_of(optimizer.state_dict(), 0)


@cases.add
def ranks_with_other_parameters_are_told() -> None:
    width = 3 + (horovod.rank() == horovod.size() - 1)
    layer = torch.nn.Linear(3, width)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    raises(MismatchError, lambda: hvd.broadcast_optimizer_state(optimizer, 0), "parameter groups", "rank 0")
    same = torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1)
    raises(MismatchError, lambda: hvd.broadcast_optimizer_state(same, int(width == 4)), "root_rank")
    raises(HorovodInternalError, lambda: hvd.broadcast_parameters(layer.state_dict(), 0), "'bias'")
    raises(TypeError, lambda: hvd.broadcast_optimizer_state(layer, 0), "Linear", "torch.optim")


@cases.add
def what_is_no_tensor_is_refused_by_name() -> None:
    raises(ValueError, lambda: hvd.broadcast_parameters(torch.ones(3), 0), "state_dict")
    raises(TypeError, lambda: hvd.broadcast_parameters({"extra": {"a": 1}}, 0), "'extra'", "broadcast_object")
    raises(TypeError, lambda: hvd.broadcast_parameters(torch.nn.LazyLinear(3).state_dict(), 0), "'bias'", "once")
    x = torch.full((2,), float(horovod.rank()))
    hvd.broadcast_parameters({"nothing": None, "x": x}, 0)
    assert x.tolist() == [0.0, 0.0]
