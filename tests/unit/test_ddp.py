"""Parts of the hooks for DistributedDataParallel in one process: a group of one rank, threads, a device of the host."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress import FP16, Adaptive, NoCompression, OneBit, ddp
from hvd_compress._torch.device import DeviceMemory, described
from hvd_compress.ddp._call_thread import CallThread
from hvd_compress.ddp._dense import dense_parts, pay_debts
from hvd_compress.ddp._given import Given, Side, Staged, views_of
from hvd_compress.ddp._hook import ByBucket
from hvd_compress.ddp._settings import named_parameters, routing_of
from hvd_compress.engine import Ledger
from hvd_compress.errors import GradientError, StateError, UnsupportedError
from hvd_compress.exchange import Account, Bucket, Pack, ParameterServer, plan_together
from hvd_compress.memory import HOST, Memory
from tests.stages import allgather, alltoall
from tests.streams import LateStreams
from tests.thorough import witnessed_by

HERE = Side(torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- one rank --------------------------------------------------------------------------------------------------------


def test_one_rank_exchanges_nothing() -> None:
    model, stock = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    stock.load_state_dict(model.state_dict())
    wrapped = DistributedDataParallel(model)
    ddp.register_comm_hook(wrapped, OneBit())
    x = torch.randn(4, 300)
    for one in (wrapped, stock):
        one(x).square().sum().backward()
    assert torch.equal(model.weight.grad, stock.weight.grad)
    assert ddp.stats(wrapped) == {**ddp.stats(wrapped), "compressor": repr(OneBit()), "tensors": {}}
    state = ddp.state_dict(wrapped)
    ddp.load_state_dict(wrapped, state)
    state["residuals"]["weight"] = {"shape": [1], "values": torch.ones(1)}
    with pytest.raises(StateError, match=r"'weight' has shape \(1,\), and the tensor has \(200, 300\)"):
        ddp.load_state_dict(wrapped, state)
    assert ddp.state_dict(wrapped)["residuals"] == {}


def owing(names_and_values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A state for one rank."""
    entries = {n: {"shape": list(v.shape), "values": v.reshape(-1).clone()} for n, v in names_and_values.items()}
    return {"format": 1, "size": 1, "rank": 0, "steps": 3, "residuals": entries, "owner_residuals": {}}


@pytest.mark.parametrize("way", ["found unused", "all used"])
def test_what_one_rank_owes_goes_with_its_next_gradients(way: str) -> None:
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(30, 20), "late": torch.nn.Linear(30, 20)})
    net.forward = lambda x, late: net["used"](x).sum() + (net["late"](x).sum() if late else 0.0)  # type: ignore[method-assign,assignment]
    wrapped = DistributedDataParallel(net, find_unused_parameters=way == "found unused")
    ddp.register_comm_hook(wrapped, OneBit())
    owed = {"used.weight": torch.randn(20, 30), "late.weight": torch.randn(20, 30)}
    state = owing(owed)
    ddp.load_state_dict(wrapped, state)
    norm = torch.cat([v.reshape(-1) for v in owed.values()]).norm()
    assert ddp.stats(wrapped)["total"]["residual_norm"] == pytest.approx(float(norm), rel=1e-6)
    x = torch.randn(4, 30)

    def gradients(scale: float, late: bool) -> dict[str, torch.Tensor]:
        wrapped.zero_grad()
        (wrapped(x, late) * scale).backward()
        return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}

    # a step that is not finite takes nothing away
    gradients(float("inf"), True)
    assert torch.equal(ddp.state_dict(wrapped)["residuals"]["used.weight"]["values"], owed["used.weight"].reshape(-1))
    if way == "found unused":
        first = gradients(1.0, False)
        assert "late.weight" not in first
        assert list(ddp.state_dict(wrapped)["residuals"]) == ["late.weight"]
        second = gradients(1.0, True)
    else:
        first = second = gradients(1.0, True)
    plain = x.sum(0).expand(20, 30)
    torch.testing.assert_close(first["used.weight"], plain + owed["used.weight"])
    torch.testing.assert_close(second["late.weight"], plain + owed["late.weight"])
    assert ddp.state_dict(wrapped)["residuals"] == {}
    third = gradients(1.0, True)
    torch.testing.assert_close(third["late.weight"], plain)


