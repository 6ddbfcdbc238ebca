"""Find out what `compression=` means and check the settings beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from numbers import Integral, Real
from typing import Any

from hvd_compress.compressors import (
    BF16,
    QSGD,
    Adaptive,
    Blockwise,
    ChunkedTopK,
    Compressor,
    EFSignSGD,
    Natural,
    NoCompression,
    OneBit,
    Percentile,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from hvd_compress.elastic import refuse_elastic
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import (
    AdaGrad,
    Exchange,
    checked,
    checked_exchange,
    exchange_with,
    is_uncompressed,
    suited,
    unchecked,
)
from hvd_compress.policy import Auto, Policy, compressors_in, horovods_own, meant, refuse_class

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_MIN_NUMEL",
    "Defaults",
    "average_share",
    "check_settings",
    "compressor_of_call",
    "describe",
    "description",
    "exchange_of",
    "exchanged",
    "horovod_compressor",
    "names_of_call",
    "op_of_call",
    "refuse_other_ops",
    "resolved",
]

# 64 KiB of float32: on the links that this package is for, a smaller tensor costs Horovod's fused allreduce less than
# the two collectives of an exchange, about a millisecond each
DEFAULT_MIN_NUMEL = 16384

# enough tensors in one exchange that its collectives' fixed costs do not count, few enough that several buckets of a
# large network are under way while backward goes on
DEFAULT_BUCKET_BYTES = 32 * 2**20

_unnamed = count()


class Defaults:
    """Offers our compressors with their default settings, beside those of a `horovod.<framework>.Compression`.

    Called, each gives another one with the given settings: `Compression.adaptive(pi=32)`. `threshold` has no default
    and must be called with its `tau`: `Compression.threshold(1e-3)`.
    """

    onebit = OneBit()
    threshold = Threshold
    adaptive = Adaptive()
    qsgd = QSGD()
    topk = TopK()
    powersgd = PowerSGD()
    randomk = RandomK()
    chunkedtopk = ChunkedTopK()
    percentile = Percentile()
    efsignsgd = EFSignSGD()
    blockwise = Blockwise()
    terngrad = TernGrad()
    natural = Natural()
    signsgd = SignSGD()
    bf16 = BF16()
    auto = Auto()


def resolved(compression: Any, exchange: str | Exchange = "auto") -> Any:
    """Return what the user gave, with a name replaced by what it stands for; see `meant`.

    With a parameter server, what Horovod could send itself becomes a compressor of ours, since no allreduce sums it.

    Raises:
        TypeError: a Horovod compressor of the user's with a parameter server.
        ValueError: a name of no compressor.
    """
    compression = meant(compression)
    if not checked_exchange(exchange).takes_all:
        return compression
    ours = horovods_own(compression)
    if isinstance(ours, Compressor):
        return checked(ours)
    if not isinstance(ours, Policy | Auto):
        raise TypeError(
            f"compression={compression!r} with {exchange!r}: give a compressor of hvd_compress, or one of "
            "hvd.Compression"
        )
    return ours


def exchanged(compression: Any) -> Compressor | Policy | Auto | None:
    """Return what chooses the payloads of our exchanges; None if Horovod's allreduce does it all."""
    compression = meant(compression)
    if isinstance(compression, Policy | Auto):
        return compression
    return compression if isinstance(compression, Compressor) and not compression.reducible else None


def compressor_of_call(compression: Any, carries: bool = False) -> Compressor | None:
    """Return what `exchanged` does, for a call that reduces single tensors.

    Args:
        compression: what the user gave.
        carries: see `check_settings`.

    Raises:
        UnsupportedError: a `Policy` or `Auto`, which choose for the tensors of an optimizer; an elastic run, unless the
            edge carries residuals over.
    """
    chosen = exchanged(resolved(compression))
    if isinstance(chosen, Policy | Auto):
        raise UnsupportedError(
            f"allreduce with {chosen!r}: it chooses for the tensors of an optimizer; give the compressor of this one"
        )
    if chosen is not None and not carries:
        refuse_elastic(chosen)
    return chosen


def horovod_compressor(compression: Any, none: Any, dense_route: Any) -> Any:
    """Return the object whose `compress` and `decompress` Horovod's own allreduce is to use.

    Args:
        compression: what the user gave.
        none: Horovod's compressor that does nothing.
        dense_route: the one for tensors that go uncompressed beside compressed ones.

    Raises:
        TypeError: neither one of our compressors nor a Horovod compressor.
    """
    refuse_class("compression", compression)
    compression = meant(compression)
    if isinstance(compression, Compressor):
        compression = unchecked(compression)
    if isinstance(compression, NoCompression):
        return none
    if isinstance(compression, Policy | Auto):
        return dense_route
    if isinstance(compression, Compressor):
        return compression if compression.reducible else dense_route
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            f"compression={compression!r}: give a compressor of hvd_compress or its name, such as 'onebit', one of "
            "hvd.Compression, or an object with Horovod's compress(tensor) and decompress(tensor, ctx)"
        )
    return compression


def describe(compression: Any) -> Any:
    """Describe a compressor for the fingerprint that ranks compare."""
    compression = meant(compression)
    if isinstance(compression, Compressor | Policy | Auto):
        return compression.get_config()
    kind = compression if isinstance(compression, type) else type(compression)
    return f"{kind.__module__}.{kind.__qualname__}"


