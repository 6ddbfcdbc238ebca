"""`DistributedOptimizer`: Horovod's, with the exchanges of this package in its gradient hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.elastic import is_elastic
from hvd_compress.engine import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_MIN_NUMEL,
    average_share,
    check_settings,
    exchange_of,
    exchanged,
    refuse_other_ops,
    refuse_what_stays,
    resolved,
)
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import AdaGrad, Exchange
from hvd_compress.policy import check_patterns
from hvd_compress.torch._carried import refuse_other_types
from hvd_compress.torch._gradients.combiner import Combiner
from hvd_compress.torch._gradients.overrides import Overrides
from hvd_compress.torch._gradients.owners import check_owner, take_over
from hvd_compress.torch._gradients.wrapping import Wrapping, label_for
from hvd_compress.torch._horovod import go_on_from, make_class
from hvd_compress.torch.compression import route_of

__all__ = ["DistributedOptimizer"]


def _refuse_types(optimizer: torch.optim.Optimizer, named: Any, adagrad: AdaGrad | None) -> None:
    """Raise TypeError for parameters whose gradients cannot be combined; all ranks have compared their types."""
    names = {id(p): name for name, p in named or []}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    by_name = {names.get(id(p), f"parameter {i}"): p for i, p in enumerate(params)}
    refuse_other_types(by_name, "DistributedOptimizer")
    if adagrad is not None and (unreal := [n for n, p in by_name.items() if p.requires_grad and p.is_complex()]):
        raise TypeError(
            f"{adagrad!r} with the complex parameter {unreal[0]!r}: it divides by roots of sums of squares of real "
            "numbers. Use torch.optim.Adagrad in place of adagrad, or keep the parameter as torch.view_as_real"
        )


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    *,
    exchange: str | Exchange = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    adagrad: AdaGrad | None = None,
) -> Any:
    """Wrap an optimizer so that `step()` works with the combined gradients of all ranks, exchanged compressed.

    Arguments up to `process_set` are those of `horovod.torch.DistributedOptimizer`. The ranks compare their settings
    here, so all ranks of the process set must call it. With one rank nothing is exchanged or compressed; residuals of a
    loaded state (what compression left out) are added to the next gradients.

    Args:
        optimizer: to wrap.
        named_parameters: such as `model.named_parameters()`; names key collectives, residuals and randomness.
        compression: a compressor of hvd_compress, `Auto` (or "auto"), a `Policy`, one of `Compression`, or one written
            for Horovod.
        backward_passes_per_step: backward passes that are summed up locally before an exchange.
        op: Average or Sum; Adasum only without compression.
        gradient_predivide_factor: splits the averaging into a division before the sum and one after it; only for
            Average. Where hvd_compress makes the sums, in float32, the factors cancel, and the result is the average.
        num_groups: old name of `groups`.
        groups: gradients that go together: a number of groups, or lists of parameters.
        sparse_as_dense: make sparse gradients dense and compress them; else they travel as Horovod sends them.
        process_set: the ranks that take part.
        exchange: "two_phase"; "allgather"; "auto" for the one of these two that sends fewer bytes, where each
            collective counts as 32 KiB more (with `Auto`: the faster one); "hierarchical", which sums gradients inside
            each host and exchanges the sums compressed between hosts; or an `Exchange`, such as `ParameterServer`
            ("parameter_server" for one with its defaults), in which one rank sums what all ranks send.
        min_numel: gradients with fewer elements are not compressed; those of float32 share an exchange with compressed
            ones.
        bucket_bytes: gradients share an exchange of up to this many bytes (as float32), in the reverse order of the
            parameters; 0 gives each gradient an exchange of its own, and leaves small ones to Horovod's fused
            allreduce.
        adagrad: make the combined gradients AdaGrad's updates; `optimizer` is then plain SGD with its learning rate.
            exchange="allgather" is not possible then. If losses are scaled, call `set_loss_scale` before the first
            backward pass. With one rank, and outside of the process set, it is applied to the rank's own gradients.

    Raises:
        ValueError: a setting out of its range.
        TypeError: `compression` is no compressor, or `adagrad` no AdaGrad.
        UnsupportedError: Adasum, or another `op` than Average and Sum, with compression; `adagrad` with
            another `op`, with `Auto` or with exchange="allgather"; `Auto` with a parameter server; a server
            whose root is no rank, or whose transport is missing; in an elastic run, a process set or messages of MPI.
        MismatchError: the ranks disagree; raised on all of them.
    """
    check_owner("DistributedOptimizer", optimizer)
    groups = num_groups if num_groups and groups is None else groups
    compression = resolved(compression, exchange)
    check_settings(
        compression, exchange, min_numel, bucket_bytes, op == hvd.Average, gradient_predivide_factor,
        backward_passes_per_step, groups, hvd.rocm_built(), carries=True,
    )  # fmt: skip
    exchange = exchange_of(adagrad, exchange, compression, carries=True)
    if adagrad is not None:
        refuse_other_ops(op, hvd.Average, hvd.Sum)
    horovods = route_of(compression)
    ours = exchanged(compression)
    named = list(named_parameters) if named_parameters is not None else None
    if op == hvd.Adasum and hvd.size() > 1:
        if ours is not None:
            raise UnsupportedError(
                f"op=Adasum with {ours!r} and exchange={exchange.id!r}: Adasum combines dense gradients pairwise. Use "
                'op=Average or op=Sum, or compression=hvd.Compression.fp16 and exchange="auto"'
            )
        return hvd.DistributedOptimizer(
            optimizer, named, horovods, backward_passes_per_step, op, process_set=process_set
        )
    # in elastic runs exchanges are made when the state is synced: who joins wraps its optimizer while the others train
    takes_part = process_set.included() and process_set.size() > 1 and not is_elastic()
    scale = 1.0 if ours is None else average_share(ours, op, hvd.Average, hvd.Sum, process_set.size() or 1)
    wrapping = Wrapping(
        compression, ours, op, exchange, min_numel, bucket_bytes, groups, adagrad, process_set, scale,
        gradient_predivide_factor, backward_passes_per_step, sparse_as_dense,
    )  # fmt: skip
    if wrapping.is_carried:
        refuse_what_stays(wrapping.name, exchange, process_set)
    if takes_part:
        wrapping.agree(optimizer.param_groups, {id(p): name for name, p in named or []})
    _refuse_types(optimizer, named, adagrad)
    cls: Any = make_class(type(optimizer), Overrides)
    wrapped: Any = cls(
        optimizer.param_groups, named, horovods, backward_passes_per_step, op, gradient_predivide_factor,
        groups, sparse_as_dense, process_set,
    )  # fmt: skip
    go_on_from(wrapped, optimizer)
    wrapped._itself = weakref.ref(wrapped)
    # of frozen ones too, which may be unfrozen
    check_patterns(
        compression, [wrapped._parameter_names[p] for group in wrapped.param_groups for p in group["params"]]
    )
    combiner = wrapped._combiner = Combiner(wrapped, wrapped._parameter_names, wrapping, horovods)
    if wrapped._exchanges or adagrad is not None:
        combiner.hook()
    if takes_part:
        wrapping.label = label_for(wrapped.param_groups, set(wrapped._parameter_names.values()), process_set)
        wrapping.equip(combiner.sender)
        combiner.sender.begin_way()
    elif adagrad is not None and not wrapping.is_carried:
        combiner.be_alone()
    taken = [p for group in wrapped.param_groups for p in group["params"] if p.requires_grad]
    take_over(wrapped, taken, "DistributedOptimizer", optimizer)
    return wrapped
