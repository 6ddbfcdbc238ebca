"""Tensors of every type and layout through every function that moves or reduces them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import BF16, FP16, AdaGrad, NoCompression, OneBit, Policy
from hvd_compress.errors import UnsupportedError
from tests.parallel.cases import Cases
from tests.parallel.workers.common import raises

cases = Cases()
INTEGERS = (torch.int32, torch.int64)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCED = (*INTEGERS, *REAL, *COMPLEX)
MOVED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float8_e4m3fn, *REDUCED)


def labelled(dtypes: tuple[torch.dtype, ...]) -> dict[str, torch.dtype]:
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Small whole numbers, whose sums and means over 2 and 4 ranks all types but integers hold exactly."""
    shape = (horovod.size() * 2, horovod.size() * 3) if shape is None else shape
    numbers = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(rank)) * 4
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double().flip(0) + 4).to(dtype)
    return numbers > 0 if dtype == torch.bool else numbers.float().to(dtype)


def of_all(dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> list[torch.Tensor]:
    return [values(rank, dtype, shape) for rank in range(horovod.size())]


def total(tensors: list[torch.Tensor], divisor: int = 1) -> torch.Tensor:
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return (torch.stack([t.to(wide) for t in tensors]).sum(0) / divisor).to(tensors[0].dtype)


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Equal tensors: contiguous, transposed, every second column of a larger one, and views of other values."""
    yield x.clone()
    yield x.clone().t().contiguous().t()
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    wide[:, ::2] = x
    yield wide[:, ::2]
    if x.is_complex():
        yield x.conj().clone().conj()


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    equal = found.resolve_conj().float() if found.dtype == torch.float8_e4m3fn else found.resolve_conj()
    assert torch.equal(equal, expected.to(equal.dtype)), f"{found} is not {expected}"


def in_place(x: torch.Tensor, result: Any, strides: tuple[int, ...], expected: torch.Tensor) -> None:
    assert result is x
    assert x.stride() == strides
    same(x, expected)


# -- movements -------------------------------------------------------------------------------------------------------


@cases.each(labelled(MOVED))
def tensors_are_moved_bit_by_bit(dtype: torch.dtype) -> None:
    every, rank, root = of_all(dtype), horovod.rank(), horovod.size() - 1
    for x in layouts(every[rank]):
        kept, strides = x.clone(), x.stride()
        same(hvd.broadcast(x, root), every[root])
        same(hvd.synchronize(hvd.broadcast_async(x, 0)), every[0])
        same(hvd.allgather(x), torch.cat(every))
        same(hvd.synchronize(hvd.allgather_async(x, name="gathered")), torch.cat(every))
        both = hvd.grouped_allgather([x, x[:1, 0]])
        same(both[0], torch.cat(every))
        same(both[1], torch.cat([e[:1, 0] for e in every]))
        same(hvd.alltoall(x), torch.cat([e[2 * rank : 2 * rank + 2] for e in every]))
        splits = torch.full((horovod.size(),), 2, dtype=torch.int32)
        received, sizes = hvd.alltoall(x, splits)
        same(received, torch.cat([e[2 * rank : 2 * rank + 2] for e in every]))
        assert sizes.tolist() == splits.tolist()
        same(x, kept)
        in_place(x, hvd.broadcast_(x, root), strides, every[root])
        x.copy_(kept)
        handle = hvd.broadcast_async_(x, 0)
        assert hvd.poll(handle) in (True, False)
        in_place(x, hvd.synchronize(handle), strides, every[0])


@cases.each(labelled(MOVED))
def scalars_and_empty_tensors_are_moved(dtype: torch.dtype) -> None:
    every, rank, root = of_all(dtype), horovod.rank(), horovod.size() - 1
    scalar, empty = every[rank][0, 0].clone(), every[rank][:0]
    same(hvd.broadcast(scalar, root), every[root][0, 0])
    same(hvd.allgather(scalar), torch.stack([e[0, 0] for e in every]))
    in_place(scalar, hvd.broadcast_(scalar, root), (), every[root][0, 0])
    for function in (hvd.allgather, hvd.alltoall, lambda x: hvd.broadcast(x, root), lambda x: hvd.broadcast_(x, root)):
        same(function(empty), empty)


@cases.each(labelled(MOVED))
def parameters_of_all_types_and_layouts_are_broadcast(dtype: torch.dtype) -> None:
    every, root = of_all(dtype), horovod.size() - 1
    tensors = {str(i): x for i, x in enumerate(layouts(every[horovod.rank()]))}
    tensors["scalar"] = every[horovod.rank()][1, 1].clone()
    strides = {name: x.stride() for name, x in tensors.items()}
    hvd.broadcast_parameters(tensors, root)
    for name, x in tensors.items():
        in_place(x, x, strides[name], every[root][1, 1] if name == "scalar" else every[root])


@cases.add
def a_model_in_bfloat16_and_channels_last_is_broadcast() -> None:
    torch.manual_seed(horovod.rank())
    layers = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8))
    model = layers.to(torch.bfloat16).to(memory_format=torch.channels_last)
    for params in (model.state_dict(), model.named_parameters(), list(model.parameters())):
        torch.manual_seed(horovod.rank())
        layers[0].reset_parameters()
        hvd.broadcast_parameters(params, 0)
        torch.manual_seed(0)
        same(layers[0].weight, torch.nn.Conv2d(4, 8, 3, dtype=torch.bfloat16).weight)
        assert layers[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert layers[0].weight.requires_grad


# -- reductions ------------------------------------------------------------------------------------------------------


@cases.each(labelled(REDUCED))
def tensors_are_summed_and_averaged(dtype: torch.dtype) -> None:
    every, rank, size = of_all(dtype), horovod.rank(), horovod.size()
    expected, mean = total(every), total(every, size)
    for x in layouts(every[rank]):
        kept, strides = x.clone(), x.stride()
        same(hvd.allreduce(x), mean)
        same(hvd.allreduce(x, op=hvd.Sum), expected)
        same(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), expected)
        same(hvd.allreduce(x[0, 0], op=hvd.Sum), expected[0, 0])
        same(hvd.allreduce(x[:0], op=hvd.Sum), expected[:0])
        same(hvd.grouped_allreduce([x, x[:, 1]], op=hvd.Sum)[1], expected[:, 1])
        same(hvd.synchronize(hvd.grouped_allreduce_async([x[:, 1], x]))[1], mean)
        same(hvd.reducescatter(x, op=hvd.Sum), expected[2 * rank : 2 * rank + 2])
        same(hvd.grouped_reducescatter([x, x.t()])[1], mean.t()[3 * rank : 3 * rank + 3])
        if not dtype.is_complex:
            same(hvd.allreduce(x, op=hvd.Max), torch.stack(every).amax(0))
        if dtype not in INTEGERS:
            same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 2 * expected)
        same(x, kept)
        in_place(x, hvd.allreduce_(x, op=hvd.Sum), strides, expected)
        twice = [kept.clone(), kept.clone().t().contiguous().t()]
        results = hvd.grouped_allreduce_(twice, op=hvd.Sum)
        for given, result in zip(twice, results, strict=True):
            in_place(given, result, given.stride(), expected)


@cases.each(labelled(REAL + COMPLEX))
def a_leaf_that_requires_a_gradient_is_reduced_in_place(dtype: torch.dtype) -> None:
    every = of_all(dtype)
    p = torch.nn.Parameter(every[horovod.rank()].clone().t())
    assert hvd.allreduce_(p, op=hvd.Sum) is p
    same(p.detach(), total(every).t())
    assert p.is_leaf
    assert p.requires_grad


@cases.add
def bfloat16_is_rounded_once() -> None:
    x = torch.full((3,), 256.0 if horovod.rank() == 0 else 1.0, dtype=torch.bfloat16)
    expected = torch.full((3,), 255.0 + horovod.size()).bfloat16()
    same(hvd.allreduce(x, op=hvd.Sum), expected)


@cases.each(labelled((torch.float32, torch.float64, torch.bfloat16, torch.complex64)))
def sparse_tensors_are_reduced(dtype: torch.dtype) -> None:
    def sparse(rank: int) -> torch.Tensor:
        rows = torch.tensor([[4.0, 8.0], [12.0, 16.0]]).to(dtype)
        return torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), rows, (6, 2), check_invariants=True)

    result = hvd.sparse_allreduce_async(sparse(horovod.rank()), "sparse", hvd.Average)()
    same(result.to_dense(), total([sparse(r).to_dense() for r in range(horovod.size())], horovod.size()))


@cases.add
def what_has_no_meaning_is_refused_by_name() -> None:
    x = torch.ones(3, dtype=torch.complex64)
    raises(UnsupportedError, lambda: hvd.allreduce(x, op=hvd.Max), "complex64", "op=Max", "view_as_real")
    raises(TypeError, lambda: hvd.allreduce(torch.ones(3, dtype=torch.bool)), "bool", "int32")
    raises(ValueError, lambda: hvd.alltoall(torch.ones(())), "alltoall", "dimension")
    raises(ValueError, lambda: hvd.reducescatter(torch.ones(())), "reducescatter", "dimension")


@cases.add
def results_may_be_asked_for_in_inference_mode() -> None:
    size, rank = horovod.size(), horovod.rank()
    with torch.inference_mode():
        x = torch.full((size, 2), float(rank)).t()
        same(hvd.allgather(x), torch.cat([torch.full((2, size), float(r)) for r in range(size)]))
        same(hvd.alltoall(x.t()), torch.arange(float(size)).repeat_interleave(2).view(size, 2))
        same(hvd.reducescatter(x.t(), op=hvd.Sum), torch.full((1, 2), size * (size - 1) / 2))
    same(hvd.allreduce_(x, op=hvd.Sum), torch.full((2, size), size * (size - 1) / 2))


# -- gradients -------------------------------------------------------------------------------------------------------


def results_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    root, rank = horovod.size() - 1, horovod.rank()
    return {
        "allreduce": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0),
        "allreduce, mean": hvd.allreduce(x),
        "grouped_allreduce": hvd.grouped_allreduce([x, x[1:]])[1],
        "allgather": hvd.allgather(x),
        "grouped_allgather": hvd.grouped_allgather([x[0], x[: 1 + rank]])[1],
        "broadcast": hvd.broadcast(x, root),
        "alltoall": hvd.alltoall(x),
        "reducescatter": hvd.reducescatter(x, op=hvd.Sum, postscale_factor=2.0),
        "grouped_reducescatter": hvd.grouped_reducescatter([x, x])[1],
    }


def gradients_of(x: torch.Tensor, weights: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What Horovod 0.28 gives for `results_of`, of all ranks' weights of the results."""
    size, rank, rows = horovod.size(), horovod.rank(), len(x)
    mean = {name: torch.stack(of_ranks).mean(0) for name, of_ranks in weights.items() if "scatter" not in name}
    nothing = torch.zeros_like(x)
    before = sum(range(1, 1 + rank))
    part = mean["grouped_allgather"][before : before + 1 + rank]
    return {
        "allreduce": mean["allreduce"] * size * 2.0,
        "allreduce, mean": mean["allreduce, mean"],
        "grouped_allreduce": torch.cat([nothing[:1], mean["grouped_allreduce"]]),
        "allgather": mean["allgather"][rows * rank : rows * (rank + 1)],
        "grouped_allgather": torch.cat([part, nothing[1 + rank :]]),
        "broadcast": mean["broadcast"] if rank == size - 1 else nothing,
        "alltoall": torch.cat([w[2 * rank : 2 * rank + 2] for w in weights["alltoall"]]),
        "reducescatter": torch.cat(weights["reducescatter"]) * size * 2.0,
        "grouped_reducescatter": torch.cat(weights["grouped_reducescatter"]),
    }


@cases.each(labelled((torch.float32, torch.float64, torch.bfloat16)))
def gradients_are_those_of_horovod(dtype: torch.dtype) -> None:
    # its own functions cannot be asked here: backward, they name their collectives by counting all of the process
    x = values(horovod.rank(), dtype).requires_grad_()
    results = results_of(x)
    weights = {name: of_all(dtype, tuple(result.shape)) for name, result in results.items()}
    expected = gradients_of(x.detach(), weights)
    for name, result in results.items():
        mine = weights[name][horovod.rank()]
        (found,) = torch.autograd.grad(result, x, mine.t().contiguous().t())
        same(found, expected[name])


@cases.add
def gradients_of_sums_and_of_complex_numbers_come_back() -> None:
    size = horovod.size()
    x = torch.ones(2, requires_grad=True)
    # the gradient is expanded from one number
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    same(x.grad, torch.full((2,), float(size)))
    z = values(horovod.rank(), torch.complex64).requires_grad_()
    (found,) = torch.autograd.grad(hvd.allreduce(z, op=hvd.Sum), z, values(horovod.rank(), torch.complex64))
    same(found, total(of_all(torch.complex64)))


# -- gradients of an optimizer ---------------------------------------------------------------------------------------

POLICY = Policy((("large", OneBit()), ("conv", FP16())), default=NoCompression())
ROUTES: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"compression": hvd.Compression.fp16},
    "NoCompression": {"compression": NoCompression()},
    "FP16": {"compression": FP16()},
    "BF16": {"compression": BF16()},
    "groups": {"groups": 2},
    "groups of fp16": {"groups": 2, "compression": hvd.Compression.fp16},
    "predivided": {"gradient_predivide_factor": 2.0},
    "sum": {"op": hvd.Sum},
    "one-bit": {"compression": OneBit()},
    "one-bit alone": {"compression": OneBit(), "bucket_bytes": 0},
    "policy": {"compression": POLICY},
    "policy alone": {"compression": POLICY, "bucket_bytes": 0},
    "auto": {"compression": "auto"},
    "parameter server": {"exchange": "parameter_server"},
}


