"""Find out whether compression pays for a model. It predicts the time of a step for each compressor and exchange.

On paper, on any machine:

    hvd-compress advise --shapes 784x4096,4096x4096*2,4096x10 --bandwidth 1gbit --latency 50us --ranks 4

Measured, with the ranks and the network that training will have:

    horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress advise --model my_package.models:make_net

In both cases it measures the kernels on this machine. With real ranks on PyTorch it tries steps instead of predicting
them, unless that would take long.

The sentence at the end compares with the faster of float32 and fp16, which Horovod has itself. A difference of less
than 5 % counts as none. Accuracy is not part of the advice: train a short stretch both ways to see it.

With --json: "tensors", "elements", "ranks", "ranks_per_host", "link" ("on paper" or "measured"), "step_seconds",
"advice" (the sentence) and "rows", none for one rank. A row has "compressor" ("none", or its repr), "exchange",
"compresses", "sent_bytes" (of a rank in a step), "seconds" (of a step, or of the exchange alone where "step_seconds"
is 0), "tried", "beats_float32" ("never", "below", "always"; null for "none") and, where it is "below",
"beats_float32_below_bits_per_second", else null.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from hvd_compress import BF16, FP16, QSGD, Adaptive, OneBit, TopK
from hvd_compress.cli.json_output import add_json_argument, print_json, working
from hvd_compress.cli.models import parse_shapes, read_shapes, shapes_of_model
from hvd_compress.cli.predict import Prediction, predict
from hvd_compress.cli.ranks import OpenRanks, is_launched, open_ranks
from hvd_compress.cli.units import parse_bandwidth, parse_seconds, seconds_argument, show_bandwidth, whole_argument
from hvd_compress.cli.verdict import as_fields, report
from hvd_compress.compressors import Compressor
from hvd_compress.cost import Network, copy_speed, measure_network, slowest_speeds, speed_of
from hvd_compress.engine import has_cores
from hvd_compress.errors import MismatchError

__all__ = ["HELP", "add_arguments", "run", "tried"]

HELP = "find out whether compression pays for a model, and which one"

_LATENCY = "50us"
CANDIDATES: tuple[Compressor, ...] = (FP16(), BF16(), QSGD(bits=4), OneBit(), TopK(), Adaptive())
# a trial has at least four steps
_TRIALS, _MOST_TRIALS, _LONGEST_TRIED = 3, 9, 20.0
_ALL_TRIALS_SECONDS = 300.0
_MOST_TRIED_NUMEL = 2**26  # a trial makes five arrays of so many float32

_MOST_RANKS = 10_000  # with so many, predictions take a second for each compressor

Shape = tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODULE:FUNCTION", help="a torch module or a built Keras model, "
                       "or a function that returns one")  # fmt: skip
    model.add_argument("--shapes", metavar="LIST", help="shapes of the tensors, such as 784x4096,4096x4096*2,4096x10")
    model.add_argument("--shapes-file", metavar="FILE", help="the same in a file, one or more in each line")
    parser.add_argument(
        "--step-seconds",
        type=seconds_argument,
        default=0.0,
        metavar="SECONDS",
        help="how long a step takes without communication; exchanges overlap with most of it. If it is left out, "
        "exchanges are timed alone",
    )
    parser.add_argument(
        "--trial-seconds",
        type=seconds_argument,
        default=_ALL_TRIALS_SECONDS,
        metavar="SECONDS",
        help=f"for how long ways are tried with real ranks ({_ALL_TRIALS_SECONDS:.0f}); with 0 all are predicted",
    )
    paper = parser.add_argument_group("on paper")
    paper.add_argument(
        "--bandwidth", metavar="RATE", help="bandwidth of a host in each direction, such as 1gbit, 10Gbps or 125MB/s"
    )
    paper.add_argument("--latency", metavar="TIME", help="latency between two hosts (50us)")
    paper.add_argument("--ranks", type=whole_argument, metavar="NUMBER", help="number of ranks in all")
    paper.add_argument(
        "--ranks-per-host",
        type=whole_argument,
        metavar="NUMBER",
        help="number of ranks that share a host's bandwidth (1); inside of a host they have 10 Gbit/s",
    )
    parser.add_argument("--measure", action="store_true", help="measure the link between the ranks that run this "
                        "command; under horovodrun and mpirun this is the default")  # fmt: skip
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the table and the sentence, or JSON, on rank 0 only."""
    measured = options.measure or is_launched()
    _check(options, measured)
    step = options.step_seconds
    with working(options.json):
        shapes = _shapes(options)
        if measured:
            opened = open_ranks()
            network, rows = _with_ranks(opened, shapes, options)
            if opened.ranks.position:
                return 0
            link = "measured just now"
        else:
            network, rows = _on_paper(shapes, options)
            bandwidth = show_bandwidth(parse_bandwidth(options.bandwidth))
            inside = ", 10 Gbit/s inside of one" if options.ranks_per_host > 1 else ""
            link = f"on paper, {bandwidth} and {options.latency} between hosts{inside}: collectives at their best"
    if options.json:
        print_json(as_fields(shapes, network, rows, measured, step))
    else:
        print(report(shapes, network, rows, link, step))
    return 0


