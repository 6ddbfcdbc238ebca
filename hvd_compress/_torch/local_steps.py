"""What a torch optimizer has of DiLoCo, whoever wraps it: nothing here knows Horovod."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from hvd_compress._torch.outer import Make, OuterOptimizer
from hvd_compress._torch.parameters import Buffers, Parameters, as_tensors
from hvd_compress.averaging import Groups
from hvd_compress.diloco import DiLoCoMember, DiLoCoSettings, Outcome
from hvd_compress.schedules import Turn

__all__ = ["LocalSteps", "LocalStepsMethods"]


class LocalSteps:
    """Counts the steps of an optimizer, and averages what they have moved; creating it is a collective call.

    Args:
        parameters: by name, those that take gradients.
        buffers: averaged with them on request.
        settings: the same on all ranks.
        groups: where this rank stands.
        outer: makes the outer optimizer of a fragment.
        others: names of the parameters that take no gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Buffers,
        settings: DiLoCoSettings,
        groups: Groups,
        outer: Make,
        others: Collection[str],
    ) -> None:
        self.parameters = Parameters(parameters, "DiLoCo")
        self._make = partial(
            DiLoCoMember, self.parameters.tensors, settings, make_outer=partial(OuterOptimizer, outer), others=others
        )
        self.member = self._make(groups=groups)
        self.buffers = buffers

    def begin_again(self, groups: Groups) -> DiLoCoMember:
        """Begin among other ranks, as if no step had been made; returns the member of before. A collective call."""
        before, self.member = self.member, self._make(groups=groups)
        return before

    @torch.no_grad()
    def land(self, state: MutableMapping[torch.Tensor, Any]) -> None:
        """Let what is under way arrive before its time, after the member's `rest`.

        Args:
            state: of the inner optimizer.
        """
        self._take_over(self.member.land(self.parameters.arrays_of), state)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if parameters have changed so that they cannot be averaged; all ranks are told."""
        if problem := self.parameters.problem(groups):
            self.refuse(problem)
            raise ValueError(problem)

    def refuse(self, problem: str) -> None:
        """Let all ranks know where they meet next that this one cannot go on; the caller raises what it knows."""
        self.member.refuse(problem)

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
        others = self.buffers.arrays()
        self._take_over(self.member.average_parameters(self.parameters.arrays_of, others), state)
        self.buffers.take()

    def _take_over(self, outcome: Outcome, state: MutableMapping[torch.Tensor, Any]) -> None:
        if outcome.problem is not None:
            warnings.warn(outcome.problem, RuntimeWarning, stacklevel=4)
        self.parameters.write_at(outcome.changed)
        _forget_spoiled(state, self.parameters.at(outcome.restored))


class LocalStepsMethods:
    """What an optimizer that DiLoCo has wrapped has beside those of torch."""

    # of torch.optim.Optimizer
    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]

    _local_steps: LocalSteps

    def average_parameters(self) -> None:
        """Make the parameters and named buffers of all ranks their mean; a collective call, after the same step.

        To be called at the end, and before ranks evaluate or save one model. What is under way arrives before. The
        mean is what the ranks agree on then; the outer optimizer does not step, and keeps its momentum. What
        compression owes stays owed. Training may go on, and the turns of fragments stay as they were.

        Raises:
            MismatchError: ranks have made other numbers of steps, or have other buffers; raised on all of them.
        """
        self._local_steps.check(self.param_groups)
        self._local_steps.average_parameters(self.state)

    def diloco_state_dict(self) -> dict[str, Any]:
        """What the ranks agreed on last, the outer optimizer's state, what is owed and under way, of this rank.

        To be saved per rank, by all ranks after the same step. What is under way is waited for, and merged when it is
        due.

        Returns:
            A dict of tensors and plain values that `torch.save` takes.
        """
        return as_tensors(self._local_steps.member.state_dict())

    def load_diloco_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `diloco_state_dict` returned on this rank; training goes on as if it had not stopped.

        Raises:
            StateError: not such a state, or of another rank, network, nodes or settings.
        """
        self._local_steps.member.load_state_dict(state)


def _forget_spoiled(state: MutableMapping[torch.Tensor, Any], parameters: Iterable[torch.Tensor]) -> None:
    """Let the inner optimizer begin anew with parameters of which it keeps what is not finite, such as momentum."""
    for p in parameters:
        kept = state.get(p, {}).values()
        if any(isinstance(v, torch.Tensor) and v.is_floating_point() and not v.isfinite().all() for v in kept):
            del state[p]
