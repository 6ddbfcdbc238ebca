"""What a torch optimizer has of DiLoCo, whoever wraps it: nothing here knows Horovod."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from hvd_compress._torch.outer import Make, OuterOptimizer
from hvd_compress._torch.parameters import Buffers, Parameters
from hvd_compress.averaging import Groups
from hvd_compress.diloco import DiLoCoSettings, Member, Outcome
from hvd_compress.schedules import Turn

__all__ = ["LocalSteps"]


class LocalSteps:
    """Counts the steps of an optimizer, and averages what they have moved; creating it is a collective call.

    Args:
        parameters: by name, those that take gradients.
        buffers: by name, averaged with them on request.
        settings: the same on all ranks.
        groups: where this rank stands.
        outer: makes the outer optimizer of a fragment.
        others: names of the parameters that take no gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        settings: DiLoCoSettings,
        groups: Groups,
        outer: Make,
        others: Collection[str],
    ) -> None:
        self.parameters = Parameters(parameters, "DiLoCo")
        self.member = Member(self.parameters.tensors, settings, groups, partial(OuterOptimizer, outer), others)
        self._buffers = Buffers({f"buffer {name}": b for name, b in buffers.items()})

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if parameters have changed so that they cannot be averaged; all ranks are told."""
        if problem := self.parameters.problem(groups):
            self.member.refuse(problem)
            raise ValueError(problem)

    @torch.no_grad()
    def before_update(self) -> None:
        """Note what all ranks begin with."""
        self.member.begin(self.parameters.arrays_of)

    @torch.no_grad()
    def after_update(self, state: MutableMapping[torch.Tensor, Any]) -> None:
        """Count a step and do what is due.

        Args:
            state: of the inner optimizer.
        """
        turn = self.member.step()
        if turn != Turn():
            self._take_over(self.member.act(turn, self.parameters.arrays_of, self.parameters.frozen()), state)

    @torch.no_grad()
    def average_parameters(self, state: MutableMapping[torch.Tensor, Any]) -> None:
        """Make parameters and buffers of all ranks their mean."""
        others = self._buffers.arrays()
        self._take_over(self.member.average_parameters(self.parameters.arrays_of, others), state)
        self._buffers.take()

    def _take_over(self, outcome: Outcome, state: MutableMapping[torch.Tensor, Any]) -> None:
        if outcome.problem is not None:
            warnings.warn(outcome.problem, RuntimeWarning, stacklevel=4)
        self.parameters.write_at(outcome.changed)
        _forget_spoiled(state, self.parameters.at(outcome.restored))


def _forget_spoiled(state: MutableMapping[torch.Tensor, Any], parameters: Iterable[torch.Tensor]) -> None:
    """Let the inner optimizer begin anew with parameters of which it keeps what is not finite, such as momentum."""
    for p in parameters:
        kept = state.get(p, {}).values()
        if any(isinstance(v, torch.Tensor) and v.is_floating_point() and not v.isfinite().all() for v in kept):
            del state[p]
