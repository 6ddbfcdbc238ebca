"""Tensors that share exchanges: the results are the grouped loopback's, and collectives are few."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import horovod.torch as horovod
import numpy as np
import torch
from horovod.torch import optimizer as horovods_optimizer

import hvd_compress.torch as hvd
from hvd_compress import QSGD, Adaptive, OneBit, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.engine import DEFAULT_BUCKET_BYTES
from hvd_compress.errors import GradientError, MismatchError
from hvd_compress.exchange import kinds
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.common import (
    MIN_NUMEL,
    bytes_of,
    check_equal_on_all_ranks,
    check_taken_back,
    gradient,
    loss_of,
    numbers,
    raises,
    residuals,
    to_numpy,
)

cases = Cases()
BUCKET_BYTES = {"alone": 0, "tiny": 1, "some": 100_000, "default": DEFAULT_BUCKET_BYTES}
TOPK = TopK(ratio=0.05)
COMPRESSORS = {
    "topk": TOPK,
    "qsgd": QSGD(bits=4),
    "threshold": Threshold(0.5),
    # tensors of these are encoded together
    "onebit": OneBit(),
    "adaptive": Adaptive(pi=16),
}
Given = Callable[[str, int], torch.Tensor]

# of every fourth tensor, beside a weight, a scale and a bias of float32: compressed as float64 or from float32 copies,
# and, below MIN_NUMEL, through Horovod's own allreduce
OTHERS = [
    ((53, 67), torch.float64),
    ((41, 83), torch.bfloat16),
    ((19,), torch.float64),
    ((5,), torch.bfloat16),
    ((), torch.float32),
    ((1000,), torch.float32),
    ((0, 3), torch.float32),
    ((2, 3, 5, 7), torch.float32),
    ((999,), torch.float32),
    ((1, 2011), torch.float64),
]


def ranks() -> range:
    return range(horovod.size())


class Many(torch.nn.Module):
    """Forty tensors of many sizes and types, without a forward pass."""

    def __init__(self, blocks: int = 10) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in range(blocks))
        for i, block in enumerate(self.blocks):
            shape, dtype = OTHERS[i % len(OTHERS)]
            block.weight = torch.nn.Parameter(torch.ones(24 + i % 10, 301))
            block.scale = torch.nn.Parameter(torch.ones(24 + i % 10))
            block.other = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
            block.bias = torch.nn.Parameter(torch.ones(1 + i % 10, 3))


class Plain(torch.nn.Module):
    """Weights of float32 with their biases."""

    def __init__(self, layers: int, prefix: str = "layer") -> None:
        super().__init__()
        self.names = [f"{prefix}{i}" for i in range(layers)]
        for name in self.names:
            self.register_module(name, torch.nn.Linear(40, 40))
            with torch.no_grad():
                for p in self.get_submodule(name).parameters():
                    p.fill_(0.25)


def wrap(model: torch.nn.Module, compressor: Compressor = TOPK, **settings: Any) -> Any:
    settings = {"exchange": "two_phase", "min_numel": MIN_NUMEL, "bucket_bytes": 100_000, **settings}
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), compressor, **settings)


class Expected:
    """What the ranks must hold after each step.

    Args:
        model: whose gradients are combined.
        compressor: of its tensors from MIN_NUMEL elements.
        bucket_bytes: of the optimizer.
        groups: of names that go together, in its order.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compressor: Compressor = TOPK,
        bucket_bytes: int = 100_000,
        exchange: str = "two_phase",
        groups: Sequence[Sequence[str]] = (),
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self.loopback = Loopback(horovod.size(), compressor, exchange)
        self.packs = bucket_bytes > 0
        # as `bucket_bytes` is documented: the reverse order of the parameters, so many bytes of float32
        buckets, filled = [*map(list, groups), []], 0
        for name, p in reversed(self.parameters.items()):
            if any(name in group for group in groups) or not (self.is_compressed(name) or self.is_packed(name)):
                continue
            if buckets[-1] and filled + 4 * p.numel() > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += 4 * p.numel()
        self.buckets = [[name for name in bucket if self.is_compressed(name)] for bucket in buckets]

    def is_compressed(self, name: str) -> bool:
        return self.parameters[name].numel() >= MIN_NUMEL

    def is_packed(self, name: str) -> bool:
        p = self.parameters[name]
        return self.packs and 0 < p.numel() < MIN_NUMEL and p.dtype == torch.float32

    def check(self, given: Given) -> None:
        """Compare all gradients with the averages of given(name, rank), bit for bit where they are ours."""
        for bucket in filter(None, self.buckets):
            arrays = [{name: to_numpy(given(name, rank)) for name in bucket} for rank in ranks()]
            for name, expected in self.loopback.grouped_allreduce(arrays)[0].items():
                dtype = self.parameters[name].dtype
                self._same(name, to_numpy(torch.from_numpy(expected).to(dtype)))
        for name, p in self.parameters.items():
            if self.is_compressed(name):
                continue
            arrays = [to_numpy(given(name, rank)) for rank in ranks()]
            if self.is_packed(name):
                # all ranks add in the order of the ranks
                total = arrays[0]
                for array in arrays[1:]:
                    total = total + array
                self._same(name, total * np.float32(1 / horovod.size()))
            else:
                tolerance = 0.02 if p.dtype == torch.bfloat16 else 1e-5
                np.testing.assert_allclose(to_numpy(p.grad), np.mean(arrays, axis=0), rtol=tolerance, atol=tolerance)

    def check_step(self, step: int) -> None:
        """`check` what `loss_of` has given."""
        self.check(lambda name, rank: gradient(name, rank, step, self.parameters[name]))

    def _same(self, name: str, expected: np.ndarray) -> None:
        found = to_numpy(self.parameters[name].grad)
        assert found.tobytes() == expected.tobytes(), f"{name}: {np.abs(found - expected).max()} off the loopback"


