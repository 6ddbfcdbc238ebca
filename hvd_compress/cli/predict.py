"""Predict what a training step takes with each compressor and each exchange, by the cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_compress import NoCompression
from hvd_compress.compressors import Compressor
from hvd_compress.cost import (
    Network,
    PlannedExchange,
    Speed,
    Work,
    break_even_bandwidth,
    dense_work,
    stages_of,
    step_seconds,
)
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, Routing, Tensor, backward_buckets, bucket_work
from hvd_compress.exchange import AllGather, Dense, Exchange, Hierarchical, TwoPhase

__all__ = ["BACKWARD_SHARE", "Prediction", "predict"]

# backward makes two products of matrices where forward makes one
BACKWARD_SHARE = 2 / 3
"""The share of a step's seconds that backward takes."""
Shape = tuple[int, ...]
Works = list[Work]


@dataclass(frozen=True)
class Prediction:
    """Holds a row of the table.

    Args:
        compressor: of the tensors that are large enough.
        exchange: its name; "dense" for Horovod's allreduce.
        sent_bytes: what each rank sends in each step; in a hierarchical exchange, what goes to other hosts.
        seconds: of a step.
        break_even: the bandwidth below which it is faster than dense float32, bits per second; always predicted.
        tried: whether `seconds` come from a trial.
        compresses: whether any tensor is large enough for the compressor; without one it sends float32.
    """

    compressor: Compressor
    exchange: str
    sent_bytes: float
    seconds: float
    break_even: float = math.nan
    tried: bool = False
    compresses: bool = True

    @property
    def is_free(self) -> bool:
        """Whether Horovod itself offers it, at no cost of accuracy that matters."""
        return self.compressor.reducible


def predict(
    shapes: Sequence[Shape],
    network: Network,
    speeds: dict[Compressor, Speed],
    step: float = 0.0,
    worker: bool = False,
) -> list[Prediction]:
    """Predict what a step takes with each compressor of `speeds` and each exchange; dense float32 comes first.

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
        jobs = [PlannedExchange(stages_of(work, speed, of), work.numel * backward / whole) for work in works]
        return step_seconds(jobs, step - backward, worker)

    def works_of(compressor: Compressor, exchange: Exchange, speed: Speed) -> Works:
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

    def row(compressor: Compressor, exchange: Exchange, speed: Speed) -> Prediction:
        works = works_of(compressor, exchange, speed)
        here = network.bandwidth
        even = break_even_bandwidth(
            lambda b: seconds(works, speed, network.slowed(here / b)),
            lambda b: seconds(plain, Speed(), network.slowed(here / b)),
        )
        compresses = any(work.half or not isinstance(work.exchange, Dense) for work in works)
        sent = sum(w.sent_bytes for w in works)
        return Prediction(compressor, exchange.id, sent, seconds(works, speed, network), even, compresses=compresses)

    plain = [work for bucket in buckets for work in plain_works(bucket)]
    first = Prediction(NoCompression(), Dense.id, sum(w.sent_bytes for w in plain), seconds(plain, Speed(), network))
    kinds: list[Exchange] = [TwoPhase(), AllGather()]
    if network.inside is not None and network.between is not None:
        kinds.append(Hierarchical())
    rows = [row(c, e, s) for c, s in speeds.items() for e in ([Dense()] if c.reducible else kinds)]
    return [first, *rows]
