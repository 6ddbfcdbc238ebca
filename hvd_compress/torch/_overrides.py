"""The methods that `DistributedOptimizer` lays over Horovod's: what backward passes call, and what users call.

A step on one rank: its first gradient opens it; hooks hand gradients over as they come; when all are here the exchange
is completed, at the end of the backward pass or in `synchronize` or `step`; `step` or `zero_grad` closes it.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.engine import Bucket, Counters, Ledger, Routing, empty_state, refuse_residuals
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.exchange import AdaGrad
from hvd_compress.torch._beginning import compare_beginnings
from hvd_compress.torch._bucket import Bucket as TorchBucket
from hvd_compress.torch._collectives import sparse_allreduce_async
from hvd_compress.torch._engine import Engine, precondition, with_tensors
from hvd_compress.torch._horovod import HorovodOptimizer, form_groups
from hvd_compress.torch._members import Members
from hvd_compress.torch._owners import refuse_retired
from hvd_compress.torch._scaling import told_by_scaler
from hvd_compress.torch._staging import all_finite
from hvd_compress.torch._steering import Steering, left_out
from hvd_compress.torch._waits import Wait, run_together
from hvd_compress.torch._wrapping import Wrapping, in_use
from hvd_compress.torch.compression import dense_route

__all__ = ["Overrides"]

_RECIPE = (
    "Clip, unscale and log gradients after backward() where every parameter gets one; where some get none, call "
    "synchronize() first"
)

_NEEDS_NO_CONTEXT = (
    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). With hvd_compress "
    "this is right, and synchronize() had nothing to do, since backward() had combined the gradients; horovod.torch "
    "would exchange them a second time"
)


class Overrides:
    """Methods laid over Horovod's `_DistributedOptimizer`; see `_horovod.make_class`."""

    _engine: Engine | None = None
    _steering: Steering | None = None
    _alone: Ledger[Bucket] | None = None
    """With AdaGrad, where this rank exchanges nothing."""
    _itself: weakref.ref[Any]
    """See `_horovod.make_class`; only of the instance."""
    _wrapping: Wrapping
    _members: Members
    _is_open = False
    """Whether gradients of a step are coming, or being exchanged."""
    _combined: dict[str, torch.Tensor] | None = None
    """The gradients of a step whose exchange is complete, until the step is made or given up."""
    _given: dict[str, torch.Tensor]
    """The gradients of this step that have come."""
    _versions: dict[str, int]
    """How often each of them had been written to by then."""
    _has_warned = False
    """Whether the user was told of gradients that were changed before the last of their passes."""
    _is_queued = False
    """Whether the end of this backward pass will be told."""
    _has_compared = False
    """Whether ranks know which gradients of each other are sparse; nothing is sent before."""
    _sparse_dims: dict[str, int]
    """Of the tensors that all ranks send sparse."""
    _chooses = False
    _is_plain = False
    """Whether all tensors go through Horovod's allreduce in one way."""
    _plain_steps = 0
    """Plain steps that are not among the counters yet: counting in every hook would make short steps longer."""
    _sparse_steps: Counter[str]
    """In how many of these a tensor was sparse, and so not reduced."""
    _sparse_now: set[str]
    """Those that are sparse in the step that is not complete yet; it may be abandoned."""
    _adagrad: AdaGrad | None = None
    _waiting: dict[str, TorchBucket] = {}  # noqa: RUF012 - replaced, never changed
    """The bucket of each tensor whose gradient a hook only puts there; Horovod's dicts know nothing of it then."""
    _new: dict[str, torch.Tensor] = {}  # noqa: RUF012 - replaced, never changed
    """Parameters that take gradients since this step began."""
    _retired = False
    """Whether another optimizer has taken over the parameters."""
    _horovods: Any
    _make_engine: Callable[[Routing], Engine]
    _sent_itemsizes: dict[tuple[Any, torch.dtype], int]

    # -- what the backward pass calls ----------------------------------------------------------------------------

    def _register_hooks(self: Any) -> None:
        self._given, self._versions, self._sparse_dims = {}, {}, {}
        self._members = Members(self._parameter_names, partial(_on_gradient, weakref.ref(self)))
        self._take_members()

    def _take_members(self: Any) -> dict[str, torch.Tensor]:
        """Take over which parameters take gradients now; returns those that never did so before."""
        new: dict[str, torch.Tensor] = self._members.take(self.param_groups)
        self._requires_update = set(self._members.by_name.values())
        for p in self._requires_update:
            self._allreduce_delay.setdefault(p, self.backward_passes_per_step)
        if self._groups is not None:
            self._p_to_group.clear()
            self._group_counts.clear()
            form_groups(self)
        return new

    def _take_gradient(self: Any, name: str, p: Any) -> None:
        """What Horovod's hook (l. 226-251) does, in a fraction of the time for tensors that wait for others."""
        if not self._is_open and self._members.is_of(name, p, self.param_groups):
            self._open(name, p)
        if name not in self._members.by_name or not self._is_open:
            # a parameter that was taken out of the groups: no step begins with it
            return
        gradient = p.grad
        bucket = self._waiting.get(name)
        left = None if bucket is None else bucket.put_off(name, gradient)
        if left is None:
            self._take_slowly(name, p)
            return
        if self._steering is not None:
            self._steering.begin()
        self._given[name], self._versions[name] = gradient, gradient._version
        if not self._is_queued or len(self._given) == len(self._requires_update):
            self._queue_end()
        if left == 0:
            self._engine.start_together(bucket)
        elif left % _TENSORS_PER_PROGRESS == 0:
            self._engine.progress()

    def _take_slowly(self: Any, name: str, p: Any) -> None:
        if name in self._given:
            self._refuse_pass(name)
        if p.grad.requires_grad:
            raise GradientError(
                f"the gradient of {name!r} has a graph of its own, as backward(create_graph=True) makes it. Use "
                "torch.autograd.grad(..., create_graph=True) for a penalty, and loss.backward() for the step"
            )
        self._make_hook(p)()
        if self._allreduce_delay[p] == 0:
            self._given[name], self._versions[name] = p.grad, p.grad._version
            self._queue_end()
        elif not self._has_warned and not p.grad._is_view():
            self._versions[name] = p.grad._version

    def _refuse_pass(self: Any, name: str) -> NoReturn:
        raise GradientError(
            f"gradient of {name!r} was computed more than backward_passes_per_step={self.backward_passes_per_step} "
            "times before step() or zero_grad(). Call one of them after each backward pass, also after one that has "
            "failed, or increase backward_passes_per_step"
        )

    def _queue_end(self: Any) -> None:
        """Let this backward pass call `_on_backward_end`; twice does no harm."""
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self._is_queued = True

    def _on_backward_end(self: Any) -> None:
        """Complete the exchange if all gradients of this rank are here, so that `.grad` is what is to be used."""
        self._is_queued = False
        for name, p in self._new_members():
            # torch takes hooks of parameters that take gradients only, so that those of this pass were not told
            self._take_gradient(name, p)
        for name, gradient in self._given.items():
            # views of one buffer count their writes together
            if gradient._is_view():
                self._versions[name] = gradient._version
        if self._is_ready():
            # others, of which this pass has computed all gradients too, and this one, in the order of all ranks
            run_together([other._combining() for other in in_use() if other._is_ready()])

    def _new_members(self: Any) -> list[tuple[str, torch.Tensor]]:
        """Parameters that were hooked in the middle of this pass, when it had computed their gradients already."""
        new, self._new = self._new, {}
        return [(name, p) for name, p in new.items() if p.grad is not None and name not in self._given]

    def _is_ready(self: Any) -> bool:
        """Whether all gradients of this rank have come."""
        return self._is_open and len(self._given) == len(self._requires_update)

    def _open(self: Any, name: str | None = None, p: torch.Tensor | None = None) -> None:
        """Begin a step, whose first gradient is that of parameter `p`; now and then a collective."""
        if self._retired:
            refuse_retired()
        if name is not None and p is not None and self._was_combined(name, p.grad):
            # what another pass has added is this rank's alone
            self._refuse_pass(name)
        self._close()
        if self._members.have_changed(self.param_groups):
            self._renew()
        self._is_open, self._is_queued = True, False

    def _was_combined(self: Any, name: str, gradient: Any) -> bool:
        """Whether a gradient is a combined one to which a pass has added, and nobody has written in between."""
        if self._combined is None or self._combined.get(name) is not gradient:
            return False
        # a GradScaler may have skipped the step, and the user have set the gradient to zero
        return bool(gradient._version == self._versions[name] + 1)

    def _close(self: Any) -> None:
        """The step is made, or given up."""
        self._is_open, self._combined, self._synchronized = False, None, False
        self._given, self._versions, self._new = {}, {}, {}

    def _renew(self: Any) -> None:
        """Parameters were frozen, unfrozen, added or converted: let all ranks compare, and go on; a collective call."""
        engine = self._engine
        self._count_plain()
        has_grown = bool(set(self._members.names) - set(self._allreduce_delay))
        self._new = self._take_members()
        if engine is None:
            return
        if self._adagrad is not None:
            self._wrapping.agree_again(self, engine)
            self._refuse_growth(engine, has_grown)
            return
        self._wrapping.agree_again(self, engine)
        self._has_compared = False
        self._wrapping.equip(self)
        self._engine.inherit(engine)
        self._begin_way()

    def _refuse_growth(self: Any, engine: Engine, has_grown: bool) -> None:
        """With AdaGrad, tensors may be left out of exchanges, but none can join them."""
        new = [name for name in self._members.by_name if not (engine.exchanges(name) or name in engine.dense)]
        if new or has_grown:
            raise UnsupportedError(
                f"{self._adagrad!r} with parameter {new[0] if new else 'groups'!r} added or unfrozen after wrapping: "
                "accumulators lie with the owners of elements, which would change. Save compression_state_dict() of "
                "all ranks, wrap the optimizer again, and load what hvd_compress.feedback.redistribute returns"
            )

    # -- how a gradient is handed over ---------------------------------------------------------------------------

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Any, Any]:
        if self._steering is not None:
            self._steering.begin()
        if self._alone is not None or (self._engine is not None and not self._has_compared):
            return _NOT_SENT
        name = self._parameter_names[p]
        goes_sparse = not self.sparse_as_dense and self._goes_sparse(name, p.grad)
        if p.grad is None:
            # another rank may have a gradient: all ranks issue the same collectives
            p.grad = self._no_gradient(name, p) if goes_sparse else torch.zeros_like(p)
        elif goes_sparse and not p.grad.is_sparse:
            p.grad = p.grad.to_sparse(self._sparse_dims[name])
        if self._engine is None or self._is_plain:
            return self._sparse_gathered(p) if goes_sparse else self._summed(p)
        if self._adagrad is not None:
            self._check_dense(name, p.grad)
        if self._engine.exchanges(name):
            if not goes_sparse:
                self._engine.start(name, p.grad.to_dense() if p.grad.is_sparse else p.grad)
                return _IN_EXCHANGE
            self._engine.start(name, None)
        else:
            self._engine.progress()
        self._compression = self._dense_compression(name)
        if goes_sparse:
            return self._sparse_gathered(p)
        self._count_dense(name, p.grad)
        p.grad = self._engine.with_debt(name, p.grad)
        return self._summed(p)

    def _goes_sparse(self: Any, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether a tensor is gathered, not summed: the same on all ranks, whatever this one's gradient is."""
        if self._engine is None:
            # as Horovod does
            return gradient is not None and gradient.is_sparse
        return name in self._sparse_dims

    def _no_gradient(self: Any, name: str, p: torch.Tensor) -> torch.Tensor:
        dims = self._sparse_dims[name]
        indices = torch.zeros((dims, 0), dtype=torch.int64, device=p.device)
        values = torch.zeros((0, *p.shape[dims:]), dtype=p.dtype, device=p.device)
        return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)

    def _summed(self: Any, p: Any) -> tuple[Any, Any]:
        """Horovod's allreduce of a gradient (l. 187-214), under a name of this optimizer's own."""
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        sent, ctx = self._compression.compress(gradient)
        factor = self.gradient_predivide_factor if self.op == hvd.Average else 1.0
        handle = hvd.allreduce_async_(
            sent, name=self._parameter_names[p] + self._wrapping.label, op=self.op, prescale_factor=1.0 / factor,
            postscale_factor=factor, process_set=self.process_set,
        )  # fmt: skip
        return handle, ctx

    def _sparse_gathered(self: Any, p: Any) -> tuple[Any, Any]:
        name = self._parameter_names[p]
        self._sparse_now.add(name)
        return sparse_allreduce_async(p.grad, name + self._wrapping.label, self.op, self.process_set), None

    def _dense_compression(self: Any, name: str) -> Any:
        """How a tensor goes through Horovod's allreduce; Horovod itself knows one way for all."""
        if not self._chooses:
            return self._horovods
        return dense_route(self._engine.routing.compressor_of(name))

    def _grouped_allreduce_grad_async(self: Any, ps: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """A group is a bucket of ours, or one operation of Horovod's (l. 216-224) where nothing is compressed."""
        is_horovods = self._engine is None or self._is_plain
        if not is_horovods or not self._is_group_dense(ps):
            return [self._allreduce_grad_async(p) for p in ps], None
        sent, ctxs = zip(*[self._compression.compress(p.grad) for p in ps], strict=True)
        name = self._parameter_names[ps[0]] + self._wrapping.label
        return hvd.grouped_allreduce_async_(list(sent), name=name, op=self.op, process_set=self.process_set), ctxs

    def _is_group_dense(self: Any, ps: tuple[Any, ...]) -> bool:
        if self._alone is not None or (self._engine is not None and not self._has_compared):
            return False
        return not any(self._goes_sparse(self._parameter_names[p], p.grad) or p.grad.is_sparse for p in ps)

    def _check_dense(self: Any, name: str, gradient: torch.Tensor) -> None:
        if gradient.is_sparse and not self.sparse_as_dense:
            raise UnsupportedError(
                f"{self._adagrad!r} with a sparse gradient of {name!r}: its elements would need accumulators of their "
                "own on all ranks. Use sparse_as_dense=True"
            )

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
                self._count_dense(name, self._members.by_name[name], steps - sparse[name])

    # -- which way the next step goes ----------------------------------------------------------------------------

    def _begin_way(self: Any) -> None:
        """Between steps, with an engine that is new, or whose debts have changed: find out what hooks are to do."""
        self._begin_plain()
        self._begin_waiting()

    def _begin_plain(self: Any) -> None:
        """Find out whether the next step is Horovod's own."""
        if not self._chooses:
            self._is_plain = not self._engine.owes
        else:
            # of groups that Horovod sends, `_steering` would not see when the first one starts
            way = self._engine.only_way if self._groups is None else None
            self._is_plain = way is not None
            if way is not None:
                self._compression = dense_route(way)

    def _begin_waiting(self: Any) -> None:
        """Find out which gradients only wait for others."""
        is_each_its_own = self._groups is None and self.backward_passes_per_step == 1 and self._has_compared
        self._waiting = self._engine.waiting() if is_each_its_own else {}
        for name in self._sparse_dims if not self.sparse_as_dense else ():
            self._waiting.pop(name, None)

    # -- what the user calls -------------------------------------------------------------------------------------

    def synchronize(self: Any) -> None:
        """Wait until the gradients of all ranks are combined in `p.grad`.

        Where all parameters have got gradients, they are when `backward()` returns, and this does nothing.
        """
        # where it waited, it was needed, here as with Horovod
        self._synchronized = self._combined is not None
        self._combine()

    def _combine(self: Any) -> None:
        if self._combined is not None or not self._is_hooked():
            return
        if not self._is_open:
            # no gradient has come: other ranks may have some
            self._open()
        run_together([self._combining()])

    @property
    def _step_supports_amp_scaling(self: Any) -> bool:
        """Whether a GradScaler is to leave gradients alone: what it writes leaves no trace (their versions stay)."""
        return bool(self._is_open)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self: Any, value: bool) -> None:
        """A fused optimizer inside says so of itself; scales are taken off before its step."""

    def _refuse_early_look(self: Any, told: dict[str, Any]) -> None:
        """Raise GradientError if a GradScaler, which has told this, has seen gradients that were being exchanged."""
        if told and self._is_open:
            # other ranks need the exchange
            self._combine()
            raise GradientError(
                "scaler.step(opt) while gradients are exchanged, since some parameters have got none: what the scaler "
                "saw of them, or divided, are not the combined ones. Call opt.synchronize() after backward(), before "
                "scaler.unscale_(opt) and scaler.step(opt)"
            )

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients of all ranks and update; a closure's gradients are combined after each call of it."""
        with told_by_scaler(self) as told:
            self._refuse_early_look(told)
        if closure is None:
            self._combine_for_step()
            return super(self.__class__, self).step()  # type: ignore[misc]

        def combined() -> Any:
            loss = closure()
            self._combine_for_step()
            return loss

        return super(self.__class__, self).step(combined)  # type: ignore[misc]

    def _combine_for_step(self: Any) -> None:
        if self._should_synchronize:
            if self._synchronized:
                # a kind that Python hides unless it is asked for: this is right here, and a habit of many
                warnings.warn(_NEEDS_NO_CONTEXT, PendingDeprecationWarning, stacklevel=4)
            self._combine()
        elif self._is_open:
            raise GradientError(
                "step() inside of skip_synchronize() while gradients are exchanged: call synchronize() before"
            )
        self._close()

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clear the gradients, as `torch.optim.Optimizer.zero_grad` does.

        Raises:
            GradientError: gradients are still being exchanged.
        """
        self._refuse_while_open("zero_grad()", GradientError)
        self._close()
        super(self.__class__, self).zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """As Horovod's.

        Raises:
            GradientError: gradients are being exchanged.
        """
        self._refuse_while_open("set_backward_passes_per_step()", GradientError)
        HorovodOptimizer.set_backward_passes_per_step(self, passes)
        if self._engine is not None:
            self._begin_waiting()

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        """Load the optimizer's own state; residuals have `load_compression_state_dict`."""
        self._give_up()
        HorovodOptimizer.load_state_dict(self, *args, **kwargs)

    def _give_up(self: Any) -> None:
        """Wait for what is in flight, and forget the step; all ranks do so at the same point."""
        if self._engine is not None:
            self._sparse_now.clear()
            self._wait_for_dense()
            self._engine.abandon()
        if self._steering is not None:
            self._steering.abandon()
        self._close()

    def _owned(self: Any) -> set[int]:
        """Which parameters this one exchanges, by their ids."""
        return set(map(id, self._requires_update))

    def retire(self: Any) -> None:
        """Another optimizer takes over the parameters: let them go, and refuse to go on."""
        if self._is_hooked():
            self._give_up()
            self._members.release()
        self._retired = True

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
            return {"compressor": self._wrapping.name, "total": Counters().report(0.0), "tensors": {}}
        chosen = {} if self._steering is None else {"auto": self._steering.report()}
        with left_out(self._steering):
            self._count_plain()
            return {"compressor": self._wrapping.name, **self._engine.stats(), **chosen}

    def compression_state_dict(self: Any) -> dict[str, Any]:
        """The residuals of this rank, to be saved per rank: it is not the same on all ranks.

        Returns:
            A dict of tensors and plain values that `torch.save` takes; see `hvd_compress.feedback`.
        """
        self._refuse_while_open("compression_state_dict()", StateError)
        if self._engine is None:
            return empty_state() if self._alone is None else with_tensors(self._alone.state_dict())
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
        self._refuse_while_open("load_compression_state_dict()", StateError)
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
        self._refuse_while_open("set_loss_scale()", StateError)
        holder = self._engine or self._alone
        if holder is not None:
            holder.set_loss_scale(float(loss_scale))

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a DistributedOptimizer cannot be copied or pickled: it exchanges the gradients of the parameters that it "
            "was made for. Save state_dict() and compression_state_dict(), and wrap an optimizer of the other model"
        )

    # -- the parts of synchronize --------------------------------------------------------------------------------

    def _is_hooked(self: Any) -> bool:
        """Whether backward passes tell this optimizer of their gradients."""
        return hasattr(self, "_members")

    def _refuse_while_open(self: Any, what: str, kind: type[Exception]) -> None:
        if self._is_open:
            raise kind(
                f"{what} between loss.backward() and step() or synchronize(): gradients are being exchanged, since "
                "some parameters have got none yet. Call one of these first"
            )

    @torch.no_grad()
    def _combining(self: Any) -> Iterator[Wait]:
        """Complete the exchange of a step, after which `.grad` is the combined gradient: yields what is waited for."""
        try:
            if self._alone is not None:
                self._precondition_alone(self._alone)
                self._ungroup()
                self._forget_handles()
                self._combined, self._is_open = self._given, False
                self._versions = {name: gradient._version for name, gradient in self._given.items()}
            else:
                yield from self._combining_ranks()
        except HorovodInternalError as error:
            # an elastic run restores the optimizer's state, which waits for what is in flight: nothing is any more
            self._handles.clear()
            self._sparse_now.clear()
            self._close()
            if "Mismatched" not in str(error):
                raise
            problem = (
                "the ranks are not at the same point of their programs: one exchanges gradients, another one something "
                f"else. Horovod says: {error} All ranks must freeze, unfreeze and add parameters before the same step, "
                "use optimizers wrapped with the same settings, and make the same number of steps before join()."
            )
            self._wrapping.on_refusal(problem)
            raise MismatchError(problem) from error
        except BaseException:
            # not ready: it is for `load_state_dict` to give the step up
            self._given = {}
            raise

    def _combining_ranks(self: Any) -> Iterator[Wait]:
        if self._engine is not None and not self._has_compared:
            yield from self._comparing()
        # told at the end: the step has to be the same on all ranks
        harms = {name: harm for name, p in self._members.by_name.items() if (harm := self._harm(name, p.grad))}
        changed = self._changed_early()
        self._submit_missing_groups()
        self._ungroup()
        self._submit_missing()
        self._wait_first_where_others_would_meet()
        finite = True if self._engine is None else (yield from self._engine.waits())
        for handle, _ in list(self._handles.values()):
            if isinstance(handle, int):
                yield Wait(partial(hvd.poll, handle))
        self._complete(finite, harms)
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
            self._begin_way()
        elif self._engine is not None and not self._is_plain:
            self._begin_plain()
        if changed is not None:
            self._warn_of_change(changed)

    def _wait_first_where_others_would_meet(self: Any) -> None:
        """See `Wrapping.agree_again`: of what Horovod reduces, this is refused if another rank's parameters changed."""
        if self._engine is None or self._engine.buckets:
            return
        met = self._members.by_name.get(next(iter(self._engine.dense), ""))
        if met in self._handles:
            self._handles = {met: self._handles[met], **self._handles}

    def _comparing(self: Any) -> Iterator[Wait]:
        """Let all ranks know which gradients are sparse, and tell the user if their parameters differ."""
        beginning = yield from compare_beginnings(self._members.by_name, self._wrapping.label, self.process_set)
        self._sparse_dims = beginning.sparse_dims
        self._has_compared = True
        self._begin_waiting()
        if beginning.unequal is not None:
            name, rank = beginning.unequal
            warnings.warn(
                f"parameter {name!r} of rank {rank} differs from that of rank 0, and will go on doing so: ranks "
                "exchange gradients only. Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the "
                "first step",
                stacklevel=2,
            )

    def _ungroup(self: Any) -> None:
        """Turn a group's entry into one of each of its parameters."""
        for group in [g for g in self._handles if isinstance(g, tuple)]:
            handles, ctxs = self._handles[group]
            if ctxs is None:
                del self._handles[group]
                self._handles.update(zip(group, handles, strict=True))
        for group in self._group_counts:
            self._group_counts[group] = 0

    def _submit_missing(self: Any) -> None:
        """Start what no hook has started, in the order of the parameters."""
        started = set(self._engine.put_off) if self._waiting else set()
        for p, (handle, _) in self._handles.items():
            if handle is not None:
                started.update(map(self._parameter_names.get, p if isinstance(p, tuple) else (p,)))
        if self._adagrad is not None:
            self._leave_out_resting()
        if len(started) == len(self._requires_update):
            return
        for name, p in self._members.by_name.items():
            if name in started:
                continue
            if p.grad is not None and not p.grad.is_sparse and 0 in p.grad.stride():
                # one memory for several elements, as `expand` makes it, cannot hold a result
                p.grad = p.grad.contiguous()
            self._handles[p] = self._allreduce_grad_async(p)
            self._given[name] = p.grad

    def _changed_early(self: Any) -> str | None:
        """A tensor that was changed after fewer passes than a step may have, and so before its exchange."""
        if self._has_warned or self._engine is None or self._is_plain:
            return None
        for name, version in self._versions.items():
            gradient = self._members.by_name[name].grad
            if name not in self._given and gradient is not None and gradient._version != version:
                return name
        return None

    def _warn_of_change(self: Any, name: str) -> None:
        self._has_warned = True
        warnings.warn(
            f"the gradient of {name!r} was changed after fewer than backward_passes_per_step="
            f"{self.backward_passes_per_step} passes, before its exchange: what earlier steps owe is added to it, and "
            "a clipped norm does not hold. Call synchronize() first; in Lightning, in on_before_optimizer_step(self, "
            "optimizer)",
            stacklevel=2,
        )

    def _leave_out_resting(self: Any) -> None:
        """Go on without the tensors that are frozen now, in exchanges that were laid out with them."""
        for name in self._members.resting:
            if self._engine.exchanges(name):
                self._engine.start(name, None)

    def _submit_missing_groups(self: Any) -> None:
        """Start the groups in which a tensor got no gradient, where all is Horovod's own.

        Its `synchronize` (l. 259-271) would send their tensors one by one, and ranks that have all gradients the group:
        each would wait for the other for ever.
        """
        if not (self._engine is None or self._is_plain):
            return
        for group in self._group_counts:
            if group in self._handles and self._handles[group][1] is not None:
                continue
            if any(self._goes_sparse(self._parameter_names[p], p.grad) for p in group):
                continue
            for p in group:
                self._handles.pop(p, None)
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                elif p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
            self._handles[group] = self._grouped_allreduce_grad_async(group)
            self._given.update((self._parameter_names[p], p.grad) for p in group)

    def _complete(self: Any, finite: bool, harms: dict[str, GradientError]) -> None:
        """Decide the whole step, when all is here: one value that is not finite takes all residuals back.

        In place of Horovod's `synchronize` (l. 255-308), whose loops would take as long as ours.
        """
        engine = self._engine
        owes = engine is not None and engine.owes
        results = {}
        for p, output in self._waited():
            # where nothing is owed, nothing depends on it
            finite = finite and (not owes or all_finite(output))
            if self._adagrad is not None:
                finite = precondition(engine, self._parameter_names[p], output) and finite
            results[self._parameter_names[p]] = output
        if engine is not None:
            # plain steps are counted when somebody asks
            results |= {} if self._is_plain else engine.combine(keep=finite)
            engine.settle(keep=finite)
        for name, p in self._members.by_name.items():
            if p.grad is None:
                p.grad = results[name]
            self._take_result(name, p.grad, results[name])
        self._forget_handles()
        self._combined, self._is_open = self._given, False
        self._versions = {name: gradient._version for name, gradient in self._given.items()}
        if harms:
            # gradients are the combined ones all the same: replicas stay equal where the error is caught
            raise next(iter(harms.values()))

    def _forget_handles(self: Any) -> None:
        # of dicts with the same keys: each look-up of a tensor is a call of its `__hash__`
        handled = [p for key in self._handles for p in (key if isinstance(key, tuple) else (key,))]
        self._allreduce_delay.update(dict.fromkeys(handled, self.backward_passes_per_step))
        self._handles.clear()

    def _waited(self: Any) -> Any:
        """(parameter, sum) of all that Horovod has reduced itself."""
        for key, (handle, ctx) in self._handles.items():
            if handle is _EXCHANGED:
                continue
            if isinstance(key, tuple):
                for p, output, its_ctx in zip(key, hvd.synchronize(handle), ctx, strict=True):
                    yield p, self._compression.decompress(output, its_ctx)
            elif callable(handle):
                # sparse gradients travel as they are
                yield key, handle()
            else:
                compression = self._dense_compression(self._parameter_names[key])
                yield key, compression.decompress(hvd.synchronize(handle), ctx)

    def _take_result(self: Any, name: str, gradient: Any, output: torch.Tensor) -> None:
        """Make a combined gradient what `.grad` is: the same tensor, in its memory where others may see that."""
        if gradient is output:
            return
        if output.is_sparse:
            gradient.zero_().add_(output)
        elif gradient.is_sparse:
            gradient.zero_().add_(output.to_sparse(gradient.sparse_dim()))
        elif self._engine is not None and self._engine.exchanges(name):
            # memory of this package's, or what nobody but `.grad` refers to
            gradient.set_(output)
        else:
            gradient.copy_(output)

    def _harm(self: Any, name: str, gradient: torch.Tensor | None) -> GradientError | None:
        """What to tell the user of a gradient that is not what it was when it was handed over."""
        given = self._given.get(name)
        if given is None:
            return None
        if gradient is None:
            return GradientError(
                f"the gradient of {name!r} was cleared while it was exchanged. Clear gradients after step(). {_RECIPE}"
            )
        if gradient is given and gradient._version == self._versions[name]:
            return None
        return GradientError(
            f"the gradient of {name!r} was changed while it was exchanged, and the change would be lost. {_RECIPE}. "
            "Register hooks that change gradients before the optimizer is wrapped"
        )

    def _wait_for_dense(self: Any) -> None:
        """Wait for Horovod's own allreduces: it forgets them here, and then refuses their names in the next step.

        Those that fail are over, too: an elastic run restores its state after a step that has failed.
        """
        self._ungroup()
        for handle, _ in self._handles.values():
            with suppress(HorovodInternalError):
                if callable(handle):
                    handle()
                elif handle is not None and handle is not _EXCHANGED:
                    hvd.synchronize(handle)

    def _precondition_alone(self: Any, ledger: Ledger[Bucket]) -> None:
        """AdaGrad where nothing is exchanged: the gradients of this rank are the combined ones."""
        finite = True
        for name, p in self._members.by_name.items():
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

_NOT_SENT = None, None
"""The entry of a gradient in `_handles` that `_submit_missing` will send."""