class Many(torch.nn.Module):
    """Parameters of one type, of which some are not contiguous; `large` alone is worth compressing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = torch.nn.Parameter(torch.ones(8, 4, 3, 3, dtype=dtype))
        self.conv.data = self.conv.data.contiguous(memory_format=torch.channels_last)
        self.transposed = torch.nn.Parameter(torch.ones(20, 30, dtype=dtype).t())
        self.scalar = torch.nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = torch.nn.Parameter(torch.ones(0, 3, dtype=dtype))
        self.large = torch.nn.Parameter(torch.ones(64, 128, dtype=dtype))


def loss_of(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """A loss of which `values` of a rank are the gradients."""
    terms = [(p * values(rank, p.dtype, tuple(p.shape)).conj()).sum() for p in model.parameters()]
    return torch.stack([term.real.double() for term in terms]).sum()


SENT = {f"{name}, {route}": (d, route) for name, d in labelled(REAL + COMPLEX).items() for route in ROUTES}


def taking_turns(dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Labels of `SENT`: each route with one of the types, and each type with several routes."""
    names = list(labelled(dtypes))
    return [f"{names[i % len(names)]}, {route}" for i, route in enumerate(ROUTES)]


@cases.each(SENT, witnesses=[*taking_turns(REAL), *taking_turns(COMPLEX)])
def an_optimizer_combines_gradients_of_all_types_and_layouts(setting: tuple[torch.dtype, str]) -> None:
    dtype, route = setting
    model, settings = Many(dtype), ROUTES[route]
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **settings)
    divisor = 1 if settings.get("op") == hvd.Sum else horovod.size()
    for _ in range(2):
        loss_of(model, horovod.rank()).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.grad.stride() == p.stride() or not p.numel(), name
            expected = total(of_all(dtype, tuple(p.shape)), divisor)
            is_exact = name != "large" or dtype.is_complex or "compression" not in settings
            if is_exact or route in ("fp16", "groups of fp16", "NoCompression", "FP16", "BF16"):
                same(p.grad, expected)
            else:
                assert (p.grad.dtype, p.grad.shape) == (p.dtype, p.shape)
        optimizer.zero_grad()
    for p in model.parameters():
        same(hvd.broadcast(p.detach(), 0), p.detach())


