"""The torch edge as the Keras code sees it: `hvd_compress._keras.link.Link`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress import wire
from hvd_compress._keras.names import stable_name
from hvd_compress.engine import Ledger, average_share, check_settings, describe, exchanged, refuse_elastic
from hvd_compress.errors import UnsupportedError
from hvd_compress.torch._agreement import require_agreement
from hvd_compress.torch._engine import Engine
from hvd_compress.torch._functions import allreduce
from hvd_compress.torch.compression import horovod_compressor

__all__ = ["LINK"]


class TorchLink:
    """See `Link`."""

    none = hvd.Compression.none
    average_op = hvd.Average
    all_ranks = hvd.global_process_set

    rank = staticmethod(hvd.rank)
    size = staticmethod(hvd.size)

    def check(
        self,
        *,
        compression: Any,
        op: Any,
        exchange: str,
        min_numel: int,
        gradient_predivide_factor: float,
        backward_passes_per_step: int = 1,
        groups: Any = None,
        **_: Any,
    ) -> None:
        """Raise what a wrong setting of a wrapper is to raise."""
        check_settings(
            exchange, min_numel, op == hvd.Average, gradient_predivide_factor, backward_passes_per_step, groups,
            hvd.rocm_built(),
        )  # fmt: skip
        horovod_compressor(compression)
        refuse_elastic(compression)
        if op not in (hvd.Average, hvd.Sum):
            raise UnsupportedError(f"op={op}: gradients are combined by op=Average or op=Sum")

    def exchange(self, variables: Sequence[Any], groups: Any, settings: dict[str, Any]) -> TorchExchange:
        """An exchange for the gradients of Keras variables; a collective call."""
        return TorchExchange(variables, settings)

    def ranks_of(self, process_set: hvd.ProcessSet) -> int:
        """How many ranks a process set has; 1 where this one is not among them."""
        return int(process_set.size()) if process_set.included() else 1

    def divided(self, gradient: torch.Tensor | None, ranks: int) -> torch.Tensor | None:
        """A gradient divided by `ranks`."""
        return None if gradient is None else gradient / ranks

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        """Make Keras variables those of the root; a collective call."""
        handles = []
        for i, variable in enumerate(variables):
            # Horovod broadcasts no scalars
            values = variable.value.detach().reshape(-1)
            handles.append((values, variable, hvd.broadcast_async_(values, root_rank, f"hvd_compress.variable.{i}")))
        for values, variable, handle in handles:
            hvd.synchronize(handle)
            variable.assign(values.reshape(tuple(variable.shape)))

    def average(self, values: Sequence[float], names: Sequence[str]) -> list[float]:
        """Averages over all ranks; a collective call."""
        require_agreement({"names of the metrics": list(names)}, hvd.global_process_set)
        mine = torch.tensor(list(values), dtype=torch.float64)
        averages: list[float] = hvd.allreduce(mine, name="hvd_compress.metrics", op=hvd.Average).tolist()
        return averages

    def accumulators(self, passes: int) -> Any:
        """Not needed: Keras 2 has no torch backend.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("Keras 2 has no torch backend")

    def allreduce(
        self,
        value: Any,
        name: str | None,
        average: bool | None,
        prescale_factor: float,
        postscale_factor: float,
        op: Any,
        compression: Any,
    ) -> torch.Tensor:
        """See `Interface.allreduce`."""
        return allreduce(_tensor(value), average, name, compression, op, prescale_factor, postscale_factor)

    def allgather(self, value: Any, name: str | None) -> torch.Tensor:
        """See `Interface.allgather`."""
        return hvd.allgather(_tensor(value), name)

    def broadcast_value(self, value: Any, root_rank: int, name: str | None) -> torch.Tensor:
        """See `Interface.broadcast`."""
        return hvd.broadcast(_tensor(value), root_rank, name)

    def reducescatter(self, value: Any, name: str | None, op: Any) -> torch.Tensor:
        """See `Interface.reducescatter`."""
        return hvd.reducescatter(_tensor(value), op=op, name=name)


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
        names = [stable_name(v.path) for v in variables]
        self._names = [n if n not in names[:i] else f"{n}.{i}" for i, n in enumerate(names)]
        self.takes_part = bool(process_set.included() and process_set.size() > 1)
        self._horovods = horovod_compressor(compression)
        self._engine: Engine | None = None
        if not self.takes_part:
            return
        tensors = [v.value for v in variables]
        require_agreement(
            {
                "wire version": wire.VERSION,
                "compression": describe(compression),
                **{k: settings[k] for k in ("exchange", "min_numel", "gradient_predivide_factor", "sparse_as_dense")},
                "op": str(settings["op"]),
                "parameters": [[n, list(t.shape), str(t.dtype)] for n, t in zip(self._names, tensors, strict=True)],
            },
            process_set,
        )
        ours, ranks = exchanged(compression), process_set.size()
        scale = 1.0 if ours is None else average_share(ours, settings["op"], hvd.Average, hvd.Sum, ranks)
        self._engine = Engine(
            ours, settings["exchange"], settings["min_numel"], scale, process_set,
            zip(self._names, tensors, strict=True),
        )  # fmt: skip

    def reduce(self, gradients: Sequence[torch.Tensor | None], loss_scale: Any = None) -> list[torch.Tensor | None]:
        """The combined gradients, in the order of the variables; None stays None."""
        engine = self._engine
        if engine is None:
            return list(gradients)
        if loss_scale is not None:
            engine.set_loss_scale(float(loss_scale))
        with torch.no_grad():
            # 1. all collectives start
            waiting = {}
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    waiting[i] = self._start(engine, i, gradient)
            # 2. all arrive; one value that is not finite anywhere takes the step's residuals back
            finite = engine.wait()
            results: list[torch.Tensor | None] = [None] * len(gradients)
            for i, dense in waiting.items():
                if dense is not None:
                    handle, context = dense
                    result = self._horovods.decompress(hvd.synchronize(handle), context)
                    finite = bool(torch.isfinite(result).all()) and finite
                    results[i] = result
            combined = engine.combine(finite)
            # 3. results take the place of the gradients that they were made from
            for i, gradient in enumerate(gradients):
                if gradient is not None and waiting[i] is None:
                    results[i] = combined[self._names[i]]
                    if self._variables[i].value.grad is gradient:
                        self._variables[i].value.grad = results[i]
        return results

    def _start(self, engine: Engine, i: int, gradient: torch.Tensor) -> tuple[int, Any] | None:
        """Start the exchange of a gradient, or Horovod's allreduce, of which handle and context are returned."""
        name = self._names[i]
        if engine.compresses(name):
            # the residual will lie in the gradient's memory: only .grad, which will be replaced, may refer to it too
            engine.start(name, gradient if self._variables[i].value.grad is gradient else gradient.clone())
            return None
        settings = self._settings
        factor = settings["gradient_predivide_factor"] if settings["op"] == hvd.Average else 1.0
        sent, context = self._horovods.compress(gradient)
        engine.count_dense(name, sent.numel() * sent.element_size(), gradient.numel() * gradient.element_size())
        handle = hvd.allreduce_async(
            sent, name=f"hvd_compress.{name}", op=settings["op"], prescale_factor=1.0 / factor,
            postscale_factor=factor, process_set=settings["process_set"],
        )  # fmt: skip
        return handle, context

    def inherit(self, other: TorchExchange) -> None:
        """Take over what another exchange of the same variables owes, and its counters."""
        if self._engine is not None and other._engine is not None:
            self._engine.inherit(other._engine)

    def stats(self) -> dict[str, Any]:
        """The "total" and "tensors" of `compression_stats()`."""
        return {"total": {}, "tensors": {}} if self._engine is None else self._engine.stats()

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`; values are NumPy arrays."""
        if self._engine is None:
            raise RuntimeError("state_dict() of an exchange that this rank takes no part in")
        return Ledger.state_dict(self._engine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank."""
        if self._engine is not None:
            self._engine.load_state_dict(state)


def _tensor(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(value).detach()
    # Horovod rejects scalars in most collectives
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


LINK = TorchLink()
