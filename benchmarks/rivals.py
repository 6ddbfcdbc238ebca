"""Time a step with compressors under Horovod and under PyTorch's DDP, against the hooks that DDP comes with.

    python benchmarks/rivals.py [--short] [--hosts 2 4] [--rates 100mbit 1gbit 10gbit] [--seconds 60]

All candidates take turns in the same ranks, each with a network of its own: DDP as it is, with its fp16, bf16 and
PowerSGD hooks, Horovod's fp32 and fp16, and our compressors on DDP and on Horovod. PowerSGD's hook has one bucket: with
several it fails on Gloo. All under DDP have gradient_as_bucket_view, which saves a copy. Networks and data are those of
scaling.py. DDP talks over Gloo, Horovod over Open MPI.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from candidates import COMPRESSORS
from measure import ALONE, DENSE, Aim, Spread, ratios, table
from places import Progress, parsed, parser_of, place, rates_or_unlimited, start

DDP = "DDP fp32"
HOOKS = ("DDP fp16 hook", "DDP bf16 hook")
POWER_SGD = {f"PowerSGD hook, rank {rank}": rank for rank in (1, 2, 4)}
RIVAL = next(iter(POWER_SGD))
OURS = ("one-bit", "adaptive(64)", "top-k 1 %", *(f"our PowerSGD, rank {rank}" for rank in POWER_SGD.values()))
BY_DDP = {f"{name}, DDP": name for name in OURS}
BY_HOROVOD = {f"{name}, Horovod": name for name in OURS}
NAMES = [ALONE, DDP, *HOOKS, *POWER_SGD, *DENSE, *BY_DDP, *BY_HOROVOD]
BATCH = 10
LONG = [("mlp", 1024, BATCH), ("mlp", 4096, BATCH), ("resnet", 44, 4)]
SHORT = [("mlp", 256, BATCH)]
COPIES = 7  # of a network: values, gradients, buckets, residuals of senders and owners, messages
SHARE_OF_MEMORY = 0.6
AIM, AIM_AT_EQUAL_RANK = 1.5, 1.2
AIMED_AT = ("2 hosts, 1gbit", (1024, 4096))


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import networks
    import ranks as r

    import hvd_compress.torch as hvd

    hvd.init()
    _start_distributed()
    cells = []
    for kind, width, batch_size in task["networks"]:
        batch, features = networks.batches(kind, batch_size)
        parameters = list(networks.network_of(kind, width, features).parameters())
        numel = sum(p.numel() for p in parameters)
        sets = []
        for names in _sets(task["candidates"], numel, task["memory"]):
            steps = {name: _step(name, networks.network_of(kind, width, features), batch) for name in names}
            for step in steps.values():
                # DDP divides its buckets anew, and PowerSGD's hook begins with the third step
                for number in range(4):
                    step(number)
            sets.append(r.rounds(steps, task["seconds"], task["least"]))
            del steps
        r.done(f"{task['label']}, {kind} {width}")
        cells.append(
            {"network": kind, "width": width, "batch": batch_size, "features": features, "tensors": len(parameters),
             "parameters": numel, "sets": sets}
        )  # fmt: skip
    r.deliver(task, cells)


def _start_distributed() -> None:
    """Start torch.distributed among the ranks that Horovod has, on the links that are counted."""
    import os
    import socket
    from pathlib import Path

    import torch.distributed as dist

    import hvd_compress.torch as hvd

    is_virtual = "eth0:" in Path("/proc/net/dev").read_text()
    if is_virtual:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    port = None
    if hvd.rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    # a name of the cluster stands for its address on the links
    host, port = hvd.broadcast_object((socket.gethostname() if is_virtual else "127.0.0.1", port), 0)
    store = dist.TCPStore(host, port, hvd.size(), hvd.rank() == 0)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def _step(name: str, network: Any, batch: Callable[[int], tuple[Any, Any]]) -> Callable[[int], None]:
    """Return a training's step."""
    import networks
    import torch

    if name in BY_HOROVOD:
        return _of_horovod(name, COMPRESSORS[BY_HOROVOD[name]], network, batch)
    if name not in (DDP, *HOOKS, *POWER_SGD, *BY_DDP):
        return networks.Training(name, network, batch).step
    model = _under_ddp(name, network)
    return _learning(model, torch.optim.SGD(network.parameters(), lr=0.01), batch)


def _of_horovod(name: str, compressor: Any, network: Any, batch: Any) -> Callable[[int], None]:
    import torch

    import hvd_compress.torch as hvd

    named = [(f"{name}/{parameter}", p) for parameter, p in network.named_parameters()]
    sgd = torch.optim.SGD(network.parameters(), lr=0.01)
    return _learning(network, hvd.DistributedOptimizer(sgd, named, compression=compressor), batch)


