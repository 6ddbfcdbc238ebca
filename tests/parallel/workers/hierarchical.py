"""exchange="hierarchical" of torch and TensorFlow against the loopback, on hosts that are pretended or real. 4 ranks.

Within one machine the ranks tell each other the names of pretended hosts: `HVD_COMPRESS_HOSTS` has a letter for each
rank. Without it the hosts are those that Horovod was started on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import QSGD, Adaptive, Blockwise, Hierarchical, NoCompression, OneBit, Policy, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.errors import MismatchError, UnsupportedError
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.common import (
    MIN_NUMEL,
    SHAPES,
    Net,
    check_equal_on_all_ranks,
    check_taken_back,
    loss_of,
    numbers,
    raises,
    to_numpy,
)

cases = Cases()
PROCESS_SETS = [hvd.ProcessSet([0, 1, 2]), hvd.ProcessSet([0, 3])]
COMPRESSORS: dict[str, Compressor] = {
    "onebit": OneBit(),
    "topk": TopK(ratio=0.05),
    "threshold": Threshold(0.5),
    "adaptive-golomb": Adaptive(pi=16, coding="golomb"),
}
PRETENDED = os.environ.get("HVD_COMPRESS_HOSTS", "")
if list(PRETENDED) == sorted(PRETENDED):
    # else a rank has another number in the loopback, and by that another randomness
    COMPRESSORS["qsgd"] = QSGD(bits=4)
STEPS = 3
WIDTHS = Hierarchical(inside=Blockwise(bits=8))
# of SHAPES in one bucket: the reverse of the parameters' order
TOGETHER = ("second.weight", "first.weight")


def hosts() -> str:
    """A letter for each rank's host."""
    return PRETENDED or "".join("abcd"[i // horovod.local_size()] for i in range(horovod.size()))


def pretend() -> None:
    """Be on the host that the test wants this rank to be on."""
    mine = f"host-{hosts()[horovod.rank()]}"
    if PRETENDED:
        socket.gethostname = lambda: mine


class Oracle:
    """What the ranks must hold: the loopback's results, whose ranks are counted host by host.

    Sums between hosts are made in the order of the ranks: the same, as long as each host's n-th rank comes before the
    next host's.
    """

    def __init__(
        self,
        compressor: Compressor,
        op: str = "average",
        ranks: Sequence[int] | None = None,
        exchange: str | Hierarchical = "hierarchical",
    ) -> None:
        letters = hosts()
        ranks = range(horovod.size()) if ranks is None else ranks
        self.order = sorted(ranks, key=lambda rank: letters.index(letters[rank]))
        per_host = len(self.order) // len({letters[rank] for rank in self.order})
        self.loopback = Loopback(len(self.order), compressor, exchange, op, ranks_per_host=per_host)

    def combine(self, step: int, names: Sequence[str] = TOGETHER) -> dict[str, np.ndarray]:
        of_ranks = [{name: numbers(name, rank, step, SHAPES[name]) for name in names} for rank in self.order]
        return self.loopback.grouped_allreduce(of_ranks)[0]


def wrap(model: torch.nn.Module, compressor: Any, **settings: Any) -> Any:
    pretend()
    settings = {"exchange": "hierarchical", "min_numel": MIN_NUMEL, **settings}
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.125), model.named_parameters(), compressor, **settings
    )


def check_step(model: torch.nn.Module, expected: dict[str, np.ndarray], step: int) -> None:
    for name, p in model.named_parameters():
        if name in expected:
            off = np.abs(to_numpy(p.grad) - expected[name]).max()
            assert to_numpy(p.grad).tobytes() == expected[name].tobytes(), (
                f"{name}, step {step}: {off} off the loopback"
            )
        else:
            mean = np.mean([numbers(name, rank, step, SHAPES[name]) for rank in range(horovod.size())], axis=0)
            np.testing.assert_allclose(to_numpy(p.grad), mean, rtol=1e-5, atol=1e-6)


