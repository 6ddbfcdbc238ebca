"""Say what to keep of a gradient and what it stands for: one algorithm per file, NumPy in, NumPy out."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors.adaptive import Adaptive
from hvd_compress.compressors.base import NOT_FINITE, Array, Body, Compressor, add_gradient, as_bytes
from hvd_compress.compressors.blockwise import Blockwise
from hvd_compress.compressors.chunked import ChunkedTopK
from hvd_compress.compressors.dense import BF16, FP16, NoCompression
from hvd_compress.compressors.efsignsgd import EFSignSGD
from hvd_compress.compressors.key import Key
from hvd_compress.compressors.names import named
from hvd_compress.compressors.natural import Natural
from hvd_compress.compressors.onebit import OneBit
from hvd_compress.compressors.percentile import Percentile
from hvd_compress.compressors.powersgd import PowerSGD
from hvd_compress.compressors.qsgd import QSGD
from hvd_compress.compressors.randomk import RandomK
from hvd_compress.compressors.registry import (
    COMPRESSORS,
    check_registered,
    class_of,
    class_of_codec,
    known_ids,
    register,
)
from hvd_compress.compressors.signsgd import SignSGD
from hvd_compress.compressors.terngrad import TernGrad
from hvd_compress.compressors.threshold import Threshold
from hvd_compress.compressors.topk import TopK
from hvd_compress.errors import WireError

__all__ = [
    "BF16",
    "COMPRESSORS",
    "FP16",
    "NOT_FINITE",
    "QSGD",
    "Adaptive",
    "Blockwise",
    "Body",
    "ChunkedTopK",
    "Compressor",
    "EFSignSGD",
    "Key",
    "Natural",
    "NoCompression",
    "OneBit",
    "Percentile",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "add_gradient",
    "check_registered",
    "decode",
    "from_config",
    "named",
    "register",
]


def from_config(config: dict[str, Any]) -> Compressor:
    """Create a compressor from a configuration that `get_config` returned.

    Raises:
        ValueError: unknown id, unknown setting, or a setting out of its range.

    Example:
        >>> from hvd_compress import Adaptive, from_config
        >>> from_config({"id": "adaptive", "pi": 32}) == Adaptive(pi=32)
        True
    """
    if not isinstance(config, dict):
        raise ValueError(f"configuration {config!r}: must be a dict, as get_config() returns")
    settings = dict(config)
    name = settings.pop("id", None)
    kind = class_of(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"unknown compressor id {name!r}; known are {', '.join(sorted(known_ids()))}. One of your own must be "
            "registered first: import its module"
        )
    try:
        return kind(**settings)
    except TypeError as error:
        raise ValueError(f"configuration {config!r}: {error}") from None


def decode(payload: npt.ArrayLike, max_numel: int | None = None) -> Array:
    """Decode a payload of any compressor: its header says which.

    A payload of a few bytes can stand for many elements, so its size does not bound the memory that decoding takes.
    Where payloads come from people you do not trust, give `max_numel`.

    Args:
        payload: uint8 or bytes, as `encode` returns it.
        max_numel: refuse a payload that claims more elements than this. By default 2^28 (1 GiB of float32), or 16384
            for each byte of the payload if that is more.

    Raises:
        WireError: truncated, corrupted or foreign payload; a payload that claims more elements than allowed; or one
            whose values are not finite although it says that they are.
        ValueError: `max_numel` is no integer of at least 0.

    Example:
        >>> import numpy as np, hvd_compress
        >>> hvd_compress.decode(hvd_compress.TopK(k=1).encode(np.array([[1.0, -2.0]], np.float32)))
        array([[ 0., -2.]], dtype=float32)
        >>> hvd_compress.decode(hvd_compress.OneBit().encode(np.ones(1000, np.float32)), max_numel=999)
        Traceback (most recent call last):
        hvd_compress.errors.WireError: payload of 176 bytes claims 1000 elements, and 999 are allowed. If it is right, \
give max_numel=1000
    """
    buffer = as_bytes(payload)
    header, _ = wire.open_payload(buffer)
    try:
        kind = class_of_codec(header.codec)
    except ValueError as error:
        raise WireError(f"payload of unknown codec {header.codec}; {error}") from error
    if kind is None:
        raise WireError(
            f"payload of unknown codec {header.codec}; known are the compressors {', '.join(sorted(known_ids()))}. One "
            "of your own must be registered first: import its module"
        )
    return kind.decoder().decode(buffer, max_numel)
