"""List the work of a bucket's exchange, for predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_compress.compressors import FP16, Compressor
from hvd_compress.cost import Network, Speed, Work, dense_work, work_of
from hvd_compress.engine.routing import Routing, Tensor
from hvd_compress.exchange import Pack, plan_together

__all__ = ["bucket_work"]


def bucket_work(
    tensors: Sequence[Tensor], compressor: Compressor, routing: Routing, network: Network, speed: Speed
) -> Work | None:
    """List the work of exchanging tensors that go together; None if all are too small for the compressor.

    Args:
        tensors: of a bucket.
        compressor: of those that are large enough.
        routing: exchange and sizes; its compressor is not looked at.
        network: of the ranks.
        speed: of the compressor.
    """
    numel = sum(math.prod(t.shape) for t in tensors)
    if compressor.reducible:
        itemsize = max(t.itemsize for t in tensors)
        return dense_work(numel, itemsize, network.ranks, half=isinstance(compressor, FP16))
    large = {t.name: (t.shape, compressor) for t in tensors if math.prod(t.shape) >= max(routing.min_numel, 1)}
    small = {t.name: t.shape for t in tensors if t.name not in large}
    if not large:
        return None
    together: dict[str, Any] = dict(large)
    if small:
        together["and small"] = (Pack.shape_of(small), Pack.compressor)
    plans = list(plan_together(routing.exchange, together, network.ranks).values())
    return work_of(plans, speed.bytes_per_element, network.ranks_per_host)
