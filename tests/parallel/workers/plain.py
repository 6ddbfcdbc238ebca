"""What a torch optimizer has when it is wrapped, whatever wraps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

__all__ = ["check_that_it_goes_on"]


class _Scaled(torch.optim.Adam):
    """Adam with an option that is no setting of its groups."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0, scale: float = 1.0) -> None:
        self.scale = scale
        super().__init__(params, lr=lr, weight_decay=weight_decay)


def check_that_it_goes_on(
    model: torch.nn.Module, wrap: Callable[[torch.optim.Optimizer], Any], loss: Callable[[], torch.Tensor]
) -> None:
    """Fail unless a wrapped optimizer has what the plain one had, and schedulers of that are heard after a load.

    Args:
        model: whose parameters are optimized.
        wrap: makes the wrapped optimizer; a collective call.
        loss: of this rank.
    """
    plain = _Scaled(model.parameters(), lr=0.25, weight_decay=0.125, scale=3.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    plain.step()
    plain.zero_grad()
    made: list[Any] = []
    plain.register_step_post_hook(lambda *_: made.append(plain))
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = wrap(plain)
    assert optimizer.scale == 3.0
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.defaults["weight_decay"] == 0.125
    p = next(model.parameters())
    assert optimizer.state[p]["step"] == 1
    assert optimizer.state[p]["exp_avg"].any()
    for rate in (0.125, 0.0625):
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler.load_state_dict(scheduler.state_dict())
        made.clear()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(made) == 1
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert optimizer.state[p]["step"] == 3