def _check(options: argparse.Namespace, measured: bool) -> None:
    """Raise ValueError for arguments that do not fit, before anything takes time; fill in what may be left out."""
    on_paper = (options.bandwidth, options.ranks, options.latency, options.ranks_per_host)
    if measured and any(option is not None for option in on_paper):
        raise ValueError("--bandwidth, --ranks, --latency and --ranks-per-host are for an estimate on paper: start it "
                         "as one process; without them the link is measured")  # fmt: skip
    if not 0 <= options.step_seconds < math.inf:
        raise ValueError(f"--step-seconds {options.step_seconds}: must be a number of seconds, 0 or more")
    if not options.trial_seconds >= 0:
        raise ValueError(f"--trial-seconds {options.trial_seconds}: must be a number of seconds, 0 or more")
    if measured:
        return
    if options.bandwidth is None or options.ranks is None:
        raise ValueError("give --bandwidth and --ranks, or start it with horovodrun to measure the link")
    options.latency = _LATENCY if options.latency is None else options.latency
    options.ranks_per_host = 1 if options.ranks_per_host is None else options.ranks_per_host
    ranks, per_host = options.ranks, options.ranks_per_host
    if not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"--ranks {ranks}: must be 1 to {_MOST_RANKS}")
    if per_host < 1 or ranks % per_host:
        raise ValueError(f"--ranks-per-host {per_host}: --ranks {ranks} must be a multiple of it")
    if 1 < per_host == ranks:
        raise ValueError(f"--ranks {ranks} --ranks-per-host {per_host}: these are ranks of one host, and --bandwidth "
                         "is between hosts. Give more ranks, or start it with horovodrun to measure")  # fmt: skip
    parse_bandwidth(options.bandwidth)
    parse_seconds(options.latency)


def _on_paper(shapes: list[Shape], options: argparse.Namespace) -> tuple[Network, list[Prediction]]:
    bandwidth, latency = parse_bandwidth(options.bandwidth), parse_seconds(options.latency)
    network = Network.on_paper(bandwidth, latency, options.ranks, options.ranks_per_host)
    if options.ranks == 1:
        return network, []
    network = replace(network, copying=copy_speed().per_unit / 4)
    rows = predict(shapes, network, {c: speed_of(c) for c in CANDIDATES}, options.step_seconds)
    return network, [row for row in rows if row.compresses]


def _with_ranks(
    opened: OpenRanks, shapes: list[Shape], options: argparse.Namespace
) -> tuple[Network, list[Prediction]]:
    """Measure the network and the kernels, predict, and try ways with real ranks; a collective call."""
    ranks = opened.ranks
    # with other shapes, trials would be other collectives
    number = float(zlib.crc32(repr(shapes).encode()))
    if ranks.maximum([number, -number]) != [number, -number]:
        raise MismatchError(
            "the ranks were given different shapes or models: start all of them with the same arguments"
        )
    if ranks.size == 1:
        return Network.on_paper(1e9, 0.0, 1), []
    network = measure_network(ranks, opened.hosts)
    speeds = slowest_speeds(CANDIDATES, ranks)
    (lacking,) = ranks.maximum([float(not has_cores(ranks.on_host().size))])
    rows = predict(shapes, network, speeds, options.step_seconds, not lacking)
    rows = [row for row in rows if row.compresses]
    return network, tried(rows, opened, shapes, options.step_seconds, options.trial_seconds)


def tried(
    rows: Sequence[Prediction],
    opened: OpenRanks,
    shapes: Sequence[Shape],
    step: float = 0.0,
    limit: float = _ALL_TRIALS_SECONDS,
) -> list[Prediction]:
    """Try the ways of some rows where ranks run PyTorch; returns the rows with measured seconds. A collective call.

    Ways are tried three times, in turns, the fastest first. Then those are tried again whose trials differ, since a
    machine may be slow for a minute. A way that is predicted to take long is not tried.

    Args:
        rows: of `predict`.
        opened: all ranks.
        shapes: of the gradients, in the order of the forward pass.
        step: seconds of a step without communication.
        limit: seconds after which no further trial begins.
    """
    ranks = opened.ranks
    # all ranks must try the same
    seconds = ranks.maximum([row.seconds for row in rows])
    few = sum(math.prod(shape) for shape in shapes) <= _MOST_TRIED_NUMEL
    order = sorted((i for i, s in enumerate(seconds) if s <= _LONGEST_TRIED), key=lambda i: seconds[i])
    if opened.framework != "torch" or not few or not order or not limit:
        return list(rows)
    from hvd_compress.cli.rehearse import Rehearsal  # an estimate on paper needs no framework

    if not ranks.position:
        print(f"trying {len(order)} of {len(rows)} ways, for about {limit:.0f} s at most", file=sys.stderr)
    rehearsal = Rehearsal(ranks, shapes, step)
    found = list(rows)
    begin = time.perf_counter()
    for turn, i in product(range(_MOST_TRIALS), order):
        way = rows[i].compressor, rows[i].exchange
        if turn >= _TRIALS and rehearsal.is_certain(*way):
            continue
        (elapsed,) = ranks.maximum([time.perf_counter() - begin])
        if elapsed > limit:
            break
        found[i] = replace(rows[i], seconds=rehearsal.seconds(*way), tried=True)
    return found


def _shapes(options: argparse.Namespace) -> list[Shape]:
    if options.model is not None:
        return shapes_of_model(options.model)
    return parse_shapes(options.shapes) if options.shapes is not None else read_shapes(options.shapes_file)
