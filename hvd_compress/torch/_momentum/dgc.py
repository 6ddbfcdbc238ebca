"""`DGC`: each rank adds up what its momentum says, and ranks exchange the largest entries of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import horovod.torch as hvd
import torch

from hvd_compress._torch.moments import gradient_of
from hvd_compress.compressors import Compressor, TopK
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Exchange, checked_exchange
from hvd_compress.policy import meant
from hvd_compress.schedules import Shares
from hvd_compress.torch._momentum.base import MomentumOptimizer
from hvd_compress.torch._momentum.carrier import Carrier, wide

__all__ = ["DGC"]


class DGC(MomentumOptimizer):
    """SGD with momentum whose ranks send the largest entries of the momentum that they have accumulated.

    Top-k of gradients delays most entries for many steps, and momentum then moves by gradients that are out of date.
    Here each rank keeps a velocity of its own, adds it in every step to its residual, and sends the largest entries of
    the residual (momentum correction). Where an entry was sent, its velocity starts again at 0 (factor masking). In the
    first steps more entries are sent (warm-up). Source: Lin et al., Deep Gradient Compression (arXiv 1712.01887, 2018),
    algorithm 4. Differences: entries are selected exactly, not by a threshold from a sample. Some tensors travel
    uncompressed: those below `min_numel`, and all where sending a share would take more bytes than sending everything.
    They have SGD's velocity, which is not masked.

    Each rank keeps its own gradients in `p.grad`. The paper clips them before they are added: call
    `torch.nn.utils.clip_grad_norm_(parameters, bound / math.sqrt(hvd.size()))` between `backward` and `step`. Each rank
    has its own velocities, which are saved per rank (`compression_state_dict`). All ranks of the process set must
    create this and make the same steps. With one rank it is `torch.optim.SGD`.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as torch.optim takes them.
        lr: learning rate.
        momentum: decay of the velocity for each step, in [0, 1).
        weight_decay: added to gradients as weight_decay times the parameter, as in SGD.
        nesterov: the gradient counts once more, as in SGD.
        compression: a compressor with error feedback that sends entries as they are: `TopK`, `Percentile`, `RandomK`.
        warmup_steps: in these, at least the shares of `warmup_shares` are sent; 0 for no warm-up.
        warmup_shares: shares of the entries, one after the other for equal numbers of steps. The default is the
            paper's, for top-k 0.1 % and one epoch each.
        named_parameters: such as `model.named_parameters()`; names key collectives, residuals and randomness.
        exchange: see `DistributedOptimizer`; not one that first adds up gradients inside of hosts.
        min_numel: see `DistributedOptimizer`.
        bucket_bytes: see `DistributedOptimizer`.
        process_set: the ranks that take part.

    Raises:
        ValueError: a setting out of its range; parameters with equal names.
        TypeError: `compression` is no compressor; a parameter is complex or no floating type.
        UnsupportedError: a compressor that does not send entries as they are; a hierarchical exchange; in an
            elastic run a process set, and a step before `hvd.elastic.TorchState` was synced.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        opt = hvd.DGC(model.named_parameters(), lr=0.1, compression=TopK(0.001), warmup_steps=4 * len(loader))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ...  # train as always
    """

    _KEPT = ("step",)
    _OWN = "velocity"
    _RANGES: ClassVar = {"lr": (0.0, None), "momentum": (0.0, 1.0), "weight_decay": (0.0, None)}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        compression: Compressor | str = TopK(0.001),
        warmup_steps: int = 0,
        warmup_shares: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004),
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        exchange: str | Exchange = "auto",
        min_numel: int = DEFAULT_MIN_NUMEL,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        self._compression = _checked(compression)
        self._shares = Shares(warmup_steps, tuple(warmup_shares))
        if warmup_steps and self._compression.keeping(0.999) == self._compression:
            raise ValueError(f"DGC(warmup_steps={warmup_steps}): {self._compression!r} cannot send another share")
        if checked_exchange(exchange).uses_hosts:
            raise UnsupportedError(
                f"DGC with exchange={exchange!r}: ranks of a host add up their gradients there before anything is "
                'chosen, so that none knows what was sent of its own. Use exchange="auto"'
            )
        told = {
            "compression": self._compression.get_config(),
            "warmup_steps": warmup_steps, "warmup_shares": list(self._shares.shares),
        }  # fmt: skip
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": bool(nesterov)}
        super().__init__("DGC", params, defaults, named_parameters, self._compression, process_set, told)
        values = {name: p for p, name in self._names.items()}
        self._carrier = Carrier(
            {name: self._stand_in(p) for name, p in values.items()}, values, compression=self._compression_at(0),
            exchange=exchange, min_numel=min_numel, bucket_bytes=bucket_bytes, process_set=process_set,
        )  # fmt: skip
        # a share of the warm-up may be so large that tensors go uncompressed, and a state may come whose share is not
        self._carrier.follow(self._compression_at(0))
        self._share = self._shares.at(0)
        self._has_compared = False
        """Whether ranks know of each other that they are at the same step: not at first, nor after a state came."""
        self._complete()

    def agree_in_elastic_run(self) -> None:
        super().agree_in_elastic_run()
        # all ranks have made as many steps as rank 0, so that they send the same share
        steps = min((self.state[p].get("step", 0) for _, p, _ in self._trained()), default=0)
        self._carrier.optimizer._combiner.begin_with(self._compression_at(steps))
        self._share, self._has_compared = self._shares.at(steps), True

    def _compression_at(self, steps: int) -> Compressor:
        share = self._shares.at(steps)
        return self._compression if share is None else self._compression.keeping(share)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _update(self) -> bool:
        trained = list(self._trained())
        if trained:
            self._send_share_of(min(self.state[p].setdefault("step", 0) for _, p, _ in trained))
        given, velocities = {}, {}
        for name, p, group in trained:
            given[name], velocities[p] = self._grown(p, group)
        averages, finite = self._averaged(self._carrier, given)
        if not finite:
            return False
        for name, p, group in trained:
            self._own[p] = self._masked(name, velocities[p])
            p.add_(averages[name].to(p.dtype), alpha=-float(group["lr"]))
            self.state[p]["step"] += 1
        return True

    def _grown(self, p: torch.Tensor, group: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """What this step adds to what is owed of a parameter, and its velocity."""
        gradient = gradient_of(p, torch.empty(p.shape, dtype=wide(p), device=p.device))
        if group["weight_decay"]:
            gradient.add_(p, alpha=group["weight_decay"])
        velocity = gradient.clone()
        if p in self._own:
            velocity.add_(self._own[p].to(velocity), alpha=group["momentum"])
        if group["nesterov"]:
            return gradient.add_(velocity, alpha=group["momentum"]), velocity
        return velocity.clone(), velocity

    def _masked(self, name: str, velocity: torch.Tensor) -> torch.Tensor:
        """A velocity that is 0 where an entry was sent: nothing is owed there."""
        owed = self._carrier.owed(name)
        return velocity if owed is None else velocity.masked_fill_(owed.view(velocity.shape) == 0, 0.0)

    def _send_share_of(self, steps: int) -> None:
        """Let the exchange send what it is to send after so many steps; ranks compare where that changes."""
        share = self._shares.at(steps)
        if share == self._share and self._has_compared:
            return
        self._carrier.agree({"call": "DGC.step()", "share": repr(share), "steps": steps})
        if share != self._share:
            self._carrier.follow(self._compression_at(steps))
        self._share, self._has_compared = share, True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state, the same on all ranks; `load_compression_state_dict` loads velocities and
        residuals.

        Raises:
            StateError: the state is of another kind of optimizer; nothing has changed then.
        """
        super().load_state_dict(state_dict)
        self.state_has_come()

    def state_has_come(self) -> None:
        """Let ranks compare, before the next step, whether all have been given a state."""
        self._has_compared = False


def _checked(compression: Any) -> Compressor:
    compressor = meant(compression)
    if not isinstance(compressor, Compressor):
        raise TypeError(f"DGC(compression={compression!r}): must be a compressor, such as TopK(0.001)")
    if not (compressor.sends_entries and compressor.feedback):
        raise UnsupportedError(
            f"DGC with {compressor!r}: which entries were sent is seen by what is not owed, so that it needs error "
            "feedback and entries that are sent as they are. Use TopK, Percentile or RandomK"
        )
    if compressor.has_narrow_residuals:
        raise UnsupportedError(
            f"DGC with {compressor!r}: which entries were sent is seen by what is not owed, and in 8 bits small "
            "values may become nothing. Use error_feedback=True"
        )
    return compressor