def train(model: torch.nn.Module, optimizer: Any, expected: Expected, steps: Sequence[int] = range(3)) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        expected.check_step(step)
        optimizer.zero_grad()


# -- results -----------------------------------------------------------------------------------------------------------


@cases.each(
    {
        f"{name}-{exchange}-{size}": (compressor, exchange, BUCKET_BYTES[size])
        for name, compressor in COMPRESSORS.items()
        for exchange in ("two_phase", "allgather")
        for size in BUCKET_BYTES
    },
    witnesses=[
        "topk-two_phase-alone",
        "qsgd-allgather-tiny",
        "threshold-two_phase-some",
        "onebit-two_phase-tiny",
        "adaptive-allgather-some",
        "onebit-allgather-default",
    ],
)
def results_are_the_grouped_loopbacks(setting: tuple[Compressor, str, int]) -> None:
    compressor, exchange, bucket_bytes = setting
    model = Many()
    expected = Expected(model, compressor, bucket_bytes, exchange)
    # of four ranks, an allgather of a small matrix's payloads sends as much as an allreduce
    with mock.patch.object(kinds, "saves_bytes", return_value=True):
        optimizer = wrap(model, compressor, exchange=exchange, bucket_bytes=bucket_bytes)
    train(model, optimizer, expected)
    check_equal_on_all_ranks(model)
    ways = {name: of_tensor["exchange"] for name, of_tensor in optimizer.compression_stats()["tensors"].items()}
    for name in expected.parameters:
        way = exchange if expected.is_compressed(name) else "dense"
        assert ways[name] == (f"{exchange}, uncompressed" if expected.is_packed(name) else way), name


