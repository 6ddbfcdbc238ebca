"""Which compressor in which epoch, so that a training begins dense and sends less and less."""

from __future__ import annotations

from typing import Any

from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.engine import describe, exchanged

__all__ = ["compression_at", "described", "later_of", "same", "tightened", "warmup_stages"]

# Lin et al., Deep Gradient Compression (ICLR 2018), section 3.3: 25 %, 6.25 %, 1.5625 %, ... of the values in the
# epochs of the warm-up
_KEPT_PER_EPOCH = 0.25


def tightened(compression: Any, epoch: int) -> Any:
    """`compression` as it is in the `epoch`-th (from 1) compressed epoch of a warm-up.

    Top-k keeps a quarter of the values, then a sixteenth, and so on down to its own ratio; percentile drops the others
    up to its own; adaptive's pi is 4, 16, ... up to its own. Compressors without such a number are used as they are.

    Example:
        >>> from hvd_compress import Adaptive, TopK
        >>> [tightened(TopK(0.01), epoch).ratio for epoch in (1, 2, 3, 4)]
        [0.25, 0.0625, 0.015625, 0.01]
        >>> tightened(Adaptive(pi=64), 2).pi
        16
    """
    kept = _KEPT_PER_EPOCH**epoch
    return compression.keeping(kept) if isinstance(compression, Compressor) else compression


def warmup_stages(compression: Any, dense_epochs: int, warmup_epochs: int) -> dict[int, Any]:
    """First epochs of the stages: dense, then one for each epoch of the warm-up, then `compression` itself.

    Example:
        >>> from hvd_compress import TopK
        >>> {epoch: getattr(c, "ratio", "dense") for epoch, c in warmup_stages(TopK(0.01), 1, 2).items()}
        {0: 'dense', 1: 0.25, 2: 0.0625, 3: 0.01}
    """
    stages: dict[int, Any] = {0: NoCompression()} if dense_epochs else {}
    for epoch in range(warmup_epochs):
        stages[dense_epochs + epoch] = tightened(compression, epoch + 1)
    stages[dense_epochs + warmup_epochs] = compression
    return stages


def compression_at(stages: dict[int, Any], epoch: int) -> Any:
    """The compression of the last stage that has begun by `epoch`."""
    return stages[max(first for first in stages if first <= epoch)]


def later_of(stages: dict[int, Any], wanted: Any, last: Any) -> Any:
    """The compression of the later one of two stages.

    Args:
        stages: first epochs and compressions.
        wanted: the compression of a stage.
        last: of what gradients were compressed with last, what `described` returns; `wanted` if that is no stage.
    """
    order = [stages[first] for first in sorted(stages)]
    positions = [max((i for i, stage in enumerate(order) if described(stage) == d), default=-1)
                 for d in (described(wanted), last)]  # fmt: skip
    return order[positions[1]] if positions[1] > positions[0] else wanted


def described(compression: Any) -> Any:
    """A compression as states have it: None where Horovod's allreduce does it all."""
    return None if exchanged(compression) is None else describe(compression)


def same(one: Any, other: Any) -> bool:
    """Whether two compressions mean the same."""
    return bool(describe(one) == describe(other))
