"""`allreduce` and `grouped_allreduce` of single tensors, with compression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress import wire
from hvd_compress._torch.device import told_places
from hvd_compress.compressors import Compressor
from hvd_compress.elastic import are_together, is_elastic
from hvd_compress.engine import (
    Routing,
    average_share,
    compressor_of_call,
    describe,
    names_of_call,
    op_of_call,
)
from hvd_compress.errors import UnsupportedError
from hvd_compress.fingerprint import Place, scope_of
from hvd_compress.torch import _differentiable
from hvd_compress.torch._agreement import Meeting, is_mismatch
from hvd_compress.torch._calls import Agreed, CallKey, agreed, engine_of, forget_residuals, keep, pay_at_once
from hvd_compress.torch._carried import name_of
from hvd_compress.torch._collectives import name_of_call
from hvd_compress.torch._gradients.bucket import collective_name
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._gradients.staging import is_compressible
from hvd_compress.torch.compression import horovod_compressor

__all__ = ["allreduce", "forget_residuals", "grouped_allreduce"]


class _Call(NamedTuple):
    """What a call was given beside its tensors; `base` is its name, or one that was made for it.

    `compressor` is one of ours, or Horovod's where a call follows a compressed one of its name.
    """

    function: str
    base: str
    is_named: bool
    compressor: Any
    op: Any
    prescale_factor: float
    postscale_factor: float
    process_set: hvd.ProcessSet

    @property
    def label(self) -> str:
        """For errors."""
        return f"{self.function} of {self.base!r}"

    @property
    def place(self) -> Place:
        """Where all ranks compare that do so, whatever they call."""
        return Place("allreduce", self.base)

    def places(self, tensors: int) -> list[Place]:
        """That one, and where a call without compression would be; the last one."""
        return [self.place, *([Place(self.function, self.base, tensors)] if self.function != "allreduce" else [])]

    @property
    def scope(self) -> tuple[str, str, int]:
        """Whose calls are compared with each other."""
        return self.base, scope_of(self.process_set), self.process_set.size()


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
    without a name it is lost. Until `forget_residuals` is called, this takes 4 bytes per element, and as many for a
    result, whose memory is reused when nothing refers to it any more. Tensors that compression would not make smaller
    travel as they are.

    With a compressor of hvd_compress the ranks compare all arguments, which takes one more collective: in the first
    call of a name, in a call that differs from the last one of its name, and in each call without a name.

    Args:
        tensor: float16, bfloat16, float32, float64, complex64 or complex128 for a compressor of hvd_compress; not
            changed.
        average: old form of `op`.
        name: the same on all ranks.
        compression: a compressor of hvd_compress, one of `Compression`, or one written for Horovod.
        op: Average (default) or Sum with a compressor of hvd_compress; any of Horovod's without.
        prescale_factor: factor on each rank's tensor.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' arguments differ, with a compressor of hvd_compress on some of them; raised on all.
        UnsupportedError: another `op`, a tensor that requires a gradient, or an elastic run before its state is synced,
            with a compressor of hvd_compress.
        TypeError: `compression` is no compressor, or the tensor's type cannot be compressed.
    """
    compressor, horovods = compressor_of_call(compression, carries=True), horovod_compressor(compression)
    factors = prescale_factor, postscale_factor
    call = _call("allreduce", name, compressor or horovods, average, op, *factors, process_set)
    if compressor is not None:
        _refuse_apart(call)
        if process_set.size() > 1:
            return _reduce([tensor], call)[0]
        [tensor] = _with_owed([tensor], call)
    with _uncompressed([tensor], call):
        return _differentiable.allreduce(tensor, average, call.base, horovods, op, *factors, process_set)


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
    tensors = list(tensors)
    compressor, horovods = compressor_of_call(compression, carries=True), horovod_compressor(compression)
    factors = prescale_factor, postscale_factor
    call = _call("grouped_allreduce", name, compressor or horovods, average, op, *factors, process_set)
    if compressor is not None:
        _refuse_apart(call)
        if process_set.size() > 1:
            return _reduce(tensors, call)
        tensors = _with_owed(tensors, call)
    with _uncompressed(tensors, call):
        return _differentiable.grouped_allreduce(tensors, average, call.base, horovods, op, *factors, process_set)


