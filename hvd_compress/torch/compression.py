"""`Compression`: Horovod's namespace of compressors, with ours beside its own."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress import engine
from hvd_compress.compressors import FP16, Compressor

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
    """How gradients that are not compressed travel beside compressed ones.

    They go as they are, but bfloat16, which Horovod does not know, as float32.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor in a type that Horovod can sum."""
        return (tensor.float(), tensor.dtype) if tensor.dtype == torch.bfloat16 else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The tensor in the type it had."""
        return tensor if ctx is None else tensor.to(ctx)


def dense_route(compressor: Compressor) -> Any:
    """How a tensor whose chosen compressor is NoCompression or FP16 goes through Horovod's allreduce."""
    return hvd.Compression.fp16 if isinstance(compressor, FP16) else DenseRoute


def horovod_compressor(compression: Any) -> Any:
    """See `engine.horovod_compressor`; Horovod's own float16 does the same in less time."""
    found = engine.horovod_compressor(compression, hvd.Compression.none, DenseRoute)
    return hvd.Compression.fp16 if type(found) is FP16 else found
