"""The end of an exchange: what no hook has handed over, what has arrived, and what users are told of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.engine import Ledger
from hvd_compress.errors import GradientError, MismatchError
from hvd_compress.torch._gradients.beginning import compare_beginnings
from hvd_compress.torch._gradients.engine import precondition
from hvd_compress.torch._gradients.sending import EXCHANGED, Sending
from hvd_compress.torch._gradients.staging import all_finite, sample_of
from hvd_compress.torch._gradients.waits import Wait, run_together

__all__ = ["Completing", "complete_steps"]

_RECIPE = (
    "Clip, unscale and log gradients after backward() where every parameter gets one; where some get none, call "
    "synchronize() first"
)


def _flat(keys: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the parameters that keys of Horovod's `_handles` stand for: a parameter, or a group of them."""
    for key in keys:
        yield from key if isinstance(key, tuple) else (key,)


class Completing(Sending):
    """Methods of `Overrides` that complete a step."""

    def _is_hooked(self) -> bool:
        """Whether backward passes tell this optimizer of their gradients."""
        return hasattr(self, "_members")

    def _refuse_while_open(self, what: str, kind: type[Exception]) -> None:
        if self._is_open:
            raise kind(
                f"{what} between loss.backward() and step() or synchronize(): gradients are being exchanged, since "
                "some parameters have got none yet. Call one of these first"
            )

    def _combining(self) -> Iterator[Wait]:
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
            self._stopped = problem
            raise MismatchError(problem) from error
        except BaseException:
            # not ready: it is for `load_state_dict` to give the step up
            self._given = {}
            raise

    def _combining_ranks(self) -> Iterator[Wait]:
        if self._engine is not None and not self._has_compared:
            yield from self._comparing()
        # told at the end: the step has to be the same on all ranks
        harms = self._harms()
        changed = self._changed_early()
        self._submit_missing_groups()
        self._ungroup()
        self._submit_missing()
        self._wait_first_where_others_would_meet()
        finite = True if self._engine is None else (yield from self._engine.waits())
        reduced = [handle for handle, _ in self._handles.values() if isinstance(handle, int)]
        if reduced:
            yield Wait(lambda: all(map(hvd.poll, reduced)))
        self._complete(finite, harms)
        if self._is_plain:
            self._plain_steps += 1
            self._sparse_steps.update(self._sparse_now)
            self._sparse_now.clear()
        if self._steering is not None and self._steering.end():
            self._count_plain()
            followed = self._make_engine(self._steering.routing)
            followed.inherit(self._known_engine())
            self._engine = followed
            self._begin_way()
        elif self._engine is not None and not self._is_plain:
            self._begin_plain()
        if changed is not None:
            self._warn_of_change(changed)

    def _wait_first_where_others_would_meet(self) -> None:
        """See `Wrapping.agree_again`: of what Horovod reduces, this is refused if another rank's parameters changed."""
        if self._engine is None or self._engine.buckets:
            return
        met = self._members.by_name.get(next(iter(self._engine.dense), ""))
        if met in self._handles:
            self._handles = {met: self._handles[met], **self._handles}

    def _comparing(self) -> Iterator[Wait]:
        """Let all ranks know which gradients are sparse, and tell the user if their parameters differ."""
        beginning = yield from compare_beginnings(
            self._members.by_name, self._has_loaded, self._wrapping.label, self.process_set
        )
        self._sparse_dims = beginning.sparse_dims
        self._has_compared, self._has_loaded = True, False
        self._begin_waiting()
        if beginning.unequal is not None:
            name, rank = beginning.unequal
            warnings.warn(
                f"parameter {name!r} of rank {rank} differs from that of rank 0, and will go on doing so: ranks "
                "exchange gradients only. Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the "
                "first step",
                stacklevel=2,
            )

    def _ungroup(self) -> None:
        """Turn a group's entry into one of each of its parameters."""
        if not self._group_counts:
            return
        for group in [g for g in self._handles if isinstance(g, tuple)]:
            handles, ctxs = self._handles[group]
            if ctxs is None:
                del self._handles[group]
                self._handles.update(zip(group, handles, strict=True))
        for group in self._group_counts:
            self._group_counts[group] = 0

    def _submit_missing(self) -> None:
        """Start what no hook has started, in the order of the parameters."""
        if self._adagrad is not None:
            self._leave_out_resting()
        sent = [key for key, (handle, _) in self._handles.items() if handle is not None]
        # of these, whose hooks are Horovod's, there may be many, and names take time
        if len(sent) == len(self._requires_update):
            return
        started = {self._parameter_names[p] for p in _flat(sent)}
        if self._engine is not None and self._waiting:
            started.update(self._engine.put_off)
        for name, p in self._members.by_name.items():
            if name in started:
                continue
            if p.grad is not None and not p.grad.is_sparse and 0 in p.grad.stride():
                # one memory for several elements, as `expand` makes it, cannot hold a result
                p.grad = p.grad.contiguous()
            self._handles[p] = self._allreduce_grad_async(p)
            # it has one now, if it had none
            self._given[name] = cast(torch.Tensor, p.grad)

    def _changed_early(self) -> str | None:
        """A tensor that was changed after fewer passes than a step may have, and so before its exchange."""
        if self._has_warned or self._engine is None or self._is_plain:
            return None
        for name, version in self._versions.items():
            gradient = self._members.by_name[name].grad
            if name not in self._given and gradient is not None and gradient._version != version:
                return name
        return None

    def _warn_of_change(self, name: str) -> None:
        self._has_warned = True
        warnings.warn(
            f"the gradient of {name!r} was changed after fewer than backward_passes_per_step="
            f"{self.backward_passes_per_step} passes, before its exchange: what earlier steps owe is added to it, and "
            "a clipped norm does not hold. Call synchronize() first; in Lightning, in on_before_optimizer_step(self, "
            "optimizer)",
            stacklevel=2,
        )

    def _leave_out_resting(self) -> None:
        """Go on without the tensors that are frozen now, in exchanges that were laid out with them."""
        engine = self._known_engine()
        for name in self._members.resting:
            if engine.exchanges(name):
                engine.start(name, None)

    def _submit_missing_groups(self) -> None:
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
            self._given.update((self._parameter_names[p], cast(torch.Tensor, p.grad)) for p in group)

    def _complete(self, finite: bool, harms: list[GradientError]) -> None:
        """Decide the whole step, when all is here: one value that is not finite takes all residuals back.

        In place of Horovod's `synchronize` (l. 255-308), whose loops would take as long as ours.
        """
        engine = self._engine
        owes = engine is not None and engine.owes
        results = {}
        for name, output in self._waited():
            # where nothing is owed, nothing depends on it
            finite = finite and (not owes or all_finite(output))
            if self._adagrad is not None and engine is not None:
                finite = precondition(engine, name, output) and finite
            results[name] = output
        if engine is not None:
            # plain steps are counted when somebody asks
            results |= {} if self._is_plain else engine.combine(keep=finite)
            engine.settle(keep=finite)
        for name, p in self._members.by_name.items():
            if p.grad is not results[name]:
                self._take_result(name, p, results[name])
        self._forget_handles()
        self._combined, self._is_open = self._given, False
        self._versions = {name: gradient._version for name, gradient in self._given.items()}
        if harms:
            # gradients are the combined ones all the same: replicas stay equal where the error is caught
            raise harms[0]

    def _forget_handles(self) -> None:
        # a dict takes over the hashes of a dict's keys, and calls `__hash__` of each tensor of a list
        handled = _flat(self._handles) if self._group_counts else self._handles
        self._allreduce_delay.update(dict.fromkeys(handled, self.backward_passes_per_step))
        self._handles.clear()

    def _waited(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for all that Horovod has reduced itself; yields names and sums."""
        for key, (handle, ctx) in self._handles.items():
            if handle is EXCHANGED:
                continue
            if isinstance(key, tuple):
                for p, output, its_ctx in zip(key, hvd.synchronize(handle), ctx, strict=True):
                    yield self._parameter_names[p], self._compression.decompress(output, its_ctx)
                continue
            name = self._parameter_names[key]
            if callable(handle):
                # sparse gradients travel as they are
                yield name, handle()
            else:
                yield name, self._dense_compression(name).decompress(hvd.synchronize(handle), ctx)

    def _take_result(self, name: str, p: torch.Tensor, output: torch.Tensor) -> None:
        """Make a combined gradient what `.grad` is, in its memory where that can hold it."""
        gradient = p.grad
        if gradient is None:
            p.grad = output
        elif output.is_sparse:
            gradient.zero_().add_(output)
        elif gradient.is_sparse:
            gradient.zero_().add_(output.to_sparse(gradient.sparse_dim()))
        elif self._engine is not None and self._engine.exchanges(name):
            # an exchange writes to the gradient, unless its memory is that of other gradients too, or is gone
            p.grad = output
        else:
            gradient.copy_(output)

    def _harms(self) -> list[GradientError]:
        """What to tell the user of gradients that are not what they were when they were handed over."""
        given, versions = self._given, self._versions
        changed = {
            name
            for name, p in self._members.by_name.items()
            if name in given
            and (p.grad is not given[name] or p.grad._version != versions[name])
            and not self._is_written(name, given[name], p.grad)
        }
        for name, (place, sample) in self._samples.items():
            # one that was given other memory gets its result there
            if given[name].data_ptr() == place and not torch.equal(sample, sample_of(given[name])):
                changed.add(name)
        return [self._harm(name, p.grad) for name, p in self._members.by_name.items() if name in changed]

    def _is_written(self, name: str, given: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Whether it may be Horovod that has written to this gradient.

        Horovod may copy its result into a gradient on a GPU as soon as it is there, and torch counts that as one write.
        """
        goes_dense = self._engine is None or not self._engine.exchanges(name)
        if not goes_dense or gradient is not given or given.is_cpu:
            return False
        return bool(given._version == self._versions[name] + 1)

    def _harm(self, name: str, gradient: torch.Tensor | None) -> GradientError:
        if gradient is None:
            return GradientError(
                f"the gradient of {name!r} was cleared while it was exchanged. Clear gradients after step(). {_RECIPE}"
            )
        return GradientError(
            f"the gradient of {name!r} was changed while it was exchanged, and the change would be lost. {_RECIPE}. "
            "Register hooks that change gradients before the optimizer is wrapped"
        )

    def _wait_for_dense(self) -> None:
        """Wait for Horovod's own allreduces: it forgets them here, and then refuses their names in the next step.

        Those that fail are over, too: an elastic run restores its state after a step that has failed.
        """
        self._ungroup()
        for handle, _ in self._handles.values():
            with suppress(HorovodInternalError):
                if callable(handle):
                    handle()
                elif handle is not None and handle is not EXCHANGED:
                    hvd.synchronize(handle)

    def _precondition_alone(self, ledger: Ledger[Any]) -> None:
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


def complete_steps(optimizers: Iterable[Completing]) -> None:
    """Complete the exchanges of these optimizers' steps, each as what it waits for arrives."""
    with torch.no_grad():
        run_together([optimizer._combining() for optimizer in optimizers])
