"""AdaGrad inside the exchange: training is that of torch.optim.Adagrad, and a step is taken back as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import FP16, AdaGrad, Auto, NoCompression, OneBit, Policy, errors
from hvd_compress.exchange.raw import CheckedRaw
from hvd_compress.feedback import redistribute
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.common import (
    MIN_NUMEL,
    SHAPES,
    Net,
    bytes_of,
    check_equal_on_all_ranks,
    check_taken_back,
    gradient,
    loss_of,
    numbers,
    raises,
    to_numpy,
    train,
    wrap,
)

cases = Cases()
EPSILON = 1e-6
# where gradients are rounded to 16 bits: a small one would make a large update of what is left of a sum that cancels
LARGE_EPSILON = 1.0
# exact, and exchanged all the same
ALL_SENT = CheckedRaw()
# tensors alone, the small ones through Horovod; all in one bucket; a bucket for each weight
BUCKETS = {"alone": 0, "together": 2**25, "some": 4 * 48 * 700}


def adagrad(model: torch.nn.Module, compression: Any = None, **settings: Any) -> Any:
    return wrap(model, compression, **{"adagrad": AdaGrad(EPSILON), **settings})


def combined(name: str, step: int, p: torch.Tensor, op: Any = hvd.Average) -> torch.Tensor:
    total = torch.stack([gradient(name, rank, step, p) for rank in range(horovod.size())]).sum(0)
    return total / horovod.size() if op == hvd.Average else total


class Twin:
    """The same model, trained by torch.optim.Adagrad on combined gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32, op: Any = hvd.Average, epsilon: float = EPSILON) -> None:
        self.model, self._op = Net(dtype), op
        self._optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.125, eps=epsilon)

    def step(self, number: int) -> None:
        for name, p in self.model.named_parameters():
            p.grad = combined(name, number, p, self._op)
        self._optimizer.step()

    def check(self, model: torch.nn.Module, tolerance: float = 2e-4) -> None:
        for (name, p), q in zip(model.named_parameters(), self.model.parameters(), strict=True):
            np.testing.assert_allclose(to_numpy(p), to_numpy(q), rtol=tolerance, atol=tolerance, err_msg=name)


def accumulators(optimizer: Any) -> dict[str, bytes]:
    entries = optimizer.compression_state_dict()["accumulators"]
    return {name: entry["values"].numpy().tobytes() for name, entry in entries.items()}


# -- what is trained ---------------------------------------------------------------------------------------------------


@cases.each({f"{e}-{b}": (e, BUCKETS[b]) for e in ("auto", "two_phase", "hierarchical") for b in BUCKETS})
def where_everything_is_sent_training_is_torchs_adagrad(setting: tuple[str, int]) -> None:
    exchange, bucket_bytes = setting
    for op in (hvd.Average, hvd.Sum):
        model, twin = Net(), Twin(op=op)
        optimizer = adagrad(model, ALL_SENT, exchange=exchange, bucket_bytes=bucket_bytes, op=op)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            twin.step(step)
            twin.check(model)
        check_equal_on_all_ranks(model)


@cases.each({"none": NoCompression(), "fp16": FP16(), "policy": Policy([("first.*", ALL_SENT), ("second.*", FP16())])})
def uncompressed_tensors_are_trained_alike(compression: Any) -> None:
    for settings in ({}, {"groups": 2}):
        model, twin = Net(), Twin(epsilon=LARGE_EPSILON)
        optimizer = adagrad(model, compression, adagrad=AdaGrad(LARGE_EPSILON), **settings)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            twin.step(step)
        twin.check(model, tolerance=1e-3)
        check_equal_on_all_ranks(model)


@cases.each({"float64": torch.float64, "float16": torch.float16})
def other_types_are_trained_alike(dtype: torch.dtype) -> None:
    model, twin = Net(dtype), Twin(dtype, epsilon=LARGE_EPSILON)
    optimizer = adagrad(model, ALL_SENT, bucket_bytes=BUCKETS["together"], adagrad=AdaGrad(LARGE_EPSILON))
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        twin.step(step)
    twin.check(model, tolerance=3e-3 if dtype == torch.float16 else 1e-5)
    check_equal_on_all_ranks(model)


@cases.add
def compressed_tensors_are_the_loopbacks() -> None:
    model, names = Net(), ("first.weight", "second.weight")
    optimizer = adagrad(model, OneBit())
    loopback = Loopback(horovod.size(), OneBit(), adagrad=AdaGrad(EPSILON))

    def check(step: int) -> None:
        for name in names:
            arrays = [numbers(name, rank, step, SHAPES[name]) for rank in range(horovod.size())]
            expected = loopback.allreduce(arrays, name=name)[0]
            assert to_numpy(model.get_parameter(name).grad).tobytes() == expected.tobytes(), name

    train(model, optimizer, range(4), check)
    check_equal_on_all_ranks(model)