@cases.add
def there_really_are_several_buckets_and_several_tensors_in_one() -> None:
    sizes = {
        label: [len(b) for b in Expected(Many(), bucket_bytes=n).buckets if b] for label, n in BUCKET_BYTES.items()
    }
    assert sizes["default"] == [14]
    assert sizes["alone"] == sizes["tiny"] == [1] * 14
    assert len(sizes["some"]) > 2
    assert max(sizes["some"]) > 1


# -- collectives -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Names of all collectives that this process hands to Horovod from now on."""
    seen: list[str] = []
    places = [
        (module, name)
        for module in (horovod, horovods_optimizer)
        for name in vars(module)
        if name.endswith(("_async", "_async_"))
    ]
    originals = {place: getattr(*place) for place in places}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            seen.append(f"{name} {settings.get('name')}")
            return original(*arguments, **settings)

        return call

    for (module, name), original in originals.items():
        setattr(module, name, counting(name, original))
    try:
        yield seen
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def collectives(layers: int, **settings: Any) -> list[str]:
    model = Plain(layers)
    optimizer = wrap(model, OneBit(), **settings)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with counted() as seen:
        loss_of(model, 1).backward()
        optimizer.step()
    return seen


@cases.add
def collectives_do_not_grow_with_the_number_of_tensors() -> None:
    for layers in (3, 20, 60):
        last = f"layer{layers - 1}.weight"
        assert collectives(layers, bucket_bytes=DEFAULT_BUCKET_BYTES) == [
            f"alltoall_async hvd_compress.alltoall.{last}",
            f"allgather_async hvd_compress.allgather.{last}",
        ]
        only = [f"allgather_async hvd_compress.allgather.{last}"]
        assert collectives(layers, exchange="allgather", bucket_bytes=DEFAULT_BUCKET_BYTES) == only
    # without buckets, two for each weight and one for each bias
    assert len(collectives(20, bucket_bytes=0)) == 3 * 20
    # four weights with their biases fill a bucket
    seen = collectives(20, bucket_bytes=4 * 4 * (40 * 40 + 40))
    assert len(seen) == 2 * 5
    assert len(set(seen)) == 2 * 5


# -- hooks -------------------------------------------------------------------------------------------------------------


def order_of(rank: int, step: int, layers: int) -> list[int]:
    return [int(i) for i in np.random.default_rng([rank, step]).permutation(layers)]


def run_through(model: Plain, order: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    for i in order:
        x = torch.tanh(model.get_submodule(model.names[i])(x))
    return x.square().sum()


@cases.each({"all-layers": 12, "some-layers": 8})
def hooks_may_fire_in_another_order_on_each_rank(used: int) -> None:
    model = Plain(12)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.1 * gradient(name, 99, 0, p))
    optimizer, expected = wrap(model, bucket_bytes=20_000), Expected(model, bucket_bytes=20_000)
    for step in range(4):
        inputs = [torch.from_numpy(numbers("x", rank, step, (7, 40))) for rank in ranks()]
        grads = []
        for rank in ranks():
            loss = run_through(model, order_of(rank, step, 12)[:used], inputs[rank])
            of_rank = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            named = zip(model.named_parameters(), of_rank, strict=True)
            grads.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in named})
        run_through(model, order_of(horovod.rank(), step, 12)[:used], inputs[horovod.rank()]).backward()
        optimizer.step()
        expected.check(lambda name, rank, grads=grads: grads[rank][name])
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def gradients_may_be_missing_on_some_ranks() -> None:
    model = Many()
    optimizer, expected = wrap(model), Expected(model)
    names = list(expected.parameters)

    def only(rank: int, step: int) -> list[str]:
        # rank 0 has all of them in no step, and none of some buckets
        return names if rank > 1 else names[rank::2] if step % 2 else names[: 20 + 10 * rank]

    for step in range(3):
        loss_of(model, step, only(horovod.rank(), step)).backward()
        optimizer.step()

        def given(name: str, rank: int, step: int = step) -> torch.Tensor:
            p = expected.parameters[name]
            return gradient(name, rank, step, p) if name in only(rank, step) else torch.zeros_like(p)

        expected.check(given)
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def several_backward_passes_fill_a_bucket_once() -> None:
    model = Many()
    optimizer, expected = wrap(model, backward_passes_per_step=3), Expected(model)
    for step in range(2):
        with counted() as seen:
            for i in range(2):
                loss_of(model, 10 * step + i).backward()
        assert not seen
        loss_of(model, 10 * step + 2).backward()
        optimizer.step()

        def total(name: str, rank: int, step: int = step) -> torch.Tensor:
            p = expected.parameters[name]
            first, *others = (gradient(name, rank, 10 * step + i, p) for i in range(3))
            for other in others:
                first = first + other
            return first

        expected.check(total)
        optimizer.zero_grad()


