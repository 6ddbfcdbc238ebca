"""Awkward values: not finite, of other types and layouts; and that nothing of a gradient is lost."""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest import mock

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import BF16, OneBit, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.engine import has_cores
from hvd_compress.exchange import kinds
from tests.parallel.cases import Cases
from tests.parallel.workers.common import (
    COMPRESSORS,
    COMPRESSORS_AND_EXCHANGES,
    EXCHANGES,
    SHAPES,
    Net,
    Oracle,
    bytes_of,
    check_equal_on_all_ranks,
    check_taken_back,
    gradient,
    loss_of,
    numbers,
    residuals,
    to_numpy,
    train,
    wrap,
    wrap_to_compress,
)
from tests.parallel.workers.neutral import EACH_ONCE

cases = Cases()
# their payloads do not depend on the number of the step, so that a skipped step leaves no trace in the next
STEPLESS = {
    f"{name}-{e}": (compressor, e)
    for name, compressor in {
        "onebit": OneBit(),
        "topk": TopK(0.05),
        "threshold": Threshold(0.5),
        "bf16": BF16(),
    }.items()
    for e in EXCHANGES
}


# -- a bad number does not poison the future -------------------------------------------------------------------------


def spoil(model: torch.nn.Module, name: str, value: float) -> None:
    """Put a bad number into the gradient of one tensor on the last rank, as the backward pass would."""
    if horovod.rank() == horovod.size() - 1:
        p = dict(model.named_parameters())[name]
        handle = p.register_hook(
            lambda grad: torch.where(torch.arange(grad.numel()).view(grad.shape) == 5, value, grad)
        )
        model.spoiler = handle


def check_skipped_step(setting: tuple[Compressor, str], name: str, value: float, **settings: Any) -> None:
    compressor, exchange = setting
    model, oracle = Net(), Oracle(compressor, exchange)
    optimizer = wrap_to_compress(model, compressor, exchange=exchange, **settings)
    train(model, optimizer, range(2), check=lambda step: oracle.check_step(model, step))
    assert any(any(bits) for bits in residuals(optimizer).values())
    before = optimizer.compression_state_dict()
    spoil(model, name, value)
    loss_of(model, 2).backward()
    optimizer.synchronize()
    for other, p in model.named_parameters():
        finite = bool(torch.isfinite(p.grad).all())
        assert finite == (other != name), f"{other} on rank {horovod.rank()}: finite is {finite}"
    check_taken_back(optimizer, before)
    with optimizer.skip_synchronize():
        pass  # a scaler would skip optimizer.step() here
    optimizer.zero_grad()
    if hasattr(model, "spoiler"):
        model.spoiler.remove()
    for step in range(3, 5):
        loss_of(model, step).backward()
        optimizer.synchronize()
        oracle.check_step(model, step)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each(STEPLESS)
def inf_in_a_compressed_tensor_is_seen_and_forgotten(setting: tuple[Compressor, str]) -> None:
    check_skipped_step(setting, "first.weight", float("inf"))


@cases.each({"inf": float("inf"), "minus-inf": -float("inf"), "nan": float("nan")})
def a_bad_number_in_a_dense_tensor_takes_all_residuals_back(value: float) -> None:
    check_skipped_step((OneBit(), "two_phase"), "second.bias", value)


@cases.add
def nan_with_groups_is_seen_and_forgotten() -> None:
    check_skipped_step((OneBit(), "two_phase"), "second.weight", float("nan"), groups=2)


SAMPLED = {k: v for k, v in COMPRESSORS_AND_EXCHANGES.items() if k.startswith(("qsgd", "adaptive"))}


@cases.each(SAMPLED, witnesses=[label for label in EACH_ONCE if label in SAMPLED])
def sampled_compressors_see_it_too(setting: tuple[Compressor, str]) -> None:
    compressor, exchange = setting
    model = Net()
    optimizer = wrap(model, compressor, exchange=exchange)
    train(model, optimizer, range(2), check=lambda step: None)
    before = optimizer.compression_state_dict()
    spoil(model, "second.weight", float("nan"))
    loss_of(model, 2).backward()
    optimizer.synchronize()
    assert not torch.isfinite(model.second.weight.grad).all()
    assert torch.isfinite(model.first.weight.grad).all()
    check_taken_back(optimizer, before)


