"""A step from its first gradient on: what backward passes call, and when the step opens and closes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch

from hvd_compress.errors import GradientError, MismatchError, UnsupportedError
from hvd_compress.torch._gradients.completing import Completing, complete_steps
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._gradients.members import Members
from hvd_compress.torch._gradients.owners import refuse_retired
from hvd_compress.torch._gradients.staging import sample_of
from hvd_compress.torch._gradients.wrapping import in_use
from hvd_compress.torch._horovod import form_groups

__all__ = ["Backward"]


class Backward(Completing):
    """Methods of `Overrides` that backward passes call."""

    def _register_hooks(self) -> None:
        self._given, self._versions, self._samples, self._sparse_dims = {}, {}, {}, {}
        self._members = Members(self._parameter_names, partial(_on_gradient, weakref.ref(self)))
        self._take_members()

    def _take_members(self) -> dict[str, torch.Tensor]:
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

    def _take_gradient(self, name: str, p: Any) -> None:
        """What Horovod's hook (l. 226-251) does, in a fraction of the time for tensors that wait for others."""
        if not self._is_open and self._members.is_of(name, p, self.param_groups):
            self._open(name, p)
        if name not in self._members.by_name or not self._is_open:
            # a parameter that was taken out of the groups: no step begins with it
            return
        gradient, engine, bucket = p.grad, self._engine, self._waiting.get(name)
        left = None if bucket is None else bucket.put_off(name, gradient)
        if bucket is None or left is None or engine is None:
            self._take_slowly(name, p)
            return
        if self._steering is not None:
            self._steering.begin()
        self._given[name], self._versions[name] = gradient, gradient._version
        if self._queued_in != current_pass() or len(self._given) == len(self._requires_update):
            self._queue_end()
        if left == 0:
            engine.start_together(bucket)
        elif left % _TENSORS_PER_PROGRESS == 0:
            engine.progress()

    def _take_slowly(self, name: str, p: Any) -> None:
        if name in self._given:
            self._refuse_pass(name)
        gradient = p.grad
        if gradient.requires_grad:
            raise GradientError(
                f"the gradient of {name!r} has a graph of its own, as backward(create_graph=True) makes it. Use "
                "torch.autograd.grad(..., create_graph=True) for a penalty, and loss.backward() for the step"
            )
        self._make_hook(p)()
        if self._allreduce_delay[p] == 0:
            # handing it over may have replaced it
            self._given[name], self._versions[name] = p.grad, p.grad._version
            if self._queued_in != current_pass() or len(self._given) == len(self._requires_update):
                self._queue_end()
        elif not self._has_warned and not gradient._is_view():
            self._versions[name] = gradient._version

    def _refuse_pass(self, name: str) -> NoReturn:
        raise GradientError(
            f"gradient of {name!r} was computed more than backward_passes_per_step={self.backward_passes_per_step} "
            "times before step() or zero_grad(). Call one of them after each backward pass, also after one that has "
            "failed, or increase backward_passes_per_step"
        )

    def _queue_end(self) -> None:
        """Let this backward pass call `_on_backward_end`; with the first gradient, and again with the last.

        A pass inside another one, as checkpoints make it, has an end of its own; one that fails has none.
        """
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self._queued_in = current_pass()

    def _on_backward_end(self) -> None:
        """Complete the exchange if all gradients of this rank are here, so that `.grad` is what is to be used."""
        for name, p in self._new_members():
            # torch takes hooks of parameters that take gradients only, so that those of this pass were not told
            self._take_gradient(name, p)
        for name, gradient in self._given.items():
            # views of one buffer count their writes together
            if gradient._is_view():
                self._versions[name] = gradient._version
        if self._is_open and not self._is_ready():
            self._take_samples()
        if self._is_ready():
            # others, of which this pass has computed all gradients too, and this one, in the order of all ranks
            complete_steps(other for other in in_use() if other._is_ready())

    def _take_samples(self) -> None:
        """Remember some values of gradients whose exchange goes on: what a GradScaler writes leaves no other trace."""
        engine = self._engine
        if engine is None or engine.debts:
            # what is owed is added to gradients that go dense, when they go
            return
        exchanged = ((n, g) for n, g in self._given.items() if engine.exchanges(n) and not g.is_sparse)
        self._samples = {n: (g.data_ptr(), sample_of(g)) for n, g in islice(exchanged, _MOST_SAMPLES)}

    def _new_members(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters that were hooked in the middle of this pass, when it had computed their gradients already."""
        new, self._new = self._new, {}
        return [(name, p) for name, p in new.items() if p.grad is not None and name not in self._given]

    def _is_ready(self) -> bool:
        """Whether all gradients of this rank have come."""
        return self._is_open and len(self._given) == len(self._requires_update)

    def _open(self, name: str | None = None, p: torch.Tensor | None = None) -> None:
        """Begin a step, whose first gradient is that of parameter `p`; now and then a collective."""
        if self._retired:
            refuse_retired()
        if self._stopped is not None:
            raise MismatchError(f"{self._stopped} Ranks cannot go on after that: start the run again")
        if name is not None and p is not None and self._was_combined(name, p.grad):
            # what another pass has added is this rank's alone
            self._refuse_pass(name)
        self._close()
        try:
            if self._has_loaded and self._has_compared:
                self._has_loaded = False
                self._wrapping.agree_on_load(self._known_engine())
            if self._members.have_changed(self.param_groups):
                self._renew()
        except MismatchError as error:
            self._stopped = str(error)
            raise
        self._is_open, self._queued_in = True, None

    def _was_combined(self, name: str, gradient: Any) -> bool:
        """Whether a gradient is a combined one to which a pass has added, and nobody has written in between."""
        if self._combined is None or self._combined.get(name) is not gradient:
            return False
        # a GradScaler may have skipped the step, and the user have set the gradient to zero
        return gradient is not None and bool(gradient._version == self._versions[name] + 1)

    def _renew(self) -> None:
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
        self._known_engine().inherit(engine)
        self._begin_way()

    def _refuse_growth(self, engine: Engine, has_grown: bool) -> None:
        """With AdaGrad, tensors may be left out of exchanges, but none can join them."""
        new = [name for name in self._members.by_name if not (engine.exchanges(name) or name in engine.dense)]
        if new or has_grown:
            raise UnsupportedError(
                f"{self._adagrad!r} with parameter {new[0] if new else 'groups'!r} added or unfrozen after wrapping: "
                "accumulators lie with the owners of elements, which would change. Save compression_state_dict() of "
                "all ranks, wrap the optimizer again, and load what hvd_compress.feedback.redistribute returns"
            )


current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that calls us; the innermost where one runs inside another."""


def _on_gradient(optimizer: weakref.ref[Any], name: str, p: torch.Tensor) -> None:
    wrapped = optimizer()
    if wrapped is not None:
        wrapped._take_gradient(name, p)


_MOST_SAMPLES = 3
"""A GradScaler writes to all gradients."""
_TENSORS_PER_PROGRESS = 8
"""Asking whether something has arrived takes as long as the rest of a hook; these are small tensors."""
