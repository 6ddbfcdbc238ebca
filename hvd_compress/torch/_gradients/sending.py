"""How a gradient is handed over: to an exchange of ours or to Horovod, and which of them the next step takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch._collectives import sparse_allreduce_async
from hvd_compress.torch._gradients.step import Step
from hvd_compress.torch.compression import dense_route

__all__ = ["EXCHANGED", "Sending"]

EXCHANGED = object()
"""Stands in `_handles` for a gradient whose exchange `_complete` will finish."""

IN_EXCHANGE = EXCHANGED, None

NOT_SENT = None, None
"""The entry of a gradient in `_handles` that `_submit_missing` will send."""


class Sending(Step):
    """Methods of `Overrides` that hand gradients over."""

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Any, Any]:
        if self._steering is not None:
            self._steering.begin()
        if self._alone is not None or (self._engine is not None and not self._has_compared):
            return NOT_SENT
        name = self._parameter_names[p]
        goes_sparse = not self.sparse_as_dense and self._goes_sparse(name, p.grad)
        if p.grad is None:
            # another rank may have a gradient: all ranks issue the same collectives
            p.grad = self._no_gradient(name, p) if goes_sparse else torch.zeros_like(p)
        elif goes_sparse and not p.grad.is_sparse:
            p.grad = p.grad.to_sparse(self._sparse_dims[name])
        if self._engine is None or self._is_plain:
            return self._sparse_gathered(name, p) if goes_sparse else self._summed(name, p)
        if self._adagrad is not None:
            self._check_dense(name, p.grad)
        if self._engine.exchanges(name):
            if not goes_sparse:
                self._engine.start(name, p.grad.to_dense() if p.grad.is_sparse else p.grad)
                return IN_EXCHANGE
            self._engine.start(name, None)
        else:
            self._engine.progress()
        self._compression = self._dense_compression(name)
        if goes_sparse:
            return self._sparse_gathered(name, p)
        self._count_dense(name, p.grad)
        p.grad = self._engine.with_debt(name, p.grad)
        return self._summed(name, p)

    def _goes_sparse(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether a tensor is gathered, not summed: the same on all ranks, whatever this one's gradient is."""
        if self._engine is None:
            # as Horovod does
            return gradient is not None and gradient.is_sparse
        return name in self._sparse_dims

    def _no_gradient(self, name: str, p: torch.Tensor) -> torch.Tensor:
        dims = self._sparse_dims[name]
        indices = torch.zeros((dims, 0), dtype=torch.int64, device=p.device)
        values = torch.zeros((0, *p.shape[dims:]), dtype=p.dtype, device=p.device)
        return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)

    def _summed(self, name: str, p: Any) -> tuple[Any, Any]:
        """Horovod's allreduce of a gradient (l. 187-214), under a name of this optimizer's own."""
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        sent, ctx = self._compression.compress(gradient)
        factor = self.gradient_predivide_factor if self.op == hvd.Average else 1.0
        handle = hvd.allreduce_async_(
            sent, name=name + self._wrapping.label, op=self.op, prescale_factor=1.0 / factor,
            postscale_factor=factor, process_set=self.process_set,
        )  # fmt: skip
        return handle, ctx

    def _sparse_gathered(self, name: str, p: Any) -> tuple[Any, Any]:
        self._sparse_now.add(name)
        return sparse_allreduce_async(p.grad, name + self._wrapping.label, self.op, self.process_set), None

    def _dense_compression(self, name: str) -> Any:
        """How a tensor goes through Horovod's allreduce; Horovod itself knows one way for all."""
        if not self._chooses:
            return self._horovods
        return dense_route(self._known_engine().routing.compressor_of(name))

    def _grouped_allreduce_grad_async(self, ps: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """A group is a bucket of ours, or one operation of Horovod's (l. 216-224) where nothing is compressed."""
        is_horovods = self._engine is None or self._is_plain
        if not is_horovods or not self._is_group_dense(ps):
            return [self._allreduce_grad_async(p) for p in ps], None
        sent, ctxs = zip(*[self._compression.compress(p.grad) for p in ps], strict=True)
        name = self._parameter_names[ps[0]] + self._wrapping.label
        return hvd.grouped_allreduce_async_(list(sent), name=name, op=self.op, process_set=self.process_set), ctxs

    def _is_group_dense(self, ps: tuple[Any, ...]) -> bool:
        if self._alone is not None or (self._engine is not None and not self._has_compared):
            return False
        return not any(self._goes_sparse(self._parameter_names[p], p.grad) or p.grad.is_sparse for p in ps)

    def _check_dense(self, name: str, gradient: torch.Tensor) -> None:
        if gradient.is_sparse and not self.sparse_as_dense:
            raise UnsupportedError(
                f"{self._adagrad!r} with a sparse gradient of {name!r}: its elements would need accumulators of their "
                "own on all ranks. Use sparse_as_dense=True"
            )

    def _count_dense(self, name: str, tensor: torch.Tensor, times: int = 1) -> None:
        kind = self._compression, tensor.dtype
        if kind not in self._sent_itemsizes:
            # asked once, not in every hook
            sent, _ = self._compression.compress(torch.zeros(1, dtype=tensor.dtype))
            self._sent_itemsizes[kind] = sent.element_size()
        # no nbytes: sparse gradients that are made dense have none
        numel, itemsize = tensor.numel(), tensor.element_size()
        self._known_engine().count_dense(name, numel * self._sent_itemsizes[kind], numel * itemsize, times)

    def _count_plain(self) -> None:
        """Bring the counters up to date; before anything that reads them or changes the way."""
        steps, sparse = self._plain_steps, self._sparse_steps
        self._plain_steps, self._sparse_steps = 0, Counter()
        if steps:
            engine = self._known_engine()
            engine.count_step(steps)
            for name in engine.dense:
                self._count_dense(name, self._members.by_name[name], steps - sparse[name])

    # -- which way the next step goes ----------------------------------------------------------------------------

    def _begin_way(self) -> None:
        """Between steps, with an engine that is new, or whose debts have changed: find out what hooks are to do."""
        self._begin_plain()
        self._begin_waiting()

    def _begin_plain(self) -> None:
        """Find out whether the next step is Horovod's own."""
        engine = self._known_engine()
        if not self._chooses:
            self._is_plain = not engine.owes
        else:
            # of groups that Horovod sends, `_steering` would not see when the first one starts
            way = engine.only_way if self._groups is None else None
            self._is_plain = way is not None
            if way is not None:
                self._compression = dense_route(way)

    def _begin_waiting(self) -> None:
        """Find out which gradients only wait for others."""
        is_each_its_own = self._groups is None and self.backward_passes_per_step == 1 and self._has_compared
        self._waiting = self._known_engine().waiting() if is_each_its_own else {}
        for name in self._sparse_dims if not self.sparse_as_dense else ():
            self._waiting.pop(name, None)
