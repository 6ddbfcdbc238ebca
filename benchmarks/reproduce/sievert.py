"""Repeat figure 1 of Sievert 2017: where the time of a step goes, QSGD of 1 bit over a parameter server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from measure import table

from .show import Record, all_groups, figure_of, of_seeds, plot_of, said_settings, shown
from .unit import Unit

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["FORMS", "VERSION", "parts", "plan", "shares", "work"]

VERSION = 2
NAME = "sievert"
COMPUTE, ENCODE, SEND, WAIT, DECODE, STEP = "compute", "encode", "send", "wait", "decode", "step"
SHARES = (COMPUTE, ENCODE, SEND, WAIT, DECODE, STEP)
_STATS = {
    ENCODE: "encode_seconds", SEND: "start_seconds", WAIT: "exchange_seconds", DECODE: "decode_seconds",
}  # fmt: skip
_WARM_UP = 5  # steps in which kernels are compiled and caches filled
_IMAGES = 4000
_WHOLE = 2**30  # elements of a bucket, so that a tensor has one norm, as in the paper
FORMS: dict[str, dict[str, Any]] = {
    "tiny": {"workers": [2], "width": 4, "blocks": [1, 1, 1, 1], "batch": 2, "steps": 3, "rate": "unlimited"},
    "short": {"workers": [2, 4, 8], "width": 16, "blocks": [1, 1, 1, 1], "batch": 8, "steps": 40, "rate": "1gbit"},
    "full": {"workers": [2, 4, 8], "width": 44, "blocks": [2, 2, 2, 2], "batch": 8, "steps": 100, "rate": "1gbit"},
}


def plan(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Unit]:
    """List one start for each number of workers and seed."""
    own = {key: value for key, value in settings.items() if key != "workers"}
    return [
        Unit(NAME, VERSION, f"{workers} workers", {**own, "seed": seed}, workers, 1)
        for seed in seeds
        for workers in settings["workers"]
    ]


# -- in the ranks ---------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Make steps of a residual network, whose parts are timed on every rank."""
    import networks
    import ranks as r
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import QSGD, ParameterServer

    from .data import cifar
    from .nets import from_seed
    from .training import wrapped

    data = cifar(_IMAGES, 1)
    network = from_seed(lambda: networks.resnet(settings["width"], tuple(settings["blocks"])), settings["seed"])
    sgd = torch.optim.SGD(network.parameters(), 0.01)
    qsgd = QSGD(bits=1, bucket_numel=_WHOLE, coding="elias", seed=settings["seed"])
    # each gradient goes as soon as it is there, as a message of MPI, and the server sends numbers back, as in the paper
    server = ParameterServer(answer="dense", transport="mpi")
    optimizer = wrapped(sgd, network, qsgd, exchange=server, bucket_bytes=0)
    clocks = {COMPUTE: 0.0, STEP: 0.0}
    before = {}
    for number in range(_WARM_UP + settings["steps"]):
        if number == _WARM_UP:
            clocks = dict.fromkeys(clocks, 0.0)
            before = optimizer.compression_stats()["total"]
        first = (number * hvd.size() + hvd.rank()) * settings["batch"]
        rows = torch.arange(first, first + settings["batch"]) % len(data.train_y)
        _timed_step(network, optimizer, data, rows, clocks)
    after = optimizer.compression_stats()["total"]
    r.done(f"{hvd.size()} workers")
    counted = {key: after[key] - before[key] for key in (*_STATS.values(), "bytes_sent", "bytes_received")}
    return {
        "ranks": hvd.allgather_object({**clocks, **counted}, name="reproduce.clocks"),
        "steps": settings["steps"],
        "parameters": sum(p.numel() for p in network.parameters()),
        "data": data.source,
    }


