"""`Compression`: Horovod's namespace of compressors, with ours beside its own."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from hvd_compress import engine
from hvd_compress.compressors import FP16, Compressor

__all__ = ["Compression"]


class Compression(hvd.Compression, engine.Defaults):
    """Compressors with their default settings; `none` and `fp16` are Horovod's own.

    Called, each of ours gives another one with the given settings: `Compression.adaptive(pi=32)`. `threshold` has no
    default and must be called with its `tau`: `Compression.threshold(1e-3)`.

    Example:
        >>> from hvd_compress.tensorflow import Compression
        >>> Compression.onebit
        OneBit(group='row', sample=None, error_feedback=True)
    """


def dense_route(compressor: Compressor) -> Any:
    """How a tensor whose chosen compressor is NoCompression or FP16 goes through Horovod's allreduce."""
    return hvd.Compression.fp16 if isinstance(compressor, FP16) else hvd.Compression.none


def horovod_compressor(compression: Any) -> Any:
    """See `engine.horovod_compressor`."""
    return engine.horovod_compressor(compression, hvd.Compression.none, hvd.Compression.none)