@cases.each(COMPRESSORS)
def the_optimizer_is_the_loopback(compressor: Compressor) -> None:
    model, oracle = Net(), Oracle(compressor)
    optimizer = wrap(model, compressor)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        check_step(model, oracle.combine(step), step)
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)


@cases.each({"alone": {"bucket_bytes": 0}, "groups": {"groups": 1}})
def settings_that_make_other_buckets(settings: dict[str, Any]) -> None:
    model, oracle = Net(), Oracle(TopK(0.05))
    optimizer = wrap(model, TopK(0.05), **settings)
    together = (
        [["second.weight"], ["first.weight"]] if "bucket_bytes" in settings else [["first.weight", "second.weight"]]
    )
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        expected: dict[str, np.ndarray] = {}
        for names in together:
            expected |= oracle.combine(step, names)
        check_step(model, expected, step)
        optimizer.zero_grad()


@cases.add
def a_bad_number_takes_what_is_owed_and_pending_back() -> None:
    model = Net()
    flat = wrap(model, OneBit(), exchange="two_phase")
    loss_of(model, 0).backward()
    flat.step()
    found = []
    for is_spoiled in (False, True):
        model = Net()
        optimizer = wrap(model, OneBit())
        # what is owed of other ranks' shards is pending
        optimizer.load_compression_state_dict(flat.compression_state_dict())
        if is_spoiled:
            hook = model.second.weight.register_hook(lambda grad: grad * (float("nan") if horovod.rank() == 1 else 1.0))
            before = optimizer.compression_state_dict()
            loss_of(model, 1).backward()
            optimizer.synchronize()
            assert not torch.isfinite(model.second.weight.grad).all()
            assert torch.isfinite(model.first.weight.grad).all()
            check_taken_back(optimizer, before)
            hook.remove()
            optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.synchronize()
        found.append([to_numpy(p.grad).tobytes() for p in model.parameters()])
    assert found[0] == found[1]


@cases.add
def nothing_is_lost_on_the_way_into_a_hierarchy_and_out_of_it() -> None:
    given = {name: np.zeros(SHAPES[name]) for name in TOGETHER}
    arrived = {name: np.zeros(SHAPES[name]) for name in TOGETHER}
    state = None
    step = 0
    for exchange in ("two_phase", "hierarchical", "allgather", "hierarchical"):
        model = Net()
        optimizer = wrap(model, OneBit(), exchange=exchange, op=hvd.Sum)
        if state is not None:
            optimizer.load_compression_state_dict(state)
        for _ in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            for name, p in model.named_parameters():
                if name in given:
                    given[name] += sum(
                        numbers(name, rank, step, SHAPES[name]).astype(float) for rank in range(horovod.size())
                    )
                    arrived[name] += to_numpy(p.grad)
            optimizer.zero_grad()
            step += 1
        state = optimizer.compression_state_dict()
        for name in TOGETHER:
            owed = state["residuals"][name]["values"].double().clone()
            if entry := state["owner_residuals"].get(name):
                owed[entry["start"] : entry["start"] + len(entry["values"])] += entry["values"]
            by_all = to_numpy(horovod.allreduce(owed, op=horovod.Sum, name="owed")).reshape(SHAPES[name])
            np.testing.assert_allclose(arrived[name] + by_all, given[name], atol=1e-3)
            assert np.abs(by_all).max() > 0.1


@cases.add
def two_compressors_share_the_hierarchy() -> None:
    model = Net()
    optimizer = wrap(model, Policy([("first.*", OneBit()), ("second.weight", TopK(0.05))], default=NoCompression()))
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)
    tensors = optimizer.compression_stats()["tensors"]
    assert {counters["exchange"] for counters in tensors.values()} == {"hierarchical", "hierarchical, uncompressed"}