@cases.each({"topk": TOPK, "onebit": OneBit()})
def a_step_that_is_given_up_half_way_leaves_nothing(compressor: Compressor) -> None:
    model = Many()
    optimizer, expected = wrap(model, compressor), Expected(model, compressor)
    train(model, optimizer, expected, range(2))
    before = optimizer.compression_state_dict()
    names = list(expected.parameters)
    # the last bucket is complete, one has some of its tensors, others none
    loss_of(model, 2, names[15:]).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    check_taken_back(optimizer, before)
    train(model, optimizer, expected, range(3, 5))


@cases.each(
    {
        "written": lambda p: p.grad.fill_(7),
        "given-other-memory": lambda p: setattr(p.grad, "data", torch.zeros(3)),
        "replaced": lambda p: setattr(p, "grad", torch.zeros_like(p)),
        "cleared": lambda p: setattr(p, "grad", None),
    }
)
def what_becomes_of_an_encoded_gradient_is_told_and_spoils_nothing(
    disturb: Callable[[torch.nn.Parameter], Any],
) -> None:
    # of tensors that are encoded together; that of layer0 does not come, and its exchange waits for it
    model = Plain(6)
    optimizer, expected = wrap(model, OneBit(), bucket_bytes=20_000), Expected(model, OneBit(), bucket_bytes=20_000)
    names = list(expected.parameters)
    train(model, optimizer, expected, range(1))
    for step in range(1, 5):
        loss_of(model, step, names[2:]).backward()
        disturbs = (step + horovod.rank()) % 2 == 1
        if disturbs:
            # a thread for the kernels may not have read it yet
            optimizer._combiner.sender.engine._kernel_thread.drain()
            disturb(model.layer5.weight)
            if model.layer5.weight.grad is None or model.layer5.weight.grad.numel() != 3:
                raises(GradientError, optimizer.synchronize, "'layer5.weight'")
        optimizer.synchronize()
        mine = torch.zeros(40, 40) if disturbs else model.layer5.weight.grad
        model.layer5.weight.grad = horovod.broadcast(mine, root_rank=step % 2, name="combined")
        optimizer.step()
        expected.check(
            lambda name, rank, step=step: (
                torch.zeros_like(expected.parameters[name])
                if name in names[:2]
                else gradient(name, rank, step, expected.parameters[name])
            )
        )
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


# -- groups ------------------------------------------------------------------------------------------------------------


@cases.each({"tiny": 1, "default": DEFAULT_BUCKET_BYTES})
def groups_go_together_whatever_their_size(bucket_bytes: int) -> None:
    model = Many()
    named = dict(model.named_parameters())
    groups = [
        ["blocks.1.weight", "blocks.7.bias", "blocks.0.weight", "blocks.2.weight"],
        ["blocks.9.other", "blocks.3.weight"],
    ]
    optimizer = wrap(model, bucket_bytes=bucket_bytes, groups=[[named[name] for name in group] for group in groups])
    expected = Expected(model, bucket_bytes=bucket_bytes, groups=groups)
    train(model, optimizer, expected)
    check_equal_on_all_ranks(model)


