"""Hooks of DistributedDataParallel on real ranks that torchrun has started."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Blockwise,
    Hierarchical,
    NoCompression,
    OneBit,
    Percentile,
    Policy,
    PowerSGD,
    Threshold,
    TopK,
    ddp,
)
from hvd_compress.ddp._groups import groups_like
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.exchange import kinds
from hvd_compress.feedback import redistribute
from hvd_compress.loopback import Loopback
from hvd_compress.policy import compressor_for
from tests import close
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import COMPRESSORS_AND_EXCHANGES, numbers, raises
from tests.ranks_contract import PROGRAMS

FRAMEWORK = "distributed"
cases = Cases()

SHAPES = {"a": (48, 601), "b": (48,), "c": (37, 803), "d": (37,)}
MIN_NUMEL = 1000
STEPS = 200
TRAINED = {
    "onebit": OneBit(),
    "threshold": Threshold(0.01),
    "adaptive": Adaptive(pi=16),
    "topk": TopK(ratio=0.02),
    "percentile": Percentile(90, error_feedback=True),
    "qsgd": QSGD(bits=4),
    "fp16": FP16(),
    "bf16": BF16(),
    "powersgd": PowerSGD(rank=2),
}


# -- networks --------------------------------------------------------------------------------------------------------


class Known(nn.Module):
    """Has a loss whose gradients are `numbers`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self, step: int, only: Iterable[str] = tuple(SHAPES)) -> torch.Tensor:
        terms = [(p * gradient(n, step, p)).sum().double() for n, p in self.named_parameters() if n in only]
        return torch.stack(terms).sum()


