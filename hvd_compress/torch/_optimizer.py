"""`DistributedOptimizer`: Horovod's, with the exchanges of this package in its gradient hooks."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.compressors import Compressor
from hvd_compress.engine import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_MIN_NUMEL,
    Bucket,
    Counters,
    Ledger,
    Routing,
    average_share,
    check_settings,
    describe,
    description,
    empty_state,
    exchange_of,
    exchanged,
    refuse_other_ops,
    refuse_residuals,
    resolved,
)
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import AdaGrad, ParameterServer
from hvd_compress.policy import Auto, Policy
from hvd_compress.torch._agreement import require_agreement
from hvd_compress.torch._bucket import Bucket as TorchBucket
from hvd_compress.torch._carried import refuse_other_types
from hvd_compress.torch._collectives import sparse_allreduce_async
from hvd_compress.torch._engine import Engine, described, precondition, with_tensors
from hvd_compress.torch._horovod import HorovodOptimizer, form_groups, make_class
from hvd_compress.torch._staging import all_finite
from hvd_compress.torch._steering import Steering, left_out
from hvd_compress.torch.compression import dense_route, route_of

__all__ = ["DistributedOptimizer"]


class _Overrides:
    """Methods laid over Horovod's `_DistributedOptimizer`; see `_horovod.make_class`."""

    _engine: Engine | None = None
    _steering: Steering | None = None
    _alone: Ledger[Bucket] | None = None
    """With AdaGrad, where this rank exchanges nothing."""
    _chooses = False
    _is_plain = False
    """Whether all tensors go through Horovod's allreduce in one way, so that its own methods do."""
    _plain_steps = 0
    """Plain steps that are not among the counters yet: counting in every hook would make short steps longer."""
    _sparse_steps: Counter[str]
    """In how many of these a tensor was sparse, and so not reduced."""
    _sparse_now: set[str]
    """Those that are sparse in the step that is not complete yet; it may be abandoned."""
    _adagrad: AdaGrad | None = None
    _waiting: dict[str, TorchBucket] = {}  # noqa: RUF012 - replaced, never changed
    """The bucket of each tensor whose gradient a hook only puts there; Horovod's dicts know nothing of it then."""
    _horovods: Any
    _make_engine: Callable[[Routing], Engine]
    _by_name: dict[str, torch.Tensor]
    _label: str
    _sent_itemsizes: dict[tuple[Any, torch.dtype], int]

    # -- what the backward pass calls ----------------------------------------------------------------------------

    def _register_hooks(self: Any) -> None:
        if self._groups is not None:
            form_groups(self)
        me = weakref.ref(self)
        for p in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
            self._requires_update.add(p)
            # Horovod's are hooks of the node that accumulates (l. 171-174): while it runs, it refers to the gradient's
            # memory, and `stage` could not tell whether anybody else does
            handle = p.register_post_accumulate_grad_hook(partial(_on_gradient, me, self._parameter_names[p]))
            # parameters may outlive their optimizer, and be given to another one
            weakref.finalize(self, handle.remove).atexit = False

    def _take_gradient(self: Any, name: str, p: torch.Tensor) -> None:
        """What Horovod's hook (l. 226-251) does, in a fraction of the time for tensors that wait for others."""
        bucket = self._waiting.get(name)
        left = None if bucket is None else bucket.put_off(name, p.grad)
        if left is None:
            if bucket is not None and name in bucket.came:
                raise AssertionError(
                    f"gradient of {name!r} was computed more than backward_passes_per_step=1 times before step() or "
                    "synchronize(). Call one of them after each backward pass, or increase backward_passes_per_step"
                )
            self._make_hook(p)()
            return
        if self._steering is not None:
            self._steering.begin()
        if left == 0:
            self._engine.start_together(bucket)
        elif left % _TENSORS_PER_PROGRESS == 0:
            self._engine.progress()

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Any, Any]:
        if self._steering is not None:
            self._steering.begin()
        if p.grad is None:
            # another rank may have a gradient: all ranks issue the same collectives
            p.grad = torch.zeros_like(p)
        is_sparse = p.grad.is_sparse
        if self._engine is None or self._is_plain:
            if is_sparse and not self.sparse_as_dense:
                return self._sparse_gathered(p)
            return HorovodOptimizer._allreduce_grad_async(self, p)
        name = self._parameter_names[p]
        if self._adagrad is not None:
            self._check_dense(name, p.grad)
        if self._engine.exchanges(name):
            if not is_sparse or self.sparse_as_dense:
                self._engine.start(name, p.grad.to_dense() if is_sparse else p.grad)
                return _IN_EXCHANGE
            self._engine.start(name, None)
        else:
            self._engine.progress()
        self._compression = self._dense_compression(name)
        if not is_sparse or self.sparse_as_dense:
            self._count_dense(name, p.grad)
            p.grad = self._engine.with_debt(name, p.grad)
        return HorovodOptimizer._allreduce_grad_async(self, p)

    def _sparse_gathered(self: Any, p: torch.Tensor) -> tuple[Any, Any]:
        self._sparse_now.add(self._parameter_names[p])
        return HorovodOptimizer._allreduce_grad_async(self, p)

    def _sparse_allreduce_grad_async(self: Any, p: Any, name: str) -> tuple[Any, Any]:
        # Horovod's own knows no bfloat16 (l. 220-223)
        return sparse_allreduce_async(p.grad, name, self.op, self.process_set), None

    def _dense_compression(self: Any, name: str) -> Any:
        """How a tensor goes through Horovod's allreduce; Horovod itself knows one way for all."""
        if not self._chooses:
            return self._horovods
        return dense_route(self._engine.routing.compressor_of(name))

    def _completes_dense(self: Any) -> bool:
        """Whether `_complete` waits for what goes through Horovod's allreduce, and decompresses it."""
        if self._engine is None or self._is_plain:
            return False
        return self._engine.is_used or self._chooses or self._adagrad is not None

    def _begin_plain(self: Any) -> None:
        """Between steps: find out whether the next one is Horovod's own."""
        if not self._chooses:
            self._is_plain = not self._engine.owes
        else:
            # of groups that Horovod sends, `_steering` would not see when the first one starts
            way = self._engine.only_way if self._groups is None else None
            self._is_plain = way is not None
            if way is not None:
                self._compression = dense_route(way)

    def _begin_waiting(self: Any) -> None:
        """Between steps: find out which gradients only wait for others, with this engine."""
        is_each_its_own = self._groups is None and self.backward_passes_per_step == 1
        self._waiting = self._engine.waiting() if is_each_its_own else {}

    def _check_dense(self: Any, name: str, gradient: torch.Tensor) -> None:
        if gradient.is_sparse and not self.sparse_as_dense:
            raise UnsupportedError(
                f"{self._adagrad!r} with a sparse gradient of {name!r}: its elements would need accumulators of their "
                "own on all ranks. Use sparse_as_dense=True"
            )

    def _grouped_allreduce_grad_async(self: Any, ps: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        # a group is a bucket here; a rank where one of its tensors got no gradient completes it in synchronize()
        if self._completes_dense():
            return [self._allreduce_grad_async(p) for p in ps], None
        return HorovodOptimizer._grouped_allreduce_grad_async(self, ps)

    def _count_dense(self: Any, name: str, tensor: torch.Tensor, times: int = 1) -> None:
        kind = self._compression, tensor.dtype
        if kind not in self._sent_itemsizes:
            # asked once, not in every hook
            sent, _ = self._compression.compress(torch.zeros(1, dtype=tensor.dtype))
            self._sent_itemsizes[kind] = sent.element_size()
        # no nbytes: sparse gradients that are made dense have none
        numel, itemsize = tensor.numel(), tensor.element_size()
        self._engine.count_dense(name, numel * self._sent_itemsizes[kind], numel * itemsize, times)

    def _count_plain(self: Any) -> None:
        """Bring the counters up to date; before anything that reads them or changes the way."""
        steps, sparse = self._plain_steps, self._sparse_steps
        self._plain_steps, self._sparse_steps = 0, Counter()
        if steps:
            self._engine.count_step(steps)
            for name in self._engine.dense:
                self._count_dense(name, self._by_name[name], steps - sparse[name])

    # -- what the user calls -------------------------------------------------------------------------------------

    def synchronize(self: Any) -> None:
        """Wait until the gradients of all ranks are combined in `p.grad`."""
        if self._completes_dense():
            self._ungroup()
            self._submit_missing()
            self._complete()
        else:
            try:
                self._submit_missing_groups()
                HorovodOptimizer.synchronize(self)
            except HorovodInternalError:
                # an elastic run restores the optimizer's state, which waits for what is in flight: nothing is any more
                self._handles.clear()
                self._sparse_now.clear()
                raise
        if self._alone is not None:
            self._precondition_alone(self._alone)
        if self._is_plain:
            self._plain_steps += 1
            self._sparse_steps.update(self._sparse_now)
            self._sparse_now.clear()
        changes = self._steering is not None and self._steering.end()
        if changes:
            self._count_plain()
            followed = self._make_engine(self._steering.routing)
            followed.inherit(self._engine)
            self._engine = followed
            self._begin_waiting()
        if self._engine is not None and (changes or not self._is_plain):
            self._begin_plain()

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients of all ranks and update; a closure's gradients are combined after each call of it."""
        if closure is None:
            return HorovodOptimizer.step(self)

        def combined() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
                self._synchronized = False
            return loss

        return super(self.__class__, self).step(combined)  # type: ignore[misc]

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clear the gradients, as `torch.optim.Optimizer.zero_grad` does.

        Raises:
            AssertionError: gradients are still being exchanged.
        """
        if self._is_exchanging():
            raise AssertionError(
                "zero_grad() between loss.backward() and step() or synchronize(): gradients are being exchanged"
            )
        super(self.__class__, self).zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """As Horovod's.

        Raises:
            AssertionError: gradients are being exchanged.
        """
        if self._is_exchanging():
            raise AssertionError(
                "set_backward_passes_per_step() between loss.backward() and step() or synchronize(): gradients are "
                "being exchanged"
            )
        HorovodOptimizer.set_backward_passes_per_step(self, passes)
        if self._engine is not None:
            self._begin_waiting()

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        """Load the optimizer's own state; residuals have `load_compression_state_dict`."""
        if self._engine is not None:
            self._sparse_now.clear()
            self._wait_for_dense()
            self._engine.abandon()
        if self._steering is not None:
            self._steering.abandon()
        HorovodOptimizer.load_state_dict(self, *args, **kwargs)

    def compression_stats(self: Any) -> dict[str, Any]:
        """Bytes, seconds and residual norms of all steps so far on this rank.

        Returns:
            {"compressor": repr, "total": counters, "tensors": {name: counters}}, where counters are: steps,
            bytes_sent, bytes_received (over the network), dense_bytes (what an uncompressed ring allreduce would have
            sent), ratio (dense_bytes / bytes_sent), encode_seconds, start_seconds (handing over), exchange_seconds
            (waited), decode_seconds, and residual_norm (Euclidean, in units of the sum over ranks). With `Auto` also
            "auto": what was chosen for each bucket, from which predicted and measured seconds, and why; "rival" is what
            it is compared with in the next step, or None.
        """
        if self._engine is None:
            return {"compressor": self._label, "total": Counters().report(0.0), "tensors": {}}
        chosen = {} if self._steering is None else {"auto": self._steering.report()}
        with left_out(self._steering):
            self._count_plain()
            return {"compressor": self._label, **self._engine.stats(), **chosen}

    def compression_state_dict(self: Any) -> dict[str, Any]:
        """The residuals of this rank, to be saved per rank: it is not the same on all ranks.

        Returns:
            A dict of tensors and plain values that `torch.save` takes; see `hvd_compress.feedback`.
        """
        if self._engine is None:
            return empty_state() if self._alone is None else with_tensors(self._alone.state_dict())
        if self._is_exchanging():
            raise StateError("compression_state_dict() while gradients are exchanged; call it after step()")
        with left_out(self._steering):
            # the state says of which step it is, the same on all ranks
            self._count_plain()
            return self._engine.state_dict()

    def load_compression_state_dict(self: Any, state: dict[str, Any]) -> None:
        """Take over the residuals that `compression_state_dict` returned on this rank.

        Raises:
            StateError: not such a state, of another rank or number of ranks, or of other tensors; or gradients are
                still being exchanged.
        """
        if self._is_exchanging():
            raise StateError("load_compression_state_dict() while gradients are exchanged; call it after step()")
        holder = self._engine or self._alone
        if holder is not None:
            self._count_plain()
            holder.load_state_dict(state)
            if self._engine is not None:
                self._begin_plain()
        else:
            refuse_residuals(state)

    def set_loss_scale(self: Any, loss_scale: float) -> None:
        """Tell the residuals the scale of the losses to come, `scaler.get_scale()`, before each backward pass.

        Residuals are in units of the scaled gradients; without this call a changed scale would weigh what is still
        owed by the ratio of the two scales. A scale that stays the same costs nothing. AdaGrad's updates are multiplied
        by it, so that `scaler.unscale_` is right for them too.

        Raises:
            ValueError: not a positive finite number.
            StateError: gradients are still being exchanged.
        """
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"loss_scale={loss_scale!r}: must be a positive finite number")
        if self._is_exchanging():
            raise StateError("set_loss_scale() while gradients are exchanged; call it after step()")
        holder = self._engine or self._alone
        if holder is not None:
            holder.set_loss_scale(float(loss_scale))

    def _wait_for_dense(self: Any) -> None:
        """Wait for Horovod's own allreduces: it forgets them here, and then refuses their names in the next step.

        Those that fail are over, too: an elastic run restores its state after a step that has failed.
        """
        if self._completes_dense():
            self._ungroup()
        for handle, _ in self._handles.values():
            with suppress(HorovodInternalError):
                if callable(handle):
                    handle()
                elif handle is not None and handle is not _EXCHANGED:
                    hvd.synchronize(handle)

    def _is_exchanging(self: Any) -> bool:
        return bool(self._handles) or (self._engine is not None and self._engine.has_begun)

    # -- the parts of synchronize --------------------------------------------------------------------------------

    def _ungroup(self: Any) -> None:
        """Turn a group's entry into one of each of its parameters."""
        for group in [g for g in self._handles if isinstance(g, tuple)]:
            handles, _ = self._handles.pop(group)
            self._handles.update(zip(group, handles, strict=True))
        for group in self._group_counts:
            self._group_counts[group] = 0

    def _submit_missing(self: Any) -> None:
        """Start what no hook has started, in the order of the parameters."""
        put_off = self._engine.put_off if self._waiting else []
        started = [None for handle, _ in self._handles.values() if handle is not None]
        if len(started) + len(put_off) == len(self._requires_update):
            return
        put_off = set(put_off)
        for name, p in self._by_name.items():
            is_started = name in put_off or self._handles.get(p, (None, None))[0] is not None
            if p in self._requires_update and not is_started:
                self._handles[p] = self._allreduce_grad_async(p)

    def _submit_missing_groups(self: Any) -> None:
        """Start the groups in which a tensor got no gradient, where all is Horovod's own.

        Its `synchronize` (l. 259-271) would send their tensors one by one, and ranks that have all gradients the group:
        each would wait for the other for ever.
        """
        for group in self._group_counts:
            if group in self._handles or any(p.grad is not None and p.grad.is_sparse for p in group):
                continue
            for p in group:
                self._handles.pop(p, None)
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            self._handles[group] = HorovodOptimizer._grouped_allreduce_grad_async(self, group)
            self._group_counts[group] = 0

    def _complete(self: Any) -> None:
        """Wait for everything, then decide the whole step: one value that is not finite takes all residuals back.

        In place of Horovod's `synchronize` (l. 255-308), whose loops would take as long as ours.
        """
        finite = self._engine.wait()
        waited = {}
        others = [(p, *entry) for p, entry in self._handles.items() if entry[0] is not _EXCHANGED]
        for p, handle, ctx in others:
            output = handle() if callable(handle) else hvd.synchronize(handle)
            # where nothing is owed, nothing depends on it
            finite = finite and (not self._engine.owes or all_finite(output))
            # Horovod sends sparse gradients, whose handle is callable, as they are
            if not callable(handle):
                output = self._dense_compression(self._parameter_names[p]).decompress(output, ctx)
            if self._adagrad is not None:
                finite = precondition(self._engine, self._parameter_names[p], output) and finite
            waited[self._parameter_names[p]] = output
        results = self._engine.combine(keep=finite) | waited
        assert len(results) == len(self._requires_update)
        self._engine.settle(keep=finite)
        for name, output in results.items():
            gradient = self._by_name[name].grad
            if gradient is output:
                continue
            if gradient.is_sparse:
                # sparse tensors have no `set_`
                gradient.zero_().add_(output if output.is_sparse else output.to_sparse())
            else:
                gradient.set_(output)
        # of dicts with the same keys: each look-up of a tensor is a call of its `__hash__`
        self._allreduce_delay.update(dict.fromkeys(self._handles, self.backward_passes_per_step))
        self._handles.clear()
        self._synchronized = True

    def _precondition_alone(self: Any, ledger: Ledger[Bucket]) -> None:
        """AdaGrad where nothing is exchanged: the gradients of this rank are the combined ones."""
        finite = True
        for name, p in self._by_name.items():
            if p.grad is None:
                continue
            self._check_dense(name, p.grad)
            dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
            finite = precondition(ledger, name, dense) and finite
            if p.grad.is_sparse:
                p.grad = dense.to_sparse()
        ledger.settle(keep=finite)
        ledger.count_step()


