"""Event-triggered averaging for torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress._torch.parameters import Buffers, Parameters, as_tensors
from hvd_compress.elastic import is_elastic
from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import Place
from hvd_compress.gossip import GossipMember, GossipSettings
from hvd_compress.mpi import start_one_sided
from hvd_compress.torch._agreement import require_agreement_through
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["Gossip"]

Array = np.ndarray[Any, Any]


class _Neighbours(TorchRanks):
    """`TorchRanks` that say what it means when another rank takes no part."""

    def wait(self, handle: Any) -> Array:
        try:
            return super().wait(handle)
        except HorovodInternalError as error:
            if "Mismatched" not in str(error):
                raise
            raise MismatchError(
                "another rank cannot go on: its parameters were unfrozen, added or changed since they were wrapped, "
                "which its own error says. All ranks must wrap a torch optimizer anew before such a step"
            ) from error


class Gossip:
    """The parameters of one rank, averaged with those of its neighbours; creating it is a collective call.

    Args:
        parameters: by name, those that are trained.
        buffers: to be averaged with the parameters at the end.
        settings: of the averaging.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Buffers,
        settings: GossipSettings,
        process_set: hvd.ProcessSet,
    ) -> None:
        self.parameters = Parameters(parameters, "the EventGraD optimizer")
        self.buffers = buffers
        self.settings = settings
        self._process_set = process_set
        # in elastic runs neighbours are found when the state is synced: who joins wraps its optimizer while others
        # train
        self._meets = process_set.included() and process_set.size() > 1 and not is_elastic()
        self.member = self._made()

    def _made(self) -> GossipMember:
        ranks = _Neighbours(self._process_set) if self._meets else None
        return GossipMember(self.parameters.tensors, self.settings, ranks, partial(start_one_sided, hvd))

    def begin_again(self) -> GossipMember:
        """Find neighbours among the ranks that there are; returns the member of before. A collective call."""
        self._meets = self._process_set.size() > 1
        before, self.member = self.member, self._made()
        return before

    @property
    def _waits(self) -> bool:
        return self._meets and not self.settings.is_one_sided

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if parameters have changed so that they cannot be averaged; ranks that wait are told."""
        problem = self.parameters.problem(groups)
        if problem is None:
            return
        if self._waits:
            self.member.drain()
            # this rank raises what it knows, whatever the others say
            with suppress(HorovodInternalError, MismatchError):
                place = Place("alltoall", self.member.name)
                require_agreement_through({"EventGraD": problem}, self._process_set, place)
        raise ValueError(problem)

    @torch.no_grad()
    def mix(self) -> None:
        """Send, receive and average, in place; what is frozen by now is left as it is."""
        self.member.begin(self.parameters.arrays)
        arrays = self.parameters.trained_arrays()
        self.member.mix(arrays)
        self.parameters.write(arrays)

    @torch.no_grad()
    def after_update(self) -> None:
        """With `overlap`: send what the next step will begin with."""
        if self.settings.overlap:
            self.member.after_update(self.parameters.trained_arrays())

    @torch.no_grad()
    def average(self) -> None:
        """Make all parameters and buffers their mean over the ranks; a collective call."""
        arrays = self.parameters.arrays()
        self.member.average(arrays, self.buffers.arrays())
        self.parameters.write(arrays)
        self.buffers.take()

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root of the mean over ranks of ‖x - mean of x‖²; a collective call."""
        return self.member.consensus_distance(self.parameters.arrays())

    def state_dict(self) -> dict[str, Any]:
        """See `Averager.state_dict`; arrays are tensors."""
        state: dict[str, Any] = as_tensors(self.member.state_dict())
        return state

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank."""
        self.member.load_state_dict(state)