@cases.add
def a_grad_scaler_skips_the_step_on_all_ranks() -> None:
    model = Net()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)

    def one_step(step: int) -> None:
        scaler.scale(loss_of(model, step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    one_step(0)
    assert scaler.get_scale() == 1024.0
    before, parameters = optimizer.compression_state_dict(), bytes_of(model.parameters())
    spoil(model, "first.weight", float("inf"))
    one_step(1)
    assert scaler.get_scale() == 512.0, "the step was not skipped"
    assert bytes_of(model.parameters()) == parameters
    check_taken_back(optimizer, before, largest=1024 * 40.0)
    owed = residuals(optimizer)
    if hasattr(model, "spoiler"):
        model.spoiler.remove()
    one_step(2)
    assert scaler.get_scale() == 512.0
    assert bytes_of(model.parameters()) != parameters
    assert residuals(optimizer) != owed
    check_equal_on_all_ranks(model)


@cases.add
def inf_in_a_sparse_gradient_takes_all_residuals_back() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(50, 30, sparse=True)
            self.rest = torch.nn.Linear(50, 40)

    torch.manual_seed(1)
    model = Both()
    optimizer = wrap(model)

    def backward(factor: float) -> None:
        x = torch.from_numpy(numbers("x", horovod.rank(), 0, (3, 50)))
        (model.rest(x).square().sum() + (model.words(torch.tensor([1, 2])) * factor).sum()).backward()

    backward(1.0)
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.compression_state_dict()
    backward(float("inf") if horovod.rank() == 0 else 1.0)
    optimizer.synchronize()
    assert not torch.isfinite(dense(model.words.weight.grad)).all()
    assert torch.isfinite(model.rest.weight.grad).all()
    check_taken_back(optimizer, before, largest=1000.0)


def dense(p: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(to_numpy(p))


# -- types and layouts -----------------------------------------------------------------------------------------------


@cases.each({str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float64)})
def parameters_of_other_types(dtype: torch.dtype) -> None:
    for exchange in EXCHANGES:
        model, oracle = Net(dtype), Oracle(OneBit(), exchange)
        optimizer = wrap(model, exchange=exchange)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            oracle.check_step(model, step)
            assert all(p.grad.dtype == dtype for p in model.parameters())
            optimizer.zero_grad()
        kept = optimizer.compression_state_dict()["residuals"]["first.weight"]["values"].dtype
        assert kept == (torch.float64 if dtype == torch.float64 else torch.float32)
        check_equal_on_all_ranks(model)


@cases.add
def types_may_be_mixed() -> None:
    model, oracle = Net(), Oracle(OneBit())
    model.second.to(torch.bfloat16)
    model.first.bias.data = model.first.bias.data.double()
    optimizer = wrap(model)
    train(model, optimizer, range(3), check=lambda step: oracle.check_step(model, step))


@cases.add
def channels_last_keeps_its_strides() -> None:
    class Conv(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(11, 17, 3)

    model, oracle = Conv().to(memory_format=torch.channels_last), Oracle(TopK(ratio=0.1))
    strides = model.conv.weight.stride()
    assert not model.conv.weight.is_contiguous()
    optimizer = wrap(model, TopK(ratio=0.1))
    for step in range(3):
        loss_of(model, step).backward()
        assert model.conv.weight.grad.stride() == strides
        optimizer.step()
        oracle.check_step(model, step)
        assert model.conv.weight.grad.stride() == strides
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def complex_gradients_travel_as_they_are() -> None:
    model = torch.nn.Linear(40, 40, bias=False, dtype=torch.complex64)
    optimizer = wrap(model)
    everyone = [torch.from_numpy(numbers("complex", rank, 0, (1, 40))) for rank in range(horovod.size())]
    model(everyone[horovod.rank()].to(torch.complex64)).real.sum().backward()
    optimizer.step()
    mean = torch.stack(everyone).mean(0).to(torch.complex64)
    torch.testing.assert_close(model.weight.grad, mean.expand(40, 40))
    optimizer.load_state_dict(optimizer.state_dict())


@cases.add
def complex_gradients_travel_beside_compressed_ones() -> None:
    model = torch.nn.ParameterDict({
        "real": torch.nn.Parameter(torch.zeros(40, 40)),
        "complex": torch.nn.Parameter(torch.zeros(5, dtype=torch.complex64)),
    })  # fmt: skip
    optimizer = wrap(model, OneBit())
    for factor in (1.0, 2.0):
        given = torch.full((5,), complex(factor, horovod.rank()), dtype=torch.complex64)
        (model["real"].sum() + (model["complex"] * given).real.sum()).backward()
        optimizer.step()
        # a gradient is the conjugate of its factor
        mean = torch.full((5,), complex(factor, -(horovod.size() - 1) / 2), dtype=torch.complex64)
        torch.testing.assert_close(model["complex"].grad, mean)
        optimizer.zero_grad()


@cases.add
def awkward_sizes() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = torch.nn.Parameter(torch.ones(()))
            self.empty = torch.nn.Parameter(torch.ones(0, 3))
            self.one = torch.nn.Parameter(torch.ones(1))
            self.three = torch.nn.Parameter(torch.ones(3))
            self.prime = torch.nn.Parameter(torch.ones(1009))

    for exchange in EXCHANGES:
        model, oracle = Odd(), Oracle(BF16(), exchange, min_numel=0)
        # of a scalar, which one rank owns, an exchange sends more than an allreduce
        optimizer = wrap_to_compress(model, BF16(), exchange=exchange, min_numel=0)
        train(model, optimizer, range(3), check=lambda step, m=model, o=oracle: o.check_step(m, step))


@cases.add
def small_scalars_go_dense() -> None:
    model = torch.nn.ParameterDict(
        {"scale": torch.nn.Parameter(torch.ones(())), "w": torch.nn.Parameter(torch.ones(9))}
    )
    optimizer = wrap(model)
    loss_of(model, 0).backward()
    optimizer.step()
    expected = np.mean([numbers("scale", rank, 0, ()) for rank in range(horovod.size())])
    np.testing.assert_allclose(model["scale"].grad.item(), expected, rtol=1e-5)


# -- memory --------------------------------------------------------------------------------------------------------


class Sharing(torch.nn.Module):
    """Backward makes one memory the gradient of two parameters, and another what it still needs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(30, 20)
        self.places = torch.nn.Parameter(torch.zeros(15, 20))
        self.one, self.other = (torch.nn.Parameter(torch.zeros(600)) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scale = torch.arange(300.0).view(1, 15, 20) + 1
        both = self.one.view(20, 30) + self.other.view(20, 30)
        of_both: torch.Tensor = (both * torch.arange(600.0).view(20, 30)).sum()
        return ((self.words(words) + self.places.unsqueeze(0)) * scale).sum() + of_both


@cases.add
def gradients_that_share_memory_do_not_spoil_each_other() -> None:
    torch.manual_seed(0)
    model, alone = Sharing(), Sharing()
    torch.manual_seed(horovod.rank())
    words = torch.randint(0, 30, (1, 15))
    alone(words).backward()
    expected = {n: horovod.allreduce(p.grad, name=f"sharing.{n}") for n, p in alone.named_parameters()}
    # both send all, the second one's kernels after the backward pass; their means are those of single elements
    for compressor in (TopK(ratio=1.0), OneBit(group=1)):
        # which send more than there is, and would go dense
        optimizer = wrap_to_compress(model, compressor, min_numel=10)
        assert optimizer._combiner.sender.engine.is_used
        model(words).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-3, msg=f"{name}, {compressor}")
        model.zero_grad()


@cases.add
def gradients_of_layers_are_encoded_where_they_lie() -> None:
    # copied instead, all would be right, only slower
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 32), torch.nn.LayerNorm(32)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 10))
    # of a bias of ten elements too, whose means take more bytes
    with mock.patch.object(kinds, "saves_bytes", return_value=True):
        optimizer = wrap(model, min_numel=1)
    own: set[str] = set()
    combine = optimizer._combiner.sender.engine.combine

    def watched(keep: bool) -> Any:
        for bucket in optimizer._combiner.sender.engine.buckets:
            own.update((*bucket._placed, *(name for name, held in bucket._gradients.items() if not held.is_copy)))
        return combine(keep)

    torch.manual_seed(horovod.rank())
    with mock.patch.object(optimizer._combiner.sender.engine, "combine", watched):
        for _ in range(3):
            own.clear()
            model(torch.randn(4, 3, 8, 8)).sum().backward()
            assert own == {name for name, _ in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()


@cases.add
def another_optimizer_takes_the_parameters_over() -> None:
    model, oracle = Net(), Oracle(OneBit())
    first = wrap(model)
    loss_of(model, 0).backward()
    first.step()
    del first
    gc.collect()
    model.zero_grad()
    optimizer = wrap(model)
    train(model, optimizer, range(3), check=lambda step: oracle.check_step(model, step))


@cases.add
def kernels_run_on_a_thread_of_their_own_where_they_are_to() -> None:
    model = Net()
    train(model, wrap(model), range(1), check=lambda step: None)
    # another one, "hvd_compress.waiting", runs wherever somebody has waited
    threads = [t.name for t in threading.enumerate() if t.name.startswith("hvd_compress_")]
    assert bool(threads) == has_cores(horovod.local_size()), threads


# -- conservation ----------------------------------------------------------------------------------------------------


WITH_FEEDBACK = {k: v for k, v in COMPRESSORS_AND_EXCHANGES.items() if v[0].feedback}


@cases.each(WITH_FEEDBACK, witnesses=[label for label in EACH_ONCE if label in WITH_FEEDBACK])
def nothing_of_a_gradient_is_lost(setting: tuple[Compressor, str]) -> None:
    compressor, exchange = setting
    model = Net()
    optimizer = wrap_to_compress(model, compressor, exchange=exchange, op=hvd.Sum)
    arrived = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    steps = range(5)

    def add(step: int) -> None:
        for name, p in model.named_parameters():
            arrived[name] += to_numpy(p.grad)

    train(model, optimizer, steps, check=add)
    state = optimizer.compression_state_dict()
    for name in ("first.weight", "second.weight"):
        owed = state["residuals"][name]["values"].double().clone()
        entry = state["owner_residuals"].get(name)
        assert (entry is not None) == (exchange == "two_phase" and not compressor.sums_factors)
        if entry is not None:
            owed[entry["start"] : entry["start"] + len(entry["values"])] += entry["values"]
        owed_by_all = to_numpy(horovod.allreduce(owed, op=horovod.Sum, name="owed")).reshape(SHAPES[name])
        p = dict(model.named_parameters())[name]
        given = sum(
            to_numpy(gradient(name, rank, step, p)).astype(float) for rank in range(horovod.size()) for step in steps
        )
        np.testing.assert_allclose(arrived[name] + owed_by_all, given, atol=2e-4)
        if compressor.id in ("onebit", "topk", "threshold", "adaptive"):
            assert np.abs(owed_by_all).max() > 0.1, "a residual that is always zero conserves nothing"


@cases.each(COMPRESSORS)
def residual_norm_is_what_is_owed(compressor: Compressor) -> None:
    model = Net()
    optimizer = wrap(model, compressor)
    train(model, optimizer, range(2), check=lambda step: None)
    state, stats = optimizer.compression_state_dict(), optimizer.compression_stats()
    squares = 0.0
    for name in ("first.weight", "second.weight"):
        parts = [
            state[kind][name]["values"].double() for kind in ("residuals", "owner_residuals") if name in state[kind]
        ]
        norm = float(torch.cat(parts).norm()) if parts else 0.0
        np.testing.assert_allclose(stats["tensors"][name]["residual_norm"], norm, rtol=1e-9)
        squares += norm**2
    np.testing.assert_allclose(stats["total"]["residual_norm"], squares**0.5, rtol=1e-9)


# -- residuals in 8 bits ---------------------------------------------------------------------------------------------


NARROW = {
    "onebit-two_phase": (OneBit(error_feedback="float8"), "two_phase"),
    "topk-allgather": (TopK(0.05, error_feedback="float8"), "allgather"),
}


@cases.each(NARROW)
def residuals_in_8_bits_keep_ranks_equal_and_resume_to_the_bit(setting: tuple[Compressor, str]) -> None:
    compressor, exchange = setting
    model, other = Net(), Net()
    optimizer = wrap_to_compress(model, compressor, exchange=exchange)
    train(model, optimizer, range(4), lambda step: None)
    other.load_state_dict(model.state_dict())
    state = optimizer.compression_state_dict()
    train(model, optimizer, range(4, 8), lambda step: None)
    check_equal_on_all_ranks(model)
    again = wrap_to_compress(other, compressor, exchange=exchange)
    again.load_compression_state_dict(state)
    train(other, again, range(4, 8), lambda step: None)
    assert bytes_of(other.parameters()) == bytes_of(model.parameters())
    assert again.compression_stats()["total"]["residual_norm"] > 0