def _on_gradient(optimizer: weakref.ref[Any], name: str, p: torch.Tensor) -> None:
    wrapped = optimizer()
    if wrapped is not None:
        wrapped._take_gradient(name, p)


_TENSORS_PER_PROGRESS = 8
"""Asking whether something has arrived takes as long as the rest of a hook; these are small tensors."""

_EXCHANGED = object()
"""Stands in `_handles` for a gradient whose exchange `_complete` will finish."""

_IN_EXCHANGE = _EXCHANGED, None


def _describe_parameters(optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]] | None) -> list[Any]:
    names = {id(p): name for name, p in named or []}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [[names.get(id(p), i), list(p.shape), str(p.dtype), p.requires_grad] for i, p in enumerate(params)]


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


def _describe_groups(optimizer: torch.optim.Optimizer, groups: Any) -> Any:
    if not isinstance(groups, list):
        return groups
    params = [p for group in optimizer.param_groups for p in group["params"]]
    positions = {id(p): i for i, p in enumerate(params)}
    return [[positions.get(id(p)) for p in group] for group in groups]


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
    exchange: str | ParameterServer = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    adagrad: AdaGrad | None = None,
) -> Any:
    """Wrap an optimizer so that `step()` works with the combined gradients of all ranks, exchanged compressed.

    Arguments up to `process_set` are those of `horovod.torch.DistributedOptimizer`. The ranks compare their settings
    here, so all ranks of the process set must call it. With one rank nothing is exchanged or compressed.

    Args:
        optimizer: to wrap.
        named_parameters: such as `model.named_parameters()`; names key collectives, residuals and randomness.
        compression: a compressor of hvd_compress, `Auto` (or "auto"), a `Policy`, one of `Compression`, or one written
            for Horovod.
        backward_passes_per_step: backward passes that are summed up locally before an exchange.
        op: Average or Sum; Adasum only without compression.
        gradient_predivide_factor: splits the averaging before and after the sum; only for Average. Where sums are made
            in float32 by us the factors cancel, and the result is the average.
        num_groups: old name of `groups`.
        groups: gradients that go together: a number of groups, or lists of parameters.
        sparse_as_dense: make sparse gradients dense and compress them; else they travel as Horovod sends them.
        process_set: the ranks that take part.
        exchange: "two_phase", "allgather", "auto" for that of these two that sends fewer bytes, each of its
            collectives counted as 32 KiB more (with `Auto`: that is faster), "hierarchical": gradients are summed
            inside each host, and their sums exchanged compressed between hosts, or a
            `ParameterServer` ("parameter_server" for one with its defaults): a rank sums what all send it.
        min_numel: gradients with fewer elements are not compressed; those of float32 travel beside compressed ones.
        bucket_bytes: gradients share an exchange up to so many bytes (as float32), in the reverse order of the
            parameters; 0 gives each an exchange of its own, and small ones to Horovod's fused allreduce.
        adagrad: make the combined gradients AdaGrad's updates; `optimizer` is then plain SGD with its learning rate.
            No exchange by allgather then. Tell `set_loss_scale` before the first backward pass if losses
            are scaled. With one rank, and outside of the process set, it is applied to the rank's own gradients.

    Raises:
        ValueError: a setting out of its range.
        TypeError: `compression` is no compressor, or `adagrad` no AdaGrad.
        UnsupportedError: Adasum, another `op` than Average and Sum, or elastic runs with compression; `adagrad` with
            another `op`, with `Auto` or with exchange="allgather"; `Auto` with a parameter server, whose root is none
            of the ranks, or whose transport is not there.
        MismatchError: the ranks disagree; raised on all of them.
    """
    groups = num_groups if num_groups and groups is None else groups
    compression = resolved(compression, exchange)
    check_settings(
        compression, exchange, min_numel, bucket_bytes, op == hvd.Average, gradient_predivide_factor,
        backward_passes_per_step, groups, hvd.rocm_built(),
    )  # fmt: skip
    exchange = exchange_of(adagrad, exchange, compression)
    if adagrad is not None:
        refuse_other_ops(op, hvd.Average, hvd.Sum)
    horovods = route_of(compression)
    ours = exchanged(compression)
    named = list(named_parameters) if named_parameters is not None else None
    if op == hvd.Adasum and hvd.size() > 1:
        if ours is not None:
            raise UnsupportedError(
                f"op=Adasum with {ours!r} and exchange={exchange!r}: Adasum combines dense gradients pairwise. Use "
                'op=Average or op=Sum, or compression=hvd.Compression.fp16 and exchange="auto"'
            )
        return hvd.DistributedOptimizer(
            optimizer, named, horovods, backward_passes_per_step, op, process_set=process_set
        )
    takes_part = process_set.included() and process_set.size() > 1
    scale = 1.0 if ours is None else average_share(ours, op, hvd.Average, hvd.Sum, process_set.size() or 1)
    if takes_part:
        told = description(
            compression, op, _describe_parameters(optimizer, named), exchange=exchange, min_numel=min_numel,
            bucket_bytes=bucket_bytes, gradient_predivide_factor=gradient_predivide_factor,
            backward_passes_per_step=backward_passes_per_step,
            sparse_as_dense=sparse_as_dense, groups=_describe_groups(optimizer, groups),
            adagrad=adagrad,
        )  # fmt: skip
        require_agreement(told, process_set)
    _refuse_types(optimizer, named, adagrad)
    cls: Any = make_class(type(optimizer), _Overrides)
    wrapped: Any = cls(
        optimizer.param_groups, named, horovods, backward_passes_per_step, op, gradient_predivide_factor,
        groups, sparse_as_dense, process_set,
    )  # fmt: skip
    params = [p for group in wrapped.param_groups for p in group["params"]]
    wrapped._by_name = {wrapped._parameter_names[p]: p for p in params}
    wrapped._sent_itemsizes, wrapped._sparse_steps, wrapped._sparse_now = {}, Counter(), set()
    wrapped._horovods, wrapped._adagrad = horovods, adagrad
    wrapped._label = repr(compression) if isinstance(compression, Compressor | Auto | Policy) else describe(compression)
    if takes_part:
        # of a list, Horovod makes a group of each parameter that is in none of its groups
        formed = [g for g in wrapped._group_counts if len(g) > 1 or not isinstance(groups, list)]
        named_groups = [[wrapped._parameter_names[p] for p in group] for group in formed] or None
        # a frozen parameter never comes, and a bucket would wait for it
        tensors = [(name, p) for name, p in wrapped._by_name.items() if p in wrapped._requires_update]
        steered = isinstance(ours, Auto)
        routing = Routing(None if isinstance(ours, Auto) else ours, exchange, min_numel, bucket_bytes)
        wrapped._make_engine = partial(
            Engine, scale=scale, process_set=process_set, tensors=tensors, groups=named_groups, pays_debts=steered,
            adagrad=adagrad,
        )  # fmt: skip
        wrapped._chooses = isinstance(ours, Auto | Policy)
        if isinstance(ours, Auto):
            wrapped._steering = Steering(ours, described(tensors), routing, process_set)
            routing = wrapped._steering.routing
        wrapped._engine = wrapped._make_engine(routing)
        wrapped._begin_waiting()
        wrapped._begin_plain()
    elif adagrad is not None:
        wrapped._alone = Ledger(Routing(None), 1, 0, described(wrapped._by_name.items()), Bucket, adagrad=adagrad)
    return wrapped