def test_what_one_replica_of_shards_owes_goes_with_its_next_gradients() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded: Any = fully_shard(torch.nn.Linear(30, 20), mesh=init_device_mesh("cpu", (1,)))
    if not hasattr(sharded, "set_all_reduce_hook"):
        pytest.skip("this torch has no hooks of FSDP2")
    ddp.fsdp_all_reduce_hook(sharded, dist.group.WORLD, OneBit())
    owed = torch.randn(20, 30)
    ddp.load_state_dict(sharded, owing({"weight": owed}))
    x = torch.randn(4, 30)
    plain = x.sum(0).expand(20, 30)
    for expected in (plain + owed, plain):
        sharded.zero_grad()
        sharded(x).sum().backward()
        torch.testing.assert_close(sharded.weight.grad.to_local(), expected)
    assert ddp.state_dict(sharded)["steps"] == 5


@pytest.mark.parametrize(
    ("compression", "settings", "error", "said"),
    [
        ("auto", {}, UnsupportedError, "Adaptive"),
        (OneBit, {}, TypeError, r"OneBit\(\.\.\.\)"),
        (3, {}, TypeError, "compression=3"),
        ("onebyte", {}, ValueError, "onebyte"),
        (OneBit(), {"min_numel": -1}, ValueError, "min_numel"),
        (OneBit(), {"start_step": True}, ValueError, "start_step"),
        (OneBit(), {"exchange": "ring"}, ValueError, "ring"),
        (OneBit(), {"exchange": ParameterServer(transport="mpi")}, UnsupportedError, "transport"),
    ],
)
def test_what_is_refused(compression: Any, settings: dict[str, Any], error: type[Exception], said: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    with pytest.raises(error, match=said):
        ddp.register_comm_hook(model, compression, **settings)


def test_sharded_models_are_refused_with_the_reason() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded: Any = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedError, match="reduce-scatter sums each element"):
        ddp.register_comm_hook(sharded, OneBit())
    with pytest.raises(TypeError, match="fully_shard"):
        ddp.fsdp_all_reduce_hook(torch.nn.Linear(4, 4), dist.group.WORLD)


# -- names and views -------------------------------------------------------------------------------------------------


def test_names_are_those_without_a_compiler() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    net[1].bias.requires_grad_(False)
    compiled: Any = torch.compile(net, backend="eager")
    assert list(named_parameters(compiled)) == ["0.weight", "0.bias", "1.weight"]
    assert list(named_parameters(net, {"0.bias"})) == ["0.weight", "1.weight"]


def test_a_buffer_is_cut_as_ddp_lays_it_out() -> None:
    conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    expanded = torch.nn.Parameter(torch.zeros(1, 1).expand(2, 3))
    parameters = [conv.weight, conv.bias, expanded]
    buffer = torch.arange(4 * 3 * 4 + 4 + 6, dtype=torch.float32)
    views = views_of(buffer, parameters)
    assert [v.shape for v in views] == [p.shape for p in parameters]
    assert views[0].stride() == conv.weight.stride()
    assert views[0][0, 1, 0, 0] == 1
    assert views[1].tolist() == [48, 49, 50, 51]
    assert views[2].tolist() == [[52, 53, 54], [55, 56, 57]]
    for wrong in (buffer[:-1], torch.zeros(100)):
        with pytest.raises(GradientError, match="Wrap the model again"):
            views_of(wrong, parameters)