@cases.add
def gradients_of_several_passes_missing_ones_and_closures() -> None:
    model, twin = Net(), Net()
    optimizer = adagrad(model, ALL_SENT, backward_passes_per_step=2)
    local = torch.optim.Adagrad(twin.parameters(), lr=0.125, eps=EPSILON)

    def only(rank: int) -> Sequence[str]:
        return [name for name in SHAPES if rank or not name.startswith("second")]

    def total(name: str, p: torch.Tensor, step: int) -> torch.Tensor:
        ranks = [rank for rank in range(horovod.size()) if name in only(rank)]
        each = [gradient(name, rank, 10 * step + i, p) for rank in ranks for i in range(2)]
        return torch.stack(each).sum(0) / horovod.size()

    for step in range(3):

        def backward(step: int = step) -> None:
            for i in range(2):
                loss_of(model, 10 * step + i, only(horovod.rank())).backward()

        if step == 1:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        optimizer.zero_grad()
        for name, p in twin.named_parameters():
            p.grad = total(name, p, step)
        local.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(to_numpy(p), to_numpy(q), rtol=2e-4, atol=2e-4)


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(70, 31, sparse=True)
        torch.nn.init.constant_(self.words.weight, 1.0)

    def run(self, rank: int, step: int) -> None:
        rng = np.random.default_rng([rank, step])
        indices = torch.from_numpy(rng.integers(0, 70, 12))
        (self.words(indices) * torch.from_numpy(rng.standard_normal((12, 31)).astype(np.float32))).sum().backward()


@cases.each({"compressed": MIN_NUMEL, "dense": 10**9})
def sparse_gradients_are_made_dense_or_refused(min_numel: int) -> None:
    model, oracle = Embedding(), 0.0
    optimizer = adagrad(model, ALL_SENT, sparse_as_dense=True, min_numel=min_numel)
    for step in range(3):
        model.run(horovod.rank(), step)
        optimizer.step()
        each = []
        for rank in range(horovod.size()):
            other = Embedding()
            other.run(rank, step)
            each.append(to_numpy(other.words.weight.grad))
        average = np.mean(each, axis=0)
        oracle = oracle + average**2
        expected = average / (np.sqrt(oracle) + EPSILON)
        np.testing.assert_allclose(to_numpy(model.words.weight.grad), expected, rtol=1e-3, atol=1e-4)
        optimizer.zero_grad()
    model = Embedding()
    optimizer = adagrad(model, ALL_SENT, min_numel=min_numel)
    raises(errors.UnsupportedError, lambda: model.run(horovod.rank(), 0), "words.weight", "sparse_as_dense=True")


# -- a step is a transaction -------------------------------------------------------------------------------------------


@cases.each(
    {f"{n}-{v}-{b}": (n, v, BUCKETS[b]) for n in SHAPES for v in ("inf", "1e30") for b in ("alone", "together")},
    # each tensor in both kinds of buckets, once with each value
    witnesses=[
        f"{n}-{v}-{b}"
        for i, n in enumerate(SHAPES)
        for v, b in zip(("inf", "1e30"), ("alone", "together")[:: 1 if i in (0, 3) else -1], strict=True)
    ],
)
def a_step_that_is_not_finite_is_taken_back_everywhere(setting: tuple[str, str, int]) -> None:
    name, bad, bucket_bytes = setting
    model, twin = Net(), Twin()
    optimizer = adagrad(model, ALL_SENT, bucket_bytes=bucket_bytes)
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        twin.step(step)
        if step == 1:
            before = accumulators(optimizer), optimizer.compression_state_dict()
            loss = loss_of(model, 77)
            if horovod.rank() == horovod.size() - 1:
                loss = loss + model.get_parameter(name).view(-1)[3].double() * float(bad)
            loss.backward()
            optimizer.step()
            assert not torch.isfinite(model.get_parameter(name).grad).all()
            assert accumulators(optimizer) == before[0]
            check_taken_back(optimizer, before[1])
            optimizer.zero_grad()
            model.load_state_dict(twin.model.state_dict())
    twin.check(model)


@cases.each(BUCKETS)
def scaled_losses_give_the_same_training(bucket_bytes: int) -> None:
    plain, scaled = Net(), Net()
    optimizers = [adagrad(model, OneBit(), bucket_bytes=bucket_bytes) for model in (plain, scaled)]
    for step, scale in enumerate((65536.0, 65536.0, 32768.0, 4.0)):
        optimizers[1].set_loss_scale(scale)
        for model, optimizer, factor in zip((plain, scaled), optimizers, (1.0, scale), strict=True):
            (factor * loss_of(model, step)).backward()
            optimizer.synchronize()
            for p in model.parameters():
                p.grad /= factor  # what GradScaler.unscale_ does
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        # all scales are powers of two
        assert bytes_of(plain.parameters()) == bytes_of(scaled.parameters()), step
    assert accumulators(optimizers[0]) == accumulators(optimizers[1])


# -- state -------------------------------------------------------------------------------------------------------------


def steps(model: torch.nn.Module, optimizer: Any, numbers: Iterable[int]) -> None:
    train(model, optimizer, numbers, check=lambda step: None)


