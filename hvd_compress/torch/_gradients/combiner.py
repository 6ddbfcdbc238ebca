"""A step of one optimizer on one rank, from its first gradient to the combined ones.

The first gradient opens the step. Hooks hand gradients over as they come. When all are here the exchange is completed,
at the end of the backward pass or in `synchronize` or `step`; `step` or `zero_grad` closes the step.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress._torch.device import described
from hvd_compress._torch.thrown_away import KeptAside
from hvd_compress.compressors import Compressor
from hvd_compress.engine import Ledger, LedgerAlone, Lost
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.policy import Policy
from hvd_compress.torch._gradients.engine import Engine, precondition, with_debt
from hvd_compress.torch._gradients.handed import Handed
from hvd_compress.torch._gradients.members import Members
from hvd_compress.torch._gradients.owners import in_use, refuse_retired
from hvd_compress.torch._gradients.sending import Sender
from hvd_compress.torch._gradients.staging import all_finite, version_of
from hvd_compress.torch._gradients.waits import Wait, run_together
from hvd_compress.torch._gradients.wrapping import Wrapping
from hvd_compress.waiting import add_note, open_waits

__all__ = ["Combiner"]

_TENSORS_PER_PROGRESS = 8
"""Asking whether something has arrived takes as long as the rest of a hook; these are small tensors."""

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that calls us; the innermost where one runs inside another."""


