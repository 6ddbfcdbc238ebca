"""`allreduce` and `grouped_allreduce` of single tensors, with compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.compressors import Compressor
from hvd_compress.engine import Routing, average_share, compressor_of_call, names_of_call, op_of_call
from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import _differentiable
from hvd_compress.torch._engine import Engine
from hvd_compress.torch.compression import horovod_compressor

__all__ = ["allreduce", "forget_residuals", "grouped_allreduce"]

# named tensors keep their residual from call to call, as an optimizer's do
_engines: dict[tuple[Any, ...], Engine] = {}


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
    without a name it is lost. Until `forget_residuals` that takes 4 bytes per element, and as many for a result, whose
    memory is used again when nothing refers to it any more. Tensors that compression would not make smaller travel as
    they are.

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
    """`allreduce` of several tensors at once, which share their exchanges."""
    if compressor_of_call(compression) is None:
        return _differentiable.grouped_allreduce(
            list(tensors), average, name, horovod_compressor(compression), op, prescale_factor, postscale_factor,
            process_set,
        )  # fmt: skip
    return _reduce(tensors, compression, average, name, op, prescale_factor, postscale_factor, process_set)


def forget_residuals() -> None:
    """Drop the residuals that named calls of `allreduce` have kept; all ranks must do so at the same point."""
    _engines.clear()


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
    compressor, horovods = compressor_of_call(compression), horovod_compressor(compression)

    def plain(tensor: torch.Tensor, its_name: str | None) -> torch.Tensor:
        return _differentiable.allreduce(
            tensor, average, its_name, horovods, op, prescale_factor, postscale_factor,
            process_set,
        )  # fmt: skip

    if compressor is None or process_set.size() == 1:
        return [plain(tensor, name) for tensor in tensors]
    op, average = op_of_call(average, op, hvd.Average, hvd.Sum), None
    share = average_share(compressor, op, hvd.Average, hvd.Sum, process_set.size())
    scale = prescale_factor * postscale_factor * share
    names = names_of_call(name, len(tensors))
    engine = _engine(tensors, names, name is not None, compressor, scale, process_set)
    for tensor, its_name in zip(tensors, names, strict=True):
        if engine.exchanges(its_name):
            engine.start(its_name, tensor, keep=True)
    results = engine.combine(engine.wait())
    return [results[n] if n in results else plain(t, n) for t, n in zip(tensors, names, strict=True)]


def _engine(
    tensors: Sequence[torch.Tensor],
    names: list[str],
    keep: bool,
    compressor: Compressor,
    scale: float,
    process_set: hvd.ProcessSet,
) -> Engine:
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"allreduce of {name!r} with {compressor!r}: the tensor requires a gradient, which compression does "
                "not pass on. Give tensor.detach(), or use compression=hvd.Compression.none"
            )
    described = tuple((name, tuple(t.shape), t.dtype) for name, t in zip(names, tensors, strict=True))
    key = (process_set.process_set_id, process_set.size(), described, compressor)
    engine = _engines.get(key)
    if engine is None:
        routing = Routing(compressor, min_numel=0)
        engine = Engine(routing, scale, process_set, zip(names, tensors, strict=True))
        if keep:
            _engines[key] = engine
    engine.scale = scale
    return engine