def test_tensors_share_the_buckets_that_ddp_has() -> None:
    tensors = {"a": torch.empty(200, 200), "b": torch.empty(7), "c": torch.empty(300, 100), "d": torch.empty(9)}
    routing = routing_of("test", OneBit(), "two_phase", 1000)
    of_ddp = [["d"], ["c", "b"], ["a"]]
    # a bucket of small ones alone goes uncompressed, and not with those of another one
    assert replace(routing, bucket_bytes=1).divided(described(tensors.items()), 2, of_ddp) == [["c", "b"], ["a"]]
    # those that follow each other share an exchange
    assert routing.divided(described(tensors.items()), 2, of_ddp) == [["d", "c", "b", "a"]]
    assert replace(routing, bucket_bytes=4 * 30_020).divided(described(tensors.items()), 2, of_ddp) == [
        ["d", "c", "b"],
        ["a"],
    ]
    halves = {**tensors, "c": tensors["c"].half(), "b": tensors["b"].half()}
    assert routing.divided(described(halves.items()), 2, of_ddp) == [["c"], ["a"]]
    assert routing_of("test", NoCompression(), "auto", 0).divided(described(tensors.items()), 2, of_ddp) == []


# -- threads ---------------------------------------------------------------------------------------------------------


def test_a_thread_raises_what_its_call_raises_and_goes_on() -> None:
    thread = CallThread("test")
    failed, then = thread.submit(math.sqrt, -1), thread.submit(math.sqrt, 4)
    with pytest.raises(ValueError, match=r"math|domain|expected"):
        failed.result()
    assert then.result() == 2
    running = thread.submit(threading.current_thread).result()
    assert running.daemon
    thread.close()
    running.join(10)
    assert not running.is_alive()


