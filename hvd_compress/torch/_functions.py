"""`allreduce` and `grouped_allreduce` of single tensors, with compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.compressors import Compressor
from hvd_compress.engine import average_share, exchanged, names_of_call, op_of_call
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import make_plan
from hvd_compress.torch._lane import Lane
from hvd_compress.torch.compression import horovod_compressor

__all__ = ["allreduce", "forget_residuals", "grouped_allreduce"]

# named tensors keep their residual from call to call, as an optimizer's do
_lanes: dict[tuple[Any, ...], Lane] = {}


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
    """Average or sum a tensor over all ranks, as `horovod.torch.allreduce` does, compressed if so asked.

    With error feedback and a name, what a call leaves out is added to the next call of that name, shape and compressor;
    without a name it is lost. Tensors that compression would not make smaller travel as they are.

    Args:
        tensor: float16, bfloat16, float32 or float64 for a compressor of hvd_compress; not changed.
        average: old form of `op`.
        name: the same on all ranks.
        compression: a compressor of hvd_compress, one of `Compression`, or one written for Horovod.
        op: Average (default) or Sum with a compressor of hvd_compress; any of Horovod's without.
        prescale_factor: factor on each rank's tensor.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.

    Raises:
        UnsupportedError: another `op`, or a tensor that requires a gradient, with a compressor of hvd_compress.
        TypeError: `compression` is no compressor, or the tensor's type cannot be compressed.
    """
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _reduce([tensor], compression, *arguments)[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors at once; their exchanges are in flight together."""
    if exchanged(compression) is None:
        return hvd.grouped_allreduce(
            list(tensors), average, name, horovod_compressor(compression), op, prescale_factor, postscale_factor,
            process_set,
        )  # fmt: skip
    return _reduce(tensors, compression, average, name, op, prescale_factor, postscale_factor, process_set)


def forget_residuals() -> None:
    """Drop the residuals that named calls of `allreduce` have kept; all ranks must do so at the same point."""
    _lanes.clear()


def _reduce(
    tensors: Sequence[torch.Tensor],
    compression: Any,
    average: bool | None,
    name: str | None,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: hvd.ProcessSet,
) -> list[torch.Tensor]:
    horovods = horovod_compressor(compression)

    def plain(tensor: torch.Tensor, its_name: str | None) -> torch.Tensor:
        return hvd.allreduce(
            tensor, average, its_name, horovods, op, prescale_factor, postscale_factor,
            process_set,
        )  # fmt: skip

    compressor = exchanged(compression)
    if compressor is None or process_set.size() == 1:
        return [plain(tensor, name) for tensor in tensors]
    op, average = op_of_call(average, op, hvd.Average, hvd.Sum), None
    share = average_share(compressor, op, hvd.Average, hvd.Sum, process_set.size())
    scale = prescale_factor * postscale_factor * share
    names = names_of_call(name, len(tensors))
    lanes = [_lane(t, n, name is not None, compressor, process_set) for t, n in zip(tensors, names, strict=True)]
    for tensor, lane in zip(tensors, lanes, strict=True):
        if lane is not None:
            lane.start(tensor.detach().clone())
    for lane in lanes:
        if lane is not None:
            lane.wait_first()
    finite = {id(lane): lane.wait() for lane in lanes if lane is not None}
    return [
        plain(tensor, its_name) if lane is None else lane.combine(finite[id(lane)], scale)
        for tensor, its_name, lane in zip(tensors, names, lanes, strict=True)
    ]


def _lane(
    tensor: torch.Tensor, name: str, keep: bool, compressor: Compressor, process_set: hvd.ProcessSet
) -> Lane | None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"allreduce of {name!r} with {compressor!r}: the tensor requires a gradient, which compression does not "
            "pass on. Give tensor.detach(), or use compression=hvd.Compression.none"
        )
    plan = make_plan("auto", compressor, tuple(tensor.shape), process_set.size(), tensor.element_size())
    if plan.exchange == "dense":
        return None
    key = (process_set.process_set_id, process_set.size(), name, tuple(tensor.shape), tensor.dtype, compressor)
    lane = _lanes.get(key)
    if lane is None:
        lane = Lane(name, plan, compressor, process_set.rank(), process_set)
        if keep:
            _lanes[key] = lane
    return lane
