"""Event-triggered averaging for torch: parameters as flat arrays, and Horovod's collectives on arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.gossip import GossipSettings, Member, Tensor
from hvd_compress.mpi import HorovodRanks
from hvd_compress.torch._agreement import require_agreement

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
        received: Array = hvd.synchronize(handle)[0].numpy()
        return received

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
        self._parameters = list(parameters.values())
        self._known = {id(p) for p in self._parameters}
        # a count of batches has no mean, nor have complex tables
        self._buffers = {f"buffer {name}": b for name, b in buffers.items() if b.is_floating_point()}
        self._overlap = settings.overlap
        tensors = [Tensor(name, tuple(p.shape), _dtype_of(name, p)) for name, p in parameters.items()]
        takes_part = process_set.included() and process_set.size() > 1
        self.member = Member(tensors, settings, TorchCollectives(process_set) if takes_part else None)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if parameters take gradients of which this knows nothing."""
        for group in groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in self._known:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} takes gradients, and did not when the optimizer was "
                        "wrapped, so that ranks would never average it. Call average_parameters(), and wrap the inner "
                        "optimizer anew, on all ranks"
                    )

    @torch.no_grad()
    def mix(self) -> None:
        """Send, receive and average, in place; what is frozen by now is left as it is."""
        arrays = self._trained_arrays()
        self.member.mix(arrays)
        self._write(arrays)

    @torch.no_grad()
    def after_update(self) -> None:
        """With `overlap`: send what the next step will begin with."""
        if self._overlap:
            self.member.after_update(self._trained_arrays())

    @torch.no_grad()
    def average(self) -> None:
        """Make all parameters and buffers their mean over the ranks; a collective call."""
        arrays = self._arrays()
        buffers = {name: _on_host(b, _summable(b)) for name, b in self._buffers.items()}
        self.member.average(arrays, {name: b.numpy() for name, b in buffers.items()})
        self._write(arrays)
        for name, b in self._buffers.items():
            b.copy_(buffers[name])

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root of the mean over ranks of ‖x - mean of x‖²; a collective call."""
        return self.member.consensus_distance(self._arrays())

    def state_dict(self) -> dict[str, Any]:
        """See `Averager.state_dict`; arrays are tensors."""
        state: dict[str, Any] = _converted(self.member.state_dict(), np.ndarray, torch.from_numpy)
        return state

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank."""
        self.member.load_state_dict(_converted(state, torch.Tensor, lambda tensor: tensor.cpu().numpy()))

    def _arrays(self) -> list[Array]:
        """Flat arrays of all parameters, sharing memory where that can be."""
        return [
            (p.detach() if _is_shared(p) else _on_host(p, _host_type(p))).view(-1).numpy() for p in self._parameters
        ]

    def _trained_arrays(self) -> list[Array | None]:
        return [x if p.requires_grad else None for x, p in zip(self._arrays(), self._parameters, strict=True)]

    def _write(self, arrays: Sequence[Array | None]) -> None:
        for p, array in zip(self._parameters, arrays, strict=True):
            if array is not None and not _is_shared(p):
                p.copy_(torch.from_numpy(array).view(p.shape))


def _dtype_of(name: str, p: torch.Tensor) -> str:
    if p.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"parameter {name!r} is {p.dtype}; averaging takes float16, bfloat16, float32 and float64")
    return "float64" if p.dtype == torch.float64 else "float32"


def _host_type(p: torch.Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _summable(b: torch.Tensor) -> torch.dtype:
    """The type in which a buffer is averaged: its own, unless it holds less than float32."""
    return torch.float32 if b.dtype in (torch.float16, torch.bfloat16) else b.dtype


def _is_shared(p: torch.Tensor) -> bool:
    return bool(p.is_cpu and p.is_contiguous() and p.dtype in (torch.float32, torch.float64))


def _on_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy, contiguous."""
    copy = torch.empty(tensor.shape, dtype=dtype)
    copy.copy_(tensor)
    return copy


def _converted(value: Any, kind: Any, convert: Any) -> Any:
    """A state with all objects of a kind, in dicts, converted."""
    if isinstance(value, dict):
        return {key: _converted(entry, kind, convert) for key, entry in value.items()}
    return convert(value) if isinstance(value, kind) else value
