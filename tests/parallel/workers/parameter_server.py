"""`ParameterServer` under the torch optimizer against the loopback, with both transports where there is MPI."""

from __future__ import annotations

import gc
import time
import zlib
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import QSGD, AdaGrad, Auto, OneBit, ParameterServer, Percentile, Policy, Threshold, TopK
from hvd_compress.errors import MismatchError, UnsupportedError
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.common import (
    MIN_NUMEL,
    SHAPES,
    Net,
    Oracle,
    check_equal_on_all_ranks,
    check_taken_back,
    gradient,
    loss_of,
    raises,
    ranks_of_start,
    to_numpy,
    train,
)

cases = Cases()
# rank 0 is not among them, so that positions are not ranks
MEMBERS = [1, 2]
PROCESS_SETS = [hvd.ProcessSet(MEMBERS)] if ranks_of_start() > max(MEMBERS) else []

COMPRESSORS = {
    "onebit": OneBit(),
    "threshold": Threshold(0.5),
    "qsgd": QSGD(bits=4),
    "qsgd-1-elias": QSGD(bits=1, coding="elias"),
    "topk": TopK(ratio=0.05),
    "percentile": Percentile(90),
    "percentile-feedback": Percentile(90, error_feedback=True),
}
SERVERS = {
    f"{transport}-{answer}-{root}": {"root": root, "answer": answer, "transport": transport}
    for transport in ("horovod", "mpi")
    for answer in ("compressed", "dense")
    for root in (1, "round_robin")
}
TOGETHER = ("second.weight", "first.weight")


def server(settings: Any) -> ParameterServer:
    """The exchange of a case; on Gloo, of one with MPI's messages the same with Horovod's collectives."""
    transport = settings["transport"] if horovod.mpi_enabled() else "horovod"
    return ParameterServer(**{**settings, "transport": transport})


def wrap(model: torch.nn.Module, compression: Any, exchange: Any, **settings: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    settings = {"exchange": exchange, "min_numel": MIN_NUMEL, **settings}
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), compression, **settings)


@cases.each({f"{c}-{s}": (COMPRESSORS[c], SERVERS[s]) for c in COMPRESSORS for s in SERVERS}, thorough="mpi-")
def average_is_the_loopbacks(setting: Any) -> None:
    compressor, exchange = setting[0], server(setting[1])
    model, oracle = Net(), Oracle(compressor, exchange, together=TOGETHER)
    optimizer = wrap(model, compressor, exchange)
    train(model, optimizer, range(4), check=lambda step: oracle.check_step(model, step))
    check_equal_on_all_ranks(model)


@cases.each(SERVERS, thorough="mpi-")
def sum_of_tensors_that_go_alone(setting: Any) -> None:
    exchange = server(setting)
    model, oracle = Net(), Oracle(TopK(0.05), exchange, op="sum")
    optimizer = wrap(model, TopK(0.05), exchange, op=hvd.Sum, bucket_bytes=0)
    train(model, optimizer, range(3), check=lambda step: oracle.check_step(model, step))
    roots = [shipment.bucket.root for shipment in optimizer._combiner.sender.engine.buckets]
    assert roots == ([0, 1] if setting["root"] == "round_robin" else [1, 1])


@cases.each(
    {f"{c}-{s}": (getattr(hvd.Compression, c), SERVERS[s]) for c in ("none", "fp16") for s in SERVERS}, thorough="mpi-"
)
def uncompressed_gradients_are_gathered_too(setting: Any) -> None:
    compression, exchange = setting[0], server(setting[1])
    model = Net()
    optimizer = wrap(model, compression, exchange)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            of_ranks = [to_numpy(gradient(name, rank, step, p)) for rank in range(horovod.size())]
            tolerance = 1e-6 if compression is hvd.Compression.none else 2e-3
            np.testing.assert_allclose(to_numpy(p.grad), np.mean(of_ranks, axis=0), atol=tolerance, err_msg=name)
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)
    tensors = optimizer.compression_stats()["tensors"]
    assert tensors["first.weight"]["exchange"] == "parameter_server"
    sent = optimizer.compression_stats()["total"]["bytes_sent"]
    assert sent > 0


