"""Does compression pay for a model? Predicts the time of a training step for each compressor and exchange.

On paper, on any machine:

    hvd-compress advise --shapes 784x4096,4096x4096*2,4096x10 --bandwidth 1gbit --latency 50us --ranks 4

Measured, with the ranks and the network that training will have:

    horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress advise --model my_package.models:make_net

Kernel speeds are measured on this machine in both cases. With real ranks on PyTorch, steps are tried rather
than predicted unless that would take long: see `hvd_compress.cli.rehearse`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from hvd_compress import BF16, FP16, QSGD, Adaptive, NoCompression, OneBit, TopK
from hvd_compress.cli.models import parse_shapes, read_shapes, shapes_of_model
from hvd_compress.cli.ranks import Ranks, is_launched, open_ranks
from hvd_compress.cli.table import short, table
from hvd_compress.cli.units import parse_bandwidth, parse_seconds, show_bandwidth, show_bytes, show_seconds
from hvd_compress.compressors import Compressor
from hvd_compress.cost import (
    Job,
    Network,
    Speed,
    Work,
    break_even_bandwidth,
    copy_speed,
    dense_work,
    measure_network,
    slowest_speeds,
    speed_of,
    stages_of,
    step_seconds,
)
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, Routing, Tensor, backward_buckets, bucket_work, has_cores
from hvd_compress.exchange import EXCHANGES

__all__ = ["BACKWARD_SHARE", "HELP", "add_arguments", "advice", "predict", "run", "tried"]

HELP = "does compression pay for a model, and which"

CANDIDATES: tuple[Compressor, ...] = (FP16(), BF16(), QSGD(bits=4), OneBit(), TopK(), Adaptive())
_LEAST_GAIN = 1.05
# backward makes two products of matrices where forward makes one
BACKWARD_SHARE = 2 / 3
"""Of the seconds of a step."""
# a trial is four steps at least
_TRIALS, _MOST_TRIALS, _LONGEST_TRIED = 3, 9, 20.0
_ALL_TRIALS_SECONDS = 300.0
_MOST_TRIED_NUMEL = 2**26  # five arrays of so many float32 are made

Shape = tuple[int, ...]
Works = list[Work]


@dataclass(frozen=True)
class Prediction:
    """A row of the table.

    Args:
        compressor: of the tensors that are large enough.
        exchange: "dense" for Horovod's allreduce.
        sent_bytes: by each rank, in each step; of a hierarchical exchange to other hosts only.
        seconds: of a step.
        break_even: bandwidth below which it is faster than dense float32, bits per second; always predicted.
        tried: whether `seconds` come from a trial.
    """

    compressor: Compressor
    exchange: str
    sent_bytes: float
    seconds: float
    break_even: float = math.nan
    tried: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODULE:FUNCTION", help="returns a torch module or a built Keras model")
    model.add_argument("--shapes", metavar="LIST", help="such as 784x4096,4096x4096*2,4096x10")
    model.add_argument("--shapes-file", metavar="FILE", help="the same in a file, one or more in a line")
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of a step without communication, most of which exchanges overlap with; without it they are alone",
    )
    parser.add_argument(
        "--trial-seconds",
        type=float,
        default=_ALL_TRIALS_SECONDS,
        metavar="SECONDS",
        help=f"after which no other way is tried with real ranks ({_ALL_TRIALS_SECONDS:.0f}); 0 only predicts",
    )
    paper = parser.add_argument_group("on paper")
    paper.add_argument("--bandwidth", metavar="RATE", help="of a host, in each direction, such as 1gbit")
    paper.add_argument("--latency", metavar="TIME", default="50us", help="between two hosts (50us)")
    paper.add_argument("--ranks", type=int, help="in all")
    paper.add_argument("--ranks-per-host", type=int, default=1, help="that share a host's bandwidth (1)")
    parser.add_argument("--measure", action="store_true", help="the link between the ranks that run this command; this "
                        "is what happens under horovodrun and mpirun")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Print the table and the sentence, on rank 0 only."""
    on_paper = options.bandwidth is not None or options.ranks is not None
    measure = options.measure or is_launched()
    if measure and on_paper:
        raise ValueError("--bandwidth and --ranks are for an estimate on paper: start it as one process, without them "
                         "the link is measured")  # fmt: skip
    if not measure and (options.bandwidth is None or options.ranks is None):
        raise ValueError("give --bandwidth and --ranks, or start it with horovodrun to measure the link")
    step = options.step_seconds
    if not 0 <= step < math.inf:
        raise ValueError(f"--step-seconds {step}: must be a number of seconds, 0 or more")
    if not options.trial_seconds >= 0:
        raise ValueError(f"--trial-seconds {options.trial_seconds}: must be a number of seconds, 0 or more")
    shapes = _shapes(options)
    if measure:
        ranks = open_ranks()
        network = measure_network(ranks, ranks.hosts, ranks.position)
        speeds = slowest_speeds(CANDIDATES, ranks)
        (lacking,) = ranks.maximum([float(not has_cores(ranks.local_size))])
        rows = tried(predict(shapes, network, speeds, step, not lacking), ranks, shapes, step, options.trial_seconds)
        if ranks.position:
            return 0
        link = "measured just now"
    else:
        bandwidth = parse_bandwidth(options.bandwidth)
        network = Network.on_paper(bandwidth, parse_seconds(options.latency), options.ranks, options.ranks_per_host)
        network = replace(network, copying=copy_speed().per_unit / 4)
        rows = predict(shapes, network, {c: speed_of(c) for c in CANDIDATES}, step)
        link = f"on paper, {show_bandwidth(bandwidth)} and {options.latency} between hosts: collectives at their best"
    print(_report(shapes, network, rows, link, step))
    return 0


