"""What people do by habit between `backward()` and `step()`, and to their parameters: it works, or is told."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import hvd_compress.torch as hvd
from hvd_compress import AdaGrad, Adaptive, Auto, OneBit, Policy, TopK
from hvd_compress.errors import GradientError, UnsupportedError
from tests.parallel.cases import Cases
from tests.parallel.workers.common import bytes_of, check_equal_on_all_ranks, raises, throwing_away, to_numpy
from tests.parallel.workers.plain import check_that_it_goes_on

cases = Cases()
ALL = TopK(ratio=1.0)
"""Sends everything: the combined gradient is the mean, and nothing is owed."""
SOME = Policy([("a.*", TopK(0.05))], default=OneBit())
WAYS: dict[str, Any] = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "all": ALL,
    "onebit": OneBit(),
    "adaptive": Adaptive(pi=16),
}


class Layers(torch.nn.Module):
    """Three layers, of which the last one need not be used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_last: bool = True) -> torch.Tensor:
        y = torch.tanh(self.b(torch.tanh(self.a(x))))
        return torch.tanh(self.c(y)) if uses_last else y


def wrap(model: torch.nn.Module, compression: Any = ALL, lr: float = 0.125, **settings: Any) -> Any:
    settings = {"min_numel": 100, **settings}
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), compression, **settings)


def loss_of(model: torch.nn.Module, step: int, rank: int | None = None, **settings: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (horovod.rank() if rank is None else rank))
    x = torch.randn(8, 24, generator=generator)
    loss: torch.Tensor = (model(x, **settings) - x).pow(2).mean() * 50
    return loss


def means(model: Any, step: int, **settings: Any) -> dict[str, np.ndarray]:
    """The mean over ranks of the gradients of `loss_of`."""
    twin = copy.deepcopy(model)
    total: dict[str, np.ndarray] = {}
    for rank in range(horovod.size()):
        twin.zero_grad()
        loss_of(twin, step, rank, **settings).backward()
        for name, p in twin.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + to_numpy(p.grad) / horovod.size()
    return total


def check_means(model: torch.nn.Module, expected: dict[str, np.ndarray]) -> None:
    for name, p in model.named_parameters():
        if name in expected:
            assert p.grad is not None, name
            np.testing.assert_allclose(to_numpy(p.grad), expected[name], rtol=1e-3, atol=4e-4, err_msg=name)


def check_equal_gradients(model: torch.nn.Module) -> None:
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    everyone = horovod.allgather(flat[None], name="habits.gradients")
    assert all(torch.equal(row, everyone[0]) for row in everyone)


def values(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: to_numpy(p) for name, p in model.named_parameters()}


# -- between backward() and step() -----------------------------------------------------------------------------------