def copy_of(model: torch.nn.Module) -> Net:
    copy = Net()
    copy.load_state_dict(model.state_dict())
    return copy


@cases.each(BUCKETS)
def a_saved_state_goes_on_bit_for_bit(bucket_bytes: int) -> None:
    model = Net()
    optimizer = adagrad(model, OneBit(), bucket_bytes=bucket_bytes)
    steps(model, optimizer, range(3))
    again = copy_of(model)
    other = adagrad(again, OneBit(), bucket_bytes=bucket_bytes)
    other.load_compression_state_dict(optimizer.compression_state_dict())
    for each, of in ((model, optimizer), (again, other)):
        steps(each, of, range(3, 6))
    assert bytes_of(model.parameters()) == bytes_of(again.parameters())
    assert accumulators(optimizer) == accumulators(other)


@cases.add
def with_other_buckets_all_states_are_put_together_first() -> None:
    model = Net()
    optimizer = adagrad(model, ALL_SENT, bucket_bytes=0)
    steps(model, optimizer, range(3))
    again = copy_of(model)
    other = adagrad(again, ALL_SENT, bucket_bytes=BUCKETS["together"])
    state = optimizer.compression_state_dict()
    owned = other._combiner.sender.engine.accounts["first.weight"].owned
    entry = state["accumulators"]["first.weight"]
    held = range(entry["start"], entry["start"] + len(entry["values"]))
    moved = [owned is not None and not (owned.start in held and owned.stop - 1 in held)]
    assert [True] in horovod.allgather_object(moved), "nothing has moved, so nothing is tested"
    if moved[0]:
        raises(
            errors.StateError, lambda: other.load_compression_state_dict(state), "accumulators of 'first.weight'",
            f"redistribute(states, {horovod.size()})",
        )  # fmt: skip
    states = horovod.allgather_object(state)
    other.load_compression_state_dict(redistribute(states, horovod.size())[horovod.rank()])
    twin = Twin()
    for step in range(6):
        twin.step(step)
    steps(again, other, range(3, 6))
    twin.check(again)


@cases.add
def states_with_and_without_adagrad() -> None:
    model = Net()
    optimizer = adagrad(model, OneBit())
    steps(model, optimizer, range(2))
    raises(
        errors.StateError, lambda: wrap(Net()).load_compression_state_dict(optimizer.compression_state_dict()),
        "adagrad=AdaGrad()",
    )  # fmt: skip
    plain = wrap(Net())
    steps(Net(), plain, ())
    model = Net()
    plain = wrap(model)
    steps(model, plain, range(2))
    before = horovod.allgather_object(plain.compression_state_dict())
    optimizer = adagrad(model, OneBit())
    optimizer.load_compression_state_dict(plain.compression_state_dict())
    after = horovod.allgather_object(optimizer.compression_state_dict())
    # in units of the sum before and after: what owners owed goes with the next gradients
    for name in ("first.weight", "second.weight"):
        owed = sum(state["residuals"][name]["values"].numpy().astype(np.float64) for state in before)
        for state in before:
            entry = state["owner_residuals"][name]
            owed[entry["start"] : entry["start"] + len(entry["values"])] += entry["values"].numpy()
        found = sum(state["residuals"][name]["values"].numpy().astype(np.float64) for state in after)
        np.testing.assert_allclose(found, owed, atol=1e-5)
    assert not any(state["owner_residuals"] for state in after)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusals() -> dict[str, tuple[dict[str, Any], type[BaseException], tuple[str, ...]]]:
    unsupported = errors.UnsupportedError
    return {
        "allgather": ({"exchange": "allgather"}, unsupported, ("allgather", "use exchange='two_phase'")),
        "auto": ({"compression": Auto()}, unsupported, ("Auto", "a compressor or a Policy")),
        "adasum": ({"op": hvd.Adasum}, unsupported, ("op=Average or op=Sum",)),
        "type": ({"adagrad": 1e-8}, TypeError, ("adagrad=1e-08", "AdaGrad()")),
    }


@cases.each(refusals())
def what_cannot_be_honoured_is_refused(case: tuple[dict[str, Any], type[BaseException], tuple[str, ...]]) -> None:
    settings, kind, parts = case
    call: Callable[[], Any] = lambda: wrap(Net(), **{"adagrad": AdaGrad(), **settings})  # noqa: E731
    raises(kind, call, *parts)


@cases.each({"before the first step": 0, "later": 2})
def all_ranks_may_load_a_state(steps: int) -> None:
    model = Net()
    optimizer = adagrad(model, OneBit())
    for step in range(steps + 2):
        if step == steps:
            optimizer.load_compression_state_dict(optimizer.compression_state_dict())
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.add
def ranks_must_agree_on_it() -> None:
    for mine in (None if horovod.rank() else AdaGrad(), AdaGrad(1e-6 if horovod.rank() else 1e-7)):
        raises(errors.MismatchError, lambda mine=mine: wrap(Net(), adagrad=mine), "adagrad")
