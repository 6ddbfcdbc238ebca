"""`Compression`: Horovod's namespace of compressors, with ours beside its own."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.compressors import BF16, QSGD, Adaptive, Compressor, NoCompression, OneBit, Threshold, TopK

__all__ = ["Compression"]


class Compression(hvd.Compression):
    """Compressors with their default settings; `none` and `fp16` are Horovod's own.

    `threshold` has no default and is called with its `tau`: `Compression.threshold(1e-3)`.

    Example:
        >>> from hvd_compress.torch import Compression
        >>> Compression.adaptive
        Adaptive(pi=64, group='row', sample=1024, error_feedback=True)
    """

    onebit = OneBit()
    threshold = Threshold
    adaptive = Adaptive()
    qsgd = QSGD()
    topk = TopK()
    bf16 = BF16()


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


def horovod_compressor(compression: Any) -> Any:
    """The object whose `compress` and `decompress` Horovod's own allreduce is to use.

    Raises:
        TypeError: neither one of our compressors nor a Horovod compressor.
    """
    if isinstance(compression, type) and issubclass(compression, Compressor):
        raise TypeError(
            f"compression={compression.__name__} is a class; give a compressor, such as {compression.__name__}(...)"
        )
    if isinstance(compression, NoCompression):
        return hvd.Compression.none
    if isinstance(compression, Compressor):
        return compression if compression.reducible else DenseRoute
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            f"compression={compression!r}: give a compressor of hvd_compress, one of hvd.Compression, or an object "
            "with Horovod's compress(tensor) and decompress(tensor, ctx)"
        )
    return compression


def exchanged(compression: Any) -> Compressor | None:
    """The compressor if its payloads need an exchange of ours, None if Horovod's allreduce can sum what it makes."""
    return compression if isinstance(compression, Compressor) and not compression.reducible else None


def describe(compression: Any) -> Any:
    """What the fingerprint compares of a compressor."""
    if isinstance(compression, Compressor):
        return compression.get_config()
    kind = compression if isinstance(compression, type) else type(compression)
    return f"{kind.__module__}.{kind.__qualname__}"
