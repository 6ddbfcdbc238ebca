"""Names, single allreduces, statistics, saved state, and what is refused."""

from __future__ import annotations

import inspect
import io
import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import horovod.torch as horovod
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

import hvd_compress
import hvd_compress.torch as hvd
from hvd_compress import FP16, QSGD, Adaptive, OneBit, Policy, PowerSGD, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.errors import ContractError, MismatchError, StateError, UnsupportedError
from hvd_compress.exchange import make_plan
from hvd_compress.feedback import redistribute
from hvd_compress.loopback import Loopback
from hvd_compress.torch import _calls
from tests.hostile import same
from tests.outsider import EveryOther, SignSum
from tests.parallel.cases import Cases
from tests.parallel.workers.common import (
    COMPRESSORS,
    EXCHANGES,
    SHAPES,
    Net,
    Oracle,
    bytes_of,
    check_equal_on_all_ranks,
    loss_of,
    numbers,
    raises,
    residuals,
    to_numpy,
    train,
    wrap,
    wrap_to_compress,
)
from tests.parallel.workers.neutral import WITNESSES

cases = Cases()
SHAPE = (53, 307)


def mine(name: str, step: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.from_numpy(numbers(name, horovod.rank(), step, shape))


def of_all(name: str, step: int, shape: tuple[int, ...] = SHAPE) -> list[np.ndarray]:
    return [numbers(name, rank, step, shape) for rank in range(horovod.size())]


# -- waiting ---------------------------------------------------------------------------------------------------------


@cases.add
def a_rank_that_waits_leaves_its_core_to_others() -> None:
    horovod.barrier()
    if horovod.rank() == horovod.size() - 1:
        time.sleep(1.0)  # what the others wait for
    begin = time.thread_time()
    horovod.barrier()
    spent = time.thread_time() - begin
    # a thread that spins starves those of Gloo where ranks are more than cores, until Gloo gives up
    assert spent < 0.05, f"{spent:.3f} s of a core for waiting: build Horovod with hvd-compress build-horovod"


# -- names -----------------------------------------------------------------------------------------------------------


@cases.add
def every_public_name_of_horovod_is_there() -> None:
    public = {name for name in dir(horovod) if not name.startswith("_")}
    missing = {name for name in public if not hasattr(hvd, name)}
    assert not missing, missing
    changed = {name for name in public if getattr(hvd, name) is not getattr(horovod, name)}
    # submodules of the same name, and what takes more than Horovod's
    others = {name for name in changed if inspect.ismodule(getattr(hvd, name))} | {
        "Compression",
        "DistributedOptimizer",
    }
    for name in changed - others:
        ours, stock = (inspect.signature(getattr(module, name)).parameters.values() for module in (hvd, horovod))
        assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in stock], name
    # tensors of all types and layouts, and calls without a name, go through functions of this package
    assert {"allgather", "alltoall_async", "broadcast_", "broadcast_parameters", "synchronize"} <= changed


@cases.add
def names_of_horovods_compressors_stay_its_own() -> None:
    assert hvd.Compression.none is horovod.Compression.none
    assert hvd.Compression.fp16 is horovod.Compression.fp16
    assert hvd.Compression.onebit == OneBit()
    assert hvd.Compression.threshold(0.5) == Threshold(0.5)


# -- a compressor of somebody else -----------------------------------------------------------------------------------


@cases.each({e: e for e in (*EXCHANGES, "parameter_server")} | {"own": EveryOther()})
def a_compressor_of_a_users_file_trains_and_resumes(exchange: Any) -> None:
    first, second = Net(), Net()
    second.load_state_dict(first.state_dict())
    optimizer = wrap_to_compress(first, "signsum:0.5", exchange=exchange)
    train(first, optimizer, range(2), check=lambda step: None)
    assert optimizer.compression_stats()["compressor"] == repr(SignSum(0.5))
    again = wrap_to_compress(second, SignSum(0.5), exchange=exchange)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(optimizer.state_dict())
    again.load_compression_state_dict(optimizer.compression_state_dict())
    for model, of_model in ((first, optimizer), (second, again)):
        train(model, of_model, range(2, 4), check=lambda step: None)
    assert bytes_of(first.parameters()) == bytes_of(second.parameters())
    check_equal_on_all_ranks(first)


@cases.add
def a_mistake_of_a_users_compressor_is_told_on_every_rank() -> None:
    with mock.patch.object(SignSum, "body_bytes", return_value=16):
        model = Net()
        optimizer = wrap_to_compress(model, SignSum(0.125))
        said = ("SignSum(factor=0.125", "encode_body", "16 bytes")
        raises(ContractError, lambda: train(model, optimizer, range(1), check=lambda step: None), *said)


