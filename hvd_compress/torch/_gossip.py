"""Event-triggered averaging for torch, with Horovod's collectives on arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.errors import MismatchError
from hvd_compress.gossip import GossipSettings, Member
from hvd_compress.mpi import HorovodRanks
from hvd_compress.torch._agreement import Place, require_agreement, require_agreement_through
from hvd_compress.torch._parameters import Buffers, Parameters, as_tensors

__all__ = ["Gossip", "TorchCollectives"]

Array = np.ndarray[Any, Any]


class TorchCollectives(HorovodRanks):
    """See `gossip.Collectives`.

    Args:
        process_set: the ranks that take part; this rank is one of them.
    """

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        super().__init__(hvd, process_set, require_agreement)

    def start(self, words: Array, splits: Array) -> Any:
        """Start an alltoall."""
        return hvd.alltoall_async(
            torch.from_numpy(words), torch.from_numpy(splits), name=self._name, process_set=self._process_set
        )

    def wait(self, handle: Any) -> Array:
        """What it brought, in the order of the senders."""
        try:
            received: Array = hvd.synchronize(handle)[0].numpy()
        except HorovodInternalError as error:
            if "Mismatched" not in str(error):
                raise
            raise MismatchError(
                "another rank cannot go on: its parameters were unfrozen, added or changed since they were wrapped, "
                "which its own error says. All ranks must wrap a torch optimizer anew before such a step"
            ) from error
        return received

    def refuse(self, problem: str) -> None:
        """Let all ranks know, in place of the alltoall that comes next, that this one cannot take part in it."""
        # the caller raises what it knows, whatever the others say
        with suppress(HorovodInternalError, MismatchError):
            require_agreement_through({"EventGraD": problem}, self._process_set, Place("alltoall", self._name))

    def mean(self, array: Array, name: str) -> Array:
        """Over the ranks."""
        named = f"{self._name}.{name}"
        mean: Array = hvd.allreduce(torch.from_numpy(array), name=named, process_set=self._process_set).numpy()
        return mean

    def barrier(self) -> None:
        """Wait for all ranks."""
        hvd.barrier(process_set=self._process_set)


class Gossip:
    """The parameters of one rank, averaged with those of its neighbours; creating it is a collective call.

    Args:
        parameters: by name, those that are trained.
        buffers: by name, to be averaged with the parameters at the end.
        settings: of the averaging.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        settings: GossipSettings,
        process_set: hvd.ProcessSet,
    ) -> None:
        self._parameters = Parameters(parameters, "the EventGraD optimizer")
        self._buffers = Buffers({f"buffer {name}": b for name, b in buffers.items()})
        self._overlap = settings.overlap
        takes_part = process_set.included() and process_set.size() > 1
        self._collectives = TorchCollectives(process_set) if takes_part else None
        self.member = Member(self._parameters.tensors, settings, self._collectives)
        self._waits = not settings.is_one_sided

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if parameters have changed so that they cannot be averaged; ranks that wait are told."""
        problem = self._parameters.problem(groups)
        if problem is None:
            return
        if self._collectives is not None and self._waits:
            self.member.drain()
            self._collectives.refuse(problem)
        raise ValueError(problem)

    @torch.no_grad()
    def mix(self) -> None:
        """Send, receive and average, in place; what is frozen by now is left as it is."""
        self.member.begin(self._parameters.arrays)
        arrays = self._parameters.trained_arrays()
        self.member.mix(arrays)
        self._parameters.write(arrays)

    @torch.no_grad()
    def after_update(self) -> None:
        """With `overlap`: send what the next step will begin with."""
        if self._overlap:
            self.member.after_update(self._parameters.trained_arrays())

    @torch.no_grad()
    def average(self) -> None:
        """Make all parameters and buffers their mean over the ranks; a collective call."""
        arrays = self._parameters.arrays()
        self.member.average(arrays, self._buffers.arrays())
        self._parameters.write(arrays)
        self._buffers.take()

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root of the mean over ranks of ‖x - mean of x‖²; a collective call."""
        return self.member.consensus_distance(self._parameters.arrays())

    def state_dict(self) -> dict[str, Any]:
        """See `Averager.state_dict`; arrays are tensors."""
        state: dict[str, Any] = as_tensors(self.member.state_dict())
        return state

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank."""
        self.member.load_state_dict(state)
