"""`allreduce` and `grouped_allreduce` of single tensors, with compression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.compressors import Compressor
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import compressor_of_call, description, names_of_call, op_of_call, refuse_what_stays
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import FewestBytes
from hvd_compress.fingerprint import Place, scope_of
from hvd_compress.tensorflow._agreement import is_mismatch
from hvd_compress.tensorflow._carried import dense_allreduce, dense_grouped_allreduce
from hvd_compress.tensorflow._carried_exchange import CarriedGraphExchange
from hvd_compress.tensorflow._exchange import GradientExchange
from hvd_compress.tensorflow._meeting import Meeting
from hvd_compress.tensorflow._settings import Settings, Source, allowed_name
from hvd_compress.tensorflow.compression import horovod_compressor

__all__ = ["allreduce", "forget_residuals", "grouped_allreduce"]

# named tensors keep their residual from call to call, as an optimizer's do
_exchanges: dict[tuple[Any, ...], GradientExchange] = {}
_carried: dict[tuple[Any, ...], CarriedGraphExchange] = {}
"""Those of elastic runs, which know no number of ranks."""


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
            takes, and bfloat16 and complex numbers. `tf.IndexedSlices` travel as Horovod sends them.
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
            has no sum; in an elastic run with a compressor, no name, a process set, or ranks that have not met in the
            `sync` of their state.
        MismatchError: the ranks disagree on op, type, shape, factors or compressor; on the first use of a name, raised
            on all of them. In a `tf.function` a rank that does not compress there gets Horovod's error of mismatched
            operations.
        TypeError: `compression` is no compressor, or the tensor's type cannot be compressed.
    """
    compressor, horovods = compressor_of_call(compression, carries=True), horovod_compressor(compression)
    factors = prescale_factor, postscale_factor
    call = _call("allreduce", [tensor], name, compressor or horovods, average, op, factors, process_set)
    if compressor is not None and not isinstance(tensor, tf.IndexedSlices) and _is_exchanged(process_set):
        return _exchanged([tensor], call)[0]
    with _uncompressed([tensor], call):
        return dense_allreduce(
            tensor, average, device_dense, device_sparse, horovods, op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, name=name, process_set=process_set, ignore_name_scope=ignore_name_scope,
        )  # fmt: skip


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
    """`allreduce` of several tensors at once; their exchanges are in flight together.

    Beside compressed ones, each `tf.IndexedSlices` travels in a call of its own.
    """
    compressor, horovods = compressor_of_call(compression, carries=True), horovod_compressor(compression)
    factors = prescale_factor, postscale_factor
    if not tensors:
        return []
    sparse = {i: t for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)}
    if compressor is not None and sparse:
        same = {"average": average, "device_dense": device_dense, "device_sparse": device_sparse,
                "compression": compression, "op": op, "process_set": process_set,
                "ignore_name_scope": ignore_name_scope}  # fmt: skip
        dense = [t for i, t in enumerate(tensors) if i not in sparse]
        rest = iter(grouped_allreduce(dense, name=name, prescale_factor=prescale_factor,
                                      postscale_factor=postscale_factor, **same))  # fmt: skip
        # Horovod takes no factors for sparse ones
        return [
            _scaled(allreduce(t, name=name and f"{name}.sparse.{i}", **same), prescale_factor * postscale_factor)
            if i in sparse
            else next(rest)
            for i, t in enumerate(tensors)
        ]
    call = _call("grouped_allreduce", tensors, name, compressor or horovods, average, op, factors, process_set)
    if compressor is not None and _is_exchanged(process_set):
        return _exchanged(tensors, call)
    with _uncompressed(tensors, call):
        return dense_grouped_allreduce(
            tensors, average, op, device_dense=device_dense, device_sparse=device_sparse, compression=horovods,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set,
            ignore_name_scope=ignore_name_scope, name=name,
        )  # fmt: skip


def forget_residuals() -> None:
    """Drop the residuals that named calls of `allreduce` have kept; all ranks must do so at the same point.

    Each `tf.function` that is traced already keeps its residuals.
    """
    _exchanges.clear()
    _carried.clear()
    _agreed.clear()