# -- stock Horovod refuses -------------------------------------------------------------------------------------------


@cases.each({"adaptive": Adaptive(), "onebit": OneBit(), "qsgd": QSGD(), "topk": TopK()})
def stock_horovod_refuses_with_the_remedy(compressor: Compressor) -> None:
    model = torch.nn.Linear(30, 30, bias=False)
    optimizer = horovod.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compressor
    )
    x = torch.ones(1, 30)
    remedy = "import hvd_compress.torch as hvd"
    raises(UnsupportedError, lambda: model(x).sum().backward(), type(compressor).__name__, remedy)
    raises(UnsupportedError, lambda: horovod.allreduce(torch.ones(3), compression=compressor), remedy)
    optimizer.load_state_dict(optimizer.state_dict())


# -- allreduce and grouped_allreduce ---------------------------------------------------------------------------------


@cases.each(COMPRESSORS)
def a_named_allreduce_keeps_its_residual(compressor: Compressor) -> None:
    loopback = Loopback(horovod.size(), compressor)
    name = f"kept.{compressor.id}"
    for step in range(3):
        tensor = mine(name, step)
        result = hvd.allreduce(tensor, name=name, compression=compressor)
        assert result.shape == SHAPE
        assert to_numpy(result).tobytes() == loopback.allreduce(of_all(name, step), name=name)[0].tobytes()
        assert torch.equal(tensor, mine(name, step)), "the argument was changed"
    hvd.forget_residuals()


@cases.add
def forgotten_residuals_start_anew() -> None:
    first = hvd.allreduce(mine("f", 0), name="forgotten", compression=OneBit())
    second = hvd.allreduce(mine("f", 0), name="forgotten", compression=OneBit())
    assert not torch.equal(first, second)
    hvd.forget_residuals()
    assert torch.equal(hvd.allreduce(mine("f", 0), name="forgotten", compression=OneBit()), first)
    hvd.forget_residuals()


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a part": lambda tensor: tensor[1:],
    "an array": torch.Tensor.numpy,
    "an array of another library": lambda tensor: np.from_dlpack(tensor),
}


@cases.each(LOOKS)
def a_result_stays_as_it_is_while_somebody_looks_at_it(look: Callable[[torch.Tensor], Any]) -> None:
    given = mine("looks", 0)
    before = given.clone()
    held = []
    for _ in range(4):
        seen = look(hvd.allreduce(given, name="looks", compression=OneBit()))
        held.append((seen, np.array(seen)))
    assert all((np.asarray(seen) == values).all() for seen, values in held)
    assert torch.equal(given, before)
    hvd.forget_residuals()


@cases.each({str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)})
def residuals_stay_where_they_are_and_results_are_the_callers(dtype: torch.dtype) -> None:
    given = mine("again", 0).to(dtype)
    before = given.clone()
    seen, results = set(), []
    for _ in range(4):
        results.append(hvd.allreduce(given, name="again", compression=OneBit()))
        (account,) = (account for engine in _calls._engines.values() for account in engine.accounts.values())
        seen.add(account.residual.ctypes.data)
    assert len(seen) == 1
    assert len({result.data_ptr() for result in results}) == 4
    assert torch.equal(given, before)
    hvd.forget_residuals()


@cases.add
def an_unnamed_allreduce_keeps_nothing() -> None:
    results = [hvd.allreduce(mine("u", 0), compression=OneBit()) for _ in range(2)]
    expected = Loopback(horovod.size(), OneBit()).allreduce(of_all("u", 0))[0]
    for result in results:
        assert to_numpy(result).tobytes() == expected.tobytes()


@cases.add
def an_allreduce_may_be_made_in_inference_mode() -> None:
    loopback = Loopback(horovod.size(), OneBit())
    for step, is_inference in enumerate((True, False, True)):
        with torch.inference_mode(is_inference):
            result = hvd.allreduce(mine("i", step), name="inference", compression=OneBit())
            assert to_numpy(result).tobytes() == loopback.allreduce(of_all("i", step), name="inference")[0].tobytes()


@cases.add
def one_name_may_serve_several_shapes() -> None:
    for shape in (SHAPE, (70, 200), SHAPE):
        hvd.allreduce(mine("s", 0, shape), name="shapes", compression=OneBit())
    again = hvd.allreduce(mine("s", 1), name="shapes", compression=OneBit())
    loopback = Loopback(horovod.size(), OneBit())
    for step in (0, 0, 1):
        expected = loopback.allreduce(of_all("s", step), name="shapes")[0]
    assert to_numpy(again).tobytes() == expected.tobytes()
    hvd.forget_residuals()