def gradient(name: str, step: int, p: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    return torch.from_numpy(numbers(name, dist.get_rank() if rank is None else rank, step, p.shape)).to(p.dtype)


class Branches(nn.Module):
    """Uses one of its branches, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
        self.left, self.right = nn.Linear(64, 40), nn.Linear(64, 40)
        self.head = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor, ways: str) -> torch.Tensor:
        x = self.trunk(x)
        return self.head(sum(getattr(self, way)(x) for way in ways.split()))


def wrapped(module: nn.Module, compression: Any, **settings: Any) -> Any:
    """A model with a hook; settings of DDP begin with an underscore."""
    of_ddp = {name[1:]: value for name, value in settings.items() if name.startswith("_")}
    of_hook = {name: value for name, value in settings.items() if not name.startswith("_")}
    model = DistributedDataParallel(module, **of_ddp)
    ddp.register_comm_hook(model, compression, **{"min_numel": MIN_NUMEL, **of_hook})
    return model


def hook_of(model: Any) -> Any:
    return model._comm_hooks[0][1]


def use(model: Any) -> None:
    """Write to parameters, as a step does; they stay what they are."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.zeros_like(p))


def check_equal(tensors: Iterable[torch.Tensor]) -> None:
    """Fail unless all ranks hold the same bits."""
    mine = zlib.crc32(b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert len(set(everyone)) == 1, f"ranks differ: {everyone}"


def summed(values: np.ndarray) -> np.ndarray:
    """The sum over ranks, in float64."""
    total = torch.from_numpy(np.asarray(values, np.float64).copy())
    dist.all_reduce(total)
    return total.numpy()


def owed(model: Any) -> dict[str, np.ndarray]:
    """What all ranks owe of each tensor, as its sum."""
    state = ddp.state_dict(model)
    found = {}
    for name, p in model.module.named_parameters():
        mine = np.zeros(p.numel())
        for kind in ("residuals", "owner_residuals"):
            if name in state[kind]:
                values = state[kind][name]["values"].double().numpy()
                start = state[kind][name].get("start", 0)
                mine[start : start + values.size] += values
        found[name] = summed(mine)
    return found


class Account:
    """Sums up what gradients were given to a model, and what came back."""

    def __init__(self, model: Any) -> None:
        self._model = model
        named = dict(model.module.named_parameters())
        self._given = {name: np.zeros(p.numel()) for name, p in named.items()}
        self._came = {name: np.zeros(p.numel()) for name, p in named.items()}
        for name, p in named.items():
            p.register_hook(functools.partial(self._take, name))

    def _take(self, name: str, grad: torch.Tensor) -> None:
        self._given[name] += grad.to_dense().double().numpy().ravel()

    def deliver(self) -> None:
        for name, p in self._model.module.named_parameters():
            if p.grad is not None:
                self._came[name] += p.grad.double().numpy().ravel() * dist.get_world_size()

    def check(self) -> None:
        """What was sent and what is owed is what was given, to rounding."""
        left = owed(self._model)
        for name, given in self._given.items():
            total = summed(given)
            off = np.abs(self._came[name] + left[name] - total).max()
            assert off < 1e-5 * STEPS * max(1.0, np.abs(total).max()), f"{name}: {off} of {np.abs(total).max()} is lost"


# -- the contract ----------------------------------------------------------------------------------------------------


for title, program in PROGRAMS.items():

    def contract(program: Callable[[Any], None]) -> None:
        ranks = groups_like(dist.group.WORLD, None)(0)
        program(ranks)
        ranks.close()

    cases[title] = functools.partial(contract, program)


# -- bits ------------------------------------------------------------------------------------------------------------


def bits_of(compressor: Any, exchange: str, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    # nothing is divided anew where parameters may be unused
    model = wrapped(Known(dtype), compressor, exchange=exchange, _find_unused_parameters=True, **settings)
    of = {name: compressor_for(compressor, name) for name in SHAPES}
    loopbacks = {repr(each): Loopback(dist.get_world_size(), each, exchange) for each in of.values()}
    for step in range(3):
        with mock.patch.object(kinds, "saves_bytes", return_value=True):
            model(step).backward()
        parameters = dict(model.module.named_parameters())
        order = [name for bucket in hook_of(model)._plan for name in bucket]
        shared = [name for name in order if parameters[name].numel() >= MIN_NUMEL]
        arrays = [
            {n: gradient(n, step, parameters[n], rank).float().numpy() for n in shared}
            if dtype != torch.float64
            else {n: gradient(n, step, parameters[n], rank).numpy() for n in shared}
            for rank in range(dist.get_world_size())
        ]
        expected_of: dict[str, Any] = {}
        for kind, loopback in loopbacks.items():
            names = [name for name in shared if repr(of[name]) == kind]
            if names:
                of_ranks = [{name: of_rank[name] for name in names} for of_rank in arrays]
                expected_of |= loopback.grouped_allreduce(of_ranks)[0]
        for name, expected in expected_of.items():
            found = parameters[name].grad
            assert torch.equal(found, torch.from_numpy(expected).to(dtype)), f"{name} differs in step {step}"
        for name in order:
            if name not in shared:
                everyone = [gradient(name, step, parameters[name], r).double() for r in range(dist.get_world_size())]
                mean = torch.stack(everyone).mean(0)
                tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
                torch.testing.assert_close(parameters[name].grad.double(), mean, rtol=tolerance, atol=tolerance)
        check_equal(p.grad for p in parameters.values())
        model.zero_grad()
    assert ddp.stats(model)["total"]["steps"] == 3
    assert ddp.stats(model)["tensors"]["a"]["exchange"] in (exchange, f"factors, {exchange}")


@cases.each(COMPRESSORS_AND_EXCHANGES)
def the_bits_are_those_of_the_loopback(setting: Any) -> None:
    bits_of(*setting)


@cases.each({"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64})
def other_types_too(dtype: torch.dtype) -> None:
    for exchange in ("two_phase", "allgather"):
        bits_of(Adaptive(pi=16), exchange, dtype)


@cases.add
def views_of_a_bucket_too() -> None:
    bits_of(OneBit(), "two_phase", _gradient_as_bucket_view=True)


@cases.add
def several_buckets_that_share_an_exchange_too() -> None:
    for compressor in (OneBit(), TopK(ratio=0.05)):
        bits_of(compressor, "two_phase", _bucket_cap_mb=0.02)


@cases.each({"two_phase": "two_phase", "allgather": "allgather"})
def compressors_that_cannot_share_an_exchange_too(exchange: str) -> None:
    for one in SHAPES:
        for rest in (OneBit(), TopK(ratio=0.05)):
            bits_of(Policy({one: PowerSGD(rank=2)}, default=rest), exchange)
    bits_of(Policy({"a": PowerSGD(rank=2)}, default=OneBit()), exchange, _bucket_cap_mb=0.02)


@cases.add
def what_takes_how_long_changes_no_bit() -> None:
    # DDP's own hooks with two collectives each fail on Gloo where these come in another order on another rank
    settings: dict[str, Any] = {"exchange": "two_phase", "bucket_bytes": 1, "_bucket_cap_mb": 0.02}
    settings["_find_unused_parameters"] = True
    models = [wrapped(Branches(), Adaptive(pi=16), min_numel=300, **settings) for _ in range(2)]
    disturbed = hook_of(models[1]).pipeline
    chance = np.random.default_rng(dist.get_rank())

    def late(move: Callable[..., Any], *arguments: Any) -> Any:
        time.sleep(chance.uniform(0, 0.01))
        return move(*arguments)

    for ranks in (disturbed._talk, *disturbed._ranks):
        ranks.move = functools.partial(late, ranks.move)
    for step in range(6):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model in models:
            model.zero_grad()
            model(x, "left right").square().mean().backward()
            use(model)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in models), strict=True))
    assert len(hook_of(models[1]).ledger.buckets) > 2


@cases.add
def hosts_and_a_root_too() -> None:
    for exchange in ("parameter_server", "hierarchical", Hierarchical(inside=Blockwise(bits=8))):
        model = wrapped(Known(), OneBit(), exchange=exchange, _find_unused_parameters=True)
        account = Account(model)
        for step in range(4):
            model(step).backward()
            account.deliver()
            check_equal(p.grad for p in model.parameters())
            use(model)
            model.zero_grad()
        account.check()


# -- long trainings --------------------------------------------------------------------------------------------------


@cases.each(TRAINED, witnesses=["adaptive", "powersgd"])
def replicas_stay_identical_where_ddp_divides_anew(compressor: Any) -> None:
    model = wrapped(
        Branches(), compressor, exchange=exchange_of_long_trainings(), bucket_bytes=50_000, _bucket_cap_mb=0.02
    )
    plans = long_training(model, compressor, lambda step: "left right")
    if not compressor.reducible:
        # some of them share an exchange
        assert len(plans[-1]) > len(hook_of(model).ledger.buckets) > 1
    assert plans[0] != plans[-1], "DDP has not divided anew"


@cases.each(TRAINED, witnesses=["onebit", "powersgd"])
def replicas_stay_identical_where_parameters_are_unused(compressor: Any) -> None:
    exchange = exchange_of_long_trainings()
    model = wrapped(
        Branches(), compressor, exchange=exchange, bucket_bytes=1, _bucket_cap_mb=0.02, _find_unused_parameters=True
    )

    def ways(step: int) -> str:
        # on no rank, on some, on all
        return ("left", "right" if dist.get_rank() else "left", "left right")[step % 3]

    long_training(model, compressor, ways)


def exchange_of_long_trainings() -> str:
    # "auto" takes one collective for buckets as small as these, which sends more among more ranks
    return "auto" if dist.get_world_size() == 2 else "two_phase"


def long_training(model: Any, compressor: Any, ways: Callable[[int], str]) -> list[Any]:
    account = Account(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    plans = []
    # four ranks on two cores make steps slowly: the other compressors repeat what these have shown
    steps = STEPS if isinstance(compressor, OneBit | PowerSGD) else STEPS // 4
    for step in range(steps):
        x, y = torch.randn(8, 64, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        accumulates = step % 5 == 3
        with model.no_sync() if accumulates else contextlib.nullcontext():
            nn.functional.cross_entropy(model(x, ways(step)), y).backward()
        if accumulates:
            continue
        account.deliver()
        plans.append(hook_of(model)._plan)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    check_equal(model.parameters())
    if compressor.feedback:
        account.check()
    total = ddp.stats(model)["total"]
    assert total["steps"] == steps - steps // 5
    assert total["bytes_sent"] < total["dense_bytes"]
    return plans


# -- what users do ---------------------------------------------------------------------------------------------------


@cases.add
def what_no_rank_uses_stays_as_it_is() -> None:
    for settings in ({"_find_unused_parameters": True}, {"_static_graph": True}):
        model = wrapped(
            Known(), OneBit(), _bucket_cap_mb=0.02, bucket_bytes=1 if "_static_graph" in settings else 2**25, **settings
        )
        account = Account(model)
        only = ("a", "b", "d")
        steps = [tuple(SHAPES), only, only, tuple(SHAPES)] if "_static_graph" not in settings else [only] * 6
        for step, used in enumerate(steps):
            model(step, used).backward()
            assert (model.module.c.grad is not None) == ("c" in used)
            account.deliver()
            use(model)
            model.zero_grad()
        account.check()


@cases.each({"frozen": True, "unfrozen": False})
def parameters_that_change_between_wrapping_and_registering_are_told(freezes: bool) -> None:
    module = Known()
    module.b.requires_grad_(freezes)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    module.b.requires_grad_(not freezes)
    ddp.register_comm_hook(model, OneBit(), min_numel=MIN_NUMEL)
    said = "'b' asked for gradients" if freezes else "no gradient of 'b'"
    raises(GradientError, lambda: model(0).backward(), said, "then wrap the model, then register")


@cases.add
def what_no_rank_uses_may_keep_its_gradient() -> None:
    model = wrapped(Known(), OneBit(), _find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        model(step).backward()
        use(model)
    kept, left = model.module.c.grad.clone(), owed(model)["c"]
    assert np.abs(left).max() > 0
    for step in (4, 5):
        for name in ("a", "b", "d"):
            getattr(model.module, name).grad = None
        model(step, ("a", "b", "d")).backward()
        use(model)
        assert torch.equal(model.module.c.grad, kept)
        np.testing.assert_array_equal(owed(model)["c"], left)


@cases.each({"fused": ({"fused": True}, slice(None)), "of one parameter": ({}, slice(1))})
def a_step_that_leaves_parameters_as_they_are_uses_gradients(made: tuple[dict[str, bool], slice]) -> None:
    kind, which = made
    results = []
    # a fused optimizer leaves no version, and a step of no length no other value
    for settings, parameters in ((kind, which), ({"foreach": True}, slice(None))):
        model = wrapped(Known(), OneBit(), _bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(list(model.parameters())[parameters], lr=0.0, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(8):
                model(number).backward()
                optimizer.step()
                model.zero_grad()
        results.append(owed(model))
    assert results[0].keys() == results[1].keys()
    for name, left in results[0].items():
        np.testing.assert_array_equal(left, results[1][name], err_msg=name)


@cases.add
def gradients_that_are_thrown_away_are_not_owed() -> None:
    settings: dict[str, Any] = {"exchange": "allgather", "_bucket_cap_mb": 0.05}
    model = wrapped(Known(), OneBit(), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, sets_to_none: bool = True, uses: bool = True) -> None:
        optimizer.zero_grad(sets_to_none)
        model(number).backward()
        if uses:
            optimizer.step()

    for number in range(4):
        step(number)
    step(4, uses=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step(5)
    assert ["thrown away without a step" in str(w.message) for w in seen] == [True]
    # a step of an optimizer that has nothing of them left uses others
    other = nn.Parameter(torch.ones(3))
    both = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    before = owed(model)
    model(6).backward()
    model.zero_grad()
    other.grad = torch.ones(3)
    both.step()
    hook_of(model)._look_back()
    for name, left in owed(model).items():
        np.testing.assert_allclose(left, before[name], atol=1e-5, err_msg=name)
    for sets_to_none in (True, False):
        twin = wrapped(Known(), OneBit(), **settings)
        twin.module.load_state_dict(model.module.state_dict())
        ddp.load_state_dict(twin, ddp.state_dict(model))
        step(6, uses=False)
        step(7, sets_to_none)
        twin(7).backward()
        for (name, p), q in zip(model.module.named_parameters(), twin.parameters(), strict=True):
            np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), atol=1e-5, err_msg=name)
    # several passes that add up are one step
    optimizer.zero_grad()
    for number in range(8, 12):
        model(number).backward()
    optimizer.step()
    check_equal(model.parameters())


@cases.add
def a_static_graph_of_several_types_and_complex_parameters() -> None:
    class Types(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Parameter(torch.ones(48, 601)), nn.Parameter(torch.ones(37, 803, dtype=torch.float64))
            self.z = nn.Parameter(torch.ones(7, 9, dtype=torch.complex64))

        def forward(self, step: int) -> torch.Tensor:
            real = [(p * gradient(n, step, p)).sum().double() for n, p in (("a", self.a), ("c", self.c))]
            turned = torch.from_numpy(numbers("z", dist.get_rank(), step, (7, 9)))
            return torch.stack(real).sum() + (self.z * torch.complex(turned, -turned)).real.sum().double()

    for graph in (True, False):
        model, stock = wrapped(Types(), OneBit(), _static_graph=graph), DistributedDataParallel(Types())
        for step in range(5):
            for one in (model, stock):
                one.zero_grad()
                one(step).backward()
                use(one)
            torch.testing.assert_close(model.module.z.grad, stock.module.z.grad)
            check_equal(torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in model.parameters())
        assert ddp.stats(model)["total"]["residual_norm"] > 0


@cases.add
def the_first_steps_are_those_of_ddp() -> None:
    torch.manual_seed(0)
    ours = wrapped(Branches(), OneBit(), start_step=3, _bucket_cap_mb=0.02)
    stock = DistributedDataParallel(Branches(), bucket_cap_mb=0.02)
    for step in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model in (ours, stock):
            model.zero_grad()
            model(x, "left right").square().mean().backward()
        use(ours)
        same = [torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), stock.parameters(), strict=True)]
        assert all(same) == (step < 3), step
    assert ddp.stats(ours)["total"]["steps"] == 5


@cases.add
def a_state_that_one_rank_alone_loads_is_told_to_all() -> None:
    model = wrapped(Branches(), OneBit())
    for _ in range(2):
        model(torch.ones(4, 64), "left right").square().mean().backward()
        use(model)
    again = wrapped(Branches(), OneBit(), start_step=2)
    if dist.get_rank() == 0:
        ddp.load_state_dict(again, ddp.state_dict(model))
    loss = again(torch.ones(4, 64), "left right").square().mean()
    raises(MismatchError, loss.backward, "steps made before")


@cases.each({"none": (NoCompression(), torch.float32), "fp16": (FP16(), torch.float16)})
def what_goes_uncompressed_goes_as_ddp_sends_it(setting: tuple[Any, torch.dtype]) -> None:
    compression, kind = setting
    model, stock = wrapped(Known(), compression), DistributedDataParallel(Known())
    if kind == torch.float16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        stock.register_comm_hook(None, fp16_compress_hook)
    for step in range(3):
        for one in (model, stock):
            one.zero_grad()
            one(step).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), stock.parameters(), strict=True))
    # twice: once as it came, and divided by hand
    sent = ddp.stats(model)["total"]
    assert sent["dense_bytes"] == sent["bytes_sent"] * 4 // kind.itemsize


@cases.add
def a_bad_number_takes_the_whole_step_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    model = wrapped(Known(), OneBit(), scaler=scaler, bucket_bytes=1, _bucket_cap_mb=0.05, _find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        scaler.scale(model(step)).backward()
        optimizer.zero_grad()
    before = copy.deepcopy(ddp.state_dict(model))
    weights = [p.detach().clone() for p in model.parameters()]
    loss = scaler.scale(model(2))
    if dist.get_rank() == dist.get_world_size() - 1:
        # in one of several buckets, on one rank
        loss = loss + (model.module.a * float("inf")).sum()
    loss.backward()
    assert len(hook_of(model).ledger.buckets) > 1
    assert not model.module.a.grad.isfinite().any()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    after = ddp.state_dict(model)
    for kind in ("residuals", "owner_residuals"):
        for name, entry in after[kind].items():
            was = before[kind].get(name)
            close.check_taken_back(entry["values"].numpy(), None if was is None else was["values"].numpy(), 200.0)
    # what is owed is in units of the scaled gradients
    owed_before = {name: values / 4.0 for name, values in owed(model).items()}
    optimizer.zero_grad()
    scaler.scale(model(3)).backward()
    came = {name: p.grad.double().numpy().ravel() / 2.0 for name, p in model.module.named_parameters()}
    for name, left in owed(model).items():
        given = summed(gradient(name, 3, getattr(model.module, name)).double().numpy().ravel())
        np.testing.assert_allclose(
            came[name] * dist.get_world_size() + left / 2.0, given + owed_before[name], atol=1e-4 * 20
        )


@cases.add
def a_state_of_scaled_losses_needs_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = wrapped(Known(), OneBit(), scaler=scaler)
    for step in range(2):
        scaler.scale(model(step)).backward()
        use(model)
    state, left = ddp.state_dict(model), owed(model)
    without = wrapped(Known(), OneBit())
    raises(StateError, lambda: ddp.load_state_dict(without, state), "saved at a loss scale of 4")
    assert not any(values.any() for values in owed(without).values())
    # losses are not scaled any more
    twin = wrapped(Known(), OneBit(), scaler=torch.amp.GradScaler("cpu", enabled=False))
    ddp.load_state_dict(twin, state)
    twin(2).backward()
    for name, p in twin.module.named_parameters():
        given = summed(gradient(name, 2, p).double().numpy().ravel()) + left[name] / 4.0
        came = p.grad.double().numpy().ravel() * dist.get_world_size()
        np.testing.assert_allclose(came + owed(twin)[name], given, atol=1e-4, err_msg=name)


@cases.add
def ranks_that_have_joined_pay_what_they_owe() -> None:
    model = wrapped(Known(), OneBit())
    account = Account(model)
    with Join([model]):
        for step in range(3 + 2 * dist.get_rank()):
            model(step).backward()
            account.deliver()
            use(model)
            model.zero_grad()
    most = 3 + 2 * (dist.get_world_size() - 1)
    # ranks that have left saw no results: the last one saw all
    if dist.get_rank() != dist.get_world_size() - 1:
        account._came = {name: np.zeros_like(values) for name, values in account._came.items()}
    came = {name: summed(values) for name, values in account._came.items()}
    left = owed(model)
    for name, given in account._given.items():
        np.testing.assert_allclose(came[name] + left[name], summed(given), atol=1e-3, err_msg=f"{name} {most}")


@cases.add
def a_join_with_another_divisor_is_refused() -> None:
    model = wrapped(Known(), OneBit())

    def train() -> None:
        with Join([model], divide_by_initial_world_size=False):
            model(0).backward()

    raises(UnsupportedError, train, "divide_by_initial_world_size=True")


@cases.add
def a_compiled_model_keeps_its_names() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # what compiles is not at issue, and takes a compiler
    inner = torch.compile(net, backend="eager")
    model = wrapped(inner, OneBit())
    outer = torch.compile(wrapped(nn.Linear(64, 32), OneBit()), backend="eager")
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step + 7 * dist.get_rank()))
        model(x).square().sum().backward()
        outer(x).square().sum().backward()
    assert sorted(ddp.state_dict(model)["residuals"]) == ["0.weight"]
    assert sorted(ddp.state_dict(outer)["residuals"]) == ["weight"]
    check_equal(p.grad for p in [*model.parameters(), *outer.parameters()])


@cases.add
def some_ranks_alone() -> None:
    members = [dist.get_world_size() - 2, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    model = wrapped(Known(), Adaptive(pi=16), _process_group=group)
    for step in range(3):
        model(step).backward()
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, model.module.a.grad.numpy().tobytes(), group=group)
        assert everyone[0] == everyone[1]
        model.zero_grad()


@cases.add
def layouts_and_sparse_gradients() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(500, 8, sparse=True)
            self.body = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Conv2d(32, 32, 3)).to(memory_format=torch.channels_last)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.body(self.words(words).permute(0, 3, 1, 2)).square().mean()

    model, stock = wrapped(Images(), TopK(ratio=0.5)), DistributedDataParallel(Images())
    account = Account(model)
    for step in range(4):
        words = torch.randint(0, 500, (2, 6, 6), generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
        for one in (model, stock):
            one.zero_grad()
            one(words).backward()
        ours, theirs = model.module.words.weight.grad, stock.module.words.weight.grad
        assert ours.is_sparse
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
        for p in model.module.body.parameters():
            account._came[next(n for n, q in model.module.named_parameters() if q is p)] += (
                p.grad.double().numpy().ravel() * dist.get_world_size()
            )
    account._given = {name: values for name, values in account._given.items() if name.startswith("body")}
    account.check()


@cases.add
def a_model_of_one_sparse_embedding() -> None:
    models = []
    for compression in (TopK(ratio=0.5), None):
        torch.manual_seed(0)
        module = nn.Embedding(500, 8, sparse=True)
        models.append(DistributedDataParallel(module) if compression is None else wrapped(module, compression))
    for step in range(4):
        words = torch.randint(0, 500, (2, 6), generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
        for model in models:
            model.zero_grad()
            model(words).square().sum().backward()
        ours, theirs = (model.module.weight.grad for model in models)
        assert ours.is_sparse
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense())


@cases.add
def a_parameter_of_the_root_that_is_ignored() -> None:
    for name in ("c", ".c"):
        model = Known()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        ours = wrapped(model, OneBit())
        for step in range(3):
            ours(step).backward()
        # DDP ignores a parameter of the root by the second name
        equal = torch.equal(ours.module.c.grad, sum(gradient("c", step, ours.module.c) for step in range(3)))
        assert equal == (name == ".c")


@cases.add
def rules_by_name() -> None:
    policy = Policy({"a": OneBit(), "c": FP16()}, default=NoCompression())
    model = wrapped(Known(), policy)
    for step in range(3):
        model(step).backward()
        model.zero_grad()
    tensors = ddp.stats(model)["tensors"]
    assert tensors["c"]["dense_bytes"] == 2 * tensors["c"]["bytes_sent"]
    assert tensors["a"]["ratio"] > 10
    raises(ValueError, lambda: wrapped(Known(), Policy({"nothing.*": OneBit()})), "nothing.*")


# -- states ----------------------------------------------------------------------------------------------------------


def trained(model: Any, steps: Iterable[int]) -> list[bytes]:
    found = []
    for step in steps:
        model(step).backward()
        found.append(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
        use(model)
        model.zero_grad()
    return found


@cases.add
def a_state_goes_on_to_the_bit() -> None:
    model = wrapped(Known(), QSGD(bits=4), _find_unused_parameters=True)
    other = wrapped(Known(), OneBit(), _find_unused_parameters=True)
    for one, compression in ((model, QSGD(bits=4)), (other, OneBit())):
        trained(one, range(3))
        file = io.BytesIO()
        torch.save(ddp.state_dict(one), file)
        file.seek(0)
        again = wrapped(Known(), compression, _find_unused_parameters=True)
        ddp.load_state_dict(again, torch.load(file))
        assert trained(one, range(3, 6)) == trained(again, range(3, 6))


@cases.add
def a_saved_state_has_tensors_only() -> None:
    model = wrapped(Known(), PowerSGD(rank=2))
    trained(model, range(4))
    state = ddp.state_dict(model)
    assert state["factors"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = wrapped(Known(), PowerSGD(rank=2))
    ddp.load_state_dict(again, torch.load(file, weights_only=True))
    assert trained(model, range(4, 7)) == trained(again, range(4, 7))


@cases.add
def a_state_goes_on_among_fewer_ranks() -> None:
    model = wrapped(Known(), OneBit())
    trained(model, range(3))
    total = owed(model)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, ddp.state_dict(model))
    group = dist.new_group([0, 1])
    raises(StateError, lambda: ddp.load_state_dict(model, {**states[dist.get_rank()], "size": 17}), "17")
    if dist.get_rank() > 1:
        return
    fewer = wrapped(Known(), OneBit(), _process_group=group)
    if dist.get_world_size() > 2:
        raises(StateError, lambda: ddp.load_state_dict(fewer, states[dist.get_rank()]), "redistribute")
    ddp.load_state_dict(fewer, redistribute(states, 2)[dist.get_rank()])
    state = ddp.state_dict(fewer)
    for name in state["residuals"]:
        both = state["residuals"][name]["values"].double().clone()
        if name in state["owner_residuals"]:
            entry = state["owner_residuals"][name]
            both[entry["start"] : entry["start"] + len(entry["values"])] += entry["values"]
        dist.all_reduce(both, group=group)
        np.testing.assert_allclose(both.numpy(), total[name], atol=1e-4)
    trained(fewer, range(3, 5))


def with_a_debt_of_c() -> tuple[Any, np.ndarray]:
    """A model that sends "c" uncompressed, and what is owed of that from steps that compressed it."""
    model = wrapped(Known(), OneBit())
    trained(model, range(3))
    again = wrapped(Known(), Policy({"a": OneBit()}), _find_unused_parameters=True)
    ddp.load_state_dict(again, ddp.state_dict(model))
    return again, owed(model)["c"]


def check_the_debt_travels(model: Any, step: int, debt: np.ndarray, name: str = "c") -> None:
    model(step).backward()
    p = getattr(model.module, name)
    given = summed(gradient(name, step, p).double().numpy().ravel())
    came = p.grad.double().numpy().ravel() * dist.get_world_size()
    np.testing.assert_allclose(came, given + debt, atol=1e-3)
    assert name not in ddp.state_dict(model)["residuals"]


@cases.add
def what_a_tensor_owes_that_goes_uncompressed_now_travels_once() -> None:
    model, debt = with_a_debt_of_c()
    check_the_debt_travels(model, 3, debt)


@cases.add
def what_a_small_tensor_owes_that_goes_beside_others_now_travels_once() -> None:
    model = wrapped(Known(), OneBit(), min_numel=40)
    trained(model, range(3))
    debt = owed(model)["b"]
    assert np.abs(debt).max() > 0
    again = wrapped(Known(), OneBit())
    ddp.load_state_dict(again, ddp.state_dict(model))
    check_the_debt_travels(again, 3, debt, "b")


@cases.add
def what_is_owed_waits_while_no_rank_uses_the_tensor() -> None:
    model, debt = with_a_debt_of_c()
    for step in (3, 4, 5):
        model(step, [name for name in SHAPES if name != "c"]).backward()
        assert model.module.c.grad is None
        model.zero_grad()
    assert "c" in ddp.state_dict(model)["residuals"]
    check_the_debt_travels(model, 6, debt)


# -- what is refused -------------------------------------------------------------------------------------------------


@cases.add
def all_ranks_are_told_what_they_disagree_on() -> None:
    mine = OneBit() if dist.get_rank() else Adaptive(pi=16)
    raises(MismatchError, lambda: wrapped(Known(), mine), "compression.id", "onebit", "adaptive")
    number = 500 + dist.get_rank()
    raises(MismatchError, lambda: wrapped(Known(), OneBit(), min_numel=number), "min_numel", "500", "501")
    for setting in ("find_unused_parameters", "static_graph"):
        # one rank would ask the others which tensors are used, and wait for them
        model = DistributedDataParallel(Known(), **{setting: dist.get_rank() == 0})
        raises(MismatchError, lambda model=model: ddp.register_comm_hook(model, OneBit()), setting)
    # nothing is left of it
    trained(wrapped(Known(), OneBit()), range(2))


@cases.add
def what_cannot_be_is_refused() -> None:
    model = wrapped(Known(), OneBit())
    raises(UnsupportedError, lambda: ddp.register_comm_hook(model, OneBit()), "has a hook")
    plain: Any = Known()
    raises(TypeError, lambda: ddp.register_comm_hook(plain, OneBit()), "DistributedDataParallel")
    raises(StateError, lambda: ddp.stats(plain), "without a hook")
    fresh = DistributedDataParallel(Known())
    raises(UnsupportedError, lambda: ddp.register_comm_hook(fresh, "auto"), "Adaptive(pi=64)")
    raises(TypeError, lambda: ddp.register_comm_hook(fresh, OneBit), "OneBit(...)")
    raises(TypeError, lambda: ddp.register_comm_hook(fresh, object()), "compressor")
    raises(ValueError, lambda: ddp.register_comm_hook(fresh, OneBit(), start_step=-1), "start_step=-1")
    raises(ValueError, lambda: ddp.register_comm_hook(fresh, OneBit(), min_numel=-1), "min_numel=-1")
    raises(ValueError, lambda: ddp.register_comm_hook(fresh, "gzip"), "gzip")
    some = DistributedDataParallel(Known(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    raises(UnsupportedError, lambda: ddp.register_comm_hook(some, OneBit()), "Leave it out")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        single = DistributedDataParallel(Known())
    raises(UnsupportedError, lambda: ddp.register_comm_hook(single, OneBit()), "python_reducer")
    raises(TypeError, lambda: pickle.dumps(model), "ddp.state_dict(model)")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)


@cases.add
def a_model_that_is_gone_leaves_no_threads() -> None:
    import gc
    import threading

    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("hvd_compress.ddp")]

    before = len(threads())
    model = wrapped(Known(), OneBit())
    trained(model, range(2))
    assert len(threads()) > before
    del model
    gc.collect()
    deadline = time.monotonic() + 10
    while len(threads()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(threads()) <= before, threads()


@cases.add
def other_buckets_than_before_are_told() -> None:
    model = wrapped(Known(), OneBit(), _bucket_cap_mb=0.02)
    trained(model, range(2))
    hook = hook_of(model)
    hook._plan = [*hook._plan[:1], ("z",)]
    hook._is_settled = True
    raises(GradientError, lambda: model(2).backward(), "held other tensors")