class _Call(NamedTuple):
    """What a call was given beside its tensors.

    `compressor` is one of ours, or Horovod's where a call follows a compressed one of its name. `alone` and `grouped`
    are the operations of a rank that does not compress.
    """

    function: str
    name: str | None
    compressor: Any
    op: Any
    factors: tuple[float, float]
    process_set: hvd.ProcessSet
    alone: Place
    grouped: Place | None

    @property
    def label(self) -> str:
        """For errors."""
        return f"{self.function} of {self.name or self.alone.name!r}"

    @property
    def places(self) -> list[Place]:
        """Where all ranks compare that do so, whatever they call, and where a call without compression would be."""
        return [self.alone, *([] if self.grouped is None else [self.grouped])]

    @property
    def scope(self) -> tuple[Any, ...]:
        """Whose calls are compared with each other."""
        return self.name, scope_of(self.process_set), self.process_set.size()

    def told(self, sources: Sequence[Source]) -> dict[str, Any]:
        """What ranks compare."""
        return {
            **description(self.compressor, self.op, [[i, s.shape, s.dtype.name] for i, s in enumerate(sources)]),
            "function": self.function, "prescale_factor": self.factors[0], "postscale_factor": self.factors[1],
        }  # fmt: skip


class _Agreed(NamedTuple):
    """The last call of a name, on which all ranks have agreed, and how its exchange begins."""

    key: tuple[Any, ...]
    first: list[Place]


_agreed: dict[tuple[Any, ...], _Agreed] = {}


@tf.autograph.experimental.do_not_convert
def _call(
    function: str,
    tensors: Sequence[Any],
    name: str | None,
    compressor: Any,
    average: bool | None,
    op: Any,
    factors: tuple[float, float],
    process_set: hvd.ProcessSet,
) -> _Call:
    if isinstance(compressor, Compressor):
        op = op_of_call(average, op, hvd.Average, hvd.Sum)
    elif op is None:
        op = hvd.Sum if average is False else hvd.Average
    grouped = None
    if function == "grouped_allreduce":
        ends = [tensors[0], tensors[-1]]
        grouped = Place(function, _horovods_name("HorovodGroupedAllreduce", name, ends), len(tensors))
    alone = Place("allreduce", _horovods_name("HorovodAllreduce", name, tensors[:1]))
    return _Call(function, name, compressor, op, factors, process_set, alone, grouped)


@tf.autograph.experimental.do_not_convert
def _exchanged(tensors: Sequence[Any], call: _Call) -> list[Any]:
    given = [t if isinstance(t, tf.IndexedSlices) else tf.convert_to_tensor(t) for t in tensors]
    sources = _sources(given, call)
    exchange = _carried_exchange(sources, call) if is_elastic() else _agreed_exchange(sources, call)

    @tf.custom_gradient
    def combine(*values: Any) -> Any:
        def refuse(*_: Any) -> Any:
            raise UnsupportedError(
                f"a gradient through allreduce of {call.name!r} with {call.compressor!r}: compression does not pass it "
                "on. Use tf.stop_gradient on the tensor, or compression=hvd.Compression.none"
            )

        return exchange.reduce(values), refuse

    try:
        combined = combine(*given)
    except tf.errors.OpError as error:
        if isinstance(exchange, CarriedGraphExchange) or not is_mismatch(error):
            raise
        # another rank compares this call, which differs from its last one: be told the same as that rank
        Meeting(call.process_set, _base(call), exchange.places()).leave(call.label, call.told(sources), error)
        raise
    combined = list(combined) if isinstance(combined, list | tuple) else [combined]
    factor = call.factors[0] * call.factors[1]
    return combined if factor == 1.0 else [t * tf.cast(factor, t.dtype) for t in combined]


def _scaled(slices: tf.IndexedSlices, factor: float) -> tf.IndexedSlices:
    if factor == 1.0:
        return slices
    values = slices.values * tf.cast(factor, slices.values.dtype)
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def _is_exchanged(process_set: hvd.ProcessSet) -> bool:
    """Whether a compressed call has an exchange: one rank has nothing to exchange, but may still owe something."""
    return is_elastic() or bool(process_set.size() > 1)


