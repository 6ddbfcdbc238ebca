"""FSDP2 with two replicas of two shards: dense inside, compressed between."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hvd_compress import FP16, QSGD, Adaptive, NoCompression, OneBit, Policy, TopK, ddp
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.feedback import redistribute
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.ddp import check_equal
from tests.parallel.workers.neutral import raises

FRAMEWORK = "distributed"
cases = Cases()
MIN_NUMEL = 500


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(over: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    # no size can be divided by the number of shards
    model = nn.Sequential(nn.Linear(61, 81), nn.ReLU(), nn.Linear(81, 51), nn.ReLU(), nn.Linear(51, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=over or mesh()["shard"], **settings)
    return fully_shard(model, mesh=over or mesh()["shard"], **settings)


def sharded_with_a_frozen_layer() -> Any:
    model = nn.Sequential(nn.Linear(61, 81), nn.ReLU(), nn.Linear(81, 51), nn.ReLU(), nn.Linear(51, 10))
    model[2].requires_grad_(False)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh()["shard"])
    return fully_shard(model, mesh=mesh()["shard"])


def trained(model: Any, steps: int, first: int = 0) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x, y = torch.randn(8, 61, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.full_tensor().detach() for p in model.parameters()]


@cases.each({"onebit": OneBit(), "adaptive": Adaptive(pi=16), "topk": TopK(0.02), "qsgd": QSGD(bits=4), "fp16": FP16()})
def replicas_stay_identical(compression: Any) -> None:
    model = sharded()
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], compression, min_numel=MIN_NUMEL)
    before = [p.full_tensor().detach() for p in model.parameters()]
    after = trained(model, 50)
    check_equal(after)
    assert not torch.equal(before[0], after[0])
    total = ddp.stats(model)["total"]
    assert total["steps"] == 50
    assert total["dense_bytes"] > 1.9 * total["bytes_sent"]


@cases.add
def replicas_that_begin_with_other_values_are_told_once() -> None:
    model = sharded()
    if dist.get_rank() >= 2:
        with torch.no_grad():
            dict(model.named_parameters())["2.weight"].to_local().mul_(2.0)
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    first = dist.get_rank() % 2
    with pytest.warns(UserWarning, match=rf"'2.weight' on rank {first + 2} differs from that on rank {first}.*seed"):
        trained(model, 1)
    trained(model, 1, first=1)


@cases.add
def a_state_that_one_replica_alone_loads_is_told_to_all() -> None:
    model = sharded()
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    trained(model, 2)
    state, model = ddp.state_dict(model), sharded()
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    if dist.get_rank() < 2:
        ddp.load_state_dict(model, state)
    raises(MismatchError, lambda: trained(model, 1), "steps made before")


@cases.add
def uncompressed_it_is_what_fsdp_does() -> None:
    model, native = sharded(), sharded(mesh())
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"].get_group(), NoCompression())
    for one, other in zip(trained(model, 3), trained(native, 3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@cases.add
def the_shards_are_exchanged_as_in_the_loopback() -> None:
    model, native = sharded(), sharded(mesh()["shard"])
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), exchange="two_phase", min_numel=MIN_NUMEL)
    loopback = Loopback(2, OneBit(), "two_phase")
    group = mesh()["replicate"].get_group()
    for step in range(3):
        for one in (model, native):
            one.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            one(torch.randn(8, 61, generator=generator)).square().sum().backward()
        # what FSDP has summed in this replica, filled up as it is
        name, shape = "0.weight", (41, 61)
        local = dict(native.named_parameters())[name].grad.to_local()
        full = torch.zeros(shape)
        full[: len(local)] = local
        both = [torch.empty(shape) for _ in range(2)]
        dist.all_gather(both, full, group=group)
        expected = loopback.allreduce([half.numpy() for half in both], name=name)[0]
        found = dict(model.named_parameters())[name].grad.to_local()
        np.testing.assert_array_equal(found.numpy(), expected[: len(local)])


@cases.add
def half_precision_and_rules() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    policy = Policy({"0.*": OneBit(), "2.weight": TopK(0.1)})
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], policy, min_numel=MIN_NUMEL)
    check_equal(trained(model, 5))
    exchanges = {name: tensor["exchange"] for name, tensor in ddp.stats(model)["tensors"].items()}
    assert exchanges["4.weight"] == "dense"
    assert exchanges["0.weight"] in ("allgather", "two_phase")


class Tied(nn.Module):
    """Has a parameter of its own, beside those of its children; a parameter and a module stand at two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place = nn.Parameter(torch.randn(7, 16))
        self.words, self.body, self.head = nn.Linear(16, 40), nn.Linear(40, 16), nn.Linear(16, 40)
        self.head.weight = self.words.weight
        self.again = self.body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self.words(x + self.place.sum(0)).relu())
        return self.head(self.again(self.words(x).relu()))


