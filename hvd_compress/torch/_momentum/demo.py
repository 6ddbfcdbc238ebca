"""`DeMo`: each rank keeps a momentum of its own, and ranks exchange its largest DCT coefficients."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from typing import Any, ClassVar

import horovod.torch as hvd
import torch

from hvd_compress._torch.dct import Chunks
from hvd_compress._torch.moments import gradient_of, move
from hvd_compress.compressors import TopK
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL
from hvd_compress.exchange import Exchange
from hvd_compress.policy import Policy
from hvd_compress.torch._momentum.base import MomentumOptimizer
from hvd_compress.torch._momentum.carrier import Carrier, stand_in, wide

__all__ = ["DeMo"]


class DeMo(MomentumOptimizer):
    """SGD whose ranks exchange the largest components of their momentum, and keep the rest for themselves.

    Each rank adds its gradient to its momentum, cuts the momentum into chunks, transforms these (discrete cosine
    transform), takes the k largest coefficients of each chunk, and subtracts what they stand for from its momentum.
    Ranks average these coefficients, transform the averages back, and step with the result, or with its signs. Source:
    Peng et al., DeMo: Decoupled Momentum Optimization (arXiv 2411.19870, 2024), algorithm 1. Differences: a dimension
    that is no multiple of the chunk's size is filled up with zeros, where the authors' code takes the largest divisor;
    a smaller chunk, or a chunk of a vector, sends the same share of its coefficients, at least one. Tensors below
    `min_numel` travel uncompressed, with zeros for the coefficients that are not sent.

    Ranks share the model only. Each rank has a momentum of its own, which is saved per rank (`compression_state_dict`),
    so that the sum of the momenta is kept with another number of ranks. Each rank keeps its own gradients in `p.grad`:
    clip and log them as such. All ranks of the process set must create this and make the same steps.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as torch.optim takes them.
        lr: learning rate.
        decay: factor on the momentum for each step, in [0, 1).
        weight_decay: AdamW's: each step multiplies parameters by 1 - lr · weight_decay.
        k: coefficients of a chunk of full size that are sent.
        chunk: rows and columns of a chunk of a matrix, and elements of a chunk of a vector.
        sign: step with the signs, as the paper does for its experiments.
        named_parameters: such as `model.named_parameters()`; names key collectives and states.
        coding: "golomb" for losslessly coded indices, see `TopK`.
        exchange: "allgather", in which all coefficients arrive as they are; another one of `DistributedOptimizer`, such
            as "hierarchical", may leave some coefficients out of sums, and sends them later.
        min_numel: see `DistributedOptimizer`.
        bucket_bytes: see `DistributedOptimizer`.
        process_set: the ranks that take part.

    Raises:
        ValueError: a setting out of its range; parameters with equal names.
        TypeError: a parameter is complex or no floating type.
        UnsupportedError: in an elastic run a process set, and a step before `hvd.elastic.TorchState` was synced.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        opt = hvd.DeMo(model.named_parameters(), lr=1e-3)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ...  # train as always
    """

    _OWN = "momentum"
    _RANGES: ClassVar = {"lr": (0.0, None), "decay": (0.0, 1.0), "weight_decay": (0.0, None)}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        *,
        k: int = 32,
        chunk: int = 64,
        sign: bool = True,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        coding: str | None = None,
        exchange: str | Exchange = "allgather",
        min_numel: int = DEFAULT_MIN_NUMEL,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        for name, value, most in (("chunk", chunk, 1024), ("k", k, chunk**2)):
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"DeMo({name}={value!r}): must be an integer from 1 to {most}")
        self._k, self._chunk, self._sign = k, chunk, bool(sign)
        self._cut: dict[torch.Tensor, Chunks] = {}
        told = {"k": k, "chunk": chunk, "sign": self._sign}
        self._rest = TopK(ratio=k / chunk**2, coding=coding)
        defaults = {"lr": lr, "decay": decay, "weight_decay": weight_decay}
        super().__init__("DeMo", params, defaults, named_parameters, self._rest, process_set, told)
        self._carrier = Carrier(
            {name: self._stand_in(p) for p, name in self._names.items()}, {name: p for p, name in self._names.items()},
            compression=self._compression(), exchange=exchange, min_numel=min_numel, bucket_bytes=bucket_bytes,
            process_set=process_set,
        )  # fmt: skip
        self._complete()

    def _compression(self) -> Policy:
        """What is sent of each parameter: as many entries as its chunks keep."""
        coding = self._rest.coding
        rules = [(glob.escape(name), TopK(k=self._sent(p), coding=coding)) for p, name in self._names.items()]
        return Policy(rules, self._rest)

    def _take_new(self, parameters: list[torch.Tensor]) -> None:
        super()._take_new(parameters)
        # exchanges are made anew in the next step
        self.combiner.begin_with(self._compression())

    def _chunks(self, p: torch.Tensor) -> Chunks:
        if p not in self._cut:
            self._cut[p] = Chunks(tuple(p.shape), self._chunk)
        return self._cut[p]

    def _sent(self, p: torch.Tensor) -> int:
        chunks = self._chunks(p)
        return max(1, chunks.count * chunks.kept(self._k))

    def _stand_in(self, p: torch.Tensor) -> torch.Tensor:
        chunks = self._chunks(p)
        return stand_in(p, (chunks.count, chunks.elements))

    def _update(self) -> bool:
        given, momenta = {}, {}
        for name, p, group in self._trained():
            chunks = self._chunks(p)
            momentum = gradient_of(p, torch.empty(p.shape, dtype=wide(p), device=p.device))
            if p in self._own:
                momentum.add_(self._own[p].to(momentum), alpha=group["decay"])
            given[name] = chunks.largest(chunks.coefficients(momentum), self._k)
            momenta[p] = momentum.sub_(chunks.restored(given[name]))
        averages, finite = self._averaged(self._carrier, given)
        if not finite:
            return False
        self._own.update(momenta)
        for name, p, group in self._trained():
            update = self._chunks(p).restored(averages[name])
            move(p, group, update.sign_() if self._sign else update)
        return True