def _carried_exchange(sources: Sequence[Source], call: _Call) -> CarriedGraphExchange:
    """The exchange of a call in an elastic run."""
    if call.name is None:
        raise UnsupportedError(
            f"{call.function} with {call.compressor!r} and without a name in an elastic run: names are counted where "
            "there are none, and ranks that join have counted other calls. Give a name, the same on all ranks"
        )
    refuse_what_stays(f"{call.label} with {call.compressor!r}", FewestBytes(), call.process_set)
    key = (call.name, call.function, call.op, call.factors, call.compressor, *sources)
    if key not in _carried:
        settings = Settings(call.compressor, call.op, min_numel=0)
        _carried[key] = CarriedGraphExchange(
            settings, sources, call=call.name, function=call.function, factors=call.factors
        )
    return _carried[key]


def _agreed_exchange(sources: Sequence[Source], call: _Call) -> GradientExchange:
    """The exchange of a call, on which all ranks have agreed; a collective call for a new one."""
    compressor, process_set, name = call.compressor, call.process_set, call.name
    key = (scope_of(process_set), process_set.size(), call.op, compressor, *sources)
    _agree(sources, call, (*key, call.function, call.factors))
    exchange = known = _exchanges.get(key)
    if exchange is None or exchange.settings.process_set is not process_set:
        settings = Settings(_for_one_call(compressor) if name is None else compressor, call.op,
                            process_set=process_set, min_numel=0)  # fmt: skip
        exchange = GradientExchange(settings, sources, compared=False)
        if known is not None:
            # the same ranks, whose process set was removed and added again
            exchange.inherit(known)
        if name is not None:
            _exchanges[key] = exchange
    if call.scope in _agreed:
        _agreed[call.scope] = _agreed[call.scope]._replace(first=exchange.places())
    return exchange


def _agree(sources: Sequence[Source], call: _Call, key: tuple[Any, ...]) -> None:
    """Compare on the first use of a name, and where a call differs from the last one of its name."""
    last = _agreed.get(call.scope)
    if last is not None and last.key == key:
        return
    places = [*call.places, *([] if last is None else last.first)]
    Meeting(call.process_set, _base(call)).require_agreement(call.label, call.told(sources), places)
    if call.name is not None:
        _agreed[call.scope] = _Agreed(key, [])


@contextmanager
def _uncompressed(tensors: Sequence[Any], call: _Call) -> Iterator[None]:
    """A call without compression, of a name whose last one may have had it, or has it on another rank."""
    if call.scope in _agreed and call.process_set.size() > 1:
        _agree(_sources(tensors, call), call, ())
        del _agreed[call.scope]
    try:
        yield
    except tf.errors.OpError as error:
        if not is_mismatch(error):
            raise
        told = call.told(_sources(tensors, call))
        Meeting(call.process_set, _base(call), call.places[-1:]).leave(call.label, told, error)
        raise


def _sources(tensors: Sequence[Any], call: _Call) -> list[Source]:
    given = [t if isinstance(t, tf.IndexedSlices) else tf.convert_to_tensor(t) for t in tensors]
    return [
        Source(n, tuple(t.shape.as_list()) if t.shape.is_fully_defined() else None, t.dtype)
        for t, n in zip(given, names_of_call(call.name, len(given)), strict=True)
    ]


def _base(call: _Call) -> str:
    return allowed_name(call.alone.name)


def _horovods_name(kind: str, name: str | None, tensors: Sequence[Any]) -> str:
    """What Horovod calls an operation of a rank that does not compress; of a group, its first tensor."""
    if tf.executing_eagerly():
        return kind
    own = name or "_".join([kind, *(t.name for t in tensors)])
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    return f"{scope}/{allowed_name(own)}".strip("/")


def _for_one_call(compressor: Compressor) -> Compressor:
    """Without error feedback: a node of a graph runs many times, and calls without a name owe each other nothing."""
    if any(field.name == "error_feedback" for field in fields(compressor)):  # type: ignore[arg-type]
        return replace(compressor, error_feedback=False)  # type: ignore[type-var]
    return compressor
