"""Horovod's collectives, for types and shapes too that they do not know; functions with the names of Horovod's.

bfloat16 travels as float32, a complex number as two real ones, and where nothing is added up, unsigned integers of 32
and 64 bits as signed ones of the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.errors import UnsupportedError
from hvd_compress.tensorflow._seams import BROADCAST, raw

__all__ = [
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_variables",
    "carried_dtype",
    "dense_allreduce",
    "dense_grouped_allreduce",
    "grouped_allgather",
    "grouped_reducescatter",
    "reducescatter",
]

Back = Callable[[tf.Tensor], tf.Tensor]

_SIGNED = {tf.uint32: tf.int32, tf.uint64: tf.int64}
_MOVED = (tf.bool, tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_IN_PLACE = tuple(dtype for dtype in _MOVED if dtype not in (tf.uint16, tf.int16))
_SCATTERED = (tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_SUMMED = (tf.uint8, tf.int8, *_SCATTERED)


# -- ways there and back -----------------------------------------------------------------------------------------------


def carried_dtype(dtype: tf.DType) -> tf.DType:
    """The type in which values of `dtype` travel."""
    return {tf.bfloat16: tf.float32, tf.complex64: tf.float32, tf.complex128: tf.float64, **_SIGNED}.get(dtype, dtype)


def _as_real(tensor: tf.Tensor) -> tuple[tf.Tensor, Back]:
    dtype = tensor.dtype
    if dtype == tf.bfloat16:
        return tf.cast(tensor, tf.float32), lambda t: tf.cast(t, dtype)
    if dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1), lambda t: tf.complex(t[..., 0], t[..., 1])
    return tensor, lambda t: t


def _moved(value: Any, what: str) -> tuple[tf.Tensor, Back]:
    tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if dtype in _SIGNED:
        return tf.bitcast(tensor, _SIGNED[dtype]), lambda t: tf.bitcast(t, dtype)
    if carried_dtype(dtype) not in _MOVED:
        raise UnsupportedError(
            f"{what} of a tensor of {dtype.name}: Horovod moves numbers and bool. Use broadcast_object or "
            "allgather_object for other values"
        )
    return _as_real(tensor)


def _rows(value: Any, what: str) -> tuple[tf.Tensor, Back]:
    """Of what goes along the first axis: a single number is a row of one."""
    tensor, back = _moved(value, what)
    is_single = tf.convert_to_tensor(value).shape.rank == 0
    return (tensor[tf.newaxis] if is_single else tensor), back


def _summed(value: Any, op: Any, what: str, allowed: Sequence[tf.DType] = _SUMMED) -> tuple[tf.Tensor, Back]:
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype.is_complex and op not in (None, hvd.Average, hvd.Sum):
        raise UnsupportedError(
            f"{what} of {tensor.dtype.name} with op={op}: complex numbers travel as two real ones, which can be added "
            "only. Use op=Average or op=Sum"
        )
    if tensor.dtype in _SIGNED or carried_dtype(tensor.dtype) not in allowed:
        known = ", ".join(dtype.name for dtype in allowed)
        raise UnsupportedError(
            f"{what} of {tensor.dtype.name}: it adds up {known}, bfloat16 and complex numbers. Use tf.cast to one of "
            "these before it, such as tf.int32"
        )
    return _as_real(tensor)


def _sparse_or_summed(value: Any, op: Any, what: str) -> tuple[Any, Callable[[Any], Any]]:
    if not isinstance(value, tf.IndexedSlices):
        return _summed(value, op, what)
    # values are gathered, not summed
    values, back = _moved(value.values, what)

    def whole(result: tf.IndexedSlices) -> tf.IndexedSlices:
        return tf.IndexedSlices(back(result.values), result.indices, value.dense_shape)

    return tf.IndexedSlices(values, value.indices, value.dense_shape), whole


# -- those that add up -------------------------------------------------------------------------------------------------


def dense_allreduce(tensor: Any, average: Any = None, *arguments: Any, op: Any = None, **settings: Any) -> Any:
    """`horovod.tensorflow.allreduce`; `op` by name."""
    sent, back = _sparse_or_summed(tensor, op, "allreduce")
    return back(hvd.allreduce(sent, average, *arguments, op=op, **settings))


def dense_grouped_allreduce(tensors: Sequence[Any], average: Any = None, op: Any = None, **settings: Any) -> list[Any]:
    """`horovod.tensorflow.grouped_allreduce`."""
    ways = [_sparse_or_summed(t, op, "grouped_allreduce") for t in tensors]
    results = hvd.grouped_allreduce([sent for sent, _ in ways], average, op=op, **settings)
    return [back(result) for result, (_, back) in zip(results, ways, strict=True)]


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = hvd.Average,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """`horovod.tensorflow.reducescatter`, for bfloat16 and complex numbers too.

    Raises:
        UnsupportedError: a type that has no sum here.
        ValueError: a single number, which cannot be scattered.
    """
    sent, back = _summed(tensor, op, "reducescatter", _SCATTERED)
    _require_rows(tensor, "reducescatter")
    return back(
        hvd.reducescatter(
            sent, device_dense, compression, op, name, process_set, ignore_name_scope, prescale_factor, postscale_factor
        )
    )


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = hvd.Average,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """`reducescatter` of several tensors of one type at once."""
    ways = [_summed(t, op, "grouped_reducescatter", _SCATTERED) for t in tensors]
    for tensor in tensors:
        _require_rows(tensor, "grouped_reducescatter")
    results = hvd.grouped_reducescatter(
        [sent for sent, _ in ways], device_dense, compression, op, process_set, prescale_factor, postscale_factor
    )
    return [back(result) for result, (_, back) in zip(results, ways, strict=True)]


# -- those that move ---------------------------------------------------------------------------------------------------


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> tf.Tensor:
    """`horovod.tensorflow.allgather`, for all numbers; of single numbers it makes a vector.

    Raises:
        UnsupportedError: a type without numbers, such as string.
    """
    sent, back = _rows(tensor, "allgather")
    return back(hvd.allgather(sent, name, ignore_name_scope, process_set))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> list[tf.Tensor]:
    """`allgather` of several tensors at once."""
    ways = [_rows(t, "grouped_allgather") for t in tensors]
    results = hvd.grouped_allgather([sent for sent, _ in ways], name, ignore_name_scope, process_set)
    return [back(result) for result, (_, back) in zip(results, ways, strict=True)]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """`horovod.tensorflow.alltoall`, for all numbers.

    Raises:
        UnsupportedError: a type without numbers, such as string.
        ValueError: a single number, which cannot be divided.
    """
    sent, back = _moved(tensor, "alltoall")
    _require_rows(tensor, "alltoall")
    received = hvd.alltoall(sent, splits, name, ignore_name_scope, process_set)
    return back(received) if splits is None else (back(received[0]), received[1])


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> tf.Tensor:
    """`horovod.tensorflow.broadcast`, for all numbers.

    Raises:
        UnsupportedError: a type without numbers, such as string.
    """
    sent, back = _moved(tensor, "broadcast")
    return back(hvd.broadcast(sent, root_rank, name, ignore_name_scope, process_set))


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """`horovod.tensorflow.broadcast_`, for variables of all numbers; in place for those that Horovod knows."""
    inner = [raw(v) for v in variables]
    if all(v.dtype.base_dtype in _IN_PLACE for v in inner):
        return hvd.broadcast_(inner, root_rank, name, process_set)
    return broadcast_variables(inner, root_rank, process_set) or [v.read_value() for v in inner]


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    inplace: bool = False,
) -> Any:
    """Make variables, of TensorFlow or of Keras 3, those of one rank; a collective call.

    Args:
        variables: of all numbers; the same on all ranks, in the same order.
        root_rank: whose values all take.
        process_set: the ranks that take part.
        inplace: without memory for a copy, where Horovod knows the type.

    Raises:
        UnsupportedError: a type without numbers, such as string.
    """
    inner = [raw(v) for v in variables]
    if inplace and all(v.dtype.base_dtype in _IN_PLACE for v in inner):
        return hvd.broadcast_variables(inner, root_rank, process_set, inplace)
    if not tf.executing_eagerly():
        # a graph of TensorFlow 1 wants an op
        return tf.group(*[v.assign(broadcast(v, root_rank, process_set=process_set)) for v in inner])

    # named by position: paths hold counters of models and optimizers, which may differ from rank to rank
    @tf.function(autograph=False)
    def received() -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            return [
                broadcast(v, root_rank, f"{BROADCAST}.variable.{i}", True, process_set) for i, v in enumerate(inner)
            ]

    for variable, value in zip(inner, received(), strict=True):
        variable.assign(value)
    return None


def _require_rows(value: Any, what: str) -> None:
    if tf.convert_to_tensor(value).shape.rank == 0:
        raise ValueError(f"{what} of a single number: it divides tensors along their first axis. Give one that has it")
