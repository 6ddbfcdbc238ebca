"""`Compression`: Horovod's namespace of compressors, with ours beside its own, and the ways of dense gradients."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress import engine
from hvd_compress.compressors import FP16, Compressor
from hvd_compress.torch._carried import is_reducible, reduced, reducible, settled

__all__ = ["Compression"]


class Compression(hvd.Compression, engine.Defaults):
    """Compressors with their default settings; `none` and `fp16` are Horovod's own.

    Called, each of ours gives another one with the given settings: `Compression.adaptive(pi=32)`. `threshold` has no
    default and must be called with its `tau`: `Compression.threshold(1e-3)`.

    Example:
        >>> from hvd_compress.torch import Compression
        >>> Compression.adaptive
        Adaptive(pi=64, group='row', sample=1024, error_feedback=True, coding=None)
    """


class DenseRoute:
    """How a gradient goes through Horovod's allreduce as it is; `decompress` writes the result where it lies.

    One of a type or layout that Horovod cannot reduce goes as a copy that it can. Sparse ones, without a context, are
    returned as they came.
    """

    @staticmethod
    def compress(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What Horovod is to reduce, and the gradient."""
        return gradient if is_reducible(gradient) else reducible(gradient, hvd.Sum, "allreduce"), gradient

    @staticmethod
    def decompress(result: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """The gradient, which holds the result."""
        if gradient is None or result is gradient:
            return result
        return settled(torch.view_as_complex(result) if gradient.is_complex() else result, gradient)


class HalfRoute(DenseRoute):
    """The same with float16 for all floating types."""

    @staticmethod
    def compress(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What Horovod is to reduce, and the gradient."""
        if not gradient.is_floating_point():
            return DenseRoute.compress(gradient)
        # one that is float16 already keeps its layout in `to`
        sent = gradient.detach().to(torch.float16, memory_format=torch.contiguous_format).contiguous()
        return sent, gradient


class UsersRoute:
    """The way of a compressor that the user has written for Horovod.

    Args:
        compressor: with `compress(tensor)` and `decompress(tensor, ctx)`.
    """

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor

    def compress(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What Horovod is to reduce, and what `decompress` needs."""
        sent, ctx = self._compressor.compress(gradient)
        return sent if is_reducible(sent) else reducible(sent, hvd.Sum, "allreduce"), (ctx, sent, gradient)

    def decompress(self, result: torch.Tensor, context: Any) -> torch.Tensor:
        """The gradient's values as the compressor gives them, in the gradient's strides."""
        if context is None:
            restored: torch.Tensor = self._compressor.decompress(result, None)
            return restored
        ctx, sent, gradient = context
        restored = self._compressor.decompress(reduced(result, sent), ctx)
        return restored if gradient.is_contiguous() else settled(restored, gradient)


def dense_route(compressor: Compressor) -> Any:
    """How a gradient whose chosen compressor is NoCompression or FP16 goes through Horovod's allreduce."""
    return HalfRoute if isinstance(compressor, FP16) else DenseRoute


def route_of(compression: Any) -> Any:
    """How all gradients go through Horovod's allreduce that no exchange of ours takes; see `horovod_compressor`."""
    found = horovod_compressor(compression)
    routes = {hvd.Compression.none: DenseRoute, hvd.Compression.fp16: HalfRoute}
    return routes[found] if found in routes else UsersRoute(found)


def horovod_compressor(compression: Any) -> Any:
    """See `engine.horovod_compressor`; Horovod's own float16 does the same in less time."""
    found = engine.horovod_compressor(compression, hvd.Compression.none, hvd.Compression.none)
    return hvd.Compression.fp16 if type(found) is FP16 else found