@cases.add
def bytes_inside_and_between_are_counted_apart() -> None:
    model = Net()
    optimizer = wrap(model, OneBit(), bucket_bytes=0)
    loss_of(model, 0).backward()
    optimizer.step()
    letters = hosts()
    count = len(set(letters))
    per_host = len(letters) // count
    for name in TOGETHER:
        counters = optimizer.compression_stats()["tensors"][name]
        numel = int(np.prod(SHAPES[name]))
        # of its host's other ranks' shards a rank sends the gradient, of its own shard the payloads of the sums
        inside = 4 * numel * (per_host - 1) / per_host
        compressed = numel / 8 / per_host
        assert (
            abs(counters["bytes_sent_inside"] - inside - (per_host - 1) * compressed)
            < 0.25 * compressed * per_host + 3000
        )
        between = 2 * compressed * (count - 1) / count
        assert abs(counters["bytes_sent"] - between) < 0.25 * between + 2000, counters


@cases.add
def two_widths_are_the_loopback_and_go_on_from_a_state() -> None:
    compressor = Blockwise(bits=4)
    model, oracle = Net(), Oracle(compressor, exchange=WIDTHS)
    optimizer = wrap(model, compressor, exchange=WIDTHS)
    for step in range(2 * STEPS):
        if step == STEPS:
            state = optimizer.compression_state_dict()
            assert state["residuals"]["first.weight"]["values"].abs().max() > 0
            optimizer = wrap(model, compressor, exchange=WIDTHS)
            optimizer.load_compression_state_dict(state)
        loss_of(model, step).backward()
        optimizer.step()
        check_step(model, oracle.combine(step), step)
        optimizer.zero_grad()
    check_equal_on_all_ranks(model)
    per_host = horovod.size() // len(set(hosts()))
    tensors = optimizer.compression_stats()["tensors"]
    sent = sum(tensors[name]["bytes_sent_inside"] for name in TOGETHER)
    # 8 bits of other ranks' shards, and 4 of what is passed on; scales of blocks, and headers, are small
    inside = STEPS * sum(int(np.prod(SHAPES[name])) for name in TOGETHER) * (per_host - 1) / per_host * (1 + 0.5)
    assert 0.95 * inside <= sent < 1.1 * inside + 3000, tensors


@cases.add
def a_bad_number_changes_nothing_that_is_owed_inside() -> None:
    model = Net()
    optimizer = wrap(model, OneBit(), exchange=WIDTHS)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.compression_state_dict()
    hook = model.second.weight.register_hook(lambda grad: grad * (float("nan") if horovod.rank() == 1 else 1.0))
    loss_of(model, 1).backward()
    optimizer.synchronize()
    assert not torch.isfinite(model.second.weight.grad).all()
    check_taken_back(optimizer, before)
    hook.remove()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    check_equal_on_all_ranks(model)


@cases.add
def ranks_with_other_widths_are_told() -> None:
    inside = Blockwise(bits=8 if horovod.rank() else 4)
    raises(MismatchError, lambda: wrap(Net(), OneBit(), exchange=Hierarchical(inside)), "inside")


@cases.add
def a_process_set_of_even_hosts_trains_and_an_uneven_one_is_refused_by_all() -> None:
    pretend()
    for process_set in PROCESS_SETS:
        if not process_set.included():
            continue
        letters = [hosts()[rank] for rank in process_set.ranks]
        model = Net()
        if len({letters.count(letter) for letter in letters}) > 1:
            raises(
                UnsupportedError, lambda m=model, s=process_set: wrap(m, OneBit(), process_set=s),
                "exchange='hierarchical'", "ranks per host", "exchange='two_phase'",
            )  # fmt: skip
            continue
        optimizer, oracle = wrap(model, OneBit(), process_set=process_set), Oracle(OneBit(), ranks=process_set.ranks)
        loss_of(model, 0).backward()
        optimizer.step()
        for name, value in oracle.combine(0).items():
            assert to_numpy(model.get_parameter(name).grad).tobytes() == value.tobytes()
        check_equal_on_all_ranks(model, process_set)


@cases.add
def all_ranks_can_still_train_together() -> None:
    model, oracle = Net(), Oracle(OneBit())
    optimizer = wrap(model, OneBit())
    loss_of(model, 0).backward()
    optimizer.step()
    check_step(model, oracle.combine(0), 0)