class Combiner:
    """Combines the gradients of an optimizer's parameters over ranks, in place.

    Args:
        optimizer: whose parameters these are; it holds this object.
        names: of parameters; those that have none get one.
        wrapping: what the optimizer was wrapped with.
        horovods: see `Sender`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], wrapping: Wrapping, horovods: Any
    ) -> None:
        self.wrapping = wrapping
        self.members = Members(names, partial(_on_gradient, weakref.ref(self)), wrapping.groups)
        self.sender = Sender(wrapping, self.members, horovods)
        self.alone: LedgerAlone | None = None
        """Where this rank exchanges nothing, with AdaGrad, or after a state was loaded that owed something."""
        self.is_hooked = False
        """Whether backward passes tell of their gradients."""
        self.is_open = False
        """Whether gradients of a step are coming, or being exchanged."""
        self.is_combined = False
        """Whether the exchange of a step is complete, and the step neither made nor given up yet."""
        self.was_needless = False
        """Whether `synchronize` was called for such a step."""
        self._optimizer = weakref.ref(optimizer)
        self._handed = Handed()
        self._passes: dict[str, int] = {}
        """How many passes have added to gradients that are not handed over yet."""
        self._has_warned = False
        """Whether the user was told of gradients that were changed before the last of their passes."""
        self._unused: tuple[torch.Tensor, int] | None = None
        """Of an exchange that has changed what is owed: a parameter, and how often it had been written to by then."""
        self._kept_aside = KeptAside()
        self._queued_in: int | None = None
        """The backward pass whose end will be told."""
        self._new: dict[str, torch.Tensor] = {}
        """Parameters that take gradients since this step began."""
        self._stopped: str | None = None
        """Why it cannot go on: ranks have disagreed while steps were made, and some collectives stay under way."""
        self.is_retired = False
        """Whether another optimizer has taken over the parameters."""
        self.lost: Lost | None = None
        """In elastic runs, what was dropped with ranks that were lost."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer; loading a state gives it others."""
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def hook(self) -> None:
        """Let backward passes tell of their gradients."""
        self.members.take(self.param_groups)
        self.is_hooked = True

    def be_alone(self, state: Any = None) -> None:
        """Where this rank exchanges nothing, keep AdaGrad's accumulators, and what a state owes.

        Raises:
            StateError: not a state for one rank, or of other tensors; nothing has changed then.
        """
        was_hooked, members = self.is_hooked, self.members
        if not was_hooked:
            self.hook()
        tensors, resting = described(members.by_name.items()), described(members.resting.items())
        ledger = LedgerAlone(tensors, self.wrapping.adagrad, resting)
        try:
            if state is not None:
                ledger.load_state_dict(state)
        except StateError:
            if not was_hooked:
                members.release()
                self.is_hooked = False
            raise
        self.alone = ledger

    @property
    def awaits_sync(self) -> bool:
        """Whether its exchanges are made when the state of an elastic run is synced, and are not made yet."""
        return self.wrapping.is_carried and self.sender.engine is None

    def begin_again(self) -> None:
        """In an elastic run, other ranks have come: nothing is known of them, and of no step that is under way."""
        self.close()
        self.members.take(self.param_groups)
        self.sender.has_compared, self.sender.has_loaded, self._stopped = False, False, None

    def let_go(self) -> None:
        """Another optimizer takes over the parameters: let them go, and refuse to go on."""
        if self.is_hooked:
            self.give_up()
            self.members.release()
        self.is_retired = True

    # -- while a backward pass runs ------------------------------------------------------------------------------

    def take_gradient(self, name: str, p: Any) -> None:
        """Take a gradient that a backward pass has computed."""
        if not self.is_open and self.members.is_of(name, p, self.param_groups):
            self._open(name, p)
        if name not in self.members.by_name or not self.is_open:
            # a parameter that was taken out of the groups: no step begins with it
            return
        sender, handed = self.sender, self._handed
        gradient, engine, bucket = p.grad, sender.engine, sender.waiting.get(name)
        left = None if bucket is None else bucket.put_off(name, gradient)
        if bucket is None or left is None or engine is None:
            self._take_slowly(name, p)
            return
        if sender.steering is not None:
            sender.steering.begin()
        handed.gradients[name], handed.versions[name] = gradient, gradient._version
        if self._queued_in != current_pass() or len(handed.gradients) == len(self.members.by_name):
            self._queue_end()
        if left == 0:
            engine.start_together(bucket)
        elif left % _TENSORS_PER_PROGRESS == 0:
            engine.progress()

    def _take_slowly(self, name: str, p: Any) -> None:
        handed, gradient = self._handed, p.grad
        if gradient is None:
            # a hook of the user's has removed it: this pass has brought none
            return
        if name in handed.gradients:
            self._refuse_pass(name)
        if gradient.requires_grad:
            raise GradientError(
                f"the gradient of {name!r} has a graph of its own, as backward(create_graph=True) makes it. Use "
                "torch.autograd.grad(..., create_graph=True) for a penalty, and loss.backward() for the step"
            )
        if self.wrapping.passes == 1 or self._is_last_pass(name):
            if self.members.groups is not None and self.alone is None:
                self.sender.send_of_group(name)
            elif self.alone is None:
                self.sender.send(name, p)
            # handing it over may have replaced it
            handed.note(name, p.grad)
            if self._queued_in != current_pass() or len(handed.gradients) == len(self.members.by_name):
                self._queue_end()
        elif not self._has_warned and not gradient._is_view():
            handed.versions[name] = version_of(gradient)

    def _is_last_pass(self, name: str) -> bool:
        passes = self._passes[name] = self._passes.get(name, 0) + 1
        return passes >= self.wrapping.passes

    def _refuse_pass(self, name: str) -> NoReturn:
        raise GradientError(
            f"gradient of {name!r} was computed more than backward_passes_per_step={self.wrapping.passes} times before "
            "step() or zero_grad(). Call step() after each backward pass, or synchronize() and zero_grad(), also after "
            "one that has failed; or increase backward_passes_per_step"
        )

    def _queue_end(self) -> None:
        """Let this backward pass call `_on_backward_end`; with the first gradient, and again with the last.

        A pass inside another one, as checkpoints make it, has an end of its own; one that fails has none.
        """
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self._queued_in = current_pass()

    def _on_backward_end(self) -> None:
        """Complete the exchange if all gradients of this rank are here, so that `.grad` is what is to be used."""
        if self._new:
            self._take_new()
        self._handed.note_views()
        engine = self.sender.engine
        if self.is_ready:
            # this pass may have computed all gradients of other optimizers, too; all ranks share this order
            complete([other for other in in_use() if other.is_ready])
        elif self.is_open and engine is not None and not engine.debts:
            # what is owed is added to gradients that go dense, when they go
            self._handed.take_samples(engine.exchanges)

    def _take_new(self) -> None:
        """Take gradients that this pass had computed before their parameters were hooked, in the middle of it."""
        new, self._new = self._new, {}
        for name, p in new.items():
            if p.grad is not None and name not in self._handed.gradients:
                self.take_gradient(name, p)

    @property
    def is_ready(self) -> bool:
        """Whether all gradients of this rank have come."""
        return self.is_open and len(self._handed.gradients) == len(self.members.by_name)

    # -- when steps begin and end --------------------------------------------------------------------------------

    def _open(self, name: str | None = None, p: torch.Tensor | None = None) -> None:
        """Begin a step, whose first gradient is that of parameter `p`; now and then a collective."""
        if self.is_retired:
            refuse_retired()
        if self._stopped is not None:
            raise MismatchError(f"{self._stopped} Ranks cannot go on after that: start the run again")
        if self.sender.engine is None and self.awaits_sync:
            raise UnsupportedError(
                f"a step with {self.wrapping.name} in an elastic run, and no hvd.elastic.TorchState has synced this "
                "optimizer: exchanges are made there for the ranks that there are. Give the wrapped optimizer to "
                "hvd.elastic.TorchState(model, optimizer) of hvd_compress.torch, and train inside of a function that "
                "is decorated with hvd.elastic.run"
            )
        if name is not None and p is not None and self.is_combined and self._handed.has_grown(name, p.grad):
            # what another pass has added is this rank's alone
            self._refuse_pass(name)
        if self._unused is not None:
            self._look_back(*self._unused)
        self.close()
        try:
            if self.sender.has_loaded and self.sender.has_compared:
                self.sender.has_loaded = False
                self.wrapping.agree_on_load(self.sender.known_engine())
            if self.members.have_changed(self.param_groups):
                self._renew()
        except MismatchError as error:
            self._stopped = str(error)
            raise
        engine = self.sender.engine
        if self._kept_aside.is_wanted:
            self._kept_aside.keep(engine)
        self.is_open, self._queued_in = True, None

    def drop(self) -> None:
        """Give the step up, if it is not made."""
        if self._unused is not None:
            self._look_back(*self._unused)
        self.close()

    def _look_back(self, p: torch.Tensor, version: int) -> None:
        """Owe what was combined if nobody has used it: a step, whoever makes it, writes to all parameters."""
        if p._version == version and self.sender.engine is not None:
            self._kept_aside.go_back(self.sender.engine)

    def close(self) -> None:
        """The step is made, or given up."""
        self.is_open = self.is_combined = self.was_needless = False
        self._unused = None
        self._handed, self._passes, self._new = Handed(), {}, {}

    def give_up(self) -> None:
        """Wait for what is in flight, and forget the step; all ranks do so at the same point."""
        self.sender.abandon()
        self.close()

    def refuse_while_open(self, what: str, kind: type[Exception]) -> None:
        """Raise an exception of this kind if gradients are being exchanged."""
        if self.is_open:
            raise kind(
                f"{what} between loss.backward() and step() or synchronize(): gradients are being exchanged, since "
                "some parameters have got none yet. Call one of these first"
            )

    def _renew(self) -> None:
        """Parameters were frozen, unfrozen, added or converted: let all ranks compare, and go on; a collective call."""
        engine = self.sender.engine
        self.sender.count_plain()
        self._new = self.members.take(self.param_groups)
        if engine is not None:
            self.wrapping.agree_again(self, engine)
        if self.wrapping.adagrad is not None:
            self._refuse_growth(self.alone if engine is None else engine)
            return
        if engine is None:
            return
        self.sender.has_compared = False
        self._equip_after(engine)

    def go_on_with(self, compression: Compressor | Policy) -> None:
        """Compress in another way from the next step on; all ranks do so between the same steps."""
        self.begin_with(compression)
        if self.sender.engine is not None:
            self.sender.count_plain()
            self._equip_after(self.sender.engine)

    def begin_with(self, compression: Compressor | Policy) -> None:
        """Compress in this way once exchanges are made anew."""
        self.wrapping.compression = self.wrapping.ours = compression

    def _equip_after(self, engine: Engine) -> None:
        self.wrapping.equip(self.sender)
        self.sender.known_engine().inherit(engine)
        self.sender.begin_way()

    def _refuse_growth(self, ledger: Ledger[Any] | None) -> None:
        """With AdaGrad, tensors may be left out of exchanges, but none can join them."""
        if ledger is None:
            return
        new = [name for name in self.members.by_name if not (ledger.exchanges(name) or name in ledger.dense)]
        if new:
            raise UnsupportedError(
                f"{self.wrapping.adagrad!r} with parameter {new[0]!r} added or unfrozen after wrapping: accumulators "
                "lie with the owners of elements, which would change. Save compression_state_dict() of all ranks, wrap "
                "the optimizer again, and load what hvd_compress.feedback.redistribute returns"
            )

    # -- when all gradients are here -----------------------------------------------------------------------------

    def combine(self) -> None:
        """Complete the exchange, if it is not complete: afterwards `.grad` is the combined gradient."""
        if self.is_combined or not self.is_hooked:
            return
        if not self.is_open:
            # no gradient has come: other ranks may have some
            self._open()
        complete([self])

    def combining(self) -> Iterator[Wait]:
        """Complete the exchange of a step: yields what is waited for."""
        since = time.monotonic()
        open_waits[self] = since, self._waited_for
        try:
            if self.alone is not None:
                self._combine_alone(self.alone)
                self._note_combined()
            else:
                yield from self._combining_ranks()
        except HorovodInternalError as error:
            add_note(error, since, self._waited_for())
            # an elastic run restores the optimizer's state, which waits for what is in flight: nothing is any more
            self.sender.forget()
            self.close()
            if "Mismatched" not in str(error):
                raise
            problem = (
                "the ranks are not at the same point of their programs: one exchanges gradients, another one something "
                f"else. Horovod says: {error} All ranks must freeze, unfreeze and add parameters before the same step, "
                "use optimizers wrapped with the same settings, and make the same number of steps before join()."
            )
            self.wrapping.on_refusal(problem)
            self._stopped = problem
            raise MismatchError(problem) from error
        except BaseException:
            if not self.is_combined:
                # not ready: it is for `give_up` to end the step
                self._handed = Handed()
            raise
        finally:
            del open_waits[self]

    def _waited_for(self) -> str:
        engine = self.sender.engine
        step = "" if engine is None else f" of step {engine.steps + 1}"
        return f"for the gradients{step} of the other ranks"

    def _combining_ranks(self) -> Iterator[Wait]:
        sender, handed, parameters = self.sender, self._handed, self.members.by_name
        if sender.engine is not None and not sender.has_compared:
            yield from sender.comparing()
            _warn_if_unequal(sender.unequal)
        # told at the end: the step has to be the same on all ranks
        harms = handed.harms(parameters, lambda name: sender.engine is None or not sender.engine.exchanges(name))
        is_early = not self._has_warned and sender.engine is not None and sender.plain is None
        changed = handed.changed_early(parameters) if is_early else None
        sender.send_missing(handed)
        finite = yield from sender.arriving()
        results, is_owed = sender.results(finite)
        for name, p in parameters.items():
            if p.grad is not results[name]:
                self._take_result(name, p, results[name])
        self._note_combined()
        if is_owed and parameters:
            self._unused = p, p._version
        sender.end_step()
        if harms:
            # gradients are the combined ones all the same: replicas stay equal where the error is caught
            raise harms[0]
        if changed is not None:
            self._warn_of_change(changed)

    def _note_combined(self) -> None:
        self._passes = {}
        self._handed.note_versions()
        self.is_combined, self.is_open = True, False

    def _take_result(self, name: str, p: torch.Tensor, output: torch.Tensor) -> None:
        """Make a combined gradient what `.grad` is, in its memory where that can hold it."""
        gradient, engine = p.grad, self.sender.engine
        if gradient is None:
            p.grad = output
        elif output.is_sparse:
            gradient.zero_().add_(output)
        elif gradient.is_sparse:
            gradient.zero_().add_(output.to_sparse(gradient.sparse_dim()))
        elif engine is not None and engine.exchanges(name):
            # an exchange writes to the gradient, unless its memory is that of other gradients too, or is gone
            p.grad = output
        else:
            gradient.copy_(output)

    def _warn_of_change(self, name: str) -> None:
        self._has_warned = True
        warnings.warn(
            f"the gradient of {name!r} was changed after fewer than backward_passes_per_step={self.wrapping.passes} "
            "passes, before its exchange: what earlier steps owe is added to it, and a clipped norm does not hold. "
            "Call synchronize() first; in Lightning, in on_before_optimizer_step(self, optimizer)",
            stacklevel=2,
        )

    def _combine_alone(self, ledger: LedgerAlone) -> None:
        """Where nothing is exchanged, the gradients of this rank, with what it owes, are the combined ones."""
        finite = True
        for name, p in self.members.by_name.items():
            if p.grad is None and name in ledger.debts:
                p.grad = torch.zeros_like(p)
            if p.grad is None:
                continue
            if self.wrapping.adagrad is not None:
                self.sender.check_dense(name, p.grad)
            elif name not in ledger.debts:
                continue
            p.grad = with_debt(ledger, name, p.grad)
            dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
            finite = all_finite(dense) and finite
            finite = precondition(ledger, name, dense) and finite
            if p.grad.is_sparse:
                p.grad = dense.to_sparse(p.grad.sparse_dim())
        ledger.settle(keep=finite)
        ledger.count_step()


def complete(combiners: Iterable[Combiner]) -> None:
    """Complete the exchanges of these steps, each as what it waits for arrives."""
    with torch.no_grad():
        run_together([combiner.combining() for combiner in combiners])


def _warn_if_unequal(unequal: tuple[str, int] | None) -> None:
    if unequal is None:
        return
    name, rank = unequal
    warnings.warn(
        f"parameter {name!r} of rank {rank} differs from that of rank 0, and will go on doing so: ranks exchange "
        "gradients only. Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step",
        stacklevel=2,
    )


def _on_gradient(combiner: weakref.ref[Combiner], name: str, p: torch.Tensor) -> None:
    held = combiner()
    if held is not None:
        held.take_gradient(name, p)