@cases.add
def shards_have_the_names_of_their_parameters() -> None:
    for exact in ("place", "words.weight", "body.weight", "head.bias"):
        ours = fully_shard(Tied(), mesh=mesh()["shard"])
        native = fully_shard(Tied(), mesh=mesh())
        policy = Policy({exact: NoCompression()}, default=OneBit())
        ddp.fsdp_all_reduce_hook(ours, mesh()["replicate"], policy, min_numel=1)
        for model in (ours, native):
            generator = torch.Generator().manual_seed(dist.get_rank())
            model(torch.randn(8, 16, generator=generator)).square().sum().backward()
        grads = [{name: p.grad.full_tensor() for name, p in model.named_parameters()} for model in (ours, native)]
        close = {name for name, grad in grads[0].items() if torch.allclose(grad, grads[1][name], rtol=1e-5)}
        # of 8 elements nothing is saved
        assert close - {"body.bias"} == {exact}


@cases.add
def values_that_are_replaced_after_the_hook_are_not_compared() -> None:
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(61, 81)
    model = fully_shard(layer, mesh=mesh()["shard"])
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    same = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
    model.load_state_dict(same, assign=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, 2)
    check_equal([p.full_tensor().detach() for p in model.parameters()])


@cases.add
def a_model_may_get_its_values_after_the_hook() -> None:
    with torch.device("meta"):
        late = sharded()
    ddp.fsdp_all_reduce_hook(late, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    late.to_empty(device="cpu")
    model = sharded()
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    with torch.no_grad():
        for mine, other in zip(late.parameters(), model.parameters(), strict=True):
            mine.copy_(other)
    for mine, other in zip(trained(late, 5), trained(model, 5), strict=True):
        assert torch.equal(mine, other)


@cases.add
def a_state_goes_on() -> None:
    replicas = mesh()["replicate"].get_group()
    model = sharded()
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    trained(model, 3)
    state = ddp.state_dict(model)
    again = sharded()
    ddp.fsdp_all_reduce_hook(again, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    again.load_state_dict(model.state_dict())
    ddp.load_state_dict(again, state)
    for one, other in zip(trained(model, 2, 3), trained(again, 2, 3), strict=True):
        assert torch.equal(one, other)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state, group=replicas)
    assert redistribute(states, 1)[0]["residuals"]["0.weight"]["shape"] == [41, 61]
    raises(StateError, lambda: ddp.load_state_dict(again, {**state, "size": 3}), "3 ranks")


@cases.add
def what_cannot_be_is_refused() -> None:
    hook = functools.partial(ddp.fsdp_all_reduce_hook, compression=OneBit())
    raises(UnsupportedError, lambda: hook(sharded(mesh()), mesh()["replicate"]), 'mesh=mesh["shard"]')
    raises(TypeError, lambda: hook(nn.Linear(3, 3), mesh()["replicate"]), "fully_shard")
    number = 500 + dist.get_rank()
    raises(MismatchError, lambda: hook(sharded(), mesh()["replicate"], min_numel=number), "min_numel")
    raises(TypeError, lambda: hook(sharded(), None), "give the process group")
    for group in (dist.group.WORLD, mesh()["shard"]):
        raises(ValueError, lambda group=group: hook(sharded(), group), "keep other shards")
    together = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard([together[1], together[2]], mesh=mesh()["shard"])
    fully_shard(together, mesh=mesh()["shard"])
    raises(UnsupportedError, lambda: hook(together, mesh()["replicate"]), "in a list")
    # of a module whose parameters were all frozen
    model = sharded_with_a_frozen_layer()
    hook(model, mesh()["replicate"], min_numel=MIN_NUMEL)
    trained(model, 2)
    model[2].requires_grad_(True)
    raises(GradientError, lambda: trained(model, 1), "frozen or unfrozen since")
    model = sharded()
    ddp.fsdp_all_reduce_hook(model, mesh()["replicate"], OneBit(), min_numel=MIN_NUMEL)
    # frozen since
    model[2].bias.requires_grad_(False)
    raises(GradientError, lambda: trained(model, 1), "has no gradient in this step")