def test_a_process_ends_while_a_thread_waits() -> None:
    program = (
        "import threading\nfrom hvd_compress.ddp._call_thread import CallThread\n"
        "thread = CallThread('test'); thread.submit(threading.Event().wait); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


# -- a bucket, on the host and on a device ---------------------------------------------------------------------------

SHAPES = {"w": (40, 61), "v": (3, 513)}


def staged(compressor: Any, exchange: str, rank: int, where: Memory) -> Staged:
    together: dict[str, Any] = {name: (shape, compressor) for name, shape in SHAPES.items()}
    together["pack"] = (Pack.shape_of({"s": (7,)}), Pack.compressor)
    plans = plan_together(exchange, together, 2)
    accounts = {n: Account(n, plans[n], compressor, rank, memory=where) for n in SHAPES}
    return Staged(Bucket(accounts, Pack("pack", {"s": (7,)}, plans["pack"], rank, memory=where)))


def given(rank: int, step: int, dtype: torch.dtype) -> Given:
    generator = torch.Generator().manual_seed(10 * rank + step)
    shapes = {**SHAPES, "s": (7,)}
    buffer = torch.randn(sum(map(math.prod, shapes.values())), generator=generator).to(dtype)
    parameters = [torch.empty(shape) for shape in shapes.values()]
    return Given(0, buffer, dict(zip(shapes, views_of(buffer, parameters), strict=True)), True, HERE)


def exchanged(made: list[Staged], buckets: list[Given]) -> None:
    assert all(one.give(bucket) for one, bucket in zip(made, buckets, strict=True))
    for collective in made[0].bucket.collectives[:-1]:
        for one, received in zip(made, alltoall([one.bucket.parcel() for one in made]), strict=True):
            one.bucket.proceed(collective, received)
            one.bucket.wait()
    received = allgather([one.bucket.parcel() for one in made])
    assert all(one.bucket.arrive(received.copy()) for one in made)
    for one in made:
        one.combine(True, 0.5)


@pytest.mark.parametrize("exchange", witnessed_by(["two_phase"], ["two_phase", "allgather"]))
@pytest.mark.parametrize("dtype", witnessed_by([torch.float32], [torch.float32, torch.bfloat16]), ids=str)
def test_a_bucket_on_a_device_comes_back_as_on_the_host(exchange: str, dtype: torch.dtype) -> None:
    device = DeviceMemory(torch.device("cpu"), LateStreams())
    here, there = ([staged(OneBit(), exchange, rank, where) for rank in range(2)] for where in (HOST, device))
    for step in range(3):
        on_host, on_device = ([given(rank, step, dtype) for rank in range(2)] for _ in range(2))
        exchanged(here, on_host)
        exchanged(there, on_device)
        for one, other in zip(on_host, on_device, strict=True):
            torch.testing.assert_close(other.buffer, one.buffer)
        assert torch.equal(on_device[0].buffer, on_device[1].buffer)


def test_a_bucket_says_how_much_comes_where_payloads_have_fixed_sizes() -> None:
    for exchange in ("two_phase", "allgather"):
        made = [staged(OneBit(), exchange, rank, HOST) for rank in range(2)]
        buckets = [given(rank, 0, torch.float32) for rank in range(2)]
        assert all(one.give(bucket) for one, bucket in zip(made, buckets, strict=True))
        for collective in made[0].bucket.collectives:
            parcels = [one.bucket.parcel() for one in made]
            for rank, one in enumerate(made):
                coming = [
                    parcel.buffer.size if collective == "allgather" else
                    (parcel.buffer.size // 2 if parcel.sizes is None else parcel.sizes[rank])
                    for parcel in parcels
                ]  # fmt: skip
                assert one.bucket.expected(collective) == coming
            if collective == "alltoall":
                for one, received in zip(made, alltoall(parcels), strict=True):
                    one.bucket.proceed(collective, received)
        varying = staged(Adaptive(pi=16, coding="golomb"), exchange, 0, HOST)
        assert varying.bucket.expected(varying.bucket.collectives[0]) is None


# -- what goes uncompressed ------------------------------------------------------------------------------------------


def test_tensors_of_fp16_go_apart_from_others() -> None:
    bucket = given(0, 0, torch.float32)
    before = bucket.buffer.clone()
    parts = dense_parts(bucket, ["w", "v", "s"], lambda name: FP16() if name == "v" else NoCompression())
    assert [(part.names, part.itemsize) for part in parts] == [(["w", "s"], 4), (["v"], 2)]
    for part in parts:
        part.start(dist.group.WORLD)
        part.wait()
        part.combine()
    torch.testing.assert_close(bucket.buffer, before, atol=2e-3, rtol=1e-3)
    assert torch.equal(bucket.gradients["w"].reshape(-1), before[: math.prod(SHAPES["w"])])


def test_debts_travel_with_their_gradients() -> None:
    bucket = given(0, 0, torch.bfloat16)
    before = bucket.gradients["s"].clone()
    pay_debts({"s": np.ones(7, np.float32), "other": np.ones(1, np.float32)}, bucket, ["w", "s"])
    assert torch.equal(bucket.gradients["s"], before + 1)


def test_a_ledger_keeps_what_is_owed_when_ddp_divides_anew() -> None:
    tensors = {"a": torch.empty(200, 200), "b": torch.empty(100, 100)}

    def ledger(plan: list[list[str]]) -> Ledger[Staged]:
        routing: ByBucket = routing_of("test", OneBit(), "two_phase", 0)
        return Ledger(
            routing, 2, 0, described(tensors.items()), lambda accounts, pack: Staged(Bucket(accounts, pack)), plan,
            pays_debts=True,
        )  # fmt: skip

    before, after = ledger([["b", "a"]]), ledger([["a"], ["b"]])
    owed = {}
    for name, account in before.accounts.items():
        rng = np.random.default_rng(account.plan.numel)
        account.residual = rng.standard_normal(account.plan.numel).astype(np.float32)
        if account.owned is not None:
            account.owner_residual = rng.standard_normal(account.owned.stop - account.owned.start).astype(np.float32)
        owed[name] = account.all_owed().copy()
    # `all_owed` may use the residuals' memory
    for name, account in before.accounts.items():
        account.residual, account.owner_residual = owed[name].copy(), None
    after.inherit(before)
    assert after.steps == before.steps == 0
    for name, account in after.accounts.items():
        np.testing.assert_allclose(account.all_owed(), owed[name], atol=1e-6)


def test_the_edge_needs_no_horovod() -> None:
    program = (
        "import sys\n"
        "for name in ('horovod', 'mpi4py', 'tensorflow', 'keras'): sys.modules[name] = None\n"
        "from hvd_compress import ddp\n"
        "print(sorted(n for n in sys.modules if n.startswith('hvd_compress.torch')), ddp.__all__)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[] ")
    assert hvd_compress.__version__