def _timed_step(network: Any, optimizer: Any, data: Any, rows: Any, clocks: dict[str, float]) -> None:
    import time

    import torch

    begin = time.perf_counter()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(network(data.train_x[rows]), data.train_y[rows]).backward()
    optimizer.synchronize()
    exchanged = time.perf_counter()
    with optimizer.skip_synchronize():
        optimizer.step()
    clocks[COMPUTE] += exchanged - begin  # with the exchange, which is taken out afterwards
    clocks[STEP] += time.perf_counter() - exchanged


# -- the page -------------------------------------------------------------------------------------------------------


def shares(of_rank: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a rank in each part; they add up to all."""
    seconds = {part: of_rank[key] for part, key in _STATS.items()}
    compute = of_rank[COMPUTE] - sum(seconds.values())
    return {COMPUTE: compute, **seconds, STEP: of_rank[STEP]}


def parts(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Write what the page shows of the records: "shares"."""
    groups: dict[str, list[Record]] = {}
    for settings, rows in all_groups(records, "width"):
        title = (
            f"### Residual network with {settings['width']} channels and {settings['blocks']} blocks, "
            f"{said_settings(settings, ('batch', 'rate'))}"
        )
        groups.setdefault(title, []).extend(record for of_label in rows.values() for record in of_label)
    found = []
    for title, of_group in groups.items():
        ordered = sorted(of_group, key=lambda record: record["ranks"])
        name = plot_of(NAME, {"title": title}, "shares")
        found += [title, "", _table(ordered), "", _plot(ordered, folder, name), ""]
    return {"shares": "\n".join(found).strip()}


def _by_workers(records: Sequence[Record]) -> dict[int, dict[str, dict[str, float]]]:
    """Return the mean seconds of a step: {workers: {"server" or "others": {part: seconds}}}."""
    grouped: dict[int, list[Record]] = {}
    for record in records:
        grouped.setdefault(record["ranks"], []).append(record)
    result = {}
    for workers, of_workers in grouped.items():
        roles = {"server": slice(0, 1), "others": slice(1, None)}
        result[workers] = {
            role: {
                part: mean(
                    shares(of_rank)[part] / record["result"]["steps"]
                    for record in of_workers
                    for of_rank in record["result"]["ranks"][which]
                )
                for part in SHARES
            }
            for role, which in roles.items()
        }
    return result


def _table(records: Sequence[Record]) -> str:
    lines: list[list[object]] = []
    for workers in dict.fromkeys(record["ranks"] for record in records):
        of_seed = [_by_workers([record])[workers] for record in records if record["ranks"] == workers]
        for role in of_seed[0]:
            totals = [sum(roles[role].values()) for roles in of_seed]
            cells = [
                of_seeds([100 * roles[role][part] / total for roles, total in zip(of_seed, totals, strict=True)], 0)
                for part in SHARES
            ]
            milliseconds = of_seeds([1e3 * total for total in totals], 0)
            lines.append([f"{workers}: {role}", *cells, milliseconds, len(of_seed)])
    return table(["workers", *(f"{part}, %" for part in SHARES), "a step, ms", "seeds"], lines)


def _plot(records: Sequence[Record], folder: Path, name: str) -> str:
    found = _by_workers(records)
    workers = [str(number) for number in found]
    from drawing import label_points, thin

    with figure_of(folder, name, panels=2, same_axes=True) as panels:
        for panel, role in zip(panels, ("others", "server"), strict=True):
            bottom = [0.0] * len(found)
            ends = []
            for i, part in enumerate(SHARES):
                heights = [100 * roles[role][part] / sum(roles[role].values()) for roles in found.values()]
                panel.bar(workers, heights, bottom=bottom, width=0.6, color=f"C{i}")
                ends.append((len(workers) - 0.7, bottom[-1] + heights[-1] / 2, part, f"C{i}"))
                bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
            panel.set(xlabel="workers", title=role)
            thin(panel)
            label_points(panel, ends)
        panels[0].set_ylabel("share of the time, %")
    return shown(name)
