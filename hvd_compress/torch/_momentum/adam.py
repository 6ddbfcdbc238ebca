"""`CompressedAdam`: Adam whose ranks average momentum compressed, once the variance is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import horovod.torch as hvd
import torch

from hvd_compress._torch.moments import Moments, add_update, direction, gradient_of
from hvd_compress.compressors import OneBit
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL
from hvd_compress.engine.momentum import COMPRESSED, LATE, RENEWAL, WARM_UP, check_betas, is_renewed
from hvd_compress.errors import StateError
from hvd_compress.exchange import Exchange
from hvd_compress.schedules import Renewals
from hvd_compress.torch._momentum.base import MomentumOptimizer
from hvd_compress.torch._momentum.carrier import Carrier, stand_in, wide
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["CompressedAdam"]


class CompressedAdam(MomentumOptimizer):
    """Adam with decoupled weight decay, whose ranks exchange compressed momentum after a warm-up.

    In the warm-up gradients are averaged uncompressed, and steps are those of AdamW. After it, each rank updates the
    shared momentum with its own gradient. Ranks average their results through the compressed exchange, with error
    feedback, and the average is the next shared momentum. With variance="frozen" the variance stays what it was at the
    end of the warm-up, as in Tang et al., 1-bit Adam (arXiv 2102.02888, 2021), algorithm 1. With "renewed" some later
    steps average gradients uncompressed and renew it, as in Lu et al., 0/1 Adam (arXiv 2202.06009, 2022), algorithm 1,
    here without local steps.

    Differences from the papers: what is compressed is momentum / (root of variance + eps). So an error of compression
    is measured in updates, and none is divided by a small variance afterwards. A gradient / (root of variance + eps) is
    limited to 1 / sqrt(1 - beta2), which is Adam's own bound. Bias is corrected, for the variance by the number of
    gradients that it has seen. Weight decay is AdamW's.

    An element that has had no gradient in the warm-up has no variance, and does not move with compressed momentum. Each
    rank adds up its own gradients of such elements. At the next step where a renewal would be due, if some rank has
    such sums, all ranks average gradients and sums uncompressed, and elements that get a gradient take its square as
    their variance. So rows of an embedding that are never used stay as they are, and rows that are first used late are
    still learned.

    Each rank keeps its own gradients in `p.grad`: clip and log them as such. Adding or unfreezing parameters later
    starts the warm-up again for all parameters; variances that are frozen stay frozen. All ranks of the process set
    must create this and make the same steps. With one rank nothing is exchanged or compressed.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as torch.optim takes them.
        lr: learning rate.
        betas: decay of momentum and variance for each step, in [0, 1).
        eps: added to the root of the variance.
        weight_decay: AdamW's: each step multiplies parameters by 1 - lr · weight_decay.
        named_parameters: such as `model.named_parameters()`; names key collectives, residuals and randomness.
        compression: for the momentum; a compressor of hvd_compress or a `Policy`.
        warmup_steps: steps with uncompressed gradients, at least 1. The papers take 15 to 20 % of all steps.
        variance: "frozen" or "renewed".
        renewals: after the warm-up every second step may be a renewal, and the interval doubles after this many
            renewals.
        exchange: see `DistributedOptimizer`.
        min_numel: see `DistributedOptimizer`.
        bucket_bytes: see `DistributedOptimizer`.
        process_set: the ranks that take part.

    Raises:
        ValueError: a setting out of its range; parameters with equal names.
        TypeError: `compression` is no compressor; a parameter is complex or no floating type.
        UnsupportedError: `Auto`; in an elastic run a process set, and a step before `hvd.elastic.TorchState` was
            synced.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        opt = hvd.CompressedAdam(model.named_parameters(), lr=1e-3, warmup_steps=500, compression=OneBit())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ...  # train as always
    """

    _KEPT = ("step", "variance_steps", "exp_avg", "exp_avg_sq")
    # of elements without a variance: those that ranks have not averaged yet
    _OWN = LATE
    _RANGES: ClassVar = {"lr": (0.0, None), "eps": (0.0, None), "weight_decay": (0.0, None)}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Any = OneBit(),
        warmup_steps: int = 100,
        variance: str = "frozen",
        renewals: int = 16,
        exchange: str | Exchange = "auto",
        min_numel: int = DEFAULT_MIN_NUMEL,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        self._is_renewed = is_renewed("CompressedAdam", variance)
        self._schedule = Renewals(warmup_steps, renewals)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        told = {"warmup_steps": warmup_steps, "variance": variance, "renewals": renewals}
        super().__init__("CompressedAdam", params, defaults, named_parameters, compression, process_set, told)
        values = {name: p for p, name in self._names.items()}
        self._plain = Carrier({name: stand_in(p) for name, p in values.items()}, values, process_set=process_set)
        self._carrier = Carrier(
            {name: stand_in(p) for name, p in values.items()}, values, compression=compression, exchange=exchange,
            min_numel=min_numel, bucket_bytes=bucket_bytes, process_set=process_set,
        )  # fmt: skip
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}
        self._unseen: dict[torch.Tensor, torch.Tensor | None] = {}
        """Where elements of a parameter have no variance, or None if all have one; others are to be looked up."""
        self._way: str | None = None
        self._has_loaded = False
        """Whether a state was loaded since the last step."""
        self._steps_by_way = dict.fromkeys((WARM_UP, RENEWAL, COMPRESSED), 0)
        self._complete()

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_betas(self._kind, **{f"betas[{i}]": beta for i, beta in enumerate(group["betas"])})

    def _take_new(self, parameters: list[torch.Tensor]) -> None:
        super()._take_new(parameters)
        for p in parameters:
            self._plain.add(self._names[p], stand_in(p), p)

    def retire(self) -> None:
        """Refuse to go on: another optimizer takes over the parameters."""
        super().retire()
        self._plain.optimizer.retire()

    def agree_in_elastic_run(self) -> None:
        super().agree_in_elastic_run()
        # all ranks have the state of rank 0, and so go the same way
        self._unseen, self._way, self._has_loaded = {}, None, False
        self._plain.optimizer._combiner.begin_again()

    # -- which way a step goes -------------------------------------------------------------------------------------

    def _update(self) -> bool:
        moments = {name: self._moments(p, group) for name, p, group in self._trained()}
        if not moments:
            return self._averaged(self._carrier if self._way == COMPRESSED else self._plain, {})[1]
        steps = min(m.steps for m in moments.values())
        warms = self._schedule.is_warming(steps)
        self._agree(steps, WARM_UP if warms else COMPRESSED)
        way = WARM_UP if warms else RENEWAL if self._renews(steps, moments) else COMPRESSED
        finite = self._with_momentum(moments) if way == COMPRESSED else self._with_gradients(moments)
        self._steps_by_way[way] += finite
        return finite

    def _agree(self, steps: int, way: str) -> None:
        """Let ranks compare where the warm-up begins or ends, and after a state was loaded."""
        if self._way == way and not self._has_loaded:
            return
        # ranks that go on as before are about to begin there
        before = self._carrier if self._way == COMPRESSED else self._plain
        self._way, self._has_loaded = way, False
        before.agree({"call": "CompressedAdam.step()", "way": way, "steps": steps})

    def _renews(self, steps: int, moments: dict[str, Moments]) -> bool:
        if not self._schedule.is_due(steps):
            return False
        if self._is_renewed:
            return True
        if not self._look(moments):
            return False
        trained = {m.parameter for m in moments.values()}
        mine = any(bool(pending.any()) for p, pending in self._own.items() if p in trained)
        if self._carrier.engine is None:
            return mine
        return TorchRanks(self._process_set).maximum([float(mine)])[0] > 0

    def _look(self, moments: dict[str, Moments]) -> dict[torch.Tensor, torch.Tensor]:
        """Where elements have no variance, of the parameters that have such elements."""
        found = {}
        for m in moments.values():
            if m.parameter not in self._unseen:
                mask = m.variance == 0
                self._unseen[m.parameter] = mask if bool(mask.any()) else None
            known = self._unseen[m.parameter]
            if known is not None:
                found[m.parameter] = known
        return found

    # -- steps -----------------------------------------------------------------------------------------------------

    def _with_gradients(self, moments: dict[str, Moments]) -> bool:
        """A step with uncompressed gradients."""
        given = {}
        for name, m in moments.items():
            given[name] = gradient_of(m.parameter, self._buffer(m.parameter))
            if m.parameter in self._own:
                given[name].add_(self._own[m.parameter].to(given[name]))
        averages, finite = self._averaged(self._plain, given)
        if not finite:
            return False
        for name, m in moments.items():
            is_known = not self._schedule.is_warming(m.steps)
            m.take_gradient(averages[name], is_frozen=is_known and not self._is_renewed)
            add_update(m, m.momentum / m.scale())
            # what is kept of a frozen parameter waits
            self._own.pop(m.parameter, None)
        self._unseen = {}
        return True

    def _with_momentum(self, moments: dict[str, Moments]) -> bool:
        """A step with compressed momentum."""
        unseen = self._look(moments)
        given = {}
        for name, m in moments.items():
            gradient = gradient_of(m.parameter, self._buffer(m.parameter))
            given[name] = direction(m, gradient, unseen.get(m.parameter))
        averages, finite = self._averaged(self._carrier, given)
        if not finite:
            return False
        for name, m in moments.items():
            update, mask = averages[name], unseen.get(m.parameter)
            if mask is not None:
                update.masked_fill_(mask, 0.0)
                self._keep_pending(m.parameter, mask)
            torch.mul(update, m.scale(), out=m.momentum)
            add_update(m, update)
        return True

    def _keep_pending(self, p: torch.Tensor, mask: torch.Tensor) -> None:
        if p.grad is None:
            return
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        late = torch.where(mask, gradient.to(wide(p)), 0.0)
        self._own[p] = self._own[p].to(late).add_(late) if p in self._own else late

    def _moments(self, p: torch.Tensor, group: dict[str, Any]) -> Moments:
        state = self.state[p]
        if not state:
            state["step"] = state["variance_steps"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=wide(p), memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        elif state["exp_avg"].dtype != wide(p) or state["exp_avg"].device != p.device:
            # the model was converted
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(device=p.device, dtype=wide(p))
            self._unseen.pop(p, None)
        return Moments(p, group, state)

    def _buffer(self, p: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(p)
        if known is None or known.shape != p.shape or known.device != p.device or known.dtype != wide(p):
            known = self._buffers[p] = torch.empty(p.shape, dtype=wide(p), device=p.device)
        return known

    # -- states ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state, or one of torch's AdamW; it is the same on all ranks.

        For residuals use `load_compression_state_dict`.

        Raises:
            StateError: the state is of another kind of optimizer; nothing has changed then.
        """
        super().load_state_dict(_of_adamw(state_dict))
        self.state_has_come()

    def state_has_come(self) -> None:
        """Let ranks compare, before the next step, whether all have been given a state."""
        self._unseen, self._has_loaded = {}, True

    def compression_stats(self) -> dict[str, Any]:
        """Bytes, seconds and residual norms of what was exchanged compressed on this rank; see `DistributedOptimizer`.

        Returns:
            What its `compression_stats` returns, and three more entries. "uncompressed" has the total counters of steps
            with uncompressed gradients. "steps_by_way" says how many steps were "warm-up", "renewal" and "compressed".
            "steps_taken_back" says how many steps no rank has made because something was not finite.
        """
        plain = self._plain.optimizer.compression_stats()["total"]
        return {**super().compression_stats(), "uncompressed": plain, "steps_by_way": dict(self._steps_by_way)}


def _of_adamw(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state in which the variances of AdamW, or of Adam, have seen all gradients.

    Raises:
        StateError: of an AdamW with settings that are not here, or of an Adam whose moments have weight decay in them.
    """
    for key in ("amsgrad", "maximize", "momentum_decay"):
        if value := next((group[key] for group in state_dict["param_groups"] if group.get(key)), None):
            raise StateError(f"load_state_dict() of a CompressedAdam: the state is of an optimizer with {key}={value}")
    for group in state_dict["param_groups"]:
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise StateError(
                f"load_state_dict() of a CompressedAdam: the state is of an Adam with weight_decay="
                f"{group['weight_decay']}, which is part of its moments, and decay here is AdamW's. Load the state of "
                "an AdamW, or set the weight_decay in the state to 0 if moments with some decay in them will do"
            )
    kept = state_dict["state"]
    full = {
        number: {"variance_steps": int(of["step"]), **of, "step": int(of["step"])} if "exp_avg_sq" in of else of
        for number, of in kept.items()
    }
    # decay is AdamW's from here on
    groups = [{k: v for k, v in group.items() if k != "decoupled_weight_decay"} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups, "state": full}