def description(compression: Any, op: Any, parameters: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """Describe an optimizer, a tape or an exchange for the fingerprint that ranks compare."""
    return {
        "compression": describe(compression),
        "op": str(op),
        **{
            name: setting.get_config() if hasattr(setting, "get_config") else setting
            for name, setting in settings.items()
        },
        "parameters": list(parameters),
    }


def average_share(compressor: Compressor | Policy | Auto, op: Any, average: Any, total: Any, ranks: int) -> float:
    """Return the factor on the sum over ranks for `op`; `average` and `total` are Horovod's Average and Sum.

    Raises:
        UnsupportedError: another `op`.
    """
    if op not in (average, total):
        raise UnsupportedError(f"op={op} with {compressor!r}: payloads are summed; use op=Average or op=Sum")
    return 1.0 / ranks if op == average else 1.0


def exchange_of(adagrad: AdaGrad | None, exchange: str | Exchange, compression: Any, carries: bool = False) -> Exchange:
    """Return the exchange to use where gradients may be AdaGrad's updates; see `exchange_with`.

    Args:
        adagrad: what the user gave.
        exchange: likewise.
        compression: likewise.
        carries: see `check_settings`.

    Raises:
        TypeError: `adagrad` is something else.
        UnsupportedError: an exchange without owners, `Auto`, or an elastic run, unless the edge carries accumulators
            over.
    """
    if adagrad is not None and isinstance(compression, Auto):
        raise UnsupportedError(
            f"{adagrad!r} with {compression!r}: accumulators lie with the owners of elements, which change with its "
            "choices. Give a compressor or a Policy"
        )
    if adagrad is not None and not carries:
        refuse_elastic(adagrad)
    return exchange_with(adagrad, checked_exchange(exchange), _given(compression))


def refuse_other_ops(op: Any, average: Any, total: Any) -> None:
    """Raise UnsupportedError unless gradients can be combined by `op`; see `average_share` for the others."""
    if op not in (average, total):
        name = _OPS[op] if op in range(len(_OPS)) else op
        raise UnsupportedError(f"op={name}: gradients are combined by op=Average or op=Sum")


_OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
"""Horovod's operations, by their numbers."""


def op_of_call(average: bool | None, op: Any, average_op: Any, total: Any) -> Any:
    """Return the `op` of a call of allreduce, which may have been given in its old form, `average`.

    Raises:
        ValueError: both are given.
    """
    if average is not None and op is not None:
        raise ValueError("give op or average, not both")
    if op is not None:
        return op
    return total if average is False else average_op


def names_of_call(name: str | None, number: int) -> list[str]:
    """Name `number` tensors of one call of allreduce, equally on all ranks."""
    if name is None:
        return [f"allreduce.noname.{next(_unnamed)}" for _ in range(number)]
    return [name] if number == 1 else [f"{name}.{i}" for i in range(number)]


def check_settings(
    compression: Any,
    exchange: str | Exchange,
    min_numel: int,
    bucket_bytes: int,
    averages: bool,
    gradient_predivide_factor: float,
    backward_passes_per_step: int,
    groups: Any,
    rocm: bool,
    carries: bool = False,
) -> None:
    """Check the settings that all optimizer wrappers and tapes have in common.

    An edge `carries` what ranks keep between steps, if its state of elastic runs hands it over to other ranks.

    Raises:
        ValueError: a setting out of its range.
        UnsupportedError: an elastic run with one of our compressors, unless the edge carries residuals over; `Auto`
            with a parameter server.
    """
    if checked_exchange(exchange).takes_all and isinstance(compression, Auto):
        raise UnsupportedError(
            f"{compression!r} with exchange={exchange!r}: it chooses exchanges, too, by what they are predicted to "
            "take. Give a compressor or a Policy, or leave the exchange to it"
        )
    suited(checked_exchange(exchange), _given(compression))
    for compressor in _given(compression):
        checked_exchange(exchange).check_votes(compressor)
    if type(min_numel) is not int or min_numel < 0:
        raise ValueError(f"min_numel={min_numel!r}: must be a number of elements, 0 or more")
    if type(bucket_bytes) is not int or bucket_bytes < 0:
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: must be a number of bytes, 0 or more")
    factor: Any = gradient_predivide_factor
    if type(factor) is bool or not isinstance(factor, Real) or not 0 < float(factor) < math.inf:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r}: must be a positive finite number")
    if gradient_predivide_factor != 1.0 and not averages:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r} goes with op=Average only")
    if gradient_predivide_factor != 1.0 and rocm:
        raise ValueError("gradient_predivide_factor is not supported by Horovod with ROCm")
    if not _is_positive(backward_passes_per_step):
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step!r}: must be a whole number, 1 or more")
    if groups is not None and not isinstance(groups, list) and not _is_positive(groups):
        raise ValueError(f"groups={groups!r}: must be a positive number or a list of lists of parameters")
    ours = exchanged(compression)
    if ours is not None and not carries:
        refuse_elastic(exchange if isinstance(ours, Compressor) and is_uncompressed(ours) else ours)


def _given(compression: Any) -> list[Compressor]:
    """Return the compressors that a user gave, or none."""
    chosen = exchanged(compression)
    return [] if chosen is None or isinstance(chosen, Auto) else compressors_in(chosen)


def _is_positive(number: Any) -> bool:
    return type(number) is not bool and isinstance(number, Integral) and int(number) > 0