def _call(
    function: str,
    name: str | None,
    compressor: Any,
    average: bool | None,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: hvd.ProcessSet,
) -> _Call:
    if isinstance(compressor, Compressor):
        op = op_of_call(average, op, hvd.Average, hvd.Sum)
    elif op is None:
        op = hvd.Sum if average is False else hvd.Average
    # counted like the calls without compression, whose Horovod name a rank may wait for
    base = name_of_call(function, name, process_set)
    return _Call(
        function, base, name is not None, compressor, op, float(prescale_factor), float(postscale_factor), process_set
    )


def _reduce(tensors: Sequence[torch.Tensor], call: _Call) -> list[torch.Tensor]:
    _agree(tensors, call)
    _refuse(tensors, call)
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    results = _exchanged(real, tensors, call)
    return [torch.view_as_complex(r) if t.is_complex() else r for r, t in zip(results, tensors, strict=True)]


def _exchanged(real: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], call: _Call) -> list[torch.Tensor]:
    names = names_of_call(call.base, len(real))
    engine = _engine(real, names, call)

    def plain(tensor: torch.Tensor, its_name: str) -> torch.Tensor:
        return _differentiable.allreduce(
            tensor, None, its_name, hvd.Compression.none, call.op, call.prescale_factor, call.postscale_factor,
            call.process_set,
        )  # fmt: skip

    try:
        for tensor, its_name in zip(real, names, strict=True):
            if engine.exchanges(its_name):
                engine.start(its_name, tensor, keep=True)
        results = engine.combine(engine.wait())
        dense = {n: t for n, t in zip(names, real, strict=True) if n not in results}
        # since other ranks have come in an elastic run, something may be owed of what is not worth compressing any more
        paid = {n: engine.with_debt(n, t, keep=True) for n, t in dense.items()} if engine.debts else dense
        results.update({n: plain(t, n) for n, t in paid.items()})
        if engine.debts:
            engine.settle(keep=all(bool(torch.isfinite(results[n]).all()) for n in paid))
        return [results[n] for n in names]
    except HorovodInternalError as error:
        if "Mismatched" not in str(error):
            raise
        engine.abandon()
        # another rank compares this call, which differs from its last one: be told the same as that rank
        _tell(tensors, call, agreed[call.scope].first or [call.place], error)
        raise


# -- what the ranks must agree on ------------------------------------------------------------------------------------


def _told(tensors: Sequence[torch.Tensor], call: _Call) -> dict[str, Any]:
    return {
        "wire version": wire.VERSION,
        "compression": describe(call.compressor),
        "op": name_of(call.op),
        "prescale_factor": call.prescale_factor,
        "postscale_factor": call.postscale_factor,
        "function": call.function,
        "tensors": [f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in tensors],
        "devices": told_places(tensors),
        "tensors that require gradients": [t.requires_grad and torch.is_grad_enabled() for t in tensors],
    }


def _agree(tensors: Sequence[torch.Tensor], call: _Call) -> None:
    last, key = agreed.get(call.scope), (call, *((t.dtype, t.shape, t.requires_grad) for t in tensors))
    if last is not None and last.key == key:
        return
    first = [] if last is None else last.first
    Meeting(call.process_set, call.base).require_agreement(
        call.label, _told(tensors, call), [*call.places(len(tensors)), *first]
    )
    if call.is_named:
        agreed[call.scope] = Agreed(key, [])


def _tell(tensors: Sequence[torch.Tensor], call: _Call, failed: Sequence[Place], error: Exception) -> None:
    """Meet the ranks that compare this call, after operations of this rank have failed where they had come."""
    meeting, told = Meeting(call.process_set, call.base, failed), _told(tensors, call)
    if call.place in failed:
        meeting.leave(call.label, told, error)
    places = [place for place in call.places(len(tensors)) if place not in failed]
    meeting.require_agreement(call.label, told, places)