@cases.each(SERVERS, thorough="mpi-")
def a_gradient_leaves_while_backward_goes_on(setting: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.ReLU(), torch.nn.Linear(50, 30))
    optimizer = wrap(model, OneBit(), server(setting), bucket_bytes=0)
    hvd.broadcast_parameters(model.state_dict(), 0)
    # ranks compare before the first exchange
    model(torch.ones(4, 40)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    under_way = []

    def look(gradient: torch.Tensor) -> None:
        # the first layer's weights have none yet
        assert model[0].weight.grad is None
        under_way.append(
            [bucket.tensors for bucket in optimizer._combiner.sender.engine.buckets if bucket._handle is not None]
        )

    hidden = model[0](torch.full((4, 40), 1.0 + horovod.rank()))
    hidden.register_hook(look)
    model[2](model[1](hidden)).square().sum().backward()
    assert under_way == [[["2.weight"]]], under_way
    optimizer.step()
    check_equal_on_all_ranks(model)


@cases.each(SERVERS, thorough="mpi-")
def hooks_may_fire_in_any_order(setting: Any) -> None:
    exchange = server(setting)
    model, oracle = Net(), Oracle(TopK(0.05), exchange)
    optimizer = wrap(model, TopK(0.05), exchange, bucket_bytes=0)
    for step in range(4):
        names = [name for name, _ in model.named_parameters()]
        # in the order of the ranks, backward reaches parameters in one order or the other
        for name in reversed(names) if (step + horovod.rank()) % 2 else names:
            loss_of(model, step, only=[name]).backward()
        optimizer.step()
        oracle.check_step(model, step)
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each({f"{s}-{r}": (SERVERS[s], r) for s in SERVERS for r in (0, 1)}, thorough="mpi-")
def a_bad_number_reaches_all_and_takes_residuals_back(setting: Any) -> None:
    exchange, bad_rank = server(setting[0]), setting[1]
    model = Net()
    optimizer = wrap(model, OneBit(), exchange)
    loss_of(model, 0).backward()
    optimizer.step()
    before = optimizer.compression_state_dict()
    optimizer.zero_grad()
    loss = loss_of(model, 1)
    if horovod.rank() == bad_rank:
        loss = loss + (model.second.weight[3, 5] * float("inf")).double()
    loss.backward()
    optimizer.synchronize()
    assert not torch.isfinite(model.second.weight.grad).all()
    check_taken_back(optimizer, before)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.isfinite(model.second.weight).all()
    check_equal_on_all_ranks(model)


@cases.each(SERVERS, thorough="mpi-")
def a_tensor_without_a_gradient_is_left_out(setting: Any) -> None:
    model = Net()
    optimizer = wrap(model, OneBit(), server(setting))
    for step in range(3):
        only = [name for name in SHAPES if step != 1 or not name.startswith("first")]
        loss_of(model, step, only=only).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each(SERVERS, thorough="mpi-")
def a_state_resumes_exactly(setting: Any) -> None:
    exchange = server(setting)
    straight, resumed = Net(), Net()
    first = wrap(straight, OneBit(), exchange)
    train(straight, first, range(3), check=lambda step: None)
    second = wrap(resumed, OneBit(), exchange)
    resumed.load_state_dict(straight.state_dict())
    second.load_compression_state_dict(first.compression_state_dict())
    train(straight, first, range(3, 6), check=lambda step: None)
    train(resumed, second, range(3, 6), check=lambda step: None)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@cases.each(SERVERS, thorough="mpi-")
def the_root_makes_updates_of_adagrad(setting: Any) -> None:
    exchange = server(setting)
    model = Net()
    optimizer = wrap(model, OneBit(), exchange, adagrad=AdaGrad(1e-6), bucket_bytes=0)
    loopback = Loopback(horovod.size(), OneBit(), exchange, adagrad=AdaGrad(1e-6))
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        for name in TOGETHER:
            p = dict(model.named_parameters())[name]
            arrays = [to_numpy(gradient(name, rank, step, p)) for rank in range(horovod.size())]
            assert to_numpy(p.grad).tobytes() == loopback.allreduce(arrays, name)[0].tobytes(), (name, step)
        optimizer.zero_grad()


@cases.each(SERVERS, thorough="mpi-")
def a_policy_mixes_compressors(setting: Any) -> None:
    policy = Policy([("first.*", OneBit()), ("second.weight", QSGD(bits=1, coding="elias"))])
    model = Net()
    optimizer = wrap(model, policy, server(setting))
    train(model, optimizer, range(3), check=lambda step: None)
    check_equal_on_all_ranks(model)


@cases.each(SERVERS, thorough="mpi-")
def positions_are_those_in_the_process_set(setting: Any) -> None:
    if horovod.size() < 3:
        return
    model = Net()
    exchange = server(setting)
    optimizer = wrap(model, OneBit(), exchange, process_set=PROCESS_SETS[0])
    if horovod.rank() not in MEMBERS:
        train(model, optimizer, range(3), check=lambda step: None)
        return
    oracle = Oracle(OneBit(), exchange, ranks=MEMBERS, together=TOGETHER)
    train(model, optimizer, range(3), check=lambda step: oracle.check_step(model, step))


@cases.add
def the_root_sends_what_comes_back() -> None:
    root, ranks = 1, horovod.size()
    for exchange in (ParameterServer(root), ParameterServer(root, "dense")):
        model = Net()
        optimizer = wrap(model, OneBit(), exchange)
        train(model, optimizer, range(2), check=lambda step: None)
        accounts = optimizer._combiner.sender.engine.accounts.values()
        packs = {id(pack): pack for pack in optimizer._combiner.sender.engine.packs.values()}.values()
        plans = [account.plan for account in (*accounts, *(pack.account for pack in packs))]
        sent = optimizer.compression_stats()["total"]["bytes_sent"]
        if horovod.rank() == root:
            assert sent == 2 * (ranks - 1) * sum(plan.answer_slots[root] for plan in plans)
        else:
            assert sent == 2 * sum(plan.slots[root] for plan in plans)


@cases.add
def ranks_that_disagree_are_told_so() -> None:
    mine = ParameterServer(root=horovod.rank() % 2)
    raises(MismatchError, lambda: wrap(Net(), OneBit(), mine), "root")
    answer = ParameterServer(answer="dense" if horovod.rank() else "compressed")
    raises(MismatchError, lambda: wrap(Net(), OneBit(), answer), "answer")


@cases.add
def what_cannot_be_is_refused_by_all() -> None:
    raises(UnsupportedError, lambda: wrap(Net(), OneBit(), ParameterServer(root=7)), "root=7", "from 0 to")
    raises(UnsupportedError, lambda: wrap(Net(), Auto(), ParameterServer()), "leave the exchange to it")
    raises(ValueError, lambda: wrap(Net(), OneBit(), "server"), "ParameterServer")

    class OfTheUser:
        @staticmethod
        def compress(tensor: Any) -> Any:
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor

    raises(TypeError, lambda: wrap(Net(), OfTheUser, ParameterServer()), "hvd.Compression")
    if not horovod.mpi_enabled():
        raises(UnsupportedError, lambda: wrap(Net(), OneBit(), ParameterServer(transport="mpi")), "Gloo", "horovod")


@cases.add
def other_ops_are_refused() -> None:
    for exchange in (ParameterServer(), "two_phase"):
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            raises(UnsupportedError, lambda op=op, e=exchange: wrap(Net(), OneBit(), e, op=op), "op=Average")
    raises(UnsupportedError, lambda: wrap(Net(), hvd.Compression.none, ParameterServer(), op=hvd.Min), "op=Average")


@cases.each(SERVERS, thorough="mpi-")
def an_optimizer_that_is_given_up_harms_nobody(setting: Any) -> None:
    exchange = server(setting)
    for _ in range(3):
        model = Net()
        optimizer = wrap(model, hvd.Compression.none, exchange, bucket_bytes=0)
        loss_of(model, 0).backward()
        if setting["transport"] == "horovod" or not horovod.mpi_enabled():
            # Horovod refuses names that are under way
            optimizer.synchronize()
        # the memory of messages under way is given up here, and there
        del optimizer, model
        gc.collect()
        mine = [np.zeros(np.prod(shape), np.float32) for shape in SHAPES.values() for _ in range(8)]
        horovod.barrier()
        time.sleep(0.05)
        assert not any(array.any() for array in mine)
    model, oracle = Net(), Oracle(TopK(0.05), exchange, together=TOGETHER)
    optimizer = wrap(model, TopK(0.05), exchange)
    train(model, optimizer, range(2), check=lambda step: oracle.check_step(model, step))


@cases.add
def both_transports_bring_the_same() -> None:
    if not horovod.mpi_enabled():
        return
    digests = []
    for transport in ("horovod", "mpi"):
        model = Net()
        optimizer = wrap(model, QSGD(bits=1, coding="elias"), ParameterServer("round_robin", transport=transport))
        train(model, optimizer, range(4), check=lambda step: None)
        digests.append(zlib.crc32(b"".join(to_numpy(p).tobytes() for p in model.parameters())))
    assert digests[0] == digests[1]
