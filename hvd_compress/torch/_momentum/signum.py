"""`Signum`: each rank keeps a momentum of its own, and ranks step with the signs that most of them have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import horovod.torch as hvd
import torch

from hvd_compress._torch.moments import gradient_of, move
from hvd_compress.compressors import SignSGD
from hvd_compress.engine import DEFAULT_BUCKET_BYTES
from hvd_compress.exchange import Exchange
from hvd_compress.torch._momentum.base import MomentumOptimizer
from hvd_compress.torch._momentum.carrier import Carrier, wide

__all__ = ["Signum"]


class Signum(MomentumOptimizer):
    """SGD that steps with the sign that most ranks' momenta have; ranks send 1 bit for each element.

    Each rank updates its momentum m to momentum · m + (1 - momentum) · gradient. Ranks vote with the signs of m, and
    every parameter moves by lr against the sign that wins. Zeros and ties are decided at random. Source: Bernstein et
    al., signSGD with Majority Vote is Communication Efficient And Fault Tolerant (arXiv 1810.05291, 2018), algorithm 1.
    Differences: zeros and ties are random; weight decay multiplies parameters by 1 - lr · weight_decay, as AdamW's.

    The learning rate is about that of Adam. A parameter without a gradient on any rank moves by lr at random in each
    step: freeze it. With one rank it is Signum without a vote. A tensor whose payload would not be smaller than the
    tensor steps with the sign of the mean momentum.

    Ranks share the model only. Each rank has a momentum of its own, which is saved per rank (`compression_state_dict`).
    Each rank keeps its own gradients in `p.grad`: clip and log them as such. All ranks of the process set must create
    this and make the same steps.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as torch.optim takes them.
        lr: learning rate.
        momentum: factor on the momentum for each step, in [0, 1); 0 is signSGD.
        weight_decay: AdamW's: each step multiplies parameters by 1 - lr · weight_decay.
        named_parameters: such as `model.named_parameters()`; names key collectives, states and randomness.
        seed: of the signs of zeros and ties.
        exchange: see `DistributedOptimizer`; it must have owners, which decide the vote. With "hierarchical" each host
            votes with the signs of its sum.
        bucket_bytes: see `DistributedOptimizer`.
        process_set: the ranks that take part.

    Raises:
        ValueError: a setting out of its range; parameters with equal names.
        TypeError: a parameter is complex or no floating type.
        UnsupportedError: exchange="allgather", in which nobody decides a vote; in an elastic run a process set, and a
            step before `hvd.elastic.TorchState` was synced.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        opt = hvd.Signum(model.named_parameters(), lr=1e-3)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ...  # train as always
    """

    _OWN = "momentum"
    _RANGES: ClassVar = {"lr": (0.0, None), "momentum": (0.0, 1.0), "weight_decay": (0.0, None)}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        seed: int = 0,
        exchange: str | Exchange = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        votes = SignSGD(seed=seed)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__("Signum", params, defaults, named_parameters, votes, process_set, {"seed": seed})
        values = {name: p for p, name in self._names.items()}
        self._carrier = Carrier(
            {name: self._stand_in(p) for name, p in values.items()}, values, compression=votes, exchange=exchange,
            min_numel=1, bucket_bytes=bucket_bytes, process_set=process_set,
        )  # fmt: skip
        self._complete()

    def _update(self) -> bool:
        given, momenta = {}, {}
        for name, p, group in self._trained():
            gradient = gradient_of(p, torch.empty(p.shape, dtype=wide(p), device=p.device))
            own = gradient.mul_(1.0 - group["momentum"])
            if p in self._own:
                own.add_(self._own[p].to(own), alpha=group["momentum"])
            given[name], momenta[p] = own.clone(), own
        averages, finite = self._averaged(self._carrier, given)
        if not finite:
            return False
        self._own.update(momenta)
        for name, p, group in self._trained():
            move(p, group, averages[name].sign_())
        return True
