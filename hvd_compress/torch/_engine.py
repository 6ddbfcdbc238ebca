"""All exchanges of one optimizer: which tensors are compressed, what is in flight, when a step is complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.compressors import Compressor
from hvd_compress.errors import StateError
from hvd_compress.exchange import make_plan
from hvd_compress.feedback import FORMAT, check_state
from hvd_compress.torch._lane import Lane
from hvd_compress.torch._stats import Counters

__all__ = ["Engine"]


class Engine:
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
        self.compressor = compressor
        self.scale = scale
        self.dense: dict[str, Counters] = {}
        self._steps = 0
        self._loss_scale = 1.0
        self._ranks = process_set.size()
        self._lanes: dict[str, Lane] = {}
        for name, tensor in tensors:
            self.dense[name] = Counters()
            if compressor is None or tensor.numel() < min_numel:
                continue
            plan = make_plan(exchange, compressor, tuple(tensor.shape), self._ranks, tensor.element_size())
            if plan.exchange != "dense":
                self._lanes[name] = Lane(name, plan, compressor, process_set)
                del self.dense[name]

    @property
    def is_used(self) -> bool:
        """Whether any tensor goes through an exchange."""
        return bool(self._lanes)

    def compresses(self, name: str) -> bool:
        """Whether the tensor goes through an exchange rather than through Horovod's allreduce."""
        return name in self._lanes

    def start(self, name: str, gradient: torch.Tensor) -> None:
        """Encode a gradient, which is spoiled, start its first collective, and move others on that are ready."""
        self.progress()
        self._lanes[name].start(gradient)

    def progress(self) -> None:
        """Run every stage whose collective is complete; never waits."""
        for lane in self._lanes.values():
            if lane.busy:
                lane.progress()

    def wait(self) -> bool:
        """Wait for all that is in flight; whether all of it is finite (the same on all ranks)."""
        busy = [lane for lane in self._lanes.values() if lane.busy]
        # No deadlock: every rank has started all first collectives before it waits for one, and starts each second
        # one as soon as it has its first. The order is that of the parameters, equal on all ranks, for speed only.
        for lane in busy:
            lane.wait_first()
        finite = True
        for lane in busy:
            finite = lane.wait() and finite
        return finite

    def finish(self, keep: bool) -> dict[str, torch.Tensor]:
        """Decode all that has arrived: {name: result}; see `Lane.finish`."""
        self._steps += 1
        return {name: lane.finish(keep, self.scale) for name, lane in self._lanes.items() if lane.busy}

    def abandon(self) -> None:
        """Forget a step in flight."""
        for lane in self._lanes.values():
            if lane.busy:
                lane.abandon()

    def set_loss_scale(self, loss_scale: float) -> None:
        """Convert the residuals, which are in units of the scaled gradients, to another loss scale."""
        factor = loss_scale / self._loss_scale
        self._loss_scale = loss_scale
        if factor != 1.0:
            for lane in self._lanes.values():
                lane.rescale(factor)

    # -- statistics ----------------------------------------------------------------------------------------------

    def count_dense(self, name: str, tensor: torch.Tensor, sent_itemsize: int) -> None:
        """An uncompressed allreduce of a tensor in elements of `sent_itemsize` bytes."""
        counters = self.dense.setdefault(name, Counters())
        counters.count_dense(tensor.numel() * sent_itemsize, tensor.numel() * tensor.element_size(), self._ranks)

    def stats(self) -> dict[str, Any]:
        """See `DistributedOptimizer.compression_stats`."""
        total = Counters(steps=self._steps)
        squares = 0.0
        tensors = {}
        for name, lane in self._lanes.items():
            norm = lane.residual_norm()
            squares += norm**2
            total.add(lane.counters)
            tensors[name] = lane.counters.report(norm) | {"exchange": lane.plan.exchange}
        for name, counters in self.dense.items():
            total.add(counters)
            tensors[name] = counters.report(0.0) | {"exchange": "dense"}
        return {"total": total.report(squares**0.5), "tensors": tensors}

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`; values are torch tensors, copied."""
        residuals, owners = {}, {}
        rank = 0
        for name, lane in self._lanes.items():
            shape = list(lane.plan.shape)
            rank = lane.transfer.position
            if lane.residual is not None:
                residuals[name] = {"shape": shape, "values": lane.residual.clone()}
            owed = lane.transfer.owner_residual
            if owed is not None:
                start = lane.plan.bounds[rank]
                owners[name] = {"shape": shape, "start": start, "values": torch.from_numpy(owed.copy())}
        return {
            "format": FORMAT,
            "size": self._ranks,
            "rank": rank,
            "steps": self._steps,
            "loss_scale": self._loss_scale,
            "transfer_steps": {name: lane.transfer.step for name, lane in self._lanes.items()},
            "compressor": None if self.compressor is None else self.compressor.get_config(),
            "residuals": residuals,
            "owner_residuals": owners,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a state completely, then take it over.

        Raises:
            StateError: not a compressor state, of another number of ranks or another rank, or of other tensors.
        """
        check_state(state)
        position = next((lane.transfer.position for lane in self._lanes.values()), state["rank"])
        if state["size"] != self._ranks:
            raise StateError(
                f"compressor state of {state['size']} ranks, there are {self._ranks} now: collect the states of all "
                f"ranks and divide them with hvd_compress.feedback.redistribute(states, {self._ranks})"
            )
        if state["rank"] != position:
            raise StateError(f"compressor state of rank {state['rank']}, this is rank {position}: save one per rank")
        for kind in ("residuals", "owner_residuals"):
            for name, entry in state[kind].items():
                self._check_entry(name, entry, kind)
        self.abandon()
        for name, lane in self._lanes.items():
            own, owed = state["residuals"].get(name), state["owner_residuals"].get(name)
            lane.residual = None if own is None else torch.as_tensor(own["values"]).clone()
            lane.transfer.owner_residual = None if owed is None else torch.as_tensor(owed["values"]).clone().numpy()
            lane.transfer.step = state.get("transfer_steps", {}).get(name, state["steps"])
        self._steps = state["steps"]
        self._loss_scale = state.get("loss_scale", 1.0)

    def _check_entry(self, name: str, entry: dict[str, Any], kind: str) -> None:
        lane = self._lanes.get(name)
        if lane is None:
            raise StateError(
                f"compressor state has a residual of {name!r}, which is not compressed here; known are "
                f"{', '.join(map(repr, self._lanes)) or 'none'}"
            )
        if tuple(entry["shape"]) != lane.plan.shape:
            raise StateError(f"residual of {name!r} has shape {tuple(entry['shape'])}, the tensor {lane.plan.shape}")
        if self.compressor is None or not self.compressor.feedback:
            raise StateError(f"compressor state has residuals, {self.compressor!r} keeps none")
        if kind == "owner_residuals":
            bounds, position = lane.plan.bounds, lane.transfer.position
            expected = (bounds[position], bounds[position + 1]) if lane.plan.exchange == "two_phase" else None
            if expected != (entry["start"], entry["start"] + len(entry["values"])):
                raise StateError(
                    f"owner residual of {name!r} covers elements from {entry['start']}, this rank owns {expected}; "
                    "divide the states with hvd_compress.feedback.redistribute to change the exchange"
                )
