"""The gradients of Keras variables on the torch backend, combined over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress._keras.names import not_broadcast, stable_name, unique
from hvd_compress._torch.checksum import checksum
from hvd_compress._torch.device import described
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import (
    DENSE,
    NONE,
    NOT_COMPARED,
    CarriedExchange,
    CarriedExchanges,
    Ledger,
    LedgerAlone,
    Routing,
    average_share,
    description,
    exchanged,
    first_unequal,
    is_carried,
    kinds_told,
    only_there,
)
from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import Place
from hvd_compress.policy import Auto, Policy, check_patterns
from hvd_compress.torch._agreement import Meeting
from hvd_compress.torch._collectives import allreduce_async, synchronize
from hvd_compress.torch._gradients.bucket import collective_name
from hvd_compress.torch._gradients.engine import Engine, precondition, with_debt
from hvd_compress.torch._gradients.staging import all_finite
from hvd_compress.torch._gradients.steering import Steering, left_out
from hvd_compress.torch._ranks import TorchRanks
from hvd_compress.torch.compression import horovod_compressor

__all__ = ["CarriedTorchExchange", "TorchExchange"]

_STEP_OF_COMPARISON = 2
"""Horovod's own recipe broadcasts variables after the first step, in which some of them are made."""


class TorchExchange:
    """Combines the gradients of Keras variables on the torch backend: all exchanges in flight, then awaited.

    Args:
        variables: of Keras; layer and variable name the tensors.
        settings: of the exchange, by name.
        compares: whether ranks look in the second step whether they have the same variables.
    """

    def __init__(self, variables: Sequence[Any], settings: dict[str, Any], compares: bool = True) -> None:
        self._variables = list(variables)
        self._settings = settings
        compression, process_set = settings["compression"], settings["process_set"]
        self._names = unique([stable_name(v.path) for v in variables])
        # in an elastic run others may join
        self.takes_part = bool(process_set.included() and (process_set.size() > 1 or is_elastic()))
        self._horovods = horovod_compressor(compression)
        self._engine: Engine | None = None
        self._alone: LedgerAlone | None = None
        """Where this rank exchanges nothing."""
        self._steering: Steering | None = None
        self._chooses = False
        self._compares = compares
        self._steps = 0
        self._last: tuple[str, ...] | None = None
        """The kinds of gradients that all ranks had in the last step."""
        tensors = [v.value for v in variables]
        adagrad = settings["adagrad"]
        if not self.takes_part:
            check_patterns(compression, self._names)
            self._alone = LedgerAlone(described(zip(self._names, tensors, strict=True)), adagrad)
            return
        compared_keys = (
            "min_numel", "bucket_bytes", "gradient_predivide_factor", "sparse_as_dense", "adagrad",
        )  # fmt: skip
        self._is_carried = is_carried(compression, adagrad)
        compared = {k: settings[k] for k in compared_keys}
        compared["exchange"] = settings["exchange"].told_among(process_set.size())
        parameters = [[n, list(t.shape), str(t.dtype)] for n, t in zip(self._names, tensors, strict=True)]
        if self._compares_steps:
            TorchRanks(process_set).agree(description(compression, settings["op"], parameters, **compared))
        check_patterns(compression, self._names)
        ranks = process_set.size()
        # the last rank of an elastic run sends everything: what it owes goes with its next gradients
        ours = None if ranks == 1 else exchanged(compression)
        scale = 1.0 if ours is None else average_share(ours, settings["op"], hvd.Average, hvd.Sum, ranks)
        named = list(zip(self._names, tensors, strict=True))
        chosen = None if isinstance(ours, Auto) else ours
        routing = Routing(chosen, settings["exchange"], settings["min_numel"], settings["bucket_bytes"])
        if isinstance(ours, Auto):
            self._steering = Steering(ours, described(named), routing, process_set)
            routing = self._steering.routing
        self._chooses = isinstance(ours, Auto | Policy)
        self._make_engine = partial(
            Engine,
            scale=scale,
            process_set=process_set,
            tensors=named,
            pays_debts=adagrad is None or self._is_carried,
            adagrad=adagrad,
        )
        self._engine = self._make_engine(routing)

    def reduce(self, gradients: Sequence[torch.Tensor | None], loss_scale: Any = None) -> list[torch.Tensor | None]:
        """The combined gradients, in the order of the variables; None stays None.

        Raises:
            MismatchError: a gradient is None on some ranks only; raised on all of them.
        """
        engine = self._engine
        if engine is None:
            alone = self._alone
            return list(gradients) if alone is None or not alone.owes else self._updates(alone, gradients, loss_scale)
        if loss_scale is not None:
            engine.set_loss_scale(float(loss_scale))
        if self._steering is not None:
            self._steering.begin()
        try:
            if self._compares_steps:
                self._agree(engine, tuple(NONE if gradient is None else DENSE for gradient in gradients))
            with torch.no_grad():
                results = self._exchanged(engine, gradients)
        except (HorovodInternalError, MismatchError) as error:
            if self._steering is not None:
                self._steering.abandon()
            raise self._explained(engine, error) from error
        self._steps += 1
        if self._steps == _STEP_OF_COMPARISON and self._compares_steps:
            self._compare_variables()
        if self._steering is not None and self._steering.end():
            self._engine = self._make_engine(self._steering.routing)
            self._engine.inherit(engine)
        return results

    def _exchanged(self, engine: Engine, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        # 1. all collectives start
        waiting = {}
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                waiting[i] = self._start(engine, i, gradient)
            elif engine.exchanges(self._names[i]):
                engine.start(self._names[i], None)
        if not waiting and not engine.buckets:
            # for ranks to meet who have a gradient
            synchronize(allreduce_async(torch.zeros(1), name=self._nothing, process_set=self._process_set))
        # 2. all arrive; one value that is not finite anywhere takes the step's residuals back
        finite, received = self._arrived(engine, {i: dense for i, dense in waiting.items() if dense is not None})
        results: list[torch.Tensor | None] = [received.get(i) for i in range(len(gradients))]
        for i, result in received.items():
            finite = finite and (not engine.owes or all_finite(result))
            finite = precondition(engine, self._names[i], result) and finite
        combined = engine.combine(finite)
        engine.settle(finite)
        # 3. results take the place of the gradients that they were made from
        for i, gradient in enumerate(gradients):
            if gradient is not None and waiting[i] is None:
                results[i] = combined[self._names[i]]
                if self._variables[i].value.grad is gradient:
                    self._variables[i].value.grad = results[i]
        return results

    def _arrived(self, engine: Engine, dense: dict[int, tuple[Any, Any, Any]]) -> tuple[bool, dict[int, torch.Tensor]]:
        """Whether all that was compressed is finite, and what came uncompressed; if it raises, nothing is under way."""
        received, problem, finite = {}, None, False
        try:
            finite = engine.wait()
        except HorovodInternalError as error:
            problem = error
            engine.abandon()
        for i, (handle, context, horovods) in dense.items():
            try:
                received[i] = horovods.decompress(synchronize(handle), context)
            except HorovodInternalError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return finite, received

    @property
    def _compares_steps(self) -> bool:
        """Not where others join who know of no steps before, and this exchange is not made anew for them."""
        return self._is_carried or not is_elastic()

    # -- what ranks compare ----------------------------------------------------------------------------------------

    def _agree(self, engine: Engine, kinds: tuple[str, ...]) -> None:
        """Compare which gradients there are, where they are other ones than in the last step; else it costs nothing.

        In place of the collectives that all ranks began the last step with: where others begin another such step,
        Horovod refuses the two on all ranks.
        """
        if kinds == self._last:
            return
        told = kinds_told(self._names, kinds)
        if self._last is None:
            TorchRanks(self._process_set).agree(told)
        else:
            Meeting(self._process_set, self._names[0]).require_agreement("gradients", told, self._places(engine))
        self._last = kinds

    def _explained(self, engine: Engine, error: HorovodInternalError | MismatchError) -> Exception:
        """What this rank is told when another one compares, whose gradients are of other kinds than before."""
        if self._last is None or isinstance(error, MismatchError) or "Mismatched" not in str(error):
            return error
        told = kinds_told(self._names, self._last)
        try:
            Meeting(self._process_set, self._names[0], self._places(engine)).leave("gradients", told, error)
        except HorovodInternalError:
            return MismatchError(only_there(self._names, self._last))
        except MismatchError as mismatch:
            return mismatch
        return error

    def _places(self, engine: Engine) -> list[Place]:
        """The first collectives of the last step."""
        kinds = self._last or ()
        begun = [shipment.beginning for shipment in engine.buckets]
        places = [Place(collective, collective_name(collective, name)) for collective, name in begun]
        dense = [n for n, kind in zip(self._names, kinds, strict=True) if kind == DENSE and not engine.exchanges(n)]
        return [*places, *(Place("allreduce", self._dense_name(n)) for n in dense)] or [
            Place("allreduce", self._nothing)
        ]

    def _compare_variables(self) -> None:
        """Warn of variables that differ between ranks; a collective call."""
        sums = [checksum(v.value) if self._compares else NOT_COMPARED for v in self._variables]
        mine = torch.tensor([sums], dtype=torch.int64)
        name = f"hvd_compress.variables.{self._names[0]}"
        rows = hvd.allgather(mine, name=name, process_set=self._process_set).numpy()
        unequal = first_unequal(rows, self._names)
        if unequal is not None:
            warnings.warn(not_broadcast(*unequal), stacklevel=2)

    def _dense_name(self, name: str) -> str:
        return f"hvd_compress.{name}"

    @property
    def _nothing(self) -> str:
        return f"hvd_compress.nothing.{self._names[0]}"

    @property
    def _process_set(self) -> hvd.ProcessSet:
        return self._settings["process_set"]

    def _updates(
        self, ledger: LedgerAlone, gradients: Sequence[torch.Tensor | None], loss_scale: Any
    ) -> list[torch.Tensor | None]:
        """Where nothing is exchanged, the gradients of this rank, with what it owes, are the combined ones."""
        if loss_scale is not None:
            ledger.set_loss_scale(float(loss_scale))
        with torch.no_grad():
            given = [(n, g) for n, g in zip(self._names, gradients, strict=True) if g is not None]
            updates = {name: with_debt(ledger, name, gradient.clone()) for name, gradient in given}
            finite = [all_finite(update) for update in updates.values()]
            finite += [precondition(ledger, name, update) for name, update in updates.items()]
        ledger.settle(keep=all(finite))
        ledger.count_step()
        return [updates.get(name) for name in self._names]

    def _start(self, engine: Engine, i: int, gradient: torch.Tensor) -> tuple[int, Any, Any] | None:
        """Start the exchange of a gradient, or Horovod's allreduce: its handle, context and Horovod's compressor."""
        name = self._names[i]
        if engine.exchanges(name):
            # a gradient that is not .grad is the caller's, and stays what it is
            engine.start(name, gradient, keep=self._variables[i].value.grad is not gradient)
            return None
        settings = self._settings
        factor = settings["gradient_predivide_factor"] if settings["op"] == hvd.Average else 1.0
        chosen = horovod_compressor(engine.routing.compressor_of(name)) if self._chooses else self._horovods
        gradient = engine.with_debt(name, gradient, keep=True)
        sent, context = chosen.compress(gradient)
        engine.count_dense(name, sent.numel() * sent.element_size(), gradient.numel() * gradient.element_size())
        handle = allreduce_async(
            sent, name=self._dense_name(name), op=settings["op"], prescale_factor=1.0 / factor,
            postscale_factor=factor, process_set=settings["process_set"],
        )  # fmt: skip
        return handle, context, chosen

    @property
    def keeps_state(self) -> bool:
        """Whether anything depends on the steps before; not where this rank exchanges nothing."""
        return self.takes_part or (self._alone is not None and (self._alone.owes or self._alone.steps > 0))

    def inherit(self, other: TorchExchange) -> None:
        """Take over what another exchange of the same variables owes, and its counters."""
        if self._engine is not None and other._engine is not None:
            self._engine.inherit(other._engine)
        if self._alone is not None and other._alone is not None:
            self._alone.inherit(other._alone)

    def inherit_counters(self, other: TorchExchange) -> None:
        """Take over what another exchange of the same variables has counted."""
        if self._engine is not None and other._engine is not None:
            self._engine.inherit_counters(other._engine)

    def rest(self) -> None:
        """Let nothing run any more that works in memory of ours; what is in flight is for whoever ends it."""
        if self._engine is not None:
            self._engine.rest()

    def stats(self) -> dict[str, Any]:
        """The "total" and "tensors" of `compression_stats()`."""
        if self._engine is None:
            return {"total": {}, "tensors": {}} if self._alone is None or not self.keeps_state else self._alone.stats()
        with left_out(self._steering):
            return self._engine.stats() | ({} if self._steering is None else {"auto": self._steering.report()})

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`; values are NumPy arrays."""
        if self._engine is not None:
            with left_out(self._steering):
                return Ledger.state_dict(self._engine)
        if self._alone is None:
            raise RuntimeError("state_dict() of an exchange that this rank takes no part in")
        return self._alone.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank."""
        holder = self._engine or self._alone
        if holder is not None:
            holder.load_state_dict(state)


class CarriedTorchExchange(CarriedExchange[TorchExchange]):
    """A `TorchExchange` of an elastic run; see `CarriedExchange`.

    Args:
        variables: see `TorchExchange`.
        settings: likewise.
        compares: likewise.
        book: see `CarriedExchange`.
    """

    keeps_state = True

    def __init__(
        self, variables: Sequence[Any], settings: dict[str, Any], compares: bool, book: CarriedExchanges
    ) -> None:
        names = unique([stable_name(v.path) for v in variables])
        parameters = [[name, list(v.shape), str(v.dtype)] for name, v in zip(names, variables, strict=True)]
        super().__init__(
            partial(TorchExchange, variables, settings, compares),
            description(settings["compression"], settings["op"], parameters), [id(v) for v in variables],
            settings["op"] == hvd.Average, book,
        )  # fmt: skip

    def reduce(self, gradients: Sequence[torch.Tensor | None], loss_scale: Any = None) -> list[torch.Tensor | None]:
        """See `TorchExchange.reduce`."""
        return self.exchange().reduce(gradients, loss_scale)