@cases.each(WAYS)
def gradients_are_combined_when_backward_returns(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression)
    for step in range(4):
        expected = means(model, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        check_equal_gradients(model)
        if compression is ALL or not isinstance(compression, OneBit | Adaptive):
            check_means(model, expected)
        optimizer.step()
    check_equal_on_all_ranks(model)
    assert optimizer.compression_stats()["total"]["steps"] == 4


@cases.each(WAYS)
def clipping_after_backward_is_respected(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression, lr=1.0)
    for step in range(4):
        before = values(model)
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        moved = np.sqrt(sum(((to_numpy(p) - before[n]) ** 2).sum() for n, p in model.named_parameters()))
        assert 0 < moved <= 1.01e-3, moved
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each(WAYS)
def a_scaler_is_used_as_most_code_does(compression: Any) -> None:
    losses = []
    for scaled in (False, True):
        model = Layers()
        optimizer = wrap(model, compression, lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        of_run = []
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            of_run.append(float(loss.detach()))
        check_equal_on_all_ranks(model)
        losses.append(of_run)
    # float16 loses what a scale of 256 makes too large
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


@cases.each(WAYS)
def a_step_after_synchronize_is_told_to_those_only_who_ask(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression)
    stock = "optimizer.step() called without optimizer.skip_synchronize()"  # what Horovod's own tests look for
    with warnings.catch_warnings(record=True) as told:
        warnings.resetwarnings()
        # what Python starts with, but for what __main__ is told
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        for step, asks in enumerate((False, True, False)):
            if asks:
                warnings.simplefilter("always")
            loss_of(model, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            assert len(told) == step, told
            optimizer.zero_grad()
    for one in told:
        assert stock in str(one.message)
        assert one.category is PendingDeprecationWarning
        assert one.filename == __file__
    # nothing is said where synchronize() was needed, or where a context says so
    loss_of(model, 3, uses_last=False).backward()
    optimizer.synchronize()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 5).backward()
    optimizer.step()
    check_equal_on_all_ranks(model)


@cases.each({f"{k}-{u}": (w, u == "unscaled") for k, w in WAYS.items() for u in ("unscaled", "not")})
def a_scaler_that_looks_before_all_gradients_have_come_is_told(setting: tuple[Any, bool]) -> None:
    compression, unscales = setting
    model = Layers()
    optimizer = wrap(model, compression)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    is_odd = horovod.rank() == horovod.size() - 1

    def step(number: int, uses_last: bool, synchronizes: bool = False) -> None:
        scaler.scale(loss_of(model, number, uses_last=uses_last)).backward()
        if synchronizes:
            optimizer.synchronize()
        if unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(0, True)
    if is_odd:
        raises(GradientError, lambda: step(1, False), "synchronize()")
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        with throwing_away():
            optimizer.zero_grad()
    else:
        step(1, True)
    # the recipe
    horovod.broadcast_parameters(model.state_dict(), 0)
    before = values(model)
    step(2, not is_odd, synchronizes=True)
    check_equal_on_all_ranks(model)
    moved = sum(float(np.sum((p - before[name]) ** 2.0)) for name, p in values(model).items())
    assert 0 < moved < (0.125e-3 if unscales else 10.0) ** 2 * 1.1


@cases.each({"onebit": OneBit(), "adaptive": Adaptive(pi=16)})
def a_scaler_that_unscales_what_is_exchanged_is_told_when_it_is_complete(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    is_odd = horovod.rank() == horovod.size() - 1
    loss_of(model, 0).backward()
    optimizer.step()
    for number in (1, 2):
        with throwing_away():
            optimizer.zero_grad()
        scaler.scale(loss_of(model, number, uses_last=not is_odd)).backward()
        if number == 1 and is_odd:
            scaler.unscale_(optimizer)
            raises(GradientError, optimizer.synchronize, "was changed while it was exchanged", "unscale")
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            continue
        # the recipe
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        if number == 2:
            scaler.step(optimizer)
        else:
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    check_equal_on_all_ranks(model)


def unlike(gradient: torch.Tensor) -> dict[str, Any]:
    """Gradients that hooks of users may leave, by kind."""
    with torch.inference_mode():
        inference = gradient.clone()
    return {"none": None, "inference": inference, "expanded": gradient.mean().expand(gradient.shape)}


@cases.each(
    {f"{kind}-{name}": (kind, name) for kind in ("none", "inference", "expanded") for name in ("large", "small")}
)
def a_hook_of_the_user_may_leave_any_gradient(setting: tuple[str, str]) -> None:
    kind, name = setting
    model = torch.nn.ParameterDict(
        {n: torch.nn.Parameter(torch.ones(s)) for n, s in {"large": (50, 60), "small": (7,)}.items()}
    )
    p = model[name]

    def replace(p: torch.Tensor) -> None:
        p.grad = unlike(p.grad)[kind]

    p.register_post_accumulate_grad_hook(replace)
    optimizer = wrap(model, ALL, min_numel=1000)
    for step in range(3):
        scale = horovod.rank() + step + 1.0
        sum(scale * q.sum() for q in model.values()).backward()
        optimizer.synchronize()
        mean = 0.0 if kind == "none" else sum(range(step + 1, step + 1 + horovod.size())) / horovod.size()
        np.testing.assert_allclose(to_numpy(p.grad), np.full(p.shape, mean), rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def an_optimizer_whose_neighbour_has_failed_goes_on() -> None:
    first, second = Layers(), Layers()
    one, two = wrap(first, ALL), wrap(second, ALL)
    # its last gradient is changed by a hook that comes after ours
    last = next(iter(first.parameters()))

    def double(p: torch.Tensor) -> None:
        p.grad.mul_(2.0)

    for step in range(3):
        is_odd = step == 1 and horovod.rank() == 0
        added = last.register_post_accumulate_grad_hook(double) if is_odd else None
        loss = loss_of(first, step) + loss_of(second, step)
        if added is None:
            loss.backward()
        else:
            raises(GradientError, loss.backward, "was changed while it was exchanged")
            added.remove()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    check_equal_on_all_ranks(first)
    check_equal_on_all_ranks(second)


CLEARS: dict[str, Any] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


@cases.each(CLEARS)
def a_step_that_a_scaler_skips_leaves_nothing(clear: Any) -> None:
    model = Layers()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = values(model)
    loss = loss_of(model, 0)
    scaler.scale(loss * (float("inf") if horovod.rank() == 0 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all((values(model)[name] == value).all() for name, value in before.items())
    clear(model, optimizer)
    expected = means(model, 1)
    loss_of(model, 1).backward()
    check_means(model, expected)
    optimizer.step()
    check_equal_on_all_ranks(model)


@cases.each(WAYS)
def a_norm_may_be_logged_and_a_step_made_in_a_closure(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression)
    norms: list[float] = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            return loss

        optimizer.step(closure)
    everyone = horovod.allgather(torch.tensor([norms]), name="habits.norms")
    assert all(torch.equal(row, everyone[0]) for row in everyone)
    check_equal_on_all_ranks(model)


@cases.each({"onebit": OneBit(), "none": hvd.Compression.none})
def several_passes_complete_in_the_one_that_brings_the_last(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression)
    for step in range(3):
        parts = [(model.a(torch.ones(1, 24)).pow(2).sum(), [model.a]), (model.b(torch.ones(1, 24)).pow(2).sum(), [])]
        for loss, _ in parts:
            loss.backward()
        (model.c.weight * (horovod.rank() + step)).sum().backward()
        (model.c.bias * (horovod.rank() + step)).sum().backward()
        check_equal_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each({"reentrant": True, "not": False})
def checkpointing_completes_too(reentrant: bool) -> None:
    model = Layers()
    optimizer = wrap(model)
    for step in range(3):
        expected = means(model, step)
        generator = torch.Generator().manual_seed(1000 * step + horovod.rank())
        x = torch.randn(8, 24, generator=generator)
        first = torch.tanh(model.a(x))
        middle = checkpoint(lambda y: torch.tanh(model.b(y)), first, use_reentrant=reentrant)
        last = checkpoint(lambda y: torch.tanh(model.c(y)), middle, use_reentrant=reentrant)
        ((last - x).pow(2).mean() * 50).backward()
        check_means(model, expected)
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each({"written": "mul_", "replaced": "replace", "cleared": "clear"})
def a_write_that_would_be_lost_is_told_on_the_rank_that_writes(how: str) -> None:
    model = Layers()
    optimizer = wrap(model)
    for step in range(2):
        # the last layer gets no gradient: nobody knows yet that nothing more comes
        loss_of(model, step, uses_last=False).backward()
        p = model.b.weight
        if how == "mul_":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            p.grad = None if how == "clear" else p.grad * 2
        raises(GradientError, optimizer.step, "synchronize()")
        model.zero_grad()
        # and synchronize() before makes it right
        expected = means(model, step, uses_last=False)
        loss_of(model, step, uses_last=False).backward()
        optimizer.synchronize()
        check_means(model, expected)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def a_hook_that_changes_gradients_counts_if_it_was_there_before() -> None:
    early, late = Layers(), Layers()

    def clamp(p: Any) -> None:
        p.grad.clamp_(-1e-3, 1e-3)

    early.a.weight.register_post_accumulate_grad_hook(clamp)
    optimizer = wrap(early)
    loss_of(early, 0).backward()
    assert early.a.weight.grad.abs().max() <= 1.001e-3
    optimizer.step()
    optimizer = wrap(late)
    late.a.weight.register_post_accumulate_grad_hook(clamp)
    raises(GradientError, lambda: loss_of(late, 0).backward(), "'a.weight'")


@cases.add
def a_flat_buffer_of_gradients_holds_the_combined_ones() -> None:
    for compression in WAYS.values():
        model = Layers()
        optimizer = wrap(model, compression)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        at = 0
        for p in model.parameters():
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        for step in range(3):
            # once made, never made again
            flat.zero_()
            loss_of(model, step).backward()
            combined = torch.cat([p.grad.flatten() for p in model.parameters()])
            assert torch.equal(flat, combined), compression
            assert flat.any()
            flat.mul_(0.5)
            before = values(model)
            optimizer.step()
            np.testing.assert_allclose(
                np.concatenate([(before[n] - to_numpy(p)).ravel() for n, p in model.named_parameters()]),
                0.125 * flat.numpy(), atol=1e-6,
            )  # fmt: skip
        check_equal_on_all_ranks(model)


@cases.each({f"{way}-{bucket_bytes}": (way, bucket_bytes) for way in WAYS for bucket_bytes in (0, 2**25)})
def whoever_looks_at_a_gradient_sees_the_combined_one(setting: tuple[str, int]) -> None:
    way, bucket_bytes = setting
    model = Layers()
    optimizer = wrap(model, WAYS[way], bucket_bytes=bucket_bytes)
    looks: dict[str, Any] = {}
    for step in range(3):
        loss_of(model, step).backward()
        for name, p in model.named_parameters():
            if step == 0:
                looks[name] = (p.grad, p.grad.view(-1), p.grad.numpy())
            kept, view, array = looks[name]
            assert p.grad is kept
            assert torch.equal(view, p.grad.view(-1)), name
            assert (array == p.grad.numpy()).all(), name
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    check_equal_on_all_ranks(model)


@cases.each({"onebit": OneBit(), "all": ALL, "each alone": TopK(ratio=0.999)})
def a_gradient_that_has_moved_gets_its_result_where_it_lies(compression: Any) -> None:
    model = Layers()
    # as a gradient is missing, the exchange is completed in step()
    settings = {"bucket_bytes": 0} if compression == TopK(ratio=0.999) else {}
    optimizer = wrap(model, compression, **settings)
    twin = Layers()
    plain = wrap(twin, compression, **settings)
    for step in range(3):
        for of in (model, twin):
            loss_of(of, step, uses_last=False).backward()
        for p in (model.a.weight, model.b.weight):
            p.grad.data = p.grad.data.clone()
            places = p.grad.data_ptr()
        optimizer.step()
        plain.step()
        assert model.b.weight.grad.data_ptr() == places
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), f"{name} in step {step}: {p.grad - q.grad}"
            assert torch.equal(p, q), name
        for each in (optimizer, plain):
            each.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def a_gradient_that_moves_while_horovod_sums_it_is_the_sum() -> None:
    # so large that a sum takes longer than moving it
    large, other = torch.nn.Parameter(torch.zeros(2**21)), torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([large, other], lr=0.0), [("large", large), ("other", other)])
    for step in range(6):
        optimizer.zero_grad()
        # the gradient of `other` is missing until step()
        (large * (step + horovod.rank())).sum().backward()
        large.grad.data = large.grad.data.clone()
        optimizer.step()
        mean = step + (horovod.size() - 1) / 2
        assert large.grad.eq(mean).all(), (step, mean, large.grad.unique())


@cases.each({"alone": 0, "together": 2**25})
def what_a_step_that_is_given_up_was_to_send_is_dropped_or_stays_owed(bucket_bytes: int) -> None:
    for is_cleared in (False, True):
        model = Layers()
        optimizer = wrap(model, OneBit(), bucket_bytes=bucket_bytes)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = optimizer.compression_state_dict()["residuals"]
        loss_of(model, 1, uses_last=False).backward()
        given = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if is_cleared:
            # it cannot be subtracted any more
            model.zero_grad(set_to_none=False)
        optimizer.load_state_dict(optimizer.state_dict())
        after = optimizer.compression_state_dict()["residuals"]
        for name, entry in before.items():
            expected = entry["values"].clone()
            if bucket_bytes == 0 and is_cleared and name in given:
                expected += given[name].view(-1)
            torch.testing.assert_close(after[name]["values"], expected, rtol=1e-5, atol=1e-5)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step()
        check_equal_on_all_ranks(model)


@cases.add
def a_graph_of_gradients_is_refused_with_the_remedy() -> None:
    model = Layers()
    optimizer = wrap(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph", UserWarning)
        raises(GradientError, lambda: loss_of(model, 0).backward(create_graph=True), "torch.autograd.grad")
    optimizer.load_state_dict(optimizer.state_dict())


@cases.each({"all": ALL, "onebit": OneBit(), "topk": TopK(0.05), "policy": SOME})
def gradients_of_a_generators_pass_may_be_thrown_away(compression: Any) -> None:
    """What is thrown away is not owed, but for the first time, which is told."""
    generator, critic, twin = Layers(), Layers(), Layers()
    optimizers = [wrap(generator, compression), wrap(critic, compression)]
    for step in range(5):
        generator.zero_grad()
        critic(generator(torch.ones(1, 24) * (step + horovod.rank()))).sum().backward()
        check_equal_gradients(generator)
        optimizers[0].step()
        # the critic's are not wanted
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            (critic if step % 2 else optimizers[1]).zero_grad()
            loss_of(critic, step).backward()
        told = [str(w.message) for w in seen]
        assert len(told) == (step == 0 and compression != ALL), told
        assert all("thrown away without a step" in t and "requires_grad_(False)" in t for t in told)
        if step == 0:
            # this once it stays owed
            optimizers[1].step()
            twin.load_state_dict(critic.state_dict())
            expected = wrap(twin, compression)
            expected.load_compression_state_dict(optimizers[1].compression_state_dict())
            continue
        twin.zero_grad()
        loss_of(twin, step).backward()
        optimizers[1].step()
        expected.step()
        for name, value in values(twin).items():
            np.testing.assert_allclose(values(critic)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    check_equal_on_all_ranks(critic)
    check_equal_on_all_ranks(generator)


@cases.add
def gradients_that_are_used_without_this_optimizer_are_sent() -> None:
    """Whoever writes to the parameters: the same as with the optimizer's own step."""
    models = [Layers(), Layers()]
    plain = torch.optim.SGD(models[0].parameters(), lr=0.125)
    optimizers = [
        hvd.DistributedOptimizer(plain, models[0].named_parameters(), OneBit(), min_numel=100),
        wrap(models[1], OneBit()),
    ]
    for step in range(4):
        for model, optimizer, stepping in zip(models, optimizers, (plain, optimizers[1]), strict=True):
            loss_of(model, step).backward()
            stepping.step()
            optimizer.zero_grad()
    assert bytes_of(models[0].parameters()) == bytes_of(models[1].parameters())


@cases.each({"onebit": OneBit(), "none": hvd.Compression.none, "groups": None})
def what_the_plain_optimizer_has_goes_on(compression: Any) -> None:
    model = Layers()
    settings = {"groups": 2} if compression is None else {"compression": compression}
    check_that_it_goes_on(
        model, lambda plain: hvd.DistributedOptimizer(plain, model.named_parameters(), min_numel=100, **settings),
        lambda: loss_of(model, 0),
    )  # fmt: skip
    check_equal_on_all_ranks(model)


@cases.add
def a_group_that_is_added_has_the_settings_of_the_plain_optimizer() -> None:
    model, head = Layers(), torch.nn.Linear(24, 24)
    plain = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), OneBit(), min_numel=100)
    optimizer.add_param_group({"params": list(head.parameters())})
    added = optimizer.param_groups[1]
    assert (added["lr"], added["momentum"]) == (0.125, 0.5)
    assert len(plain.param_groups) == 1


# -- loops of other kinds --------------------------------------------------------------------------------------------


@cases.add
def one_scaler_serves_two_optimizers_and_unscales_once() -> None:
    models = [Layers(), Layers()]
    optimizers = [wrap(m) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        expected = [means(m, step) for m in models]
        scaler.scale(loss_of(models[0], step) + loss_of(models[1], step)).backward()
        for model, optimizer, its in zip(models, optimizers, expected, strict=True):
            scaler.unscale_(optimizer)
            check_means(model, its)
            raises(RuntimeError, functools.partial(scaler.unscale_, optimizer), "already been called")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for model in models:
        check_equal_on_all_ranks(model)


def shared_weight() -> Layers:
    model = Layers()
    model.c.weight = model.a.weight
    return model


def shared_module() -> Layers:
    model = Layers()
    model.c = model.a
    return model


@cases.each({"compiled": "compiled", "module": shared_module, "weight": shared_weight})
def a_model_may_be_compiled_or_share_layers(how: Any) -> None:
    model = Layers() if how == "compiled" else how()
    optimizer = wrap(model)
    called = torch.compile(model, backend="eager") if how == "compiled" else model
    for step in range(3):
        expected = means(model, step)
        loss_of(called, step).backward()
        check_means(model, expected)
        before = values(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        moved = np.sqrt(sum(((to_numpy(p) - before[n]) ** 2).sum() for n, p in model.named_parameters()))
        assert 0 < moved <= 0.126e-3, moved
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each({"weight": torch.nn.utils.parametrizations.weight_norm, "orthogonal": "orthogonal"})
def weights_may_be_made_of_others_and_averaged_over_steps(parametrization: Any) -> None:
    model = Layers()
    if parametrization == "orthogonal":
        parametrization = torch.nn.utils.parametrizations.orthogonal
    parametrization(model.b)
    optimizer = wrap(model, OneBit())
    averages = [
        torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=fn)
        for fn in (None, torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    ]
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    for step in range(4):
        loss_of(model, step).backward()
        check_equal_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for average in averages:
            average.update_parameters(model)
    for module in (model, *averages):
        check_equal_on_all_ranks(module)


KINDS: dict[str, Any] = {
    "sgd-foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "adam-fused": functools.partial(torch.optim.Adam, lr=0.01, eps=1e-2, fused=True),
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-2, foreach=True, amsgrad=True),
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
}


@cases.each(KINDS)
def optimizers_of_all_kinds_train_as_one_that_sees_all_batches(kind: Any) -> None:
    model = Layers()
    twin = copy.deepcopy(model)
    whole = kind(twin.parameters())
    optimizer = hvd.DistributedOptimizer(kind(model.parameters()), model.named_parameters(), ALL, min_numel=100)
    for step in range(3):

        def of_rank(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return horovod.allreduce(loss.detach(), name="habits.loss")

        def of_all(step: int = step) -> torch.Tensor:
            whole.zero_grad()
            loss: Any = sum(loss_of(twin, step, rank) for rank in range(horovod.size())) / horovod.size()
            loss.backward()
            return loss

        optimizer.step(of_rank)
        whole.step(of_all)
    check_equal_on_all_ranks(model)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(to_numpy(p), values(twin)[name], atol=3e-3, err_msg=name)


@cases.each({"optimizer": False, "model": True})
def a_step_may_take_two_passes_with_the_first_thrown_away(clears_model: bool) -> None:
    # sharpness-aware minimization
    model = Layers()
    optimizer = wrap(model)
    cleared: Any = model if clears_model else optimizer
    for step in range(3):
        loss_of(model, step).backward()
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            ascents = [p.grad * 0.05 / norm for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), ascents)
        cleared.zero_grad()
        expected = means(model, step)
        loss_of(model, step).backward()
        check_means(model, expected)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), ascents)
            optimizer.step()
        cleared.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def a_penalty_on_gradients_is_exchanged_with_the_loss() -> None:
    def penalized(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = loss_of(model, step, rank)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total: torch.Tensor = loss + 0.01 * sum(g.pow(2).sum() for g in gradients)
        return total

    model = Layers()
    optimizer = wrap(model)
    for step in range(3):
        twin = copy.deepcopy(model)
        whole: Any = sum(penalized(twin, step, rank) for rank in range(horovod.size())) / horovod.size()
        whole.backward()
        penalized(model, step, horovod.rank()).backward()
        check_means(model, {name: to_numpy(p.grad) for name, p in twin.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each({"retained": True, "new": False})
def a_second_loss_on_the_same_parameters_is_refused_and_leaves_nothing(retains: bool) -> None:
    model = Layers()
    optimizer = wrap(model)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=retains)
    raises(GradientError, (loss if retains else loss_of(model, 1)).backward, "backward_passes_per_step")
    model.zero_grad()
    expected = means(model, 2)
    loss_of(model, 2).backward()
    check_means(model, expected)
    optimizer.step()
    check_equal_on_all_ranks(model)


@cases.each({"all": ALL, "onebit": OneBit()})
def two_models_may_freeze_each_other_in_turn(compression: Any) -> None:
    models = [Layers(), Layers()]
    optimizers = [wrap(m, compression) for m in models]
    for step in range(4):
        for this, other, optimizer in zip(models, models[::-1], optimizers, strict=True):
            other.requires_grad_(False)
            models[1](models[0](torch.ones(1, 24) * (step + horovod.rank()))).sum().backward()
            assert all(p.grad is None for p in other.parameters())
            check_equal_gradients(this)
            optimizer.step()
            optimizer.zero_grad()
            other.requires_grad_(True)
    for model, optimizer in zip(models, optimizers, strict=True):
        check_equal_on_all_ranks(model)
        assert optimizer.compression_stats()["total"]["steps"] == 4


@cases.add
def hooks_of_tensors_change_what_is_exchanged() -> None:
    model = Layers()
    optimizer = wrap(model)
    model.a.weight.register_hook(lambda gradient: gradient * 3)
    model.b.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for step in range(3):
        expected = means(model, step)
        loss_of(model, step).backward()
        # copies of a model have no hooks
        expected["a.weight"] = expected["a.weight"] * 3
        del expected["b.weight"]
        check_means(model, expected)
        assert 0 < model.b.weight.grad.abs().max() <= 1.001e-3
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each({"none": "none", "optimizer": "optimizer", "in-place": "in-place"})
def gradients_may_be_cleared_in_any_way(how: str) -> None:
    model = Layers()
    optimizer = wrap(model)
    for step in range(4):
        for p in model.parameters():
            if how == "none":
                p.grad = None
            elif how == "in-place" and p.grad is not None:
                p.grad.zero_()
        if how == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        expected = means(model, step)
        loss_of(model, step).backward()
        check_means(model, expected)
        if step == 2:
            # what is cleared after it was combined is left as it is, on each rank
            model.a.weight.grad = None
            still = values(model)["a.weight"]
        optimizer.step()
        if step == 2:
            assert (values(model)["a.weight"] == still).all()
    check_equal_on_all_ranks(model)


@cases.each(WAYS)
def a_gradient_given_by_hand_may_be_expanded(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.full((1,), float(step + horovod.rank())).expand(p.shape)
        optimizer.step()
        expected = step + (horovod.size() - 1) / 2
        if not isinstance(compression, OneBit | Adaptive):
            assert all(torch.allclose(p.grad, torch.full(p.shape, expected)) for p in model.parameters())
    check_equal_on_all_ranks(model)


# -- parameters that change ------------------------------------------------------------------------------------------


def owed(optimizer: Any) -> dict[str, np.ndarray]:
    """What all ranks together owe, in units of the sum, by name."""
    total: dict[str, np.ndarray] = {}
    for state in horovod.allgather_object(optimizer.compression_state_dict()):
        for kind in ("residuals", "owner_residuals"):
            for name, entry in state[kind].items():
                whole = total.setdefault(name, np.zeros(int(np.prod(entry["shape"]))))
                start = entry.get("start", 0)
                whole[start : start + len(entry["values"])] += np.asarray(entry["values"])
    return total


@cases.each({**WAYS, "auto": Auto([OneBit()])})
def what_is_frozen_later_stays_and_what_is_owed_of_it_waits(compression: Any) -> None:
    model = Layers()
    optimizer = wrap(model, compression)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.b.parameters():
        p.requires_grad_(False)
    still, debt = values(model), owed(optimizer).get("b.weight")
    for step in range(3, 6):
        expected = means(model, step)
        loss_of(model, step).backward()
        if not isinstance(compression, OneBit | Adaptive | Auto):
            check_means(model, expected)
        optimizer.step()
        optimizer.zero_grad()
        for name in ("b.weight", "b.bias"):
            assert values(model)[name].tobytes() == still[name].tobytes(), name
    assert (values(model)["a.weight"] != still["a.weight"]).any()
    if debt is not None:
        np.testing.assert_allclose(owed(optimizer)["b.weight"], debt, rtol=1e-4, atol=1e-4)
    steps = optimizer.compression_stats()["total"]["steps"]
    assert steps == 6
    for p in model.b.parameters():
        p.requires_grad_(True)
    for step in range(6, 8):
        expected = means(model, step)
        loss_of(model, step).backward()
        check_equal_gradients(model)
        if not isinstance(compression, OneBit | Adaptive | Auto):
            check_means(model, expected)
        optimizer.step()
        optimizer.zero_grad()
    assert (values(model)["b.weight"] != still["b.weight"]).any()
    check_equal_on_all_ranks(model)


@cases.each(WAYS)
def what_is_unfrozen_or_added_later_is_exchanged(compression: Any) -> None:
    model = Layers()
    for p in model.b.parameters():
        p.requires_grad_(False)
    sgd = torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=0.125)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression, min_numel=100)
    for step in range(6):
        if step == 2:
            for p in model.b.parameters():
                p.requires_grad_(True)
        if step == 4:
            optimizer.add_param_group({"params": list(model.c.parameters()), "lr": 0.1})
        for p in model.c.parameters():
            p.requires_grad_(step >= 4)
        expected = means(model, step)
        loss_of(model, step).backward()
        # in the first step with them too
        check_equal_gradients(model)
        if not isinstance(compression, OneBit | Adaptive):
            check_means(model, expected)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        check_equal_on_all_ranks(model)
    assert set(optimizer.compression_stats()["tensors"]) == {name for name, _ in model.named_parameters()}


@cases.each({"onebit": OneBit(), "groups": "groups", "nameless": "nameless"})
def a_new_group_without_names_is_exchanged(how: Any) -> None:
    model, extra = Layers(), torch.nn.Linear(24, 24)
    with torch.no_grad():
        extra.weight.copy_(torch.eye(24))
        extra.bias.zero_()
    named = None if how == "nameless" else model.named_parameters()
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    settings = {"groups": 2} if how == "groups" else {}
    optimizer = hvd.DistributedOptimizer(sgd, named, OneBit(), min_numel=100, **settings)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(extra.parameters())})
        (loss_of(model, step) + (extra(torch.ones(1, 24) * (horovod.rank() + step))).pow(2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            extra.zero_grad()
    check_equal_on_all_ranks(model)
    check_equal_on_all_ranks(extra)
    assert (extra.bias != 0).any()


@cases.each({"frozen": True, "uncompressed since": False})
def groups_stay_groups_where_only_one_rank_owes(freezes: bool) -> None:
    model = Layers()
    optimizer = wrap(model, OneBit(), exchange="allgather", groups=2)
    for step in range(2):
        (loss_of(model, step) * (horovod.rank() == 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    owed = owed_by(optimizer)
    assert bool(owed) == (horovod.rank() == 0)
    owed = horovod.broadcast_object(owed, root_rank=0, name="habits.owed")
    if not freezes:
        state = optimizer.compression_state_dict()
        optimizer = wrap(model, OneBit(), exchange="allgather", groups=2, min_numel=10**6)
        optimizer.load_compression_state_dict(state)
    for p in (model.a.weight, model.b.weight, model.c.weight):
        p.requires_grad_(not freezes)
    for step in range(2, 4):
        expected = means(model, step)
        if step == 2 and not freezes:
            expected = {
                n: g + owed[n].reshape(g.shape) / horovod.size() if n in owed else g for n, g in expected.items()
            }
        loss_of(model, step).backward()
        optimizer.synchronize()
        check_means(model, expected)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        check_equal_on_all_ranks(model)
    assert bool(owed_by(optimizer)) == (freezes and horovod.rank() == 0)


def owed_by(optimizer: Any) -> dict[str, np.ndarray]:
    found = {name: to_numpy(saved["values"]) for name, saved in optimizer.compression_state_dict()["residuals"].items()}
    return {name: values for name, values in found.items() if values.any()}


@cases.add
def adagrad_leaves_out_what_is_frozen_and_refuses_what_is_added() -> None:
    model = Layers()
    optimizer = wrap(model, OneBit(), adagrad=AdaGrad())
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.b.parameters():
        p.requires_grad_(False)
    still = values(model)
    for step in range(2, 4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(values(model)[n].tobytes() == still[n].tobytes() for n in ("b.weight", "b.bias"))
    for p in model.b.parameters():
        p.requires_grad_(True)
    loss_of(model, 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert (values(model)["b.weight"] != still["b.weight"]).any()
    check_equal_on_all_ranks(model)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(20, 20))]})
    raises(UnsupportedError, lambda: loss_of(model, 5).backward(), "redistribute")


@cases.each({"bfloat16": torch.bfloat16, "float64": torch.float64})
def a_model_may_be_converted_after_wrapping(dtype: torch.dtype) -> None:
    model = Layers()
    optimizer = wrap(model)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.to(dtype)
    for _ in range(2):
        x = torch.ones(2, 24, dtype=dtype) * (1 + horovod.rank())
        model(x).pow(2).sum().backward()
        check_equal_gradients(model)
        assert model.a.bias.grad.dtype == dtype
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each(WAYS)
def all_parameters_may_be_frozen(compression: Any) -> None:
    model = Layers()
    model.requires_grad_(False)
    optimizer = wrap(model, compression)
    for step in range(3):
        # the evaluation of a model that others train, or the first phase of a schedule
        still = values(model)
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        assert all((values(model)[name] == value).all() for name, value in still.items())
        model.requires_grad_(True)
        expected = means(model, step)
        loss_of(model, step).backward()
        optimizer.synchronize()
        check_equal_gradients(model)
        if not isinstance(compression, OneBit | Adaptive):
            check_means(model, expected)
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(False)
    check_equal_on_all_ranks(model)


@cases.each(WAYS)
def gradients_of_a_removed_group_begin_no_step(compression: Any) -> None:
    model = Layers()
    groups = [{"params": list(layer.parameters())} for layer in (model.a, model.b, model.c)]
    sgd = torch.optim.SGD(groups, lr=0.125)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression, min_numel=100)
    optimizer.param_groups.pop()
    still = values(model)
    for step in range(3):
        expected = {name: mean for name, mean in means(model, step).items() if not name.startswith("c")}
        loss_of(model, step).backward()
        # of nobody's parameters; what is combined stays so
        model.c(torch.ones(1, 24)).sum().backward()
        if not isinstance(compression, OneBit | Adaptive):
            check_means(model, expected)
        optimizer.step()
        assert optimizer.compression_stats()["total"]["steps"] == step + 1
        model.zero_grad()
        model.c(torch.ones(1, 24)).sum().backward()
        optimizer.zero_grad()
        model.zero_grad()
    assert (values(model)["c.weight"] == still["c.weight"]).all()
    check_equal_on_all_ranks(model)


# -- optimizers that come and go -------------------------------------------------------------------------------------


@cases.add
def a_model_that_is_wrapped_again_leaves_its_first_optimizer() -> None:
    model = Layers()
    first = wrap(model)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
    loss_of(model, 0).backward()
    first.step()
    scheduler.step()
    first.zero_grad()
    second = wrap(model, OneBit())
    for step in range(2):
        loss_of(model, step).backward()
        check_equal_gradients(model)
        second.step()
        second.zero_grad()
    assert second.compression_stats()["total"]["steps"] == 2
    raises(GradientError, first.step, "another DistributedOptimizer")
    check_equal_on_all_ranks(model)


@cases.each({"onebit": OneBit(), "none": hvd.Compression.none})
def optimizers_of_equal_names_do_not_meet(compression: Any) -> None:
    models = [Layers(), Layers()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), compression=compression, min_numel=100)
        for m in models
    ]
    for step in range(3):
        (loss_of(models[0], step) + loss_of(models[1], step + 7)).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            check_equal_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    for model in models:
        check_equal_on_all_ranks(model)
    assert bytes_of(models[0].parameters()) != bytes_of(models[1].parameters())


@cases.add
def what_cannot_be_wrapped_copied_or_pickled_says_so() -> None:
    model = Layers()
    optimizer = wrap(model)
    raises(UnsupportedError, lambda: hvd.DistributedOptimizer(optimizer, model.named_parameters()), "already")
    raises(UnsupportedError, lambda: copy.deepcopy(optimizer), "state_dict()")
    raises(UnsupportedError, lambda: pickle.dumps(optimizer), "state_dict()")


@cases.add
def parameters_that_were_not_broadcast_are_told() -> None:
    model = Layers()
    with torch.no_grad():
        model.b.bias.add_(horovod.rank())
    optimizer = wrap(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss_of(model, 0).backward()
    assert len(told) == 1, told
    assert "'b.bias'" in str(told[0].message)
    assert "broadcast_parameters" in str(told[0].message)
    optimizer.step()


# -- sparse gradients that ranks differ in ---------------------------------------------------------------------------


class Tables(torch.nn.Module):
    """Two embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (torch.nn.Embedding(100, 16, sparse=True) for _ in range(2))

    def forward(self, words: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.a(words) + self.b(words) if both else self.a(words)).pow(2).sum()


@cases.each(
    {
        f"{label}-{'dense' if as_dense else 'sparse'}": (compression, as_dense)
        for label, compression in {"none": hvd.Compression.none, "onebit": OneBit(), "all": ALL}.items()
        for as_dense in (False, True)
    }
)
def a_sparse_gradient_may_be_missing_on_a_rank(setting: tuple[Any, bool]) -> None:
    compression, as_dense = setting
    model = Tables()
    optimizer = wrap(model, compression, sparse_as_dense=as_dense)
    for step in range(4):
        both = (step + horovod.rank()) % 2 == 0
        words = torch.tensor([1, 2, 3 + horovod.rank() + step])
        model(words, both).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)