def predict(
    shapes: Sequence[Shape],
    network: Network,
    speeds: dict[Compressor, Speed],
    step: float = 0.0,
    worker: bool = False,
) -> list[Prediction]:
    """What a step takes with each compressor of `speeds` and each exchange; dense float32 comes first.

    Args:
        shapes: of the gradients, in the order of the forward pass.
        network: of the ranks.
        speeds: of the compressors.
        step: seconds of a step without communication.
        worker: whether kernels have a core of their own.

    Example:
        >>> from hvd_compress import OneBit
        >>> from hvd_compress.cli.advise import predict
        >>> from hvd_compress.cost import Line, Network, Speed
        >>> kernels = Speed(Line(0, 1e-9), Line(0, 1e-9), Line(0, 1e-9))
        >>> network = Network.on_paper(bandwidth=1e9, latency=50e-6, ranks=4)
        >>> rows = predict([(4096, 4096)], network, {OneBit(): kernels})
        >>> [row.exchange for row in rows]
        ['dense', 'two_phase', 'allgather']
        >>> rows[0].seconds > 6 * rows[1].seconds
        True
    """
    tensors = {str(i): Tensor(str(i), shape) for i, shape in enumerate(shapes)}
    whole = sum(math.prod(shape) for shape in shapes)
    names = backward_buckets({name: t.shape for name, t in tensors.items()}, DEFAULT_BUCKET_BYTES)
    buckets = [[tensors[name] for name in of_bucket] for of_bucket in names]
    backward = BACKWARD_SHARE * step

    def seconds(works: Works, speed: Speed, of: Network) -> float:
        jobs = [Job(stages_of(work, speed, of), work.numel * backward / whole) for work in works]
        return step_seconds(jobs, step - backward, worker)

    def works_of(compressor: Compressor, exchange: str, speed: Speed) -> Works:
        routing = Routing(None, exchange)
        works: list[Work] = []
        for bucket in buckets:
            # Horovod starts the allreduce of each tensor when it is there, and fuses those that wait
            parts = [[tensor] for tensor in bucket] if compressor.reducible else [bucket]
            for part in parts:
                work = bucket_work(part, compressor, routing, network, speed)
                works += [work] if work else plain_works(part)
        return works

    def plain_works(of: Sequence[Tensor]) -> Works:
        return [dense_work(math.prod(t.shape), 4, network.ranks) for t in of]

    def row(compressor: Compressor, exchange: str, speed: Speed) -> Prediction:
        works = works_of(compressor, exchange, speed)
        here = network.bandwidth
        even = break_even_bandwidth(
            lambda b: seconds(works, speed, network.slowed(here / b)),
            lambda b: seconds(plain, Speed(), network.slowed(here / b)),
        )
        return Prediction(compressor, exchange, sum(w.sent_bytes for w in works), seconds(works, speed, network), even)

    plain = [work for bucket in buckets for work in plain_works(bucket)]
    first = Prediction(NoCompression(), "dense", sum(w.sent_bytes for w in plain), seconds(plain, Speed(), network))
    kinds = [e for e in EXCHANGES if e in ("two_phase", "allgather", "hierarchical")]
    if network.inside is None or network.between is None:
        kinds = [e for e in kinds if e != "hierarchical"]
    rows = [row(c, e, s) for c, s in speeds.items() for e in (["dense"] if c.reducible else kinds)]
    return [first, *rows]


