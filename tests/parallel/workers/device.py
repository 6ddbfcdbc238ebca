"""Training whose gradients lie on a device: a GPU where HVD_COMPRESS_TEST_GPU=1 is set, else Triton's interpreter and
streams that bring payloads late.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import (
    QSGD,
    AdaGrad,
    Adaptive,
    Blockwise,
    ChunkedTopK,
    EFSignSGD,
    Natural,
    OneBit,
    Percentile,
    Policy,
    Threshold,
    TopK,
)
from hvd_compress._torch.device import DeviceMemory
from hvd_compress.compressors import BF16, Compressor
from hvd_compress.memory import HOST
from hvd_compress.torch._gradients import engine
from tests.parallel.cases import Cases
from tests.streams import LateStreams

cases = Cases()
ON_GPU = os.environ.get("HVD_COMPRESS_TEST_GPU") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS = 4
MIN_NUMEL = 500

COMPRESSORS: dict[str, Any] = {
    "onebit": OneBit(),
    "qsgd": QSGD(bits=4),
    "bf16": BF16(),
    "adaptive": Adaptive(pi=16),
    "topk": TopK(0.05),
    "threshold": Threshold(0.01),
    "percentile": Percentile(90, error_feedback=True),
    "efsignsgd": EFSignSGD(),
    "natural": Natural(),
    "blockwise": Blockwise(bits=4, block=64, hadamard=True),
    "chunked": ChunkedTopK(0.05, 256),
    "policy": Policy([("2.*", QSGD(bits=8))], default=OneBit()),
}
# each step of an interpreted kernel takes seconds; test_device_memory.py has steps of all of them, in one process
TRAINED = COMPRESSORS if ON_GPU else {name: COMPRESSORS[name] for name in ("onebit", "policy")}
OF_16_BITS = ("onebit", "topk", "adaptive") if ON_GPU else ("onebit",)


@contextlib.contextmanager
def device_memory(on: bool = True) -> Iterator[list[DeviceMemory]]:
    """Let optimizers that are wrapped meanwhile exchange gradients on the device, or with `on` False on the host."""
    made: list[DeviceMemory] = []

    def memories(tensors: Any) -> Any:
        memory = DeviceMemory(torch.device("cpu"), LateStreams())
        made.append(memory)
        return lambda names: memory

    if ON_GPU and on:
        yield made
        return
    fake = memories if on else (lambda tensors: lambda names: HOST)
    with mock.patch.object(engine, "memories", fake):
        yield made


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5)
    return torch.nn.Sequential(*layers).to(DEVICE, dtype)


def loss_of(model: torch.nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (hvd.rank() if rank is None else rank))
    x = torch.randn(16, 24, generator=generator).to(DEVICE, next(model.parameters()).dtype)
    y = torch.randn(16, 5, generator=generator).to(DEVICE)
    return (model(x).float() - y).square().mean()


def wrapped(model: torch.nn.Module, compressor: Any, on: bool = True, **settings: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"min_numel": MIN_NUMEL, "exchange": "two_phase", **settings}
    if compressor == "auto":
        settings = {}
    with device_memory(on):
        return hvd.DistributedOptimizer(sgd, model.named_parameters(), compressor, **settings)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().float().cpu() for p in model.parameters()]


def check_equal(model: torch.nn.Module) -> None:
    """Fail unless all ranks have the same parameters, bit for bit."""
    digests = hvd.allgather_object(hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights(model))).hexdigest())
    assert len(set(digests)) == 1, digests


def memory_of(optimizer: Any) -> list[Any]:
    return [bucket.bucket.memory for bucket in optimizer._combiner.sender.engine.buckets]


def trained(compressor: Any, on: bool, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.nn.Module:
    model = network(dtype)
    optimizer = wrapped(model, compressor, on, **settings)
    passes = settings.get("backward_passes_per_step", 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, step * passes + i).backward()
        optimizer.step()
        check_equal(model)
    memories = memory_of(optimizer)
    assert all(isinstance(m, DeviceMemory) == on for m in memories), memories
    if on and not ON_GPU:
        # results are there for what the caller computes, and kernels have waited for gradients
        assert all(m.streams.has_met and m.streams.has_parted for m in memories)
    assert optimizer.compression_stats()["total"]["bytes_sent"] > 0
    return model


def check_near(one: torch.nn.Module, other: torch.nn.Module, tolerance: float) -> None:
    for a, b in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=tolerance)


@cases.each(TRAINED)
def a_training_is_that_of_the_host(compressor: Any) -> None:
    for exchange in ("two_phase", "allgather"):
        there, here = (trained(compressor, on, exchange=exchange) for on in (True, False))
        check_near(there, here, 2e-5)


@cases.each({name: COMPRESSORS[name] for name in OF_16_BITS})
def parameters_of_16_bits(compressor: Any) -> None:
    there, here = (trained(compressor, on, torch.bfloat16) for on in (True, False))
    check_near(there, here, 0.02)


@cases.add
def passes_are_accumulated() -> None:
    there, here = (trained(OneBit(), on, backward_passes_per_step=2) for on in (True, False))
    check_near(there, here, 2e-5)


@cases.add
def a_tensor_in_each_bucket() -> None:
    there, here = (trained(OneBit(), on, bucket_bytes=0) for on in (True, False))
    check_near(there, here, 2e-5)


@cases.add
def a_bad_number_is_taken_back() -> None:
    model = network()
    optimizer = wrapped(model, OneBit())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    before = optimizer.compression_state_dict()
    optimizer.zero_grad()
    (loss_of(model, 3) * (float("inf") if hvd.rank() == 1 else 1.0)).backward()
    assert not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    after = optimizer.compression_state_dict()
    for kind in ("residuals", "owner_residuals"):
        assert before[kind].keys() == after[kind].keys()
        for name, entry in before[kind].items():
            np.testing.assert_allclose(after[kind][name]["values"].numpy(), entry["values"].numpy(), atol=1e-6)
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    optimizer.step()
    check_equal(model)


@cases.add
def a_state_goes_to_the_host_and_back() -> None:
    whole, cut = network(), network()
    one, other = wrapped(whole, OneBit()), wrapped(cut, OneBit())
    for step in range(4):
        if step == 2:
            state = other.compression_state_dict()
            assert all(not e["values"].is_cuda for e in state["residuals"].values())
            rest = other.state_dict()
            other = wrapped(cut, OneBit())
            other.load_state_dict(rest)
            other.load_compression_state_dict(state)
        for optimizer, model in ((one, whole), (other, cut)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    for a, b in zip(weights(whole), weights(cut), strict=True):
        assert torch.equal(a, b)


@cases.add
def a_parameter_without_a_gradient() -> None:
    model = network()
    optimizer = wrapped(model, OneBit())
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 1:
            # of one layer only, and on one rank only
            loss = loss if hvd.rank() == 0 else model[4](torch.randn(3, 30, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        check_equal(model)


@cases.add
def residuals_follow_the_loss_scale() -> None:
    model = network()
    optimizer = wrapped(model, OneBit())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    norm = optimizer.compression_stats()["total"]["residual_norm"]
    optimizer.set_loss_scale(4.0)
    assert abs(optimizer.compression_stats()["total"]["residual_norm"] / norm - 4) < 1e-5


@cases.add
def a_gradient_that_is_not_contiguous_is_copied() -> None:
    parameter = torch.nn.Parameter(torch.zeros(40, 30, device=DEVICE))
    with device_memory():
        sgd = torch.optim.SGD([parameter], lr=1.0)
        optimizer: Any = hvd.DistributedOptimizer(sgd, [("w", parameter)], OneBit(error_feedback=False), min_numel=1)
    gradient = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE).t()
    parameter.grad = gradient
    optimizer.synchronize()
    expected = compressed(OneBit(error_feedback=False), gradient.contiguous().cpu())
    np.testing.assert_allclose(parameter.grad.cpu().numpy(), expected, rtol=1e-5)


@cases.add
def tensors_in_groups() -> None:
    there, here = (trained(OneBit(), on, num_groups=2) for on in (True, False))
    check_near(there, here, 2e-5)


@cases.add
def what_has_no_kernel_goes_through_host_memory() -> None:
    for settings in ({"exchange": "hierarchical"}, {"adagrad": AdaGrad()}):
        model = network()
        optimizer = wrapped(model, OneBit(), **settings)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert all(memory is HOST for memory in memory_of(optimizer))
        check_equal(model)
    model = network()
    optimizer = wrapped(model, TopK(0.05, coding="golomb"))
    loss_of(model, 0).backward()
    optimizer.step()
    assert all(memory is HOST for memory in memory_of(optimizer))


@cases.add
def single_calls_are_compressed_there() -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    found = {}
    for on in (True, False):
        with device_memory(on):
            for step in range(3):
                generator.manual_seed(10 * step + hvd.rank())
                tensor = torch.randn(60, 50, generator=generator).to(DEVICE)
                before = tensor.clone()
                found[on, step] = hvd.allreduce(tensor, name=f"t{on}", compression=OneBit()).cpu()
                assert torch.equal(tensor, before), "the tensor of a call is only read"
    for step in range(3):
        np.testing.assert_allclose(found[True, step].numpy(), found[False, step].numpy(), atol=2e-6)
        same = hvd.allgather_object(found[True, step].numpy().tobytes())
        assert len(set(same)) == 1


@cases.add
def auto_chooses_there() -> None:
    model = network()
    optimizer = wrapped(model, "auto")
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        check_equal(model)


def compressed(compressor: Compressor, gradient: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return what comes of equal gradients of all ranks: what is decoded once is what is decoded again."""
    return compressor.decode(compressor.encode(gradient.numpy()))
