"""All exchanges of one optimizer: what is in flight, and when a step is complete."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.compressors import Compressor
from hvd_compress.engine import Ledger
from hvd_compress.torch._lane import Lane

__all__ = ["Engine"]


class Engine(Ledger[Lane]):
    """Starts, drives and finishes the exchanges of named tensors.

    Args:
        compressor: of all tensors; None if all go dense.
        exchange: "auto", "two_phase" or "allgather".
        min_numel: tensors with fewer elements go dense.
        scale: factor on the sum over ranks.
        process_set: the ranks that take part; this rank is one of them.
        tensors: (name, tensor) of all that may come.
    """

    def __init__(
        self,
        compressor: Compressor | None,
        exchange: str,
        min_numel: int,
        scale: float,
        process_set: hvd.ProcessSet,
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        described = ((name, tuple(tensor.shape), tensor.element_size()) for name, tensor in tensors)
        make_lane = partial(Lane, process_set=process_set)
        super().__init__(compressor, exchange, min_numel, process_set.size(), process_set.rank(), described, make_lane)
        self.scale = scale

    def start(self, name: str, gradient: torch.Tensor) -> None:
        """Encode a gradient, which is spoiled, start its first collective, and move others on that are ready."""
        self.progress()
        self.lanes[name].start(gradient)

    def progress(self) -> None:
        """Run every stage whose collective is complete; never waits."""
        for lane in self.lanes.values():
            if lane.busy:
                lane.progress()

    def wait(self) -> bool:
        """Wait for all that is in flight; whether all of it is finite (the same on all ranks)."""
        busy = [lane for lane in self.lanes.values() if lane.busy]
        # No deadlock: every rank has started all first collectives before it waits for one, and starts each second
        # one as soon as it has its first. The order is that of the parameters, equal on all ranks, for speed only.
        for lane in busy:
            lane.wait_first()
        finite = True
        for lane in busy:
            finite = lane.wait() and finite
        return finite

    def combine(self, keep: bool) -> dict[str, torch.Tensor]:
        """Decode all that has arrived: {name: result}; see `Lane.combine`."""
        self.count_step()
        return {name: lane.combine(keep, self.scale) for name, lane in self.lanes.items() if lane.busy}

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`; values are torch tensors, copied."""
        state = super().state_dict()
        for kind in ("residuals", "owner_residuals"):
            for entry in state[kind].values():
                entry["values"] = torch.from_numpy(entry["values"])
        return state
