"""How many Python functions a step enters, from the first hook to `.grad`: its cost beside kernels and collectives."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive, OneBit, TopK
from hvd_compress.compressors import Compressor
from tests.parallel.cases import Cases
from tests.python_calls import count_calls

cases = Cases()

LARGE = (1024, 1024)
SMALL = (36, 37)
MIN_NUMEL = 1000
SMALL_TENSORS = (256, 1024)
# of the first steps, which also compile kernels and lay buckets out
WARM_UP = 2


class Most(NamedTuple):
    """Bounds on calls in one step at two ranks.

    Args:
        large: with one large tensor.
        each: for each small tensor.
        constant: of a step with small tensors, however many these are.
    """

    large: int
    each: float
    constant: int


class Setting(NamedTuple):
    """What is counted, and what it may come to. Lower the bounds when the code needs fewer calls; never raise them."""

    compressor: Compressor
    exchange: str
    most: Most


SETTINGS = {
    "onebit-two_phase": Setting(OneBit(), "two_phase", Most(large=240, each=3.25, constant=230)),
    "onebit-allgather": Setting(OneBit(), "allgather", Most(large=176, each=3.25, constant=166)),
    "adaptive-two_phase": Setting(Adaptive(pi=64), "two_phase", Most(large=240, each=3.25, constant=230)),
    "topk-two_phase": Setting(TopK(0.01), "two_phase", Most(large=240, each=3.25, constant=229)),
}


def calls_of_a_step(setting: Setting, shapes: Iterable[tuple[int, ...]]) -> Counter[str]:
    """The functions that a step enters on this rank, after some steps, with gradients of these shapes."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes)
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    # kernels run where they are counted
    with mock.patch.dict(os.environ, HVD_COMPRESS_KERNEL_THREAD="0"):
        optimizer: Any = hvd.DistributedOptimizer(
            sgd, model.named_parameters(), setting.compressor, exchange=setting.exchange, min_numel=MIN_NUMEL
        )
    for _ in range(WARM_UP):
        _loss_of(model, optimizer).backward()
        optimizer.step()
    calls = count_calls(_loss_of(model, optimizer).backward)
    optimizer.step()
    return calls


def _loss_of(model: torch.nn.ParameterList, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def check(calls: Counter[str], most: float) -> None:
    """Fail if there were more calls, and say where most of them go."""
    told = "\n".join(f"{times:6} {name}" for name, times in calls.most_common(30))
    assert calls, "no function of the package was entered"
    assert calls.total() <= most, f"{calls.total()} calls of Python functions in a step, at most {most}:\n{told}"


@cases.each(SETTINGS)
def a_step_with_a_large_tensor_takes_few_calls(setting: Setting) -> None:
    check(calls_of_a_step(setting, [LARGE]), setting.most.large)


@cases.each(SETTINGS)
def a_step_with_many_small_tensors_takes_few_calls_for_each(setting: Setting) -> None:
    # a rank that failed between the two would leave the others waiting
    counted = {tensors: calls_of_a_step(setting, [SMALL] * tensors) for tensors in SMALL_TENSORS}
    for tensors, calls in counted.items():
        check(calls, setting.most.constant + setting.most.each * tensors)