# -- sparse gradients --------------------------------------------------------------------------------------------------


class Words(torch.nn.Module):
    """Embeddings among layers, the small one below MIN_NUMEL; they can give sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(601, 24)
        self.words = torch.nn.Embedding(70, 31)
        self.second = torch.nn.Linear(601, 24)
        self.small = torch.nn.Embedding(9, 5)
        self.third = torch.nn.Linear(601, 24)
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(0.5)

    def loss(self, rank: int, step: int, sparse: bool) -> torch.Tensor:
        layers = [name for name, _ in self.named_parameters() if name not in EMBEDDINGS]
        loss = loss_of(self, step, layers, rank)
        for name in EMBEDDINGS:
            table = self.get_submodule(name.removesuffix(".weight"))
            table.sparse = sparse
            indices = torch.from_numpy(np.random.default_rng([rank, step]).integers(0, table.num_embeddings, 12))
            factors = torch.from_numpy(numbers(name, rank, step, (12, table.embedding_dim)))
            loss = loss + (table(indices) * factors).sum()
        return loss


EMBEDDINGS = ("words.weight", "small.weight")


def grads_of_words(step: int) -> list[dict[str, torch.Tensor]]:
    grads = []
    for rank in ranks():
        model = Words()
        model.loss(rank, step, sparse=False).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    return grads


@cases.each({f"{first}-{e}": (first, e) for first in ("sparse", "dense") for e in ("two_phase", "allgather")})
def the_first_gradient_decides_whether_a_tensor_goes_sparse(setting: tuple[str, str]) -> None:
    first, exchange = setting
    model = Words()
    # chunks are whole rows: what is sent of a tensor does not depend on what it shares an exchange with
    optimizer = wrap(model, OneBit(), exchange=exchange)
    loopback = Loopback(horovod.size(), OneBit(), exchange)
    named = dict(model.named_parameters())
    for step, sparse in enumerate((first == "sparse", False, True, True, False)):
        model.loss(horovod.rank(), step, sparse).backward()
        optimizer.step()
        grads = grads_of_words(step)
        for name, p in named.items():
            arrays = [to_numpy(of_rank[name]) for of_rank in grads]
            goes_sparse = first == "sparse" and name in EMBEDDINGS
            if p.numel() >= MIN_NUMEL and not goes_sparse:
                assert to_numpy(p.grad).tobytes() == loopback.allreduce(arrays, name=name)[0].tobytes(), name
            else:
                np.testing.assert_allclose(to_numpy(p.grad), np.mean(arrays, axis=0), rtol=1e-5, atol=1e-6)
        kept = [bits for key, bits in residuals(optimizer).items() if "words" in key]
        assert any(map(any, kept)) == (first == "dense")
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)
    tensors = optimizer.compression_stats()["tensors"]
    expected = (0, 5) if first == "sparse" else (5, 5)
    assert (tensors["words.weight"]["steps"], tensors["first.weight"]["steps"]) == expected


# -- values that are not finite ----------------------------------------------------------------------------------------


@cases.each(
    {
        f"{label}-{exchange}": (value, exchange)
        for label, value in {"inf": float("inf"), "nan": float("nan")}.items()
        for exchange in ("two_phase", "allgather")
    }
)
def a_bad_number_in_a_small_tensor_takes_all_residuals_back(setting: tuple[float, str]) -> None:
    value, exchange = setting
    model = Many()
    optimizer, expected = wrap(model, exchange=exchange), Expected(model, exchange=exchange)
    train(model, optimizer, expected, range(2))
    assert any(any(bits) for bits in residuals(optimizer).values())
    before = optimizer.compression_state_dict()
    # one in the first bucket and one in the last
    for name in ("blocks.0.scale", "blocks.9.bias"):
        loss_of(model, 2).backward(inputs=[p for n, p in expected.parameters.items() if n != name])
        bad = expected.parameters[name]
        bad.grad = gradient(name, horovod.rank(), 2, bad)
        if horovod.rank() == horovod.size() - 1:
            bad.grad.view(-1)[1] = value
        optimizer.synchronize()
        check_taken_back(optimizer, before)
        for other, p in expected.parameters.items():
            finite = torch.isfinite(p.grad.float()).view(-1)
            assert finite.all() or (other == name and not finite[1] and finite.sum() == p.numel() - 1), other
        np.testing.assert_equal(float(bad.grad.view(-1)[1]), value)
        others = torch.arange(bad.numel()) != 1
        mean = np.mean([to_numpy(gradient(name, rank, 2, bad)) for rank in ranks()], axis=0)
        np.testing.assert_allclose(to_numpy(bad.grad.view(-1)[others]), mean.reshape(-1)[others], rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()


@cases.add
def a_bad_number_in_a_compressed_tensor_leaves_the_others_of_its_bucket_finite() -> None:
    model = Many()
    optimizer = wrap(model)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.compression_state_dict()
    p = model.blocks[4].weight
    if horovod.rank() == 0:
        p.register_hook(lambda grad: grad * float("nan"))
    loss_of(model, 1).backward()
    optimizer.synchronize()
    assert [n for n, q in model.named_parameters() if not torch.isfinite(q.grad.float()).all()] == ["blocks.4.weight"]
    check_taken_back(optimizer, before)
    optimizer.zero_grad()


# -- how people drive optimizers ---------------------------------------------------------------------------------------


@cases.add
def clipping_between_synchronize_and_step() -> None:
    model = Plain(6)
    optimizer, expected = wrap(model, bucket_bytes=20_000), Expected(model, bucket_bytes=20_000)
    for step in range(3):
        before = {name: to_numpy(p) for name, p in model.named_parameters()}
        loss_of(model, step).backward()
        optimizer.synchronize()
        expected.check_step(step)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        with optimizer.skip_synchronize():
            optimizer.step()
        for name, p in model.named_parameters():
            np.testing.assert_array_equal(to_numpy(p), before[name] - np.float32(0.125) * to_numpy(p.grad))
        optimizer.zero_grad()
    assert optimizer.compression_stats()["total"]["steps"] == 3


@cases.add
def two_optimizers_may_be_in_flight_together() -> None:
    models = [Plain(5, "generator"), Plain(7, "critic")]
    optimizers = [wrap(model, bucket_bytes=20_000) for model in models]
    expected = [Expected(model, bucket_bytes=20_000) for model in models]
    for step in range(3):
        # each rank in an order of its own; of one that has computed all gradients of only one of them, others wait
        order = (0, 1) if (horovod.rank() + step) % 2 else (1, 0)

        def given(name: str, rank: int, step: int = step, i: int = 0) -> torch.Tensor:
            p = expected[i].parameters[name]
            is_missing = step == rank and name == "generator0.weight"
            return torch.zeros_like(p) if is_missing else gradient(name, rank, step, p)

        names = [n for n in expected[0].parameters if not (step == horovod.rank() and n == "generator0.weight")]
        first, second = (loss_of(models[i], step, None if i else names) for i in order)
        (first + second).backward()
        for i in (1, 0):
            optimizers[i].step()
            expected[i].check(partial(given, i=i))
            optimizers[i].zero_grad()


def owed(optimizer: Any, name: str) -> np.ndarray:
    """What all ranks together still owe of a tensor, in units of the sum."""
    state = optimizer.compression_state_dict()
    total = torch.zeros(int(np.prod(state["residuals"][name]["shape"])), dtype=torch.float64)
    total += state["residuals"][name]["values"]
    part = state["owner_residuals"].get(name)
    if part is not None:
        total[part["start"] : part["start"] + len(part["values"])] += part["values"]
    return horovod.allreduce(total, op=horovod.Sum, name=f"owed.{name}").numpy()


@cases.each(
    {f"{a}-to-{b}": (a, b) for a in BUCKET_BYTES for b in BUCKET_BYTES if a != b},
    witnesses=["alone-to-some", "some-to-tiny", "default-to-some"],
)
def a_state_goes_to_other_buckets(setting: tuple[str, str]) -> None:
    before, after = (BUCKET_BYTES[label] for label in setting)
    then, model = Many(), Many()
    first = wrap(then, bucket_bytes=before)
    train(then, first, Expected(then, bucket_bytes=before))
    second = wrap(model, bucket_bytes=after)
    second.load_compression_state_dict(first.compression_state_dict())
    names = [n for n, p in model.named_parameters() if p.numel() >= MIN_NUMEL]
    debt = {name: owed(second, name) for name in names}
    for name in names:
        np.testing.assert_allclose(debt[name], owed(first, name), atol=1e-4)
        assert np.abs(debt[name]).max() > 0.1
    loss_of(model, 3).backward()
    second.step()
    for name, p in model.named_parameters():
        if name in names:
            given = sum(to_numpy(gradient(name, rank, 3, p)).astype(np.float64) for rank in ranks())
            arrived = to_numpy(p.grad).reshape(-1).astype(np.float64) * horovod.size()
            tolerance = 0.2 if p.dtype == torch.bfloat16 else 1e-3
            np.testing.assert_allclose(arrived + owed(second, name), given.reshape(-1) + debt[name], atol=tolerance)
    second.zero_grad()


@cases.add
def ranks_that_disagree_on_the_size_of_buckets_are_told_so() -> None:
    raises(MismatchError, lambda: wrap(Plain(2), bucket_bytes=100 + horovod.rank()), "bucket_bytes", "100", "101")


@cases.add
def a_negative_size_is_refused() -> None:
    raises(ValueError, lambda: wrap(Plain(2), bucket_bytes=-1), "bucket_bytes=-1", "0 or more")


@cases.add
def unnamed_calls_of_the_user_may_come_in_between() -> None:
    model = Plain(8)
    optimizer, expected = wrap(model, bucket_bytes=20_000), Expected(model, bucket_bytes=20_000)
    size, mine = horovod.size(), torch.tensor([float(horovod.rank())])
    total = size * (size - 1) / 2
    for step in range(8):
        loss_of(model, step).backward()
        # a mean of the loss, or a metric, as scripts have it; the ranks are not at the same point of their exchanges
        assert float(hvd.allreduce(mine)) == total / size
        assert float(hvd.allreduce_(mine.clone(), op=hvd.Sum)) == total
        assert [float(x) for x in hvd.grouped_allreduce([mine, 2 * mine], op=hvd.Sum)] == [total, 2 * total]
        assert hvd.allgather(mine).tolist() == list(ranks())
        assert float(hvd.broadcast(mine, 1)) == 1
        handle = hvd.allreduce_async(mine, op=hvd.Sum)
        hvd.barrier()
        assert float(hvd.synchronize(handle)) == total
        optimizer.step()
        expected.check_step(step)
        optimizer.zero_grad()


@cases.add
def a_network_that_is_all_small_goes_through_horovods_allreduce() -> None:
    model = Plain(5)
    optimizer = wrap(model, min_numel=10**6)
    loss_of(model, 0).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        mean = np.mean([to_numpy(gradient(name, rank, 0, p)) for rank in ranks()], axis=0)
        np.testing.assert_allclose(to_numpy(p.grad), mean, rtol=1e-5, atol=1e-6)
    tensors = optimizer.compression_stats()["tensors"]
    assert {of_tensor["exchange"] for of_tensor in tensors.values()} == {"dense"}


@cases.add
def training_goes_on_after_all_of_this() -> None:
    model = Many(3)
    train(model, wrap(model), Expected(model), range(2))
    assert len(bytes_of(model.parameters())) > 0
    check_equal_on_all_ranks(model)
