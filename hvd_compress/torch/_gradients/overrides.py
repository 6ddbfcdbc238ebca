"""The methods that `DistributedOptimizer` lays over Horovod's: what users call, handed on to its `Combiner`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from hvd_compress._torch.scaling import told_by_scaler
from hvd_compress._torch.states import with_tensors
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import empty_state, has_residuals, refuse_residuals
from hvd_compress.errors import GradientError, StateError, UnsupportedError
from hvd_compress.exchange import Counters
from hvd_compress.torch._gradients.combiner import Combiner
from hvd_compress.torch._gradients.steering import left_out
from hvd_compress.torch._horovod import HorovodOptimizer, keeping_groups, tell_schedulers

__all__ = ["Overrides"]

_NEEDS_NO_CONTEXT = (
    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). With hvd_compress "
    "this is right, and synchronize() had nothing to do, since backward() had combined the gradients; horovod.torch "
    "would exchange them a second time"
)


class Overrides:
    """Methods laid over Horovod's `_DistributedOptimizer`; see `_horovod.make_class`."""

    _should_synchronize: bool
    """Of Horovod's: false inside `skip_synchronize`."""
    _exchanges = False
    """Whether Horovod would hook the parameters."""
    _combiner: Combiner

    def _register_hooks(self) -> None:
        # Horovod calls this while it makes the optimizer, which gets its combiner afterwards
        self._exchanges = True

    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are combined in `p.grad`.

        If all parameters have got gradients, they are combined already when `backward()` returns, and this does
        nothing.
        """
        # where it waited, it was needed, here as with Horovod
        self._combiner.was_needless = self._combiner.is_combined
        self._combiner.combine()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler is to leave gradients alone: what it writes leaves no trace (their versions stay)."""
        return hasattr(self, "_combiner") and self._combiner.is_open

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore what a fused optimizer inside sets: gradients are unscaled before its step."""

    def _refuse_early_look(self, told: dict[str, Any]) -> None:
        """Raise GradientError if a GradScaler, which has told this, has seen gradients that were being exchanged."""
        if told and self._combiner.is_open:
            # other ranks need the exchange
            self._combiner.combine()
            raise GradientError(
                "scaler.step(opt) while gradients are exchanged, since some parameters have got none: what the scaler "
                "saw of them, or divided, are not the combined ones. Call opt.synchronize() after backward(), before "
                "scaler.unscale_(opt) and scaler.step(opt)"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients of all ranks and update; a closure's gradients are combined after each call of it."""
        with told_by_scaler(self) as told:
            self._refuse_early_look(told)
        tell_schedulers(self)
        if closure is None:
            self._combine_for_step()
            return super(self.__class__, self).step()  # type: ignore[misc]

        def combined() -> Any:
            loss = closure()
            self._combine_for_step()
            return loss

        return super(self.__class__, self).step(combined)  # type: ignore[misc]

    def _combine_for_step(self) -> None:
        if self._should_synchronize:
            if self._combiner.was_needless:
                # a kind that Python hides unless it is asked for: this is right here, and a habit of many
                warnings.warn(_NEEDS_NO_CONTEXT, PendingDeprecationWarning, stacklevel=4)
            self._combiner.combine()
        elif self._combiner.is_open:
            raise GradientError(
                "step() inside of skip_synchronize() while gradients are exchanged: call synchronize() before"
            )
        self._combiner.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as `torch.optim.Optimizer.zero_grad` does.

        Raises:
            GradientError: gradients are still being exchanged.
        """
        self._combiner.refuse_while_open("zero_grad()", GradientError)
        self._combiner.drop()
        super(self.__class__, self).zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes are summed up before an exchange, as Horovod's method does.

        Raises:
            GradientError: gradients are being exchanged.
        """
        self._combiner.refuse_while_open("set_backward_passes_per_step()", GradientError)
        HorovodOptimizer.set_backward_passes_per_step(self, passes)
        self._combiner.wrapping.passes = passes
        self._combiner.sender.begin_waiting()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the optimizer's own state; for residuals use `load_compression_state_dict`."""
        self._combiner.give_up()
        with keeping_groups(self):  # type: ignore[arg-type]  # laid over an optimizer
            HorovodOptimizer.load_state_dict(self, *args, **kwargs)

    def _owned(self) -> set[int]:
        """Which parameters this one exchanges, by their ids."""
        return set(map(id, self._combiner.members.by_name.values()))

    def retire(self) -> None:
        """Release the parameters, which another optimizer takes over, and refuse to go on."""
        self._combiner.let_go()

    def compression_stats(self) -> dict[str, Any]:
        """Bytes, seconds and residual norms of all steps so far on this rank.

        Returns:
            A dict. "compressor" is a repr, "total" has counters, and "tensors" has `{name: counters}`. Counters are:
            steps, bytes_sent, bytes_received (over the network), dense_bytes (what an uncompressed ring allreduce would
            have sent), ratio (dense_bytes / bytes_sent), encode_seconds, start_seconds (handing over), exchange_seconds
            (waited), decode_seconds, and residual_norm (Euclidean, in units of the sum over ranks).

            With `Auto`, "auto" has what was chosen for each bucket, the predicted and measured seconds behind the
            choice, and the reason; "rival" is the way that the choice is compared with in the next steps, or None. In
            elastic runs "lost_ranks" says how many ranks were lost with their residuals, and "lost_norm" is the
            Euclidean norm of all these residuals at the last commits.
        """
        sender, compressor = self._combiner.sender, self._combiner.wrapping.name
        lost = self._combiner.lost
        dropped = {} if lost is None else {"lost_ranks": lost.ranks, "lost_norm": lost.norm}
        if sender.engine is None:
            alone = self._combiner.alone
            counted = {"total": Counters().report(0.0), "tensors": {}} if alone is None else alone.stats()
            return {"compressor": compressor, **counted, **dropped}
        chosen = {} if sender.steering is None else {"auto": sender.steering.report()}
        with left_out(sender.steering):
            sender.count_plain()
            return {"compressor": compressor, **sender.engine.stats(), **chosen, **dropped}

    def compression_state_dict(self) -> dict[str, Any]:
        """The residuals of this rank; save them on each rank, since they differ between ranks.

        Returns:
            A dict of tensors and plain values that `torch.save` takes; see `hvd_compress.feedback`.
        """
        self._combiner.refuse_while_open("compression_state_dict()", StateError)
        sender, alone = self._combiner.sender, self._combiner.alone
        if sender.engine is None:
            return empty_state() if alone is None else with_tensors(alone.state_dict())
        with left_out(sender.steering):
            # the state says of which step it is, the same on all ranks
            sender.count_plain()
            return sender.engine.state_dict()

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the residuals that `compression_state_dict` returned on this rank.

        With AdaGrad all ranks must load a state before the same step; this step checks that. One rank exchanges
        nothing: it adds the residuals to its next gradients. Residuals that are updates of AdaGrad wait until there are
        more ranks.

        Raises:
            StateError: not such a state, of another rank or number of ranks, or of other tensors; or gradients are
                still being exchanged.
        """
        self._combiner.refuse_while_open("load_compression_state_dict()", StateError)
        sender, alone = self._combiner.sender, self._combiner.alone
        if self._combiner.awaits_sync:
            raise StateError(
                "load_compression_state_dict() in an elastic run before its state is synced: which rank this is, and "
                "among how many, is not known yet. Call it in the function that is decorated with hvd.elastic.run, "
                "where state.step is 0"
            )
        if sender.engine is not None:
            sender.count_plain()
            sender.engine.load_state_dict(state)
            sender.has_loaded = self._combiner.wrapping.adagrad is not None
            sender.begin_plain()
        elif alone is not None:
            alone.load_state_dict(state)
        elif is_elastic() or not has_residuals(state):
            refuse_residuals(state)
        else:
            self._combiner.be_alone(state)

    def set_loss_scale(self, loss_scale: float) -> None:
        """Rescale the residuals for the coming losses' scale, `scaler.get_scale()`; call it before each backward pass.

        Residuals are in units of the scaled gradients; without this call, a changed scale would multiply the weight of
        the residuals by the ratio of the old to the new scale. A scale that stays the same costs nothing. AdaGrad's
        updates are multiplied by it, so that `scaler.unscale_` is right for them too.

        Raises:
            ValueError: not a positive finite number.
            StateError: gradients are still being exchanged.
        """
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"loss_scale={loss_scale!r}: must be a positive finite number")
        self._combiner.refuse_while_open("set_loss_scale()", StateError)
        holder = self._combiner.sender.engine or self._combiner.alone
        if holder is not None:
            holder.set_loss_scale(float(loss_scale))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a DistributedOptimizer cannot be copied or pickled: it exchanges the gradients of the parameters that it "
            "was made for. Save state_dict() and compression_state_dict(), and wrap an optimizer of the other model"
        )
