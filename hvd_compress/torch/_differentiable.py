"""Horovod's functions that pass gradients on, for tensors of any type and layout.

Gradients are those of Horovod: of a mean or sum, the same reduction of gradients; of an allgather or broadcast, their
average, of which each rank, or the root, gets its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch.autograd import Function

from hvd_compress.torch._collectives import (
    allgather_async,
    allreduce_async,
    alltoall_async,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    reducescatter_async,
    synchronize,
)

# those that take a compressor of ours are in `_functions`
__all__ = [
    "allgather",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_reducescatter",
    "reducescatter",
]

Tensors = Sequence[torch.Tensor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> torch.Tensor:
    """`horovod.torch.allreduce`, with compressors written for Horovod."""
    sent, ctx = compression.compress(tensor)
    settings = (average, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = compression.decompress(_Allreduce.apply(name, settings, sent), ctx)
    return result


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> list[torch.Tensor]:
    """`horovod.torch.grouped_allreduce`, with compressors written for Horovod."""
    sent, contexts = _compressed(tensors, compression)
    settings = (average, op, prescale_factor, postscale_factor, process_set)
    results = _GroupedAllreduce.apply(name, settings, *sent)
    return [compression.decompress(r, ctx) for r, ctx in zip(results, contexts, strict=True)]


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = hvd.Compression.none,
    op: Any = hvd.Average,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and keep this rank's part along the first dimension.

    See `horovod.torch.reducescatter`.

    Raises:
        ValueError: a tensor without dimensions.
    """
    sent, ctx = compression.compress(tensor)
    settings = (op, process_set, prescale_factor, postscale_factor)
    result: torch.Tensor = compression.decompress(_Reducescatter.apply(name, settings, sent), ctx)
    return result


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = hvd.Compression.none,
    op: Any = hvd.Average,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors as one operation."""
    sent, contexts = _compressed(tensors, compression)
    results = _GroupedReducescatter.apply(name, (op, process_set, prescale_factor, postscale_factor), *sent)
    return [compression.decompress(r, ctx) for r, ctx in zip(results, contexts, strict=True)]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> torch.Tensor:
    """The root's tensor on all ranks; see `horovod.torch.broadcast`."""
    return _Broadcast.apply(name, root_rank, process_set, tensor)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: hvd.ProcessSet = hvd.global_process_set
) -> torch.Tensor:
    """The tensors of all ranks joined along their first dimension, which may differ; see `horovod.torch.allgather`.

    Tensors without dimensions become elements of a vector.
    """
    return _Allgather.apply(name, process_set, torch.atleast_1d(tensor))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: hvd.ProcessSet = hvd.global_process_set
) -> tuple[torch.Tensor, ...]:
    """`allgather` of several tensors as one operation."""
    # of several tensors it would return a tuple
    vectors = [torch.atleast_1d(tensor) for tensor in tensors]
    return _GroupedAllgather.apply(name, process_set, *vectors)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Send each rank a part of the tensor along its first dimension, and join what comes.

    See `horovod.torch.alltoall`.

    Returns:
        What has come; with `splits`, also how much from each rank.

    Raises:
        ValueError: a tensor without dimensions.
    """
    return _Alltoall.apply(name, splits, process_set, tensor)


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, settings: tuple[Any, ...], tensor: torch.Tensor) -> Any:
        ctx.settings = settings
        average, *others = settings
        return synchronize(allreduce_async(tensor, average, name, *others))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, _Allreduce.apply(None, ctx.settings, *gradients)


class _GroupedAllreduce(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, settings: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.settings = settings
        average, *others = settings
        return synchronize(grouped_allreduce_async(tensors, average, name, *others))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, *_GroupedAllreduce.apply(None, ctx.settings, *gradients))


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, settings: tuple[Any, ...], tensor: torch.Tensor) -> Any:
        ctx.settings = settings
        return synchronize(reducescatter_async(tensor, name, *settings))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        process_set = ctx.settings[1]
        return None, None, allgather(gradients[0] * _weight(*ctx.settings), process_set=process_set)


class _GroupedReducescatter(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, settings: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.settings = settings
        return synchronize(grouped_reducescatter_async(tensors, name, *settings))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weighted = [g * _weight(*ctx.settings) for g in gradients]
        return (None, None, *grouped_allgather(weighted, process_set=ctx.settings[1]))


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, root_rank: int, process_set: hvd.ProcessSet, tensor: torch.Tensor) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        averaged = allreduce(gradients[0], op=hvd.Average, process_set=ctx.process_set)
        is_root = hvd.rank() == ctx.root_rank
        return None, None, None, averaged if is_root else torch.zeros_like(averaged)


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: hvd.ProcessSet, tensor: torch.Tensor) -> Any:
        ctx.process_set, ctx.length = process_set, len(tensor)
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        averaged = allreduce(gradients[0], op=hvd.Average, process_set=ctx.process_set)
        lengths = allgather(torch.tensor([ctx.length]), process_set=ctx.process_set)
        return None, None, _part(averaged, lengths, ctx.process_set)


class _GroupedAllgather(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: hvd.ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.process_set, ctx.lengths = process_set, [len(tensor) for tensor in tensors]
        return synchronize(grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        averaged = grouped_allreduce(gradients, op=hvd.Average, process_set=ctx.process_set)
        lengths = allgather(torch.tensor([ctx.lengths]), process_set=ctx.process_set)
        parts = [_part(a, of_ranks, ctx.process_set) for a, of_ranks in zip(averaged, lengths.t(), strict=True)]
        return (None, None, *parts)


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, splits: Any, process_set: hvd.ProcessSet, tensor: torch.Tensor) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received = process_set, received
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        returned, _ = alltoall(gradients[0], ctx.received, process_set=ctx.process_set)
        return None, None, None, returned


def _compressed(tensors: Tensors, compression: Any) -> tuple[list[torch.Tensor], list[Any]]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [sent for sent, _ in pairs], [ctx for _, ctx in pairs]


def _weight(op: Any, process_set: hvd.ProcessSet, prescale_factor: float, postscale_factor: float) -> float:
    total = process_set.size() if op == hvd.Sum else 1
    return float(total * prescale_factor * postscale_factor)


def _part(averaged: torch.Tensor, lengths: torch.Tensor, process_set: hvd.ProcessSet) -> torch.Tensor:
    """This rank's part of what was gathered."""
    of_ranks, position = lengths.tolist(), process_set.rank()
    return averaged.narrow(0, sum(of_ranks[:position]), of_ranks[position])
