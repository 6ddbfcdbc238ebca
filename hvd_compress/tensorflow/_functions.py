"""`allreduce` and `grouped_allreduce` of single tensors, with compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.compressors import Compressor
from hvd_compress.engine import compressor_of_call, description, names_of_call, op_of_call
from hvd_compress.errors import UnsupportedError
from hvd_compress.tensorflow._carried import dense_allreduce, dense_grouped_allreduce
from hvd_compress.tensorflow._exchange import GradientExchange, Settings, Source, allowed_name
from hvd_compress.tensorflow._ranks import TensorFlowRanks
from hvd_compress.tensorflow.compression import horovod_compressor

__all__ = ["allreduce", "forget_residuals", "grouped_allreduce"]

# named tensors keep their residual from call to call, as an optimizer's do
_exchanges: dict[tuple[Any, ...], GradientExchange] = {}


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Average or sum a tensor over all ranks, as `horovod.tensorflow.allreduce` does, compressed if so asked.

    With error feedback and a name, what a call leaves out is added to the next call of that name, shape and compressor;
    without a name it is lost. Tensors that compression would not make smaller travel as they are.

    Args:
        tensor: float16, bfloat16, float32 or float64 for a compressor of hvd_compress; without one, all that Horovod
            takes, bfloat16 and complex numbers. `tf.IndexedSlices` travel as Horovod sends them.
        average: old form of `op`.
        device_dense: of Horovod's allreduce.
        device_sparse: of Horovod's allgathers.
        compression: a compressor of hvd_compress, one of `Compression`, or one written for Horovod.
        op: Average (default) or Sum with a compressor of hvd_compress; any of Horovod's without.
        prescale_factor: factor on each rank's tensor.
        postscale_factor: factor on the result.
        name: the same on all ranks.
        process_set: the ranks that take part.
        ignore_name_scope: of Horovod's allreduce; collectives of an exchange never use the scope.

    Raises:
        UnsupportedError: another `op`, or a gradient through the result, with a compressor of hvd_compress; a type that
            has no sum; an elastic run.
        MismatchError: the ranks disagree on op, type, shape, factors or compressor; on the first use of a name, raised
            on all of them. A rank that does not compress at all there gets Horovod's error of mismatched operations.
        TypeError: `compression` is no compressor, or the tensor's type cannot be compressed.
    """
    compressor = compressor_of_call(compression)
    if compressor is None or isinstance(tensor, tf.IndexedSlices) or process_set.size() == 1:
        return dense_allreduce(
            tensor, average, device_dense, device_sparse, horovod_compressor(compression), op=op,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor, name=name, process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )  # fmt: skip
    factor = prescale_factor * postscale_factor
    return _exchange([tensor], average, compressor, op, factor, name, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of several tensors at once; their exchanges are in flight together."""
    compressor = compressor_of_call(compression)
    if compressor is None or process_set.size() == 1 or not tensors:
        return dense_grouped_allreduce(
            tensors, average, op, device_dense=device_dense, device_sparse=device_sparse,
            compression=horovod_compressor(compression), prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, process_set=process_set, ignore_name_scope=ignore_name_scope, name=name,
        )  # fmt: skip
    factor = prescale_factor * postscale_factor
    return _exchange(tensors, average, compressor, op, factor, name, process_set)


def forget_residuals() -> None:
    """Drop the residuals that named calls of `allreduce` have kept; all ranks must do so at the same point.

    Functions that are traced already keep theirs.
    """
    _exchanges.clear()


@tf.autograph.experimental.do_not_convert
def _exchange(
    tensors: Sequence[Any],
    average: bool | None,
    compression: Compressor,
    op: Any,
    factor: float,
    name: str | None,
    process_set: hvd.ProcessSet,
) -> list[Any]:
    op = op_of_call(average, op, hvd.Average, hvd.Sum)
    given = [t if isinstance(t, tf.IndexedSlices) else tf.convert_to_tensor(t) for t in tensors]
    sources = [
        Source(n, tuple(t.shape.as_list()) if t.shape.is_fully_defined() else None, t.dtype)
        for t, n in zip(given, names_of_call(name, len(given)), strict=True)
    ]
    settings = Settings(_for_one_call(compression) if name is None else compression, op,
                        process_set=process_set, min_numel=0)  # fmt: skip
    key = (process_set.process_set_id, process_set.size(), op, compression, *sources)
    exchange = _exchanges.get(key)
    if exchange is None:
        _require_agreement(compression, op, factor, sources, process_set, _horovods_name(name, given))
        exchange = GradientExchange(settings, sources, compared=False)
        if name is not None:
            _exchanges[key] = exchange

    @tf.custom_gradient
    def combine(*values: Any) -> Any:
        def refuse(*_: Any) -> Any:
            raise UnsupportedError(
                f"a gradient through allreduce of {name!r} with {compression!r}: compression does not pass it on. "
                "Use tf.stop_gradient on the tensor, or compression=hvd.Compression.none"
            )

        return exchange.reduce(values), refuse

    combined = combine(*given)
    combined = list(combined) if isinstance(combined, list | tuple) else [combined]
    return combined if factor == 1.0 else [t * tf.cast(factor, t.dtype) for t in combined]


def _require_agreement(
    compression: Compressor,
    op: Any,
    factor: float,
    sources: Sequence[Source],
    process_set: hvd.ProcessSet,
    name: str,
) -> None:
    """Compare on the first use of a name what would make ranks wait for each other, or get different results."""
    told = description(
        compression, op, [[s.name, s.shape, s.dtype.name] for s in sources],
        **{"prescale_factor * postscale_factor": factor},
    )  # fmt: skip
    TensorFlowRanks(process_set).agree(told, name)


def _horovods_name(name: str | None, tensors: Sequence[tf.Tensor]) -> str:
    """What Horovod calls this operation on a rank that does not compress; of a group, its first tensor."""
    several = len(tensors) > 1
    if tf.executing_eagerly():
        own = "HorovodGroupedAllreduce" if several else "HorovodAllreduce"
    elif several:
        own = name or f"HorovodGroupedAllreduce_{tensors[0].name}_{tensors[-1].name}"
    else:
        own = name or f"HorovodAllreduce_{tensors[0].name}"
    scope = "" if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()
    return f"{scope}/{allowed_name(own)}".strip("/") + (f"_1of{len(tensors)}" if several else "")


def _for_one_call(compressor: Compressor) -> Compressor:
    """Without error feedback: a node of a graph runs many times, and calls without a name owe each other nothing."""
    if any(field.name == "error_feedback" for field in fields(compressor)):  # type: ignore[arg-type]
        return replace(compressor, error_feedback=False)  # type: ignore[type-var]
    return compressor
