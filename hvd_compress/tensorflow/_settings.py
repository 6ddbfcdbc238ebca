"""What an exchange is told: how gradients are combined, what they are of, and how their collectives are named."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.elastic import is_elastic
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL
from hvd_compress.exchange import AdaGrad, Exchange, FewestBytes
from hvd_compress.fingerprint import scope_of

__all__ = ["Settings", "Source", "allowed_name", "claim", "name_in_graph", "ranks_of"]

_names: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True)
class Settings:
    """How gradients are combined; see `DistributedGradientTape` for the meaning of each.

    `groups` holds a number, or one tuple of positions in the list of tensors for each group.
    """

    compression: Any = hvd.Compression.none
    op: Any = hvd.Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    groups: int | tuple[tuple[int, ...], ...] | None = None
    process_set: hvd.ProcessSet = hvd.global_process_set
    exchange: Exchange = FewestBytes()  # noqa: RUF009 - it is frozen
    min_numel: int = DEFAULT_MIN_NUMEL
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    device_dense: str = ""
    device_sparse: str = ""
    adagrad: AdaGrad | None = None


@dataclass(frozen=True)
class Source:
    """What a gradient is of.

    Args:
        name: the same on all ranks, unique in its list.
        shape: None where it is not known before a step.
        dtype: of the gradient.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: tf.DType


def ranks_of(process_set: hvd.ProcessSet) -> Any:
    """How many ranks take part, 1 where this one does not: a number, or in an elastic run a tensor.

    The same graph runs among other ranks then.
    """
    if not process_set.included():
        return 1
    return hvd.size_op(process_set.process_set_id) if is_elastic() else process_set.size()


def claim(name: str, process_set: hvd.ProcessSet) -> str:
    """`name` for collectives: what a graph allows, and unique in this process, on all ranks in the same way."""
    allowed = allowed_name(name)
    if is_elastic():
        # who joins has not made what the others have; `name_in_graph` makes it unique
        return allowed
    counted = scope_of(process_set), allowed
    taken = _names[counted]
    _names[counted] += 1
    return f"{allowed}.again{taken}" if taken else allowed


def allowed_name(name: str) -> str:
    """`name` with what a graph does not allow in names replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", ".", name)


def name_in_graph(name: str) -> str:
    """`name` for Horovod; in an elastic run unique in the current graph, which does not depend on the graphs before."""
    if not is_elastic():
        return name
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None):
        return str(graph.unique_name(name))