def _learning(model: Any, optimizer: Any, batch: Any) -> Callable[[int], None]:
    import torch

    def step(number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _under_ddp(name: str, network: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from hvd_compress import ddp

    if name in POWER_SGD:
        nbytes = sum(p.numel() * p.element_size() for p in network.parameters())
        cap = math.ceil(nbytes / 2**20) + 1
        model = DistributedDataParallel(network, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        state = PowerSGDState(None, matrix_approximation_rank=POWER_SGD[name], start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
        return model
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    if name in HOOKS:
        hook = default_hooks.fp16_compress_hook if "fp16" in name else default_hooks.bf16_compress_hook
        # DDP takes that of bf16 with NCCL only, which it knows by its name; Gloo sums bfloat16, too
        model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    if name in BY_DDP:
        ddp.register_comm_hook(model, COMPRESSORS[BY_DDP[name]])
    return model


def _sets(names: Sequence[str], numel: int, memory: float) -> list[list[str]]:
    """Divide candidates into sets whose networks fit into memory; the rival is in each, to be compared with.

    Example:
        >>> _sets(["alone", "PowerSGD hook, rank 1", "a", "b"], 10**6, 3 * 28e6)
        [['alone', 'PowerSGD hook, rank 1', 'a'], ['alone', 'PowerSGD hook, rank 1', 'b']]
    """
    in_each = [name for name in names if name in (ALONE, RIVAL)]
    others = [name for name in names if name not in in_each]
    most = max(1, int(memory // (COPIES * 4 * numel)) - len(in_each))
    return [in_each + others[at : at + most] for at in range(0, len(others), most)] or [in_each]


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import psutil

    networks = [network for network in LONG if _is_wanted(network, options)] if not options.short else SHORT
    rates = rates_or_unlimited(options.rates)
    result: dict[str, Any] = {"runs": []}
    with Progress("rivals", len(options.hosts) * len(rates) * len(networks)) as progress:
        for hosts in options.hosts:
            with place(hosts, progress) as here:
                for rate in rates:
                    task = {
                        "networks": networks,
                        "candidates": options.candidates,
                        "seconds": options.seconds,
                        "least": options.least,
                        "memory": SHARE_OF_MEMORY * psutil.virtual_memory().available / hosts,
                        "label": f"{hosts} hosts, {rate}",
                    }
                    cells = here.run(__file__, task, rate)
                    result["runs"].append({"hosts": hosts, "rate": rate, "cells": cells})
    return result


def _is_wanted(network: tuple[str, int, int], options: argparse.Namespace) -> bool:
    kind, width, _ = network
    return width in options.widths if kind == "mlp" else not options.no_resnet


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="one small network", each="set of candidates")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096], help="of the fully connected networks")
    parser.add_argument("--no-resnet", action="store_true")
    parser.add_argument("--candidates", nargs="+", default=NAMES, choices=NAMES)
    return parsed(parser, given, seconds=(4.0, 60.0), least=(3, 8))


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    parts = [
        "## Against the hooks of DDP",
        "",
        "Steps of training with DDP's own hooks, Horovod and the compressors of this package on both, in turns in the "
        f"same ranks. Times are ratios to {RIVAL} in the same rounds. Bytes are what a rank sent in a step, counted "
        "at its link, over those of DDP without a hook.",
    ]
    for run in result["runs"]:
        for cell in run["cells"]:
            parts += ["", f"### {_title(run, cell)}", "", _table(cell)]
    return "\n".join(parts)


def aims(result: dict[str, Any]) -> list[Aim]:
    found = []
    for run in result["runs"]:
        where, widths = AIMED_AT
        for cell in run["cells"] if f"{run['hosts']} hosts, {run['rate']}" == where else []:
            if cell["network"] == "mlp" and cell["width"] in widths:
                found += _aims_of(_title(run, cell), _faster(cell))
    return found


def _aims_of(title: str, faster: dict[str, Spread]) -> list[Aim]:
    found = []
    for name, of_ours in BY_DDP.items():
        rival = next((hook for hook, rank in POWER_SGD.items() if of_ours.endswith(f"rank {rank}")), RIVAL)
        if name not in faster or rival not in faster:
            continue
        bound = AIM_AT_EQUAL_RANK if of_ours.startswith("our PowerSGD") else AIM
        # those of higher ranks may have run beside the first rival only
        measured = faster[name] if rival == RIVAL else Spread.of([faster[name].median / faster[rival].median])
        found.append(Aim(f"{title}: {name}, times as fast as {rival}", "≥", bound, measured))
    return found


def _title(run: dict[str, Any], cell: dict[str, Any]) -> str:
    names = {"mlp": "{1}-{0}-{0}-{0}-10", "resnet": "ResNet-50 with {0} channels"}
    name = names[cell["network"]].format(cell["width"], cell["features"])
    return f"{name}, {cell['parameters'] / 1e6:.1f} million parameters: {run['hosts']} hosts, {run['rate']}"


def _faster(cell: dict[str, Any]) -> dict[str, Spread]:
    """Return how many times as fast as the rival each candidate is, in its own set."""
    found: dict[str, Spread] = {}
    for rows in cell["sets"]:
        if RIVAL in rows:
            for name, row in rows.items():
                found.setdefault(name, Spread.of(ratios(rows[RIVAL]["seconds"], row["seconds"])))
    return found


def _table(cell: dict[str, Any]) -> str:
    rows = {name: row for of_set in cell["sets"] for name, row in of_set.items()}
    faster = _faster(cell)
    dense = Spread.of(rows[DDP]["bytes"]).median if DDP in rows else 0.0
    lines = []
    for name, row in rows.items():
        sent = Spread.of(row["bytes"]).median
        milliseconds = Spread.of([1e3 * seconds for seconds in row["seconds"]])
        share = f"{sent / dense:.4f}" if dense else ""
        lines.append([name, faster.get(name, ""), milliseconds, f"{sent:.0f}", share])
    return table(["", f"times as fast as {RIVAL}", "ms", "bytes", "of fp32"], lines)


if __name__ == "__main__":
    main()
