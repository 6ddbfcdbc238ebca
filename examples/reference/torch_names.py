"""Every name of `hvd_compress.torch` at work, on two ranks or more:

    horovodrun -np 2 --gloo python examples/reference/torch_names.py

The pages of the reference show these functions one by one; each is a collective call, so all ranks make all of them.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import horovod.torch
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit, TopK


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))


def train(net: torch.nn.Module, opt: Any, steps: int = 3) -> float:
    torch.manual_seed(1 + hvd.rank())  # each rank has data of its own
    loss = torch.zeros(())
    for _ in range(steps):
        opt.zero_grad()
        x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
    return loss.item()


def processes() -> None:
    assert hvd.is_initialized()
    print(f"rank {hvd.rank()} of {hvd.size()}, the {hvd.local_rank()} of {hvd.local_size()} on its host")
    print(f"host {hvd.cross_rank()} of {hvd.cross_size()} for this local rank")


def what_was_built() -> None:
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", horovod.torch.__file__, "mpi_lib_v2")
    print("MPI:", hvd.mpi_built(), "in use:", hvd.mpi_built() and hvd.mpi_enabled())
    print("Gloo:", hvd.gloo_built(), "in use:", hvd.gloo_enabled())
    if hvd.mpi_enabled():
        print("several threads may call MPI:", hvd.mpi_threads_supported())
    print("GPUs:", hvd.cuda_built(), hvd.nccl_built(), hvd.rocm_built())
    print("others:", hvd.ddl_built(), hvd.ccl_built())


def reductions() -> None:
    x = torch.full((4,), float(hvd.rank()))
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        print(hvd.allreduce(x, op=op, name=f"x.{op}"))
    if hvd.mpi_enabled() and hvd.size() in (2, 4, 8, 16):  # Adasum wants MPI, and a power of two
        print(hvd.allreduce(x + 1, op=hvd.Adasum, name="x.adasum"))
    hvd.allreduce_(x, name="x.in_place")
    a, b = hvd.grouped_allreduce([x, x + 1], name="pair")
    hvd.grouped_allreduce_([a, b], name="pair.in_place")


def compressed_reductions() -> None:
    x = torch.randn(256, 256)
    mean = hvd.allreduce(x, name="features", compression=OneBit())  # what it leaves out is kept under the name
    again = hvd.allreduce(x, name="features", compression=hvd.Compression.onebit)
    print((mean + again).div(2).sub(hvd.allreduce(x, name="exact")).norm())
    hvd.forget_residuals()  # the next call of "features" begins anew
    print(hvd.DEFAULT_MIN_NUMEL, "elements, below which optimizers do not compress")


def asynchronous_reductions() -> None:
    x = torch.ones(4)
    handles = [hvd.allreduce_async(x, name="a"), hvd.allreduce_async_(x.clone(), name="b")]
    handles += [hvd.grouped_allreduce_async([x, x], name="c"), hvd.grouped_allreduce_async_([x.clone()], name="d")]
    print("ready:", [hvd.poll(handle) for handle in handles])
    print([hvd.synchronize(handle) for handle in handles])


def gathers() -> None:
    mine = torch.full((1 + hvd.rank(), 2), float(hvd.rank()))  # first dimensions may differ
    print(hvd.allgather(mine, name="rows").shape)
    print(hvd.grouped_allgather([mine, mine], name="rows.pair")[0].shape)
    print(hvd.synchronize(hvd.allgather_async(mine, name="rows.later")).shape)
    print(hvd.synchronize(hvd.grouped_allgather_async([mine], name="rows.pair.later"))[0].shape)
    print(hvd.allgather_object({"rank": hvd.rank()}))


def broadcasts() -> None:
    x = torch.full((2,), float(hvd.rank()))
    print(hvd.broadcast(x, root_rank=0, name="x0"))
    hvd.broadcast_(x, root_rank=0, name="x1")
    print(hvd.synchronize(hvd.broadcast_async(x, root_rank=0, name="x2")))
    hvd.synchronize(hvd.broadcast_async_(x, root_rank=0, name="x3"))
    print(hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0, name="epoch"))


def parts_for_each_rank() -> None:
    x = torch.arange(4.0 * hvd.size()).reshape(-1, 2)
    print(hvd.alltoall(x, name="parts"))
    print(hvd.synchronize(hvd.alltoall_async(x, name="parts.later")))
    print(hvd.reducescatter(x, name="shares"))
    print(hvd.synchronize(hvd.reducescatter_async(x, name="shares.later")))
    print(hvd.grouped_reducescatter([x, x], name="shares.pair")[0])
    print(hvd.synchronize(hvd.grouped_reducescatter_async([x], name="shares.pair.later"))[0])


def sparse_tensors() -> None:
    x = torch.sparse_coo_tensor(torch.tensor([[hvd.rank()]]), torch.ones(1), (8,))
    wait = hvd.sparse_allreduce_async(x, name="embedding", op=hvd.Sum)
    print(wait().to_dense())


def process_sets() -> None:
    first = hvd.add_process_set(hvd.ProcessSet([0]))  # needs hvd.init(process_sets="dynamic")
    if first.included():
        print(hvd.allreduce(torch.ones(2), name="alone", process_set=first))
    print(hvd.global_process_set.size(), "ranks in all")
    hvd.barrier()
    hvd.remove_process_set(first)


def timelines() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(f"{folder}/timeline.json")  # open it with chrome://tracing
        hvd.allreduce(torch.ones(2), name="seen")
        hvd.stop_timeline()


def an_optimizer() -> None:
    net = model()
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, net.named_parameters(), compression=hvd.Compression.adaptive(pi=32))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    train(net, opt)
    print(opt.compression_stats()["total"])


def neighbours() -> None:
    net = model()
    opt: Any = hvd.DPSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    train(net, opt)
    opt.average_parameters()
    net = model()
    opt = hvd.EventGraDOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters(), compression=TopK())
    train(net, opt)
    print(opt.event_stats()["total"], opt.consensus_distance())
    opt.average_parameters()


def nodes() -> None:
    # hvd.init(process_sets=hvd.daso_process_sets()) is the other way to make its process sets
    print(len(hvd.daso_process_sets(ranks_per_node=1, size=hvd.size())), "process sets")
    net = model()
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    opt = hvd.DASO(opt, net.named_parameters(), global_skips=2, ranks_per_node=1)
    for _ in range(2):
        opt.epoch_end(train(net, opt))
    print(opt.daso_stats())


def alone() -> None:
    net = model()
    opt: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    opt = hvd.DiLoCo(opt, net.named_parameters(), sync_every=4, fragments=2, delay=1, compression=OneBit())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    train(net, opt, steps=8)
    opt.average_parameters()  # all ranks have one model now
    print(opt.diloco_stats())


def momentum() -> None:
    for make in (
        lambda net: hvd.CompressedAdam(net.named_parameters(), lr=1e-3, warmup_steps=2, compression=OneBit()),
        lambda net: hvd.DeMo(net.named_parameters(), lr=1e-3),
        lambda net: hvd.DGC(net.named_parameters(), lr=1e-2, compression=TopK(0.01), warmup_steps=4),
        lambda net: hvd.Signum(net.named_parameters(), lr=1e-3),
    ):
        net = model()
        opt: Any = make(net)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        train(net, opt, steps=8)  # .grad stays this rank's own
        print(opt.compression_stats()["total"]["ratio"])


def a_server() -> None:
    if not hvd.mpi_enabled():
        return print("an asynchronous server needs MPI")
    net = model()
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    opt = hvd.AsyncParameterServerOptimizer(opt, net.named_parameters(), staleness=2)
    if opt.is_server:
        opt.serve()
    else:
        train(net, opt)
    opt.close()
    return None


def batch_norm() -> None:
    layer = hvd.SyncBatchNorm(3)  # its statistics are those of the batches of all ranks
    if torch.cuda.is_available():  # Horovod's works on GPUs only
        print(layer.cuda()(torch.randn(4, 3, device="cuda") + hvd.rank()).mean())


def elastic_state() -> None:
    state = hvd.elastic.TorchState(model=model(), epoch=0)
    state.epoch += 1
    state.commit()  # what a new rank gets, and what all go back to after a failure
    assert issubclass(hvd.HorovodInternalError, RuntimeError)  # what a lost rank raises
    print("committed epoch", state.epoch)


def submodules() -> None:
    print([m.__name__ for m in (hvd.compression, hvd.functions, hvd.mpi_ops, hvd.optimizer, hvd.sync_batch_norm)])
    print(hvd.mpi_lib_v2.__name__)


def the_end() -> None:
    print("last to come:", hvd.join())


def main() -> None:
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # so that timelines can begin later
    sets: Any = "dynamic"
    hvd.init(process_sets=sets)
    for part in (processes, what_was_built, reductions, compressed_reductions, asynchronous_reductions):
        part()
    for part in (gathers, broadcasts, parts_for_each_rank, sparse_tensors, process_sets, timelines):
        part()
    for part in (an_optimizer, momentum, neighbours, nodes, alone, a_server):
        part()
    for part in (batch_norm, elastic_state, submodules, the_end):
        part()
    hvd.shutdown()


if __name__ == "__main__":
    main()
