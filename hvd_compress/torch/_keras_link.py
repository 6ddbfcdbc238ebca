"""The torch edge as the Keras code sees it: `hvd_compress._keras.link.Link`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import ObjectState

from hvd_compress._keras.link import Link
from hvd_compress._keras.names import stable_name, unique
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import Ledger, Routing, average_share, description, exchanged
from hvd_compress.exchange import Bucket
from hvd_compress.mpi import start_one_sided
from hvd_compress.policy import Auto, Policy, check_patterns
from hvd_compress.torch._collectives import allreduce_async, broadcast_async, synchronize
from hvd_compress.torch._engine import Engine, described, precondition
from hvd_compress.torch._functions import allreduce
from hvd_compress.torch._ranks import NODES, TorchRanks
from hvd_compress.torch._staging import all_finite
from hvd_compress.torch._steering import Steering, left_out
from hvd_compress.torch.compression import horovod_compressor

__all__ = ["LINK"]


class TorchLink(Link):
    """See `Link`."""

    def exchange(self, variables: Sequence[Any], groups: Any, settings: dict[str, Any]) -> TorchExchange:
        return TorchExchange(variables, settings)

    def divided(self, gradient: torch.Tensor | None, divisor: float) -> torch.Tensor | None:
        return None if gradient is None else gradient / divisor

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        handles = []
        for i, variable in enumerate(variables):
            handles.append((variable, broadcast_async(variable.value, root_rank, f"hvd_compress.variable.{i}")))
        for variable, handle in handles:
            variable.assign(synchronize(handle))

    def keep_uncompiled(self, optimizer: Any, method: str) -> None:
        # torch.compile looks methods up in the class that an object says it is of, which is not that of the overrides;
        # attributes of the object come first there too
        object.__setattr__(optimizer, method, torch.compiler.disable(getattr(optimizer, method)))

    def tensor(self, value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value).detach()
        # Horovod rejects scalars in most collectives
        return tensor.reshape(1) if tensor.dim() == 0 else tensor

    def values(self, variable: Any) -> Any:
        value = variable.value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

    def accumulators(self, passes: int) -> Any:
        raise NotImplementedError("Keras 2 has no torch backend")


class TorchExchange:
    """Combines the gradients of Keras variables on the torch backend: all exchanges in flight, then awaited.

    Args:
        variables: of Keras; layer and variable name the tensors.
        settings: of the exchange, by name.
    """

    def __init__(self, variables: Sequence[Any], settings: dict[str, Any]) -> None:
        self._variables = list(variables)
        self._settings = settings
        compression, process_set = settings["compression"], settings["process_set"]
        self._names = unique([stable_name(v.path) for v in variables])
        # in an elastic run others may join
        self.takes_part = bool(process_set.included() and (process_set.size() > 1 or is_elastic()))
        self._horovods = horovod_compressor(compression)
        self._engine: Engine | None = None
        self._alone: Ledger[Bucket] | None = None
        """With AdaGrad, where this rank exchanges nothing."""
        self._steering: Steering | None = None
        self._chooses = False
        tensors = [v.value for v in variables]
        adagrad = settings["adagrad"]
        if not self.takes_part:
            check_patterns(compression, self._names)
            if adagrad is not None:
                self._alone = Ledger(
                    Routing(None), 1, 0, described(zip(self._names, tensors, strict=True)), Bucket,
                    adagrad=adagrad,
                )  # fmt: skip
            return
        compared_keys = (
            "exchange", "min_numel", "bucket_bytes", "gradient_predivide_factor", "sparse_as_dense", "adagrad",
        )  # fmt: skip
        compared = {k: settings[k] for k in compared_keys}
        parameters = [[n, list(t.shape), str(t.dtype)] for n, t in zip(self._names, tensors, strict=True)]
        TorchRanks(process_set).agree(description(compression, settings["op"], parameters, **compared))
        check_patterns(compression, self._names)
        ours, ranks = exchanged(compression), process_set.size()
        scale = 1.0 if ours is None else average_share(ours, settings["op"], hvd.Average, hvd.Sum, ranks)
        named = list(zip(self._names, tensors, strict=True))
        steered = isinstance(ours, Auto)
        chosen = None if isinstance(ours, Auto) else ours
        routing = Routing(chosen, settings["exchange"], settings["min_numel"], settings["bucket_bytes"])
        if isinstance(ours, Auto):
            self._steering = Steering(ours, described(named), routing, process_set)
            routing = self._steering.routing
        self._chooses = isinstance(ours, Auto | Policy)
        self._make_engine = partial(
            Engine, scale=scale, process_set=process_set, tensors=named, pays_debts=steered, adagrad=adagrad
        )
        self._engine = self._make_engine(routing)

    def reduce(self, gradients: Sequence[torch.Tensor | None], loss_scale: Any = None) -> list[torch.Tensor | None]:
        """The combined gradients, in the order of the variables; None stays None."""
        engine = self._engine
        if engine is None:
            return list(gradients) if self._alone is None else self._preconditioned(self._alone, gradients, loss_scale)
        if loss_scale is not None:
            engine.set_loss_scale(float(loss_scale))
        if self._steering is not None:
            self._steering.begin()
        with torch.no_grad():
            # 1. all collectives start
            waiting = {}
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    waiting[i] = self._start(engine, i, gradient)
                elif engine.exchanges(self._names[i]):
                    engine.start(self._names[i], None)
            # 2. all arrive; one value that is not finite anywhere takes the step's residuals back
            finite = engine.wait()
            results: list[torch.Tensor | None] = [None] * len(gradients)
            for i, dense in waiting.items():
                if dense is not None:
                    handle, context, horovods = dense
                    result = horovods.decompress(synchronize(handle), context)
                    finite = finite and (not engine.owes or all_finite(result))
                    finite = precondition(engine, self._names[i], result) and finite
                    results[i] = result
            combined = engine.combine(finite)
            engine.settle(finite)
            # 3. results take the place of the gradients that they were made from
            for i, gradient in enumerate(gradients):
                if gradient is not None and waiting[i] is None:
                    results[i] = combined[self._names[i]]
                    if self._variables[i].value.grad is gradient:
                        self._variables[i].value.grad = results[i]
        if self._steering is not None and self._steering.end():
            self._engine = self._make_engine(self._steering.routing)
            self._engine.inherit(engine)
        return results

    def _preconditioned(
        self, ledger: Ledger[Bucket], gradients: Sequence[torch.Tensor | None], loss_scale: Any
    ) -> list[torch.Tensor | None]:
        """AdaGrad where nothing is exchanged: the gradients of this rank are the combined ones."""
        if loss_scale is not None:
            ledger.set_loss_scale(float(loss_scale))
        with torch.no_grad():
            updates = [None if gradient is None else gradient.clone() for gradient in gradients]
            finite = [
                precondition(ledger, name, update)
                for name, update in zip(self._names, updates, strict=True)
                if update is not None
            ]
        ledger.settle(keep=all(finite))
        ledger.count_step()
        return updates

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
            sent, name=f"hvd_compress.{name}", op=settings["op"], prescale_factor=1.0 / factor,
            postscale_factor=factor, process_set=settings["process_set"],
        )  # fmt: skip
        return handle, context, chosen

    @property
    def keeps_state(self) -> bool:
        """Whether anything depends on the steps before; not where this rank exchanges nothing."""
        return self.takes_part or self._alone is not None

    def inherit(self, other: TorchExchange) -> None:
        """Take over what another exchange of the same variables owes, and its counters."""
        if self._engine is not None and other._engine is not None:
            self._engine.inherit(other._engine)

    def stats(self) -> dict[str, Any]:
        """The "total" and "tensors" of `compression_stats()`."""
        if self._engine is None:
            return {"total": {}, "tensors": {}} if self._alone is None else self._alone.stats()
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


LINK = TorchLink(hvd, allreduce, horovod_compressor, TorchRanks, partial(start_one_sided, hvd), NODES, ObjectState, hvd)