def _refuse(tensors: Sequence[torch.Tensor], call: _Call) -> None:
    """Raise for what cannot be compressed; all ranks have agreed on it, so that none is left waiting."""
    for tensor in tensors:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{call.label} with {call.compressor!r}: the tensor requires a gradient, which compression does not "
                "pass on. Give tensor.detach(), or use compression=hvd.Compression.none"
            )
        if not tensor.is_complex() and not is_compressible(tensor):
            raise TypeError(
                f"{call.label} with {call.compressor!r}: the tensor is {tensor.dtype}; compressors take float16, "
                "bfloat16, float32, float64, complex64 and complex128. Use compression=hvd.Compression.none"
            )


@contextmanager
def _uncompressed(tensors: Sequence[torch.Tensor], call: _Call) -> Iterator[None]:
    """A call without compression, of a name whose last one may have had it, or has it on another rank."""
    if call.scope in agreed and call.process_set.size() > 1:
        _agree(tensors, call)
        del agreed[call.scope]
    try:
        yield
    except HorovodInternalError as error:
        if not is_mismatch(error):
            raise
        # the last one is what this rank has started; all that get this error come here
        _tell(tensors, call, call.places(len(tensors))[-1:], error)
        raise


def _key(tensors: Sequence[torch.Tensor], names: list[str], call: _Call) -> CallKey:
    described = tuple((name, tuple(t.shape), t.dtype) for name, t in zip(names, tensors, strict=True))
    return CallKey(scope_of(call.process_set), described, call.compressor)


def _with_owed(tensors: Sequence[torch.Tensor], call: _Call) -> list[torch.Tensor]:
    """The tensors of one rank, with what it still owes since others have left an elastic run."""
    if not (call.is_named and is_elastic()):
        return list(tensors)
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    paid = pay_at_once(_key(real, names_of_call(call.base, len(real)), call), real, call.op == hvd.Average)
    return [torch.view_as_complex(r) if t.is_complex() else r for r, t in zip(paid, tensors, strict=True)]


def _refuse_apart(call: _Call) -> None:
    """Raise UnsupportedError in an elastic run where ranks are not together."""
    if not are_together():
        raise UnsupportedError(
            f"{call.label} with {call.compressor!r} in an elastic run, before hvd.elastic.TorchState of "
            "hvd_compress.torch has synced the ranks: others may be in the middle of their training. Call it inside of "
            "the function that is decorated with hvd.elastic.run"
        )
    if is_elastic() and call.process_set.process_set_id != 0:
        raise UnsupportedError(
            f"{call.label} with {call.compressor!r} and a process set in an elastic run: Horovod forgets process sets "
            "when ranks come or go. Leave process_set out, or use compression=hvd.Compression.none"
        )


def _engine(tensors: Sequence[torch.Tensor], names: list[str], call: _Call) -> Engine:
    ranks = call.process_set.size()
    share = average_share(call.compressor, call.op, hvd.Average, hvd.Sum, ranks)
    scale = call.prescale_factor * call.postscale_factor * share
    key = _key(tensors, names, call)
    engine = known = engine_of(key, ranks)
    if engine is None or engine.process_set is not call.process_set:
        routing = Routing(call.compressor, min_numel=0)
        engine = Engine(routing, scale, call.process_set, zip(names, tensors, strict=True), pays_debts=True)
        if known is not None:
            # the same ranks, whose process set was removed and added again
            engine.inherit(known)
        if call.is_named:
            keep(key, ranks, engine, call.op == hvd.Average)
    if call.scope in agreed:
        begun = [shipment.beginning for shipment in engine.buckets]
        first = [Place(collective, collective_name(collective, name)) for collective, name in begun]
        if not first and len(names) > 1:
            first = [Place("allreduce", names[0])]
        agreed[call.scope] = agreed[call.scope]._replace(first=first)
    engine.scale = scale
    return engine
