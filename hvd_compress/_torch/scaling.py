"""What a GradScaler tells an optimizer whose steps are counted: it cannot skip some of them on one rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["told_by_scaler", "unscale"]

_TOLD = ("grad_scale", "found_inf")


@contextmanager
def told_by_scaler(optimizer: Any) -> Iterator[dict[str, Any]]:
    """What `scaler.step(optimizer)` has left at an optimizer whose `_step_supports_amp_scaling` is true.

    Yields:
        "grad_scale", which gradients are to be divided by, or None if they have been; "found_inf", whether one of them
        is not finite; empty without a scaler. A fused optimizer inside must not see them, and the scaler takes them
        away afterwards.
    """
    told = {key: vars(optimizer).pop(key) for key in _TOLD if key in vars(optimizer)}
    yield told
    # where the step has failed, the scaler takes nothing away
    vars(optimizer).update(told)


@torch.no_grad()
def unscale(groups: Sequence[Mapping[str, Any]], scale: Any) -> None:
    """Divide all gradients by a scale, in place, as `scaler.unscale_` does."""
    for p in (p for group in groups for p in group["params"]):
        if p.grad is not None:
            values = p.grad._values() if p.grad.is_sparse else p.grad
            # through float64, as a GradScaler divides
            values.mul_(scale.double().reciprocal().to(values.device))