@cases.add
def sum_average_and_factors() -> None:
    expected = Loopback(horovod.size(), OneBit(), op="sum").allreduce(of_all("o", 0))[0]
    by_op = hvd.allreduce(mine("o", 0), op=hvd.Sum, compression=OneBit())
    by_average = hvd.allreduce(mine("o", 0), average=False, compression=OneBit())
    assert to_numpy(by_op).tobytes() == to_numpy(by_average).tobytes() == expected.tobytes()
    scaled = hvd.allreduce(mine("o", 0), op=hvd.Sum, compression=OneBit(), prescale_factor=0.5, postscale_factor=8.0)
    np.testing.assert_allclose(to_numpy(scaled), 4.0 * expected, rtol=1e-6)
    averaged = hvd.allreduce(mine("o", 0), op=hvd.Average, compression=OneBit())
    np.testing.assert_allclose(to_numpy(averaged), expected / horovod.size(), rtol=1e-6)
    raises(ValueError, lambda: hvd.allreduce(mine("o", 0), True, op=hvd.Sum, compression=OneBit()), "op or average")
    raises(UnsupportedError, lambda: hvd.allreduce(mine("o", 0), op=hvd.Max, compression=OneBit()), "op=Average")


@cases.add
def without_compression_it_is_horovods() -> None:
    x = mine("h", 0)
    assert torch.equal(hvd.allreduce(x, name="plain"), horovod.allreduce(x, name="stock"))
    fp16 = [m.allreduce(x, name="h16", compression=hvd.Compression.fp16) for m in (hvd, horovod)]
    assert torch.equal(*fp16)
    pairs = [m.grouped_allreduce([x, x + 1], name="pair", op=hvd.Sum) for m in (hvd, horovod)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    differentiable = mine("h", 0).requires_grad_()
    hvd.allreduce(differentiable, name="differentiable", op=hvd.Sum).square().sum().backward()
    total = horovod.allreduce(x, name="total", op=horovod.Sum)
    np.testing.assert_allclose(to_numpy(differentiable.grad), 2 * horovod.size() * to_numpy(total), rtol=1e-5)


@cases.add
def what_cannot_be_compressed_is_refused() -> None:
    integers = torch.ones(SHAPE, dtype=torch.int64)
    raises(TypeError, lambda: hvd.allreduce(integers, name="i", compression=OneBit()), "int64", "float32")
    tracked = mine("r", 0).requires_grad_()
    raises(UnsupportedError, lambda: hvd.allreduce(tracked, name="r", compression=OneBit()), "detach", "gradient")
    with torch.no_grad():
        hvd.allreduce(tracked, name="r", compression=OneBit())
    raises(TypeError, lambda: hvd.allreduce(mine("r", 0), compression=OneBit), "OneBit(...)")
    raises(ValueError, lambda: hvd.allreduce(mine("r", 0), compression="onebot"), "did you mean 'onebit'")
    hvd.forget_residuals()


@cases.add
def bad_numbers_reach_all_ranks_and_leave_the_residual() -> None:
    loopback = Loopback(horovod.size(), OneBit())
    for step in range(3):
        arrays = of_all("bad", step)
        if step == 1:
            arrays[0][0, 0] = float("nan")
        result = hvd.allreduce(torch.from_numpy(arrays[horovod.rank()].copy()), name="bad", compression=OneBit())
        assert bool(torch.isfinite(result).all()) == (step != 1)
        np.testing.assert_array_equal(to_numpy(result), loopback.allreduce(arrays, name="bad")[0])
    hvd.forget_residuals()


@cases.add
def a_group_shares_one_exchange() -> None:
    loopback = Loopback(horovod.size(), OneBit())
    shapes = [SHAPE, (1009,), (3,), (64, 64)]
    for step in range(2):
        tensors = [mine(f"g{i}", step, shape) for i, shape in enumerate(shapes)]
        results = hvd.grouped_allreduce(tensors, name="group", compression=OneBit())
        of_ranks = [of_all(f"g{i}", step, shape) for i, shape in enumerate(shapes)]
        # in the order of a backward pass, without the one for which a payload's header alone is larger
        together = [
            {f"group.{i}": of_ranks[i][rank] for i in reversed(range(4)) if i != 2} for rank in range(horovod.size())
        ]
        expected = loopback.grouped_allreduce(together)[0]
        for i, result in enumerate(results):
            if i == 2:
                np.testing.assert_allclose(to_numpy(result), np.mean(of_ranks[i], axis=0), rtol=1e-5, atol=1e-6)
            else:
                assert to_numpy(result).tobytes() == expected[f"group.{i}"].tobytes(), shapes[i]
    hvd.forget_residuals()


@cases.each({"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64})
def allreduce_of_other_types(dtype: torch.dtype) -> None:
    shape = (200, 301)
    result = hvd.allreduce(mine("t", 0, shape).to(dtype), compression=OneBit())
    assert result.dtype == dtype
    arrays = [to_numpy(torch.from_numpy(a).to(dtype)) for a in of_all("t", 0, shape)]
    plan = make_plan("auto", OneBit(), shape, horovod.size(), dtype.itemsize)
    assert plan.exchange.id != "dense"
    expected = Loopback(horovod.size(), OneBit(), plan.exchange).allreduce(arrays)[0]
    assert torch.equal(result, torch.from_numpy(expected).to(dtype))


@cases.add
def allreduce_of_a_strided_tensor() -> None:
    x = mine("st", 0, (307, 53)).t()
    result = hvd.allreduce(x, compression=TopK(0.05))
    arrays = [np.ascontiguousarray(a.T) for a in of_all("st", 0, (307, 53))]
    expected = Loopback(horovod.size(), TopK(0.05)).allreduce(arrays)[0]
    assert to_numpy(result).tobytes() == expected.tobytes()


# -- statistics ------------------------------------------------------------------------------------------------------


def planned_bytes(compressor: Compressor, exchange: str, shape: tuple[int, ...]) -> int:
    """Bytes that a rank sends, typed from the wire format; for payloads of one size."""
    n = horovod.size()
    plan = make_plan(exchange, compressor, shape, n)
    if exchange == "allgather":
        return (n - 1) * plan.slots[0]
    own = plan.slots[horovod.rank()]
    return sum(plan.slots) - own + (n - 1) * own


@cases.each({f"{c}-{e}": (COMPRESSORS[c], e) for c in ("onebit", "qsgd", "bf16") for e in EXCHANGES})
def bytes_sent_are_those_of_the_plan(setting: tuple[Compressor, str]) -> None:
    compressor, exchange = setting
    model = Net()
    optimizer = wrap_to_compress(model, compressor, exchange=exchange)
    train(model, optimizer, range(3), check=lambda step: None)
    stats = optimizer.compression_stats()
    n = horovod.size()
    sums = dict.fromkeys(("bytes_sent", "bytes_received", "dense_bytes"), 0.0)
    for name, shape in SHAPES.items():
        found = stats["tensors"][name]
        ring = 3 * 2 * (n - 1) / n * 4 * np.prod(shape)
        sent = 3 * planned_bytes(compressor, exchange, shape) if name.endswith("weight") else ring
        assert found["bytes_sent"] == found["bytes_received"] == round(sent), (name, found)
        assert found["dense_bytes"] == round(ring)
        np.testing.assert_allclose(found["ratio"], ring / sent, rtol=1e-6)
        assert found["steps"] == 3
        assert found["exchange"] == (exchange if name.endswith("weight") else "dense")
        for key in sums:
            sums[key] += found[key]
    for key, value in sums.items():
        assert abs(stats["total"][key] - value) <= len(SHAPES), key
    assert stats["total"]["steps"] == 3
    assert all(stats["total"][f"{part}_seconds"] > 0 for part in ("encode", "exchange", "decode"))
    assert stats["compressor"] == repr(compressor)
    json.dumps(stats)


@cases.each({f"{c}-{e}": (COMPRESSORS[c], e) for c in ("threshold", "topk", "adaptive") for e in EXCHANGES})
def bytes_sent_are_the_loopbacks(setting: tuple[Compressor, str]) -> None:
    compressor, exchange = setting
    model, oracle = Net(), Oracle(compressor, exchange)
    optimizer = wrap_to_compress(model, compressor, exchange=exchange)
    train(model, optimizer, range(3), check=lambda step: oracle.check_step(model, step))
    stats = optimizer.compression_stats()["tensors"]
    sent = sum(stats[name]["bytes_sent"] for name in SHAPES if name.endswith("weight"))
    assert sent == oracle.loopback.bytes_sent[horovod.rank()]
    everyone = horovod.allreduce(torch.tensor([float(sent), -float(received_by(stats))]), op=horovod.Sum, name="flow")
    # allgathers of unequal parts: what all send is what all receive
    assert abs(float(everyone.sum())) < 1e-3 * float(everyone[0]), everyone


@cases.each({e: e for e in EXCHANGES})
def bytes_sent_are_those_of_factors(exchange: str) -> None:
    compressor = COMPRESSORS["powersgd"]
    assert isinstance(compressor, PowerSGD)
    model, n = Net(), horovod.size()
    optimizer = wrap_to_compress(model, compressor, exchange=exchange)
    train(model, optimizer, range(3), check=lambda step: None)
    stats = optimizer.compression_stats()["tensors"]
    weights = [name for name in SHAPES if name.endswith("weight")]
    factors = sum(4 * compressor.rank * sum(SHAPES[name]) for name in weights)
    least = 3 * factors * (2 * (n - 1) / n if exchange == "two_phase" else n - 1)
    sent = sum(stats[name]["bytes_sent"] for name in weights)
    # headers of payloads, and the numbers that are compared
    assert least <= sent <= least + 3 * 600 * n, (least, sent)


def received_by(stats: dict[str, Any]) -> float:
    return sum(stats[name]["bytes_received"] for name in SHAPES if name.endswith("weight"))


@cases.add
def fp16_counts_half_the_bytes() -> None:
    model = Net()
    optimizer = wrap(model, hvd.Compression.fp16)
    train(model, optimizer, range(2), check=lambda step: None)
    total = optimizer.compression_stats()["total"]
    np.testing.assert_allclose(total["ratio"], 2.0, rtol=1e-4)
    assert total["steps"] == 2, total


@cases.add
def sparse_gradients_are_in_the_statistics_or_not_at_all() -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(100, 30, sparse=True)
    optimizer = wrap(embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    found = optimizer.compression_stats()["tensors"].get("weight")
    assert found is None or found["bytes_sent"] == found["dense_bytes"] == 0, found


@cases.each({"fp16": hvd.Compression.fp16, "ours": FP16(), "policy": Policy([("*", FP16())])})
def steps_of_horovods_own_are_counted_whenever_somebody_looks(compression: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(100, 30, sparse=True), "last": torch.nn.Linear(30, 7)})
    optimizer = wrap(model, compression)

    def backward(is_sparse: bool) -> None:
        model["words"].sparse = is_sparse
        optimizer.zero_grad()
        model["last"](model["words"](torch.tensor([1, 2]))).sum().backward()

    for step, is_sparse in enumerate((True, False, True, False, False)):
        backward(is_sparse)
        if horovod.rank() == 0:
            optimizer.compression_stats()
        optimizer.step()
        if horovod.rank() == 0 and step != 3:
            assert optimizer.compression_stats()["total"]["steps"] == step + 1
    assert optimizer.compression_state_dict()["steps"] == 5
    optimizer.zero_grad()
    model["words"](torch.tensor([1, 2])).sum().backward()
    # what is in flight is abandoned, and so is no step
    optimizer.load_state_dict(optimizer.state_dict())
    stats, n = optimizer.compression_stats(), horovod.size()
    assert stats["total"]["steps"] == 5
    # what has come sparse once goes sparse on all ranks, and is not reduced
    expected = {"words.weight": (0, 3000), "last.weight": (5, 210), "last.bias": (5, 7)}
    for name, (steps, numel) in expected.items():
        found = stats["tensors"][name]
        assert (found["steps"], found["dense_bytes"]) == (steps, round(steps * 2 * (n - 1) / n * 4 * numel)), found
        assert abs(found["bytes_sent"] - found["dense_bytes"] / 2) <= 1, found


@cases.each({"none": hvd.Compression.none, "fp16": hvd.Compression.fp16})
def state_can_be_restored_after_a_step_that_failed(compression: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(100, 30, sparse=True), "last": torch.nn.Linear(30, 7)})
    optimizer = wrap(model, compression)
    before = optimizer.state_dict()

    waits = horovod.synchronize

    def failing(*arguments: Any) -> Any:
        waited.append(waits(*arguments))
        raise HorovodInternalError("a rank has ended")

    for step in range(2):
        waited: list[Any] = []
        loss = model["last"](model["words"](torch.tensor([1, 2]))).sum()
        with mock.patch.object(horovod, "synchronize", failing):
            raises(HorovodInternalError, loss.backward, "a rank has ended")
        assert waited
        optimizer.load_state_dict(before)
        optimizer.zero_grad()
        horovod.barrier()
        assert optimizer.compression_stats()["total"]["steps"] == step
        model["last"](model["words"](torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- saved state -----------------------------------------------------------------------------------------------------


def through_torch_save(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@cases.each(
    {f"{name}-{e}": (c, e) for name, c in COMPRESSORS.items() for e in EXCHANGES},
    witnesses=WITNESSES,
)
def a_resumed_run_is_bit_identical(setting: tuple[Compressor, str]) -> None:
    compressor, exchange = setting
    straight = Net()
    train(straight, wrap_to_compress(straight, compressor, exchange=exchange), range(10), check=lambda step: None)

    first = Net()
    optimizer = wrap_to_compress(first, compressor, exchange=exchange)
    train(first, optimizer, range(5), check=lambda step: None)
    saved = through_torch_save([first.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()])

    second = Net()
    second.load_state_dict(saved[0])
    optimizer = wrap_to_compress(second, compressor, exchange=exchange)
    optimizer.load_state_dict(saved[1])
    optimizer.load_compression_state_dict(saved[2])
    train(second, optimizer, range(5, 10), check=lambda step: None)
    assert bytes_of(second.parameters()) == bytes_of(straight.parameters())
    check_equal_on_all_ranks(second)

    third = Net()
    third.load_state_dict(saved[0])
    train(third, wrap_to_compress(third, compressor, exchange=exchange), range(5, 10), check=lambda step: None)
    if compressor.feedback:
        assert bytes_of(third.parameters()) != bytes_of(straight.parameters()), "the residuals do not matter"


@cases.add
def counters_of_a_resumed_run_are_its_own() -> None:
    first = trained()
    each = first.compression_stats()["total"]["bytes_sent"] / 2
    second = wrap(Net())
    second.load_compression_state_dict(through_torch_save(first.compression_state_dict()))
    assert second.compression_stats()["total"]["steps"] == 0
    model = Net()
    third = wrap(model)
    third.load_compression_state_dict(first.compression_state_dict())
    train(model, third, range(2, 5), check=lambda step: None)
    total = third.compression_stats()["total"]
    assert (total["steps"], total["bytes_sent"]) == (3, 3 * each)
    assert third.compression_state_dict()["steps"] == 5


@cases.each({"nan": float("nan"), "inf": float("inf")})
def a_residual_that_is_not_finite_is_refused(value: float) -> None:
    optimizer = trained()
    state = optimizer.compression_state_dict()
    for kind in ("residuals", "owner_residuals"):
        good = state[kind]["first.weight"]["values"]
        bad = good.clone()
        bad[-1] = value
        wrong = {**state, kind: {**state[kind], "first.weight": {**state[kind]["first.weight"], "values": bad}}}
        raises(StateError, lambda wrong=wrong: optimizer.load_compression_state_dict(wrong), "'first.weight'", "finite")
    assert same(arrays_of(optimizer.compression_state_dict()), arrays_of(state))


def arrays_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: arrays_of(value) for key, value in state.items()}
    return to_numpy(state) if isinstance(state, torch.Tensor) else state


# -- settings --------------------------------------------------------------------------------------------------------


NAMED = {"onebit": OneBit(), "adaptive:32": Adaptive(32), "topk:0.05": TopK(0.05), "qsgd:bits=2": QSGD(2)}


@cases.each({name: (name, compressor) for name, compressor in NAMED.items()})
def a_name_is_the_compressor(setting: tuple[str, Compressor]) -> None:
    name, compressor = setting
    models = [Net(), Net()]
    for model, compression in zip(models, (name, compressor), strict=True):
        optimizer = wrap(model, compression)
        assert optimizer.compression_stats()["compressor"] == repr(compressor)
        train(model, optimizer, range(2), check=lambda step: None)
    assert bytes_of(models[0].parameters()) == bytes_of(models[1].parameters())
    found = []
    for compression in (name, compressor):
        hvd.forget_residuals()
        found.append(hvd.allreduce(mine("named", 0), name="named", compression=compression))
    assert bytes_of(found[:1]) == bytes_of(found[1:])


@cases.add
def a_pattern_that_matches_nothing_is_told_on_all_ranks() -> None:
    policy = Policy({"first.*": OneBit(), "secnd.*": "topk:0.05"}, default=hvd.Compression.none)
    raises(ValueError, lambda: wrap(Net(), policy), "'secnd.*'", "'second.weight'")
    # that ranks differ is told before
    odd = Policy({"first.*": OneBit(), ("second.*" if horovod.rank() else "none.*"): "topk:0.05"})
    raises(MismatchError, lambda: wrap(Net(), odd), "rules", "none.*")
    frozen = Net()
    frozen.second.weight.requires_grad_(False)
    wrap(frozen, Policy({"second.*": TopK(0.05)}, default=hvd.Compression.fp16))


@cases.each(
    {
        "package": ("package version", hvd_compress, "__version__"),
        "wire": ("wire version", hvd_compress.wire, "VERSION"),
    }
)
def another_release_on_one_rank_is_told_on_all(setting: tuple[str, Any, str]) -> None:
    said, module, name = setting
    other = getattr(module, name) if horovod.rank() == 0 else 99
    with mock.patch.object(module, name, other):
        raises(MismatchError, lambda: wrap(Net()), f"disagree on {said}", "99", "Install the same release")


def trained(**settings: Any) -> Any:
    model = Net()
    optimizer = wrap(model, **settings)
    train(model, optimizer, range(2), check=lambda step: None)
    return optimizer


@cases.add
def a_saved_state_is_a_copy() -> None:
    model = Net()
    optimizer = wrap(model)
    train(model, optimizer, range(2), check=lambda step: None)
    state = optimizer.compression_state_dict()
    before = state["residuals"]["first.weight"]["values"].clone()
    train(model, optimizer, range(2, 4), check=lambda step: None)
    assert torch.equal(state["residuals"]["first.weight"]["values"], before)
    optimizer.load_compression_state_dict(state)
    train(model, optimizer, range(2, 4), check=lambda step: None)
    assert torch.equal(state["residuals"]["first.weight"]["values"], before)


def states_that_do_not_fit() -> dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]]:
    def change(kind: str, name: str, **entry: Any) -> Callable[[dict[str, Any]], Any]:
        def apply(state: dict[str, Any]) -> Any:
            return {**state, kind: {**state[kind], name: {**state[kind]["first.weight"], **entry}}}

        return apply

    def other_rank(state: dict[str, Any]) -> Any:
        return {**state, "rank": (state["rank"] + 1) % state["size"]}

    return {
        "rank": (other_rank, ("rank", "save a state on each rank")),
        "size": (lambda state: {**state, "size": state["size"] + 1}, ("ranks", "redistribute(states")),
        "format": (lambda state: {**state, "format": 99}, ("format", "99")),
        "not-a-dict": (lambda state: [1, 2], ("not a compressor state",)),
        "incomplete": (lambda state: {k: v for k, v in state.items() if k != "residuals"}, ("lacks residuals",)),
        "shape": (change("residuals", "first.weight", shape=[601, 48]), ("first.weight", "(601, 48)", "(48, 601)")),
        "values": (change("residuals", "first.weight", values=torch.zeros(7)), ("first.weight", "7 values")),
        "name": (change("residuals", "third.weight"), ("third.weight", "first.weight")),
        "owner": (change("owner_residuals", "first.weight", start=10**6), ("first.weight", "outside")),
    }


@cases.each(states_that_do_not_fit())
def a_state_that_does_not_fit_is_refused(setting: tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]) -> None:
    spoil, parts = setting
    optimizer = trained()
    before = residuals(optimizer)
    bad = spoil(optimizer.compression_state_dict())
    raises(StateError, lambda: optimizer.load_compression_state_dict(bad), *parts)
    assert residuals(optimizer) == before, "a refused state has changed something"


@cases.each({"float64": torch.float64, "bfloat16": torch.bfloat16})
def a_state_goes_with_a_model_that_was_converted(dtype: torch.dtype) -> None:
    state = trained().compression_state_dict()
    model = Net(dtype)
    optimizer = wrap(model)
    optimizer.load_compression_state_dict(state)
    train(model, optimizer, range(2, 4), check=lambda step: None)
    after = optimizer.compression_state_dict()
    for kind in ("residuals", "owner_residuals"):
        kept = after[kind]["first.weight"]["values"].dtype
        assert kept == (torch.float64 if dtype == torch.float64 else torch.float32)
    check_equal_on_all_ranks(model)


@cases.add
def a_state_with_residuals_needs_error_feedback() -> None:
    state = trained().compression_state_dict()
    without = wrap(Net(), OneBit(error_feedback=False))
    raises(StateError, lambda: without.load_compression_state_dict(state), "error_feedback=False")


@cases.add
def no_state_while_gradients_are_in_flight() -> None:
    model = Net()
    optimizer = wrap(model)
    loss_of(model, 0, ["first.weight"]).backward()
    raises(StateError, optimizer.compression_state_dict, "step()")
    optimizer.step()
    optimizer.compression_state_dict()


@cases.add
def redistributing_to_the_same_ranks_keeps_the_sum() -> None:
    optimizer = trained()
    state = optimizer.compression_state_dict()
    states = horovod.allgather_object(state)
    parts = redistribute(states, horovod.size())
    optimizer.load_compression_state_dict(parts[horovod.rank()])
    after = horovod.allgather_object(optimizer.compression_state_dict())
    for name in ("first.weight", "second.weight"):
        np.testing.assert_allclose(owed(after, name), owed(states, name), atol=1e-5)
        assert np.abs(owed(states, name)).max() > 0.1


def owed(states: list[dict[str, Any]], name: str) -> np.ndarray:
    total = np.zeros(int(np.prod(SHAPES[name])))
    for state in states:
        if name in state["residuals"]:
            total += np.asarray(state["residuals"][name]["values"])
        if name in state["owner_residuals"]:
            entry = state["owner_residuals"][name]
            total[entry["start"] : entry["start"] + len(entry["values"])] += np.asarray(entry["values"])
    return total


@cases.add
def a_new_loss_scale_rescales_what_is_owed() -> None:
    optimizer = trained()
    optimizer.set_loss_scale(1024.0)
    before = optimizer.compression_state_dict()
    optimizer.set_loss_scale(256.0)
    after = optimizer.compression_state_dict()
    for kind in ("residuals", "owner_residuals"):
        for name, entry in before[kind].items():
            assert torch.equal(after[kind][name]["values"], entry["values"] / 4)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        raises(ValueError, lambda bad=bad: optimizer.set_loss_scale(bad), "loss_scale")
    optimizer.load_compression_state_dict(before)
    assert optimizer.compression_state_dict()["loss_scale"] == 1024.0


# -- ranks that disagree ---------------------------------------------------------------------------------------------


class Renamed(torch.nn.Module):
    def __init__(self, names: list[str], width: int = 60, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Parameter(torch.ones(40, width, dtype=dtype)))


def disagreements() -> dict[str, tuple[Callable[[bool], Any], tuple[str, ...]]]:
    """What rank 1 does otherwise, and what all ranks must be told."""
    return {
        "compressor": (lambda odd: wrap(Net(), TopK(0.5) if odd else TopK(0.25)), ("compression.ratio", "0.5", "0.25")),
        "kind": (lambda odd: wrap(Net(), OneBit() if odd else QSGD()), ("compression", "onebit", "qsgd")),
        "horovods": (lambda odd: wrap(Net(), hvd.Compression.fp16 if odd else OneBit()), ("compression", "FP16")),
        "exchange": (lambda odd: wrap(Net(), exchange="allgather" if odd else "auto"), ("exchange", "'allgather'")),
        "own exchange": (
            lambda odd: wrap(Net(), exchange=EveryOther() if odd else "two_phase"),
            ("exchange", "'every_other'", "'two_phase'"),
        ),
        "min_numel": (lambda odd: wrap(Net(), min_numel=7 if odd else 8), ("min_numel", "7", "8")),
        "op": (lambda odd: wrap(Net(), op=hvd.Sum if odd else hvd.Average), ("op",)),
        "passes": (lambda odd: wrap(Net(), backward_passes_per_step=3 if odd else 2), ("backward_passes_per_step",)),
        "groups": (lambda odd: wrap(Net(), groups=2 if odd else 1), ("groups", "2", "1")),
        "sparse": (lambda odd: wrap(Net(), sparse_as_dense=odd), ("sparse_as_dense", "True")),
        "name": (lambda odd: wrap(Renamed(["a", "c" if odd else "b"])), ("parameters[1]", "'c'", "'b'")),
        "order": (lambda odd: wrap(Renamed(["b", "a"] if odd else ["a", "b"])), ("parameters[0]", "'a'", "'b'")),
        "shape": (lambda odd: wrap(Renamed(["a"], 61 if odd else 60)), ("parameters[0]", "60", "61")),
        "dtype": (
            lambda odd: wrap(Renamed(["a"], dtype=torch.float64 if odd else torch.float32)),
            ("parameters[0]", "float64", "float32"),
        ),
        "number": (lambda odd: wrap(Renamed(["a", "b"] if odd else ["a"])), ("number of parameters", "1", "2")),
        "frozen": (lambda odd: wrap(half_frozen(odd)), ("parameters[0]", "False", "True")),
    }


def half_frozen(frozen: bool) -> torch.nn.Module:
    model = Renamed(["a"])
    model.a.requires_grad_(not frozen)
    return model


@cases.each(disagreements())
def ranks_that_disagree_are_all_told(setting: tuple[Callable[[bool], Any], tuple[str, ...]]) -> None:
    make, parts = setting
    raises(MismatchError, lambda: make(horovod.rank() == 1), *parts, "rank 0", "rank 1")


@cases.add
def group_lists_of_other_parameters_are_a_disagreement() -> None:
    def make() -> None:
        model = Net()
        first, second = model.first, model.second
        a = [[first.weight, first.bias], [second.weight, second.bias]]
        b = [[first.weight, second.bias], [second.weight, first.bias]]
        wrap(model, groups=b if horovod.rank() == 1 else a)

    raises(MismatchError, make, "groups")


@cases.each(
    {
        "exchange": ({"exchange": "ring"}, ("exchange", "ring", "two_phase")),
        "min_numel": ({"min_numel": -1}, ("min_numel=-1",)),
        "passes": ({"backward_passes_per_step": 0}, ("backward_passes_per_step=0",)),
        "groups": ({"groups": -2}, ("groups=-2",)),
    }
)
def bad_settings_say_what_is_allowed(setting: tuple[dict[str, Any], tuple[str, ...]]) -> None:
    settings, parts = setting
    raises(ValueError, lambda: wrap(Net(), **settings), *parts)


@cases.add
def training_goes_on_after_all_of_this() -> None:
    model, oracle = Net(), Oracle(OneBit())
    train(model, wrap(model), range(3), check=lambda step: oracle.check_step(model, step))
    check_equal_on_all_ranks(model)
