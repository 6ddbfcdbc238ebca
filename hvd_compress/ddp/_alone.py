"""What one rank does that exchanges nothing: the hook that adds what a loaded state owes to the next gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from hvd_compress._torch.device import described
from hvd_compress.ddp._given import BoundHook, views_of
from hvd_compress.engine import LedgerAlone, has_residuals, refuse_residuals

__all__ = ["Alone", "AloneHook"]


class Alone:
    """Residuals of a single rank, and when they are added; nothing is set up before a state that has some is loaded.

    Args:
        tensors: by name.
        scaler: by whose scale losses are multiplied, or None.
        set_hook: called once, with this object, where something is owed.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], scaler: Any, set_hook: Callable[[Alone], None]) -> None:
        self.ledger: LedgerAlone | None = None
        """What is owed, as soon as something was loaded."""
        self._tensors = described(tensors.items())
        self._scaler = scaler
        self._set_hook = set_hook
        self._is_finite = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state.

        Raises:
            StateError: not a state for one rank, or of other tensors; nothing has changed then.
        """
        if self.ledger is not None:
            self.ledger.load_state_dict(state)
        elif has_residuals(state):
            ledger = LedgerAlone(self._tensors)
            ledger.load_state_dict(state)
            self.ledger = ledger
            self._set_hook(self)
        else:
            refuse_residuals(state)

    def pay(self, gradients: Mapping[str, torch.Tensor], waits: Collection[str] = ()) -> None:
        """Add what is owed to gradients, in place.

        Args:
            gradients: by name.
            waits: those of which what is owed stays owed.
        """
        ledger = self.ledger
        if ledger is None or not ledger.debts:
            return
        if self._scaler is not None:
            ledger.set_loss_scale(float(self._scaler.get_scale()))
        for name, gradient in gradients.items():
            due = None if name in waits else ledger.due(name)
            if due is not None:
                owed = torch.from_numpy(due).view(gradient.shape)
                gradient.add_(owed.to(gradient.device, gradient.dtype))
                self._is_finite = self._is_finite and bool(torch.isfinite(gradient).all())

    def end_step(self, counts: bool = True) -> None:
        """End a step, or a part that does not count: what was added is owed no more, if all of it was finite."""
        if self.ledger is not None:
            self.ledger.settle(keep=self._is_finite)
            self.ledger.count_step(int(counts))
        self._is_finite = True


class AloneHook(BoundHook):
    """What DDP calls with the buckets of one rank.

    Args:
        model: that is trained.
        tensors: its parameters by name.
        alone: what is owed of them.
    """

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], alone: Alone) -> None:
        # DDP keeps the hook alive
        self._model = weakref.ref(model)
        self._names = {p: name for name, p in tensors.items()}
        self._alone = alone

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Add what is owed; the gradients of one rank are their mean."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if not buffer.is_sparse:
            # nothing is owed of a parameter that has come since
            names = [self._names.get(p, "") for p in parameters]
            gradients = dict(zip(names, views_of(buffer, parameters), strict=True))
            self._alone.pay(gradients, self._unused(gradients))
        if bucket.is_last():
            self._alone.end_step()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def _unused(self, gradients: Mapping[str, torch.Tensor]) -> list[str]:
        """Name the gradients that DDP may leave alone, so that nothing must be paid there."""
        model: Any = self._model()
        if model is None or not (model.find_unused_parameters or model.static_graph):
            return []
        return [name for name, gradient in gradients.items() if not bool(gradient.any())]