def tried(
    rows: Sequence[Prediction],
    ranks: Ranks,
    shapes: Sequence[Shape],
    step: float = 0.0,
    limit: float = _ALL_TRIALS_SECONDS,
) -> list[Prediction]:
    """The rows with the seconds of trials, where ranks run PyTorch; a collective call.

    They are tried the fastest first, three times, in turns; then those again whose trials differ, since machines may be
    slow for a minute. What takes long by prediction is not tried.

    Args:
        rows: of `predict`.
        ranks: all of them.
        shapes: of the gradients, in the order of the forward pass.
        step: seconds of a step without communication.
        limit: seconds after which no further trial begins.
    """
    # all ranks must try the same
    seconds = ranks.maximum([row.seconds for row in rows])
    few = sum(math.prod(shape) for shape in shapes) <= _MOST_TRIED_NUMEL
    order = sorted((i for i, s in enumerate(seconds) if s <= _LONGEST_TRIED), key=lambda i: seconds[i])
    if ranks.framework != "torch" or not few or not order or not limit:
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


def advice(rows: Sequence[Prediction]) -> str:
    """The plain sentence about a table whose first row is dense float32."""
    dense, *others = rows
    best = min(others, key=lambda row: row.seconds)
    gain = dense.seconds / best.seconds
    times = f"{show_seconds(best.seconds)} instead of {show_seconds(dense.seconds)}"
    if gain < 1:
        return f"Don't compress: a step would take at least {times}."
    if gain < _LEAST_GAIN:
        return f"Don't compress: it would gain {100 * (gain - 1):.0f} % at most, a step of {times}."
    how = f"compression={short(best.compressor)}"
    if best.exchange != "dense":
        how += f', exchange="{best.exchange}"'
    worth = {math.inf: "It pays at any bandwidth."}.get(
        best.break_even, f"It pays below {show_bandwidth(best.break_even)}."
    )
    return f"Use {how}: a step takes {times}, {gain:.1f} times faster. {worth}"


def _shapes(options: argparse.Namespace) -> list[Shape]:
    if options.model:
        return shapes_of_model(options.model)
    return parse_shapes(options.shapes) if options.shapes else read_shapes(options.shapes_file)


def _report(shapes: Sequence[Shape], network: Network, rows: Sequence[Prediction], link: str, step: float) -> str:
    numel = sum(math.prod(shape) for shape in shapes)
    hosts = f", {network.ranks_per_host} on each host" if network.ranks_per_host > 1 else ""
    dense = rows[0]
    trials = any(row.tried for row in rows)
    cells = [
        [
            "none (float32)" if row is dense else short(row.compressor),
            row.exchange,
            show_bytes(row.sent_bytes),
            f"{dense.sent_bytes / row.sent_bytes:.1f}x",
            show_seconds(row.seconds),
            f"{dense.seconds / row.seconds:.2f}x",
            "" if row is dense else show_bandwidth(row.break_even),
            *(["tried" if row.tried else "predicted"] if trials else []),
        ]
        for row in rows
    ]
    head = ["compressor", "exchange", "sent/rank", "fewer", "step" if step else "exchange", "faster", "pays below"]
    head += ["how"] if trials else []
    return "\n".join(
        [
            f"{len(shapes)} tensors, {numel:,} elements, {network.ranks} ranks{hosts}",
            f"link: {link}; kernels: measured on this machine",
            table(head, cells, left=2),
            advice(rows),
        ]
    )
