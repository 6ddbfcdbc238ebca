"""Measure how far Horovod's collectives fill a link, over Open MPI with and without its put protocol, and over Gloo.

    python benchmarks/links.py [--short] [--hosts 2 4] [--rates 100mbit 1gbit 10gbit]

All other benchmarks run without put: see `cluster/launch.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from cluster.launch import TCP_FLAGS, WITHOUT_PUT
from cluster.links import parse_rate
from measure import Spread, table
from places import Progress, parsed, parser_of, place, rates_to_be_had, start

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "Open MPI, as it comes": ("mpi", {TCP_FLAGS: f"put,{WITHOUT_PUT}"}),
    "Open MPI, without put": ("mpi", {TCP_FLAGS: WITHOUT_PUT}),
    "Gloo": ("gloo", {}),
}
RATES = ("100mbit", "1gbit", "10gbit")
LINK_SECONDS = 0.5  # a tensor takes the link at least so long, unless it is the largest
MOST_NUMEL = 2**24


# -- in the ranks ---------------------------------------------------------------------------------------------------


def ranks(task: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import ranks as r
    import torch

    hvd.init()
    size = hvd.size()
    part = torch.ones(task["numel"] // size)
    whole = part.repeat(size)
    actions: dict[str, Callable[[int], object]] = {
        "allreduce": lambda _: hvd.allreduce_(whole, name="allreduce", op=hvd.Average),
        "alltoall": lambda _: hvd.alltoall(whole, name="alltoall"),
        "allgather": lambda _: hvd.allgather(part, name="allgather"),
    }
    samples = r.rounds(actions, task["seconds"], task["least"])
    # a rank must send at least so many bytes
    one = whole.nbytes * (size - 1) / size
    least = {"allreduce": 2 * one, "alltoall": one, "allgather": one}
    r.done(task["label"])
    r.deliver(task, {name: [least[name] / s for s in of["seconds"]] for name, of in samples.items()})


# -- outside --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    rates = rates_to_be_had(options.rates)
    if not rates:
        print("links: nothing is measured, since there is no link with a rate", file=sys.stderr)
        return None
    cases = list(product(rates, WAYS))
    runs = []
    with Progress("links", len(options.hosts) * len(cases) * options.turns) as progress:
        for hosts in options.hosts:
            with place(hosts, progress) as here:
                # each way is a start of its own; what else runs on the machine meets all of them
                for turn in range(options.turns):
                    for rate, way in cases:
                        launcher, env = WAYS[way]
                        task = {
                            "numel": min(int(_bits(rate) / 32 * LINK_SECONDS), MOST_NUMEL),
                            "seconds": options.seconds,
                            "least": options.least,
                            "label": f"{hosts} hosts, {rate}, {way}",
                        }
                        speeds = here.run(__file__, task, rate, env, launcher)
                        runs.append({"hosts": hosts, "rate": rate, "way": way, "turn": turn, "speeds": speeds})
    return {"runs": runs}


def _bits(rate: str) -> int:
    """Return the bits per second."""
    bits = parse_rate(rate)
    if bits is None:
        raise ValueError(f"rate {rate}: there is nothing to fill; give one such as 1gbit")
    return bits


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, short="2 hosts, one rate, one start of each way", each="start")
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--rates", nargs="+")
    parser.add_argument("--turns", type=int, help="starts of each way")
    return parsed(
        parser,
        given,
        hosts=([2], [2, 4]),
        rates=(RATES[1:2], RATES),
        turns=(1, 3),
        seconds=(5.0, 8.0),
        least=(3, 3),
    )


def main(given: Sequence[str] | None = None) -> None:
    start(__file__, arguments(given), ranks, measure)


# -- the page -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    shares: dict[tuple[int, str, str], dict[str, list[float]]] = {}
    for run in result["runs"]:
        of_case = shares.setdefault((run["hosts"], run["rate"], run["way"]), {})
        for name, speeds in run["speeds"].items():
            of_case.setdefault(name, []).extend(8 * speed / _bits(run["rate"]) for speed in speeds)
    names = list(next(iter(shares.values()), {}))
    lines = [
        [f"{hosts} hosts, {rate}", way, *(Spread.of(of_case[name]) for name in names)]
        for (hosts, rate, way), of_case in sorted(shares.items(), key=lambda item: (item[0][0], _bits(item[0][1])))
    ]
    return "\n".join(
        [
            "## How far collectives fill a link",
            "",
            "The bytes that a rank must send at least, over what its link could have carried in that time, in each "
            "direction; 1 is all of it. Plain Horovod, large float32 tensors, one rank a host. Open MPI as it comes "
            "lets a receiver's request wait behind what it sends itself; Gloo is that of `hvd-compress "
            "build-horovod`, which receives before it sends. All else on this page was measured over Open MPI, "
            "*without put* unless the last table says otherwise.",
            "",
            table(["", "", *names], lines),
        ]
    )


if __name__ == "__main__":
    main()