@cases.each(labelled((torch.bfloat16, torch.float64)))
def sparse_gradients_of_all_types_are_combined(dtype: torch.dtype) -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16, OneBit()):
        for as_dense in (False, True):
            words = torch.nn.Embedding(50, 4, sparse=True, dtype=dtype)
            sgd = torch.optim.SGD(words.parameters(), lr=1.0)
            optimizer = hvd.DistributedOptimizer(
                sgd, words.named_parameters(), compression, op=hvd.Sum, sparse_as_dense=as_dense
            )
            (words(torch.tensor([horovod.rank(), 7, 7])) * 2).sum().backward()
            optimizer.synchronize()
            expected = torch.zeros(50, 4, dtype=dtype)
            expected[: horovod.size()], expected[7] = 2, 4 * horovod.size()
            same(words.weight.grad.to_dense(), expected)
            with optimizer.skip_synchronize():
                optimizer.step()


@cases.add
def other_types_are_refused_at_wrapping_with_a_remedy_that_works() -> None:
    small = torch.nn.Parameter(torch.zeros(20, 30).to(torch.float8_e4m3fn))
    frozen = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    weight = torch.nn.Parameter(torch.ones(30))
    named = [("small", small), ("frozen", frozen), ("weight", weight)]

    def wrap(**settings: Any) -> Any:
        sgd = torch.optim.SGD([small, frozen, weight], lr=1.0)
        return hvd.DistributedOptimizer(sgd, named, **settings)

    for compression in (hvd.Compression.none, OneBit()):
        small.requires_grad_(True)
        raises(
            TypeError, lambda c=compression: wrap(compression=c), "'small'", "float8_e4m3fn", "requires_grad_(False)"
        )
        small.requires_grad_(False)
        optimizer = wrap(compression=compression, op=hvd.Sum)
        weight.sum().backward()
        optimizer.synchronize()
        same(weight.grad, torch.full((30,), float(horovod.size())))
        with optimizer.skip_synchronize():
            optimizer.zero_grad()


@cases.add
def complex_parameters_have_no_adagrad() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.complex64)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    raises(TypeError, lambda: hvd.DistributedOptimizer(sgd, adagrad=AdaGrad()), "complex", "torch.optim.Adagrad")
